"""The newest lines of one log, kept in memory for the screen; the file on the host is the whole of it.

One thread feeds bytes as they come, others read lines by their numbers, which never change.
"""

from __future__ import annotations

import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from backends.verdict.startup import MARKERS, Startup
from console.log_lines import PREFIX, Clock, Level, Levels, clean, redrawn

LONGEST = 64 << 10
"""Bytes that are kept of a line."""
UNFINISHED_SECONDS = 0.25
"""How long half a line waits for its end before it is shown as it is."""
BLOCK = 1024
"""Lines that are kept, and dropped, together."""
_START = MARKERS[0]  # the first line of a server's start that tells of it
_NEEDLES = tuple({marker.needle for marker in MARKERS})


class Line(msgspec.Struct, frozen=True, gc=False):
    """One line. `time` is in epoch seconds, None where the line has no stamp.

    `phase` is the start-up phase that begins here (one of `startup.PHASES`), else "". `cut` is how many bytes were left
    out at its end. `ours`: it stands in no log, but says what became of one.
    """

    number: int
    text: str
    level: Level = ""
    phase: str = ""
    time: float | None = None
    cut: int = 0
    ours: bool = False


class _Block(NamedTuple):
    """Lines from number `start` on, and the bytes that their text takes.

    The garbage collector does not go through a tuple of what it does not track; through 200,000 lines in a list it
    goes for 60 ms.
    """

    start: int
    bytes: int
    lines: tuple[Line, ...]


class LogBuffer:
    """The newest lines of a log: at most `most_lines`, whose text takes at most `most_bytes` of memory.

    `first` is the number of the oldest line kept and `next` that of the one to come. `bytes` counts what was fed.
    `newest` is the last time stamp, in epoch seconds, and `rank_width` the length of the longest rank tag, as in `TP0`.
    """

    def __init__(
        self,
        most_lines: int = 200_000,
        most_bytes: int = 64 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.most_lines = most_lines
        self.most_bytes = most_bytes
        self.first = 0
        self.next = 0
        self.bytes = 0
        self.newest: float | None = None
        self.rank_width = 0
        self._clock = clock
        self._feeding = threading.Lock()
        self._moving = threading.Lock()  # apart, so that no reader waits while a large part is taken in
        self._blocks: list[_Block] = []
        self._blocks_bytes = 0
        self._open: list[Line] = []  # the block to come
        self._open_start = 0
        self._open_bytes = 0
        self._most_open = (max(1, min(BLOCK, most_lines // 64)), most_bytes // 64)
        self._half = b""
        self._half_cut = 0
        self._half_since = 0.0
        self._stamps = Clock()
        self._levels = Levels()
        self._startup: Startup | None = None

    @property
    def dropped(self) -> int:
        """How many lines are no longer here."""
        return self.first

    @property
    def unfinished(self) -> Line | None:
        """The line whose end has not come yet, once it has waited for a moment; its number is `next`."""
        half = self._half
        if not half or self._clock() - self._half_since < UNFINISHED_SECONDS:
            return None
        text = redrawn(half.decode(errors="replace"))[-1]
        return Line(self.next, clean(text), cut=self._half_cut)

    def line(self, number: int) -> Line | None:
        """The line of that number; None where it was dropped or has not come yet."""
        found = self.lines(number, number + 1)
        return found[0] if found else None

    def lines(self, first: int, next: int) -> list[Line]:
        """The lines from `first` up to, not including, `next`, as far as they are here."""
        found: list[Line] = []
        with self._moving:
            begin = bisect_right(self._blocks, first, key=lambda block: block.start) - 1
            for block in self._blocks[max(0, begin) :]:
                if block.start >= next:
                    break
                found += block.lines[max(0, first - block.start) : next - block.start]
            start = self._open_start
            found += self._open[max(0, first - start) : max(0, next - start)]
        return found

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the log, cut anywhere."""
        with self._feeding:
            self.bytes += len(data)
            end_of_half, *others = data.split(b"\n")
            self._extend_half(end_of_half)
            if others:
                self._finish_half()
                for whole in others[:-1]:
                    self._take(whole)
                self._extend_half(others[-1])

    def mark(self, text: str) -> None:
        """Add a line of our own, such as `run server-… begins`. A half line before it gets no end any more."""
        with self._feeding:
            if self._half:
                self._finish_half()
            self._append(Line(self.next, clean(text), ours=True))

    def _extend_half(self, part: bytes) -> None:
        if part and not self._half:
            self._half_since = self._clock()
        self._half += part
        if b"\r" in part:
            *done, drawing = redrawn(self._half.decode(errors="surrogateescape"))
            for text in done:
                self._take(text.encode(errors="surrogateescape"))
            returned = b"\r" if part.endswith(b"\r") else b""
            self._half = drawing.encode(errors="surrogateescape") + returned
        self._half_cut += max(0, len(self._half) - LONGEST)
        self._half = self._half[:LONGEST]

    def _finish_half(self) -> None:
        half, cut = self._half, self._half_cut
        self._half, self._half_cut = b"", 0
        self._take(half, cut)

    def _take(self, whole: bytes, cut: int = 0) -> None:
        if b"\r" in whole:
            whole = whole.rstrip(b"\r")
            for text in redrawn(whole.decode(errors="replace")):
                self._add(text[:LONGEST], cut + max(0, len(text) - LONGEST))
        else:
            self._add(whole[:LONGEST].decode(errors="replace"), cut + max(0, len(whole) - LONGEST))

    def _add(self, text: str, cut: int) -> None:
        text = clean(text)
        message, stamp = text, None
        prefix = PREFIX.match(text)
        if prefix is not None:
            message = text[prefix.end() :]
            stamp = self._stamps.read(f"{prefix['date']} {prefix['clock']}")
            self.newest = stamp or self.newest
            self.rank_width = max(self.rank_width, len(prefix["rank"]) - 1)
        level = self._levels.of(message, stamped=prefix is not None)
        self._append(Line(self.next, text, level, self._phase(text, message), stamp, cut))

    def _append(self, line: Line) -> None:
        self._open.append(line)
        self._open_bytes += sys.getsizeof(line.text)
        self.next += 1
        most_lines, most_bytes = self._most_open
        if len(self._open) >= most_lines or self._open_bytes >= most_bytes:
            self._close_block()

    def _close_block(self) -> None:
        block = _Block(self._open_start, self._open_bytes, tuple(self._open))
        with self._moving:
            self._blocks.append(block)
            self._blocks_bytes += block.bytes
            self._open, self._open_start, self._open_bytes = [], self.next, 0
            self._drop()

    def _phase(self, text: str, message: str) -> str:
        """The start-up phase that begins with this line, or "". Only of a start that was seen from its beginning."""
        if _START.needle in message and _START.pattern.match(message):
            self._startup = Startup()
        startup = self._startup
        if startup is None or startup.ready or not any(needle in message for needle in _NEEDLES):
            return ""
        before = {phase.id for phase in startup.phases}
        startup.feed(text + "\n")
        return next((phase.id for phase in startup.phases if phase.id not in before), "")

    def _drop(self) -> None:
        """Let go of the oldest blocks, as far as the limits ask for it."""
        count = 0
        while count < len(self._blocks) and (
            self.next - self.first > self.most_lines - self._most_open[0] or self._blocks_bytes > self.most_bytes
        ):
            self._blocks_bytes -= self._blocks[count].bytes
            count += 1
            self.first = self._blocks[count].start if count < len(self._blocks) else self._open_start
        del self._blocks[:count]
