"""How one row of a log is drawn: its sign, the cursor, the text as far as it is in view, and a tag at the right."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from console.log_buffer import Line
from console.log_lines import PREFIX
from console.words import figures

MARGIN = 2  # cells left of the text: the level's sign and the cursor
SIGNS = {"error": "E", "warning": "W", "": " "}
LEAST_FOR_TAGS = 40  # cells of width below which a tag would hide too much of its line

Span = tuple[int, int, Style]


class Look(NamedTuple):
    """The styles of a log, as the theme has them."""

    base: Style
    error: Style
    warning: Style
    muted: Style
    match: Style
    cursor: Style
    selection: Style


def shown(line: Line, rank_width: int) -> str:
    """The line as it is drawn: the stamp without its date, and ranks in a column `rank_width` wide."""
    prefix = PREFIX.match(line.text)
    if prefix is None:
        return line.text
    rank = f" {prefix['rank'].strip():<{rank_width}}" if rank_width else ""
    return f"{prefix['clock']}{rank}  {line.text[prefix.end() :]}"


def tag(line: Line) -> str:
    """What is said at the right end of the line, or ""."""
    if line.cut:
        return f"── {line.cut:,} more bytes in the file ──"
    return f"── {figures.dashed(line.phase)} ──" if line.phase else ""


def lines_in_words(count: int) -> str:
    """`1 line`, `84,112 lines`."""
    return "1 line" if count == 1 else f"{count:,} lines"


def boundary(line: Line, width: int) -> str:
    """A line of our own: a rule as wide as the log, with its words at the right."""
    words = f" {line.text} ──"
    return "─" * max(2, width - len(words)) + words


def draw(line: Line, text: str, spans: list[Span], left: int, width: int, look: Look, *, current: bool) -> Strip:
    """The row of `text`, which is `line` as shown, from its character `left` on; `spans` have styles of their own."""
    base = look.base + look.cursor if current else look.base
    style = base + look.error if line.level == "error" else base + look.warning if line.level == "warning" else base
    right = tag(line) if width >= LEAST_FOR_TAGS else ""
    room = width - MARGIN - (len(right) + 1 if right else 0)
    visible, cells = _fit(text, left, room)
    more = left + len(visible) < len(text)
    if more and cells == room:
        visible, cells = _fit(visible, 0, room - 1)
    segments = [
        Segment(SIGNS[line.level], style),
        Segment("▌" if current else " ", base),
        *_segments(visible, style, [(start - left, end - left, extra) for start, end, extra in spans]),
    ]
    end = ("…" if more else "") + " " * (room - cells - more) + (f" {right}" if right else "")
    if end:
        segments.append(Segment(end, base + look.muted))
    return Strip(segments, width)


def with_offsets(strip: Strip, line: Line, left: int) -> Strip:
    """A drawn row whose parts say where in the line they stand, which is what a selection by mouse asks for."""
    margin, text = strip.divide([MARGIN, strip.cell_length])
    offset = Style.from_meta({"offset": (left, line.number)})  # a selection may begin in the margin, too
    return Strip.join([margin.apply_style(offset), text.apply_offsets(left, line.number)])


def plain(text: str, width: int, style: Style) -> Strip:
    """A row that is no line of the log."""
    return Strip([Segment(" " * MARGIN + text, style)]).crop_extend(0, width, style)


def _fit(text: str, left: int, room: int) -> tuple[str, int]:
    """As much of the text from `left` on as takes at most `room` cells, and how many it takes."""
    visible = text[left : left + room]
    if visible.isascii():
        return visible, len(visible)
    cells = cell_len(visible)
    while cells > room:
        cells -= cell_len(visible[-1])
        visible = visible[:-1]
    return visible, cells


def _segments(text: str, base: Style, spans: list[Span]) -> list[Segment]:
    """The text cut where a style begins or ends."""
    edges = {0, len(text), *(edge for start, end, _ in spans for edge in (start, end) if 0 < edge < len(text))}
    segments = []
    for start, end in pairwise(sorted(edges)):
        style = base
        for first, last, extra in spans:
            if first <= start and end <= last:
                style += extra
        segments.append(Segment(text[start:end], style))
    return segments
