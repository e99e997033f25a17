"""Text of rows, logs and files as it is safe on a terminal, which obeys some characters instead of showing them."""

from __future__ import annotations

import re
import unicodedata

_SUSPECT = re.compile(r"[^\x20-\x7e\n]")


def printable(text: str) -> str:
    r"""The text with each character that is not shown as itself as its escape: `\x1b`, `\u202e`; lines stay lines."""
    return text if text.isascii() and text.isprintable() else _SUSPECT.sub(_escape, text)


def is_safe(char: str) -> bool:
    """Whether a terminal shows this character as itself; blanks of any width are shown too."""
    return char.isprintable() or unicodedata.category(char) == "Zs"


def _escape(found: re.Match[str]) -> str:
    char = found[0]
    return char if is_safe(char) else char.encode("unicode_escape", "surrogatepass").decode("ascii")
