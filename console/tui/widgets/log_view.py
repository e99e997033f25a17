"""A live log: drawn from a LogBuffer, as much as is in view, on a timer that nothing else has to wait for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar

from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.reactive import var
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip

from console.log_buffer import Line, LogBuffer
from console.log_filter import AllRows, FilteredRows, Rows, Terms, moment
from console.tui.widgets.log_hunt import Hunt
from console.tui.widgets.log_row import MARGIN, Look, Span, boundary, draw, lines_in_words, plain, shown, with_offsets

TICK = 1 / 20  # seconds between looks at the buffer
HURRY = 1 / 60  # the same while a filter or a search goes through it
SLICE = 0.01  # seconds of one go at that
NOTE_SECONDS = 5.0
CONTEXTS = (0, 2, 5)
SIDEWAYS = 16  # columns of one step
MOST_COPIED = 1 << 20  # characters; terminals drop or choke on more


class LogView(ScrollView, can_focus=True, inherit_bindings=False):
    """One log. It follows its end until one scrolls up, and again after `action_follow`.

    `behind` counts the lines that have come since it was paused, and `left` the columns that are scrolled out at the
    left. `note` is what the last key came to, in a sentence, for some seconds.
    """

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "log-view--error",
        "log-view--warning",
        "log-view--muted",
        "log-view--match",
        "log-view--cursor",
    }
    DEFAULT_CSS = """
    LogView {
        background: $surface;
        color: $foreground;
        overflow-x: hidden;
        overflow-y: scroll;
        scrollbar-size-vertical: 1;
    }
    LogView > .log-view--error { color: $text-error; text-style: bold; }
    LogView > .log-view--warning { color: $text-warning; }
    LogView > .log-view--muted { color: $foreground-muted; }
    LogView > .log-view--match { text-style: reverse; }
    LogView > .log-view--cursor { background: $primary 25%; text-style: bold; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("e", "error(1)", "Next error", id="logs.next_error"),
        Binding("E", "error(-1)", "Error before", id="logs.previous_error", show=False),
        Binding("space", "pause", "Pause", id="logs.pause"),
        Binding("G,end", "follow", "End", id="logs.end", show=False),
        Binding("y", "copy", "Copy", id="logs.copy", show=False),
        Binding("c", "context", "Context", id="logs.context"),
        Binding("n", "again(1)", "Next match", id="logs.next_match", show=False),
        Binding("N", "again(-1)", "Match before", id="logs.previous_match", show=False),
        Binding("j,down", "move(1)", "Line down", id="logs.down", show=False),
        Binding("k,up", "move(-1)", "Line up", id="logs.up", show=False),
        Binding("g,home", "top", "Top", id="logs.top", show=False),
        Binding("ctrl+d", "page(0.5)", "Half a page down", id="logs.half_page_down", show=False),
        Binding("ctrl+u", "page(-0.5)", "Half a page up", id="logs.half_page_up", show=False),
        Binding("pagedown", "page(1.0)", "Page down", id="logs.page_down", show=False),
        Binding("pageup", "page(-1.0)", "Page up", id="logs.page_up", show=False),
        Binding("right", "sideways(1)", "Right", id="logs.right", show=False),
        Binding("left", "sideways(-1)", "Left", id="logs.left", show=False),
    ]

    following: var[bool] = var(True)
    behind: var[int] = var(0)
    left: var[int] = var(0)
    note: var[str] = var("")

    def __init__(self, buffer: LogBuffer, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.buffer = buffer
        self._rows: Rows = AllRows(buffer)
        self._filter = Terms("")
        self._around = 0
        self._searched = Terms("")
        self._hunt: Hunt | None = None
        self._unfinished: Line | None = None
        self._cursor = 0  # number of the current line while paused
        self._paused_at = 0  # number of the line that was to come then
        self._anchor: int | None = None  # number of the line to go back to once a new filter is through
        self._painting = False
        self._moving = False  # by us, not by the user
        self._note_until = 0.0
        self._look: Look | None = None

    def on_mount(self) -> None:
        """Begin to look at the buffer."""
        self.set_interval(TICK, self._drain)
        self._hurry = self.set_interval(HURRY, self._drain, pause=True)
        self._drain()

    def on_show(self) -> None:
        """Catch up with what came while it was hidden."""
        self._drain()

    # --- What is shown ---

    @property
    def filter(self) -> str:
        """The filter as it was typed; "" where there is none."""
        return self._filter.typed

    @property
    def context(self) -> int:
        """How many lines are shown around each line that the filter leaves."""
        return self._around

    @property
    def searched(self) -> str:
        """What was searched last, as it was typed."""
        return self._searched.typed

    @property
    def progress(self) -> float | None:
        """How much of the log the filter has gone through, from 0 to 1; None once that is all of it."""
        return self._rows.progress

    @property
    def current(self) -> Line | None:
        """The line that the cursor is on: the last one while following."""
        row = self._current_row()
        return None if row is None else self.buffer.line(self._rows.number(row))

    def set_filter(self, typed: str) -> None:
        """Show only lines that match, as `Terms` has it. Raises ValueError, and keeps the filter that was."""
        self._filter = Terms(typed)
        self._show_rows()

    def search(self, typed: str) -> None:
        """Mark what matches, and go to the next match, or to the last one while following. Raises ValueError."""
        self._searched = Terms(typed)
        self.refresh()
        if self._searched:
            self._seek_match(-1 if self.following else 1, from_here=True)

    def jump(self, typed: str) -> None:
        """Go to the first line of a time such as `14:02`, `14:02:11` or `-5m`. Raises ValueError."""
        then = moment(typed, self.buffer.newest)
        self._start(
            Hunt(
                lambda row: self._matches(row, lambda line: line.time is not None and line.time >= then),
                row=0,
                step=1,
                nothing="no line of that time is shown",
            )
        )

    def _show_rows(self) -> None:
        current = None if self.following else self.current
        self._hunt = None
        self._rows = FilteredRows(self.buffer, self._filter, self._around) if self._filter else AllRows(self.buffer)
        self._anchor = current.number if current is not None else self._anchor
        self._drain()
        self.refresh()

    @property
    def _width(self) -> int:
        return self.scrollable_content_region.width

    @property
    def _height(self) -> int:
        return self.scrollable_content_region.height

    # --- The timer ---

    def _drain(self) -> None:
        """Take in what came since the last time, for a limited time."""
        if not (self.display and self.screen.is_current):
            return
        before = len(self._rows)
        gone = self._rows.advance(SLICE)
        unfinished, self._unfinished = self._unfinished, self._find_unfinished()
        height = len(self._rows) + (self._unfinished is not None)
        if height != self.virtual_size.height:
            self.virtual_size = Size(0, height)
        if self.following:
            self._scroll(self.max_scroll_y)
        elif gone:
            self._scroll(self.scroll_offset.y - gone)
        bottom = self.scroll_offset.y + self._height
        if gone or (before != len(self._rows) and bottom >= before - gone) or unfinished != self._unfinished:
            self.refresh()
        if self._anchor is not None and self._rows.progress is None:
            self._show(self._rows.row(self._anchor), centred=True)
        self._chase(gone)
        self.behind = 0 if self.following else self.buffer.next - self._paused_at
        if self.note and time.monotonic() > self._note_until:
            self.note = ""
        if self._rows.progress is None and self._hunt is None:
            self._hurry.pause()
        else:
            self._hurry.resume()

    def _find_unfinished(self) -> Line | None:
        line = self.buffer.unfinished
        return line if line is not None and (not self._filter or self._filter.match(line.text)) else None

    def _chase(self, gone: int) -> None:
        """Go on with what is looked for, once the filter has gone through the log."""
        hunt = self._hunt
        if hunt is None:
            return
        hunt.forget(gone)
        if self._rows.progress is not None:
            return
        found = hunt.go_on(len(self._rows), SLICE)
        if not hunt.over:
            self.say("looking …")
            return
        self._hunt = None
        if found is None:
            self.say(hunt.nothing)
            return
        self._show(found, centred=True)
        again = "from the top again" if hunt.step > 0 else "from the end again"
        self.say(again if hunt.wrapped else "")

    def _start(self, hunt: Hunt) -> None:
        self._hunt = hunt
        self._drain()

    def say(self, note: str) -> None:
        """Let `note` be this, for some seconds."""
        self.note = note
        self._note_until = time.monotonic() + NOTE_SECONDS

    # --- Moving ---

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Pause where the user scrolls up, by wheel or scroll bar."""
        super().watch_scroll_y(old_value, new_value)
        if new_value < old_value and not self._moving and round(new_value) < self.max_scroll_y:
            self._pause()

    def action_pause(self) -> None:
        """Pause, or follow again."""
        if self.following:
            self._pause()
        else:
            self.action_follow()

    def action_follow(self) -> None:
        """Show the end, and stay there."""
        self.following = True
        self._hunt = self._anchor = None
        self._drain()
        self.refresh()

    def action_top(self) -> None:
        """Go to the oldest line."""
        self._hunt = None
        self._show(0)

    def action_move(self, rows: int) -> None:
        """Move the cursor."""
        self._hunt = None
        row = self._current_row()
        if row is not None and not (self.following and rows > 0):
            self._show(row + rows, step=rows)

    def action_page(self, pages: float) -> None:
        """Move by pages, the cursor with it."""
        self._hunt = None
        row = self._current_row()
        if row is None or (self.following and pages > 0):
            return
        rows = round(pages * self._height)
        self._pause()
        self._scroll(self.scroll_offset.y + rows)
        self._show(row + rows, step=rows)

    def action_sideways(self, steps: int) -> None:
        """Move to the right or left in lines that are wider than the view."""
        bottom = self.scroll_offset.y + self._height
        rows = range(self.scroll_offset.y, min(bottom, len(self._rows)))
        longest = max((len(self._shown(line)) for row in rows if (line := self._line(row))), default=0)
        most = max(0, longest - self._width // 2)
        self.left = max(0, min(self.left + steps * SIDEWAYS, max(most, self.left)))
        self.refresh()

    def action_error(self, step: int) -> None:
        """Go to the next error, or the one before; a traceback is one."""
        self._seek(self._begins_error, step, "no errors in what is shown" if self._filter else "no errors")

    def action_again(self, step: int) -> None:
        """Go to the next match of the search, or the one before."""
        if self._searched:
            self._seek_match(step)
        else:
            self.say("nothing was searched yet: / searches")

    def action_context(self) -> None:
        """Show more lines, or none again, around those that the filter leaves."""
        if not self._filter:
            self.say("context is shown around what a filter leaves: f filters")
            return
        self._around = CONTEXTS[(CONTEXTS.index(self._around) + 1) % len(CONTEXTS)]
        self._show_rows()
        self.say(f"with {self._around} lines around each match" if self._around else "matches only")

    def action_copy(self) -> None:
        """Copy what is selected, else the current line as it stands in the log."""
        text = self.screen.get_selected_text() or (self.current.text if self.current else "")
        if len(text) > MOST_COPIED:
            self.say(f"{len(text):,} characters are too many for a terminal's clipboard")
        elif text:
            self.app.copy_to_clipboard(text)
            self.say(f"copied {lines_in_words(text.count(chr(10)) + 1)}")

    def on_mouse_down(self, event: events.MouseDown) -> None:
        """Stand still while something is selected; the cursor goes where the mouse is."""
        row = self.scroll_offset.y + event.y
        if row < len(self._rows):
            self._pause()
            self._cursor = self._rows.number(row)
            self.refresh()

    def _pause(self) -> None:
        if self.following and len(self._rows):
            self._cursor = self._rows.number(len(self._rows) - 1)
            self._paused_at = self.buffer.next
            self.following = False
            self.refresh()

    def _current_row(self) -> int | None:
        """The row of the cursor, which goes along where one scrolls by mouse."""
        if not len(self._rows):
            return None
        last = len(self._rows) - 1
        if self.following:
            return last
        top = self.scroll_offset.y
        row = min(max(self._rows.row(self._cursor), top), top + self._height - 1)
        return min(max(row, 0), last)

    def _show(self, row: int, *, step: int = 1, centred: bool = False) -> None:
        """Make a row the current one, and scroll to it."""
        self._anchor = None
        if not len(self._rows):
            return
        self._pause()
        last = len(self._rows) - 1
        row = min(max(row, 0), last)
        if self._rows.is_gap(row):
            row += 1 if step > 0 else -1
        top, height = self.scroll_offset.y, max(1, self._height)
        if not top <= row < top + height:
            if centred:
                top = row - height // 3
            else:
                top = row if row < top else row - height + 1
            self._scroll(top)
        self._cursor = self._rows.number(row)
        self.refresh()

    def _scroll(self, row: int) -> None:
        self._moving = True
        self.scroll_to(y=row, animate=False, immediate=True, force=True)
        self._moving = False

    # --- Looking for something ---

    def _seek_match(self, step: int, *, from_here: bool = False) -> None:
        self._seek(
            lambda row: self._matches(row, lambda line: self._searched.match(line.text)),
            step,
            f"nothing matches {self._searched.typed}",
            from_here=from_here,
        )

    def _seek(self, wanted: Callable[[int], bool], step: int, nothing: str, *, from_here: bool = False) -> None:
        row = self._current_row() or 0
        self._start(Hunt(wanted, row=row if from_here else row + step, step=step, nothing=nothing))

    def _begins_error(self, row: int) -> bool:
        def is_error(line: Line) -> bool:
            return line.level == "error"

        return self._matches(row, is_error) and not (row > 0 and self._matches(row - 1, is_error))

    def _matches(self, row: int, wanted: Callable[[Line], bool]) -> bool:
        line = self._line(row)
        return line is not None and wanted(line)

    # --- Drawing ---

    def notify_style_update(self) -> None:
        """Take the styles anew: the theme changed."""
        super().notify_style_update()
        self._look = None

    def render_lines(self, crop: Region) -> list[Strip]:
        """The rows to paint."""
        self._painting = True
        try:
            return super().render_lines(crop)
        finally:
            self._painting = False

    def render_line(self, y: int) -> Strip:
        """One row of the screen."""
        width, look = self._width, self._styles()
        row = self.scroll_offset.y + y
        if row >= len(self._rows):
            if row == len(self._rows) and self._unfinished is not None:
                return self._draw(self._unfinished, look, current=False)
            return plain(self._why_empty() if y == 0 and row == 0 else "", width, look.base + look.muted)
        if self._rows.is_gap(row):
            left_out = self._rows.number(row) - self._rows.number(row - 1) - 1
            return plain(f"… {lines_in_words(left_out)}", width, look.base + look.muted)
        line = self._line(row)
        if line is None:  # dropped since the last look at the buffer
            return plain("", width, look.base)
        return self._draw(line, look, current=not self.following and row == self._current_row())

    def _draw(self, line: Line, look: Look, *, current: bool) -> Strip:
        text = self._shown(line)
        spans: list[Span] = []
        if line.ours:
            spans.append((0, len(text), look.muted))
        elif line.time is not None:
            spans.append((0, len("00:00:00"), look.muted))
        if self._searched:
            seen = text[: self.left + self._width]
            spans += [(start, end, look.match) for start, end in self._searched.spans(seen)]
        selection = self.text_selection
        if selection is not None and (selected := selection.get_span(line.number)) is not None:
            start, end = selected
            spans.append((start, len(text) if end == -1 else end, look.selection))
        left = 0 if line.ours else self.left
        strip = draw(line, text, spans, left, self._width, look, current=current)
        # Whoever asks for one row wants to know what the mouse is on. Painted rows go without: each offset makes styles
        # that stay in the caches of Rich and Textual, and the garbage collector then stops everything for 60 ms.
        return strip if self._painting else with_offsets(strip, line, left)

    def _why_empty(self) -> str:
        if self._rows.progress is not None:
            return "filtering …"
        return f"no line matches {self._filter.typed}" if self._filter else "nothing logged yet"

    def _line(self, row: int) -> Line | None:
        """The line of a row; None for a gap, and where it was dropped."""
        if not 0 <= row < len(self._rows) or self._rows.is_gap(row):
            return None
        return self.buffer.line(self._rows.number(row))

    def _shown(self, line: Line) -> str:
        return boundary(line, self._width - MARGIN) if line.ours else shown(line, self.buffer.rank_width)

    def _styles(self) -> Look:
        if self._look is None:
            self._look = Look(
                base=self.rich_style,
                error=self._part("error"),
                warning=self._part("warning"),
                muted=self._part("muted"),
                match=self._part("match"),
                cursor=self._part("cursor"),
                selection=self.screen.get_component_rich_style("screen--selection"),
            )
        return self._look

    def _part(self, name: str) -> Style:
        """What this part of the look changes, with its colours laid over those behind them."""
        own = self.get_component_rich_style(f"log-view--{name}", partial=True)
        blended = self.get_component_rich_style(f"log-view--{name}")
        return own.without_color + Style.from_color(own.color and blended.color, own.bgcolor and blended.bgcolor)

    # --- Selecting ---

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """The selected text as it is shown, only rows that are; a selection's y is the number of a line."""
        first = self._rows.row(selection.start.y) if selection.start else 0
        lines: list[str] = []
        for row in range(first, len(self._rows)):
            line = self._line(row)
            if line is None:
                continue
            span = selection.get_span(line.number)
            if span is None:
                break
            text = self._shown(line)
            lines.append(text[span[0] : None if span[1] == -1 else span[1]])
        return "\n".join(lines), "\n"

    def selection_updated(self, selection: Selection | None) -> None:
        """Draw what is selected now."""
        del selection
        self.refresh()
