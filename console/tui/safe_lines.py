"""What every line goes through last on its way to the terminal, whichever widget drew it."""

from __future__ import annotations

from rich.cells import cell_len
from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

from console.words.printable import is_safe


class SafeLines(LineFilter):
    """Takes out what a terminal would obey. It keeps widths, so escapes are made before: `printable`."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """See `LineFilter`."""
        if all(text.isprintable() for text, _, _ in segments):
            return segments
        return [
            segment
            if segment.control or segment.text.isprintable()
            else segment._replace(text="".join(map(_safe, segment.text)))
            for segment in segments
        ]


def _safe(char: str) -> str:
    return char if is_safe(char) else "�" * cell_len(char)
