"""What a person types into a field, as the number that it is."""

from __future__ import annotations

from backends.errors import UsageError

DIGITS = 18  # more do not fit in the 64 bits of a ledger, and none of them is meant


def whole(text: str, what: str, example: str, least: int = 0) -> int:
    """A whole number, `least` (0 or 1) or more. Raises UsageError, which says `what` it is for, and an example."""
    word = text.strip()
    if not (word.isascii() and word.isdecimal() and len(word) <= DIGITS and int(word) >= least):
        kind = "a positive whole number" if least else "a whole number, 0 or more"
        raise UsageError(f"{what}: expected {kind}, such as {example}, and not {word[: DIGITS + 2]!r}")
    return int(word)


def wholes(text: str, what: str, example: str, least: int = 0) -> list[int]:
    """Whole numbers with blanks or commas between them. Raises UsageError, see `whole`."""
    return [whole(word, what, example, least) for word in text.replace(",", " ").split()]
