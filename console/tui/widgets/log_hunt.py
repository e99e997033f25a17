"""Looking for a row that is far away, a slice at a time."""

from __future__ import annotations

import time
from collections.abc import Callable

ROWS = 128  # between two looks at the clock


class Hunt:
    """Goes from `row` by `step` until a row is wanted, at most `left` rows, and on at the other end where one ends.

    `over` once it has ended, `wrapped` where it went on at the other end; `nothing` is what to say if it found none.
    """

    def __init__(self, wanted: Callable[[int], bool], *, row: int, step: int, left: int, nothing: str) -> None:
        self.step = step
        self.nothing = nothing
        self.over = False
        self.wrapped = False
        self._wanted = wanted
        self._row = row
        self._left = left

    def forget(self, gone: int) -> None:
        """The first `gone` rows are no longer there."""
        self._row = max(0, self._row - gone) if self.step > 0 else self._row - gone

    def go_on(self, rows: int, seconds: float) -> int | None:
        """Look on among `rows` rows for at most about `seconds`; the row, once it is found."""
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            for _ in range(min(ROWS, self._left)):
                self._left -= 1
                if not 0 <= self._row < rows:
                    self._row = 0 if self.step > 0 else rows - 1
                    self.wrapped = True
                if self._wanted(self._row):
                    self.over = True
                    return self._row
                self._row += self.step
            if self._left <= 0:
                self.over = True
                return None
        return None
