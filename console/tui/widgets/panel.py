"""A framed part of a screen that draws itself anew from each snapshot."""

from __future__ import annotations

import textwrap
from typing import Any

from textual.content import Content
from textual.events import Resize
from textual.message import Message
from textual.widgets import Static

from console.words.printable import printable

SIGN_STYLES = {
    "+": "$text-success",
    "~": "$text-accent",
    "!": "$text-error",
    "?": "$text-warning",
    "-": "$foreground-muted",
}

ROWS = 4  # of one line, which may be a log's and endless
BREAKS = (" · ", "  ", " (", " ")


class Panel(Static):
    """Subclasses say in `paint` what stands in it; `title` is in its frame."""

    DEFAULT_CSS = """
    Panel {
        border: round $panel-lighten-2;
        border-title-color: $text-muted;
        border-subtitle-color: $text-muted;
        padding: 0 1;
        height: auto;
        min-height: 3;
    }
    """

    title = ""

    class Grown(Message):
        """It has more lines than before, or fewer."""

    def __init__(self, **known: Any) -> None:
        super().__init__(markup=False, **known)
        self.border_title = self.title
        self._now: dict[str, Any] | None = None
        self._drawn: list[Any] = []

    def paint(self, now: dict[str, Any], width: int) -> list[Content]:
        """The lines to show; one wider than `width` cells is folded."""
        raise NotImplementedError

    @property
    def height(self) -> int:
        """Rows that it needs, with its frame."""
        return max(1, len(self._drawn)) + 2

    def show(self, now: dict[str, Any]) -> None:
        """Draw this snapshot."""
        self._now = now
        width = self.content_size.width
        if not width:
            return  # not laid out yet; the resize that follows draws it
        lines = [row for line in self.paint(now, width) for row in folded(line, width)]
        drawn = [(line.plain, line.spans) for line in lines]
        if drawn != self._drawn:
            if len(drawn) != len(self._drawn):
                self.post_message(self.Grown())
            self._drawn = drawn
            self.update(Content("\n").join(lines))

    def on_resize(self, event: Resize) -> None:
        """Draw for the new width."""
        if self._now is not None:
            self.show(self._now)


def line(*parts: str | tuple[str, str] | Content) -> Content:
    """A line of text and of (text, style) pairs, with escapes for what a terminal would obey."""
    return Content.assemble(*(_safe(part) for part in parts))


def _safe(part: str | tuple[str, str] | Content) -> str | tuple[str, str] | Content:
    if isinstance(part, str):
        return printable(part)
    return (printable(part[0]), part[1]) if isinstance(part, tuple) else part


def wrapped(text: str, width: int, style: str = "", first: str = "", rest: str = "") -> list[Content]:
    """A text over as many lines as it needs; `first` and `rest` stand before its first and its other lines."""
    lines = textwrap.wrap(printable(text), max(10, width), initial_indent=first, subsequent_indent=rest) or [first]
    return [Content.assemble((one, style)) for one in lines]


def folded(content: Content, width: int) -> list[Content]:
    """A line over as many rows as it needs, `ROWS` at most: broken between its parts, else between words."""
    margin = " " * (len(content.plain) - len(content.plain.lstrip()) + 2)
    rows: list[Content] = []
    while content.cell_length > width and len(rows) < ROWS - 1 and width > 2 * len(margin):
        end = _end(content.plain, len(content.truncate(width).plain.rstrip()))
        rows.append(content[:end].rstrip())
        rest = content[end:]
        content = line(margin, rest[len(rest.plain) - len(rest.plain.lstrip(" ·")) :])
    return [*rows, content.truncate(width, ellipsis=True)]


def _end(text: str, most: int) -> int:
    """Where to break a text, so that at most `most` characters come before: not early for the sake of a good place."""
    for between in BREAKS:
        end = text.rfind(between, most // 2, most + len(between))
        if end > 0:
            return end
    return most


def joined(parts: list[Content | str], between: str = " · ") -> Content:
    """The parts that say something, with `between` between them."""
    return Content(between).join([line(part) for part in parts if part])
