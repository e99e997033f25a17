"""Which lines of a log are shown: what a filter or a search asks for, and the rows that a filter leaves."""

from __future__ import annotations

import re
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable
from datetime import datetime, timedelta

from console.log_buffer import Line, LogBuffer

SLICE = 256  # lines between two looks at the clock
_TERM = re.compile(r"(?P<not>!?)(?:/(?P<regex>(?:[^/\\]|\\.)+)/(?=\s|$)|(?P<text>\S+))")


class Terms:
    """Terms as they are typed, apart by spaces; a line must match all of them.

    A term is text or `/a regular expression/`, and `!` before it asks for lines that do not match. Without a capital
    letter in it, a term means both cases. Raises ValueError, with a sentence, where an expression is none.
    """

    def __init__(self, typed: str) -> None:
        self.typed = typed.strip()
        self._wanted: list[re.Pattern[str]] = []
        self._unwanted: list[re.Pattern[str]] = []
        for term in _TERM.finditer(self.typed):
            pattern = term["regex"] or re.escape(term["text"])
            bare = re.sub(r"\\.", "", pattern)  # \S and \W are no capital letters
            try:
                compiled = re.compile(pattern, 0 if bare != bare.lower() else re.IGNORECASE)
            except re.error as error:
                raise ValueError(f"{term[0]} is no regular expression: {error}") from error
            (self._unwanted if term["not"] else self._wanted).append(compiled)

    def __bool__(self) -> bool:
        return bool(self._wanted or self._unwanted)

    def match(self, text: str) -> bool:
        """Whether a line of this text is asked for."""
        for pattern in self._wanted:
            if not pattern.search(text):
                return False
        return not any(pattern.search(text) for pattern in self._unwanted)

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Where in the text the wanted terms are, in order, not overlapping."""
        found = sorted(match.span() for pattern in self._wanted for match in pattern.finditer(text))
        spans: list[tuple[int, int]] = []
        for start, end in found:
            start = max(start, spans[-1][1]) if spans else start
            if start < end:
                spans.append((start, end))
        return spans


_AGO = re.compile(r"-(\d{1,9}) ?([smh])")
_CLOCK = re.compile(r"(\d{1,2}):(\d\d)(?::(\d\d))?")
_SECONDS = {"s": 1, "m": 60, "h": 3600}


def moment(typed: str, newest: float | None) -> float:
    """What `14:02`, `14:02:11` or `-5m` means in a log whose newest stamp is `newest`; all in epoch seconds.

    A time of day is the last one not after `newest`. Raises ValueError, with a sentence.
    """
    if newest is None:
        raise ValueError("no line of this log has a time yet")
    if ago := _AGO.fullmatch(typed.strip()):
        return newest - int(ago[1]) * _SECONDS[ago[2]]
    clock = _CLOCK.fullmatch(typed.strip())
    if clock is None:
        raise ValueError(f"{typed!r} is no time: type 14:02, 14:02:11 or -5m")
    last = datetime.fromtimestamp(newest)
    try:
        then = last.replace(hour=int(clock[1]), minute=int(clock[2]), second=int(clock[3] or 0), microsecond=0)
    except ValueError as error:
        raise ValueError(f"{typed!r} is no time of day") from error
    return (then if then <= last else then - timedelta(days=1)).timestamp()


class AllRows:
    """A row for every line of a buffer, as many as there were at the last `advance`."""

    progress: float | None = None
    """How much of the buffer was gone through, from 0 to 1; None once all of it was."""

    def __init__(self, buffer: LogBuffer) -> None:
        self._buffer = buffer
        self._first = buffer.first
        self._next = max(buffer.next, self._first)

    def __len__(self) -> int:
        return self._next - self._first

    def advance(self, seconds: float) -> int:
        """Take in what changed, for at most about `seconds`; returns how many rows are gone at the top."""
        del seconds
        gone, self._first = self._first, self._buffer.first
        self._next = max(self._buffer.next, self._first)
        return self._first - gone

    def number(self, row: int) -> int:
        """The number of the row's line."""
        return self._first + row

    def is_gap(self, row: int) -> bool:
        """Whether the row stands for lines that are left out before line `number(row)`."""
        del row
        return False

    def row(self, number: int) -> int:
        """The row of this line, or of the next one that is shown; `len(self)` where none is."""
        return min(max(0, number - self._first), len(self))


class FilteredRows:
    """The lines that match, and `context` lines around each; with those, there is a gap between groups.

    Lines of our own always match. The filter goes through the buffer in slices, from its oldest line on, and then
    follows it.
    """

    def __init__(self, buffer: LogBuffer, terms: Terms, context: int = 0) -> None:
        self.terms = terms
        self.context = context
        self.progress: float | None = 0.0
        self._buffer = buffer
        self._begun = self._next = buffer.first
        self._rows = array("q")  # numbers of lines; a gap is the negative of the number that follows it
        self._after = 0  # lines of context still to come

    def __len__(self) -> int:
        return len(self._rows)

    def advance(self, seconds: float, clock: Callable[[], float] = time.perf_counter) -> int:
        """Take in what changed, for at most about `seconds`; returns how many rows are gone at the top."""
        gone = self._forget(self._buffer.first)
        deadline = clock() + seconds
        until = self._buffer.next
        while self._next < until and clock() < deadline:
            lines = self._buffer.lines(self._next, min(self._next + SLICE, until))
            for line in lines:
                self._take(line)
            self._next = lines[-1].number + 1 if lines else self._buffer.first
        left = until - self._next
        self.progress = None if left <= 0 else (self._next - self._begun) / max(1, until - self._begun)
        return gone

    def number(self, row: int) -> int:
        """The number of the row's line."""
        return abs(self._rows[row])

    def is_gap(self, row: int) -> bool:
        """Whether the row stands for lines that are left out before line `number(row)`."""
        return self._rows[row] < 0

    def row(self, number: int) -> int:
        """The row of this line, or of the next one that is shown; `len(self)` where none is."""
        row = bisect_left(self._rows, number, key=abs)
        return row + 1 if row < len(self) and self.is_gap(row) else row

    def _take(self, line: Line) -> None:
        if line.ours or self.terms.match(line.text):
            self._show(max(line.number - self.context, self._buffer.first), line.number)
            self._after = self.context
        elif self._after:
            self._after -= 1
            self._show(line.number, line.number)

    def _show(self, first: int, last: int) -> None:
        shown = self._rows[-1] if self._rows else None
        if shown is not None:
            if self.context and first > shown + 1:
                self._rows.append(-first)
            first = max(first, shown + 1)
        self._rows.extend(range(first, last + 1))

    def _forget(self, first: int) -> int:
        """Let go of rows whose lines were dropped."""
        gone = bisect_left(self._rows, first, key=abs)
        if gone < len(self) and self.is_gap(gone):
            gone += 1
        del self._rows[:gone]
        return gone


Rows = AllRows | FilteredRows
