"""Looking for a row that is far away, a slice at a time."""

from __future__ import annotations

import time
from collections.abc import Callable

ROWS = 128  # between two looks at the clock


class Hunt:
    """Goes from `row` by `step` until a row is wanted, and on at the other end where one ends, once through all rows.

    `over` once it has ended, `wrapped` where it went on at the other end; `nothing` is what to say if it found none.
    """

    def __init__(self, wanted: Callable[[int], bool], *, row: int, step: int, nothing: str) -> None:
        self.step = step
        self.nothing = nothing
        self.over = False
        self.wrapped = False
        self._wanted = wanted
        self._row = row
        self._left: int | None = None  # rows still to look at

    def forget(self, gone: int) -> None:
        """The first `gone` rows are no longer there."""
        self._row = max(0, self._row - gone) if self.step > 0 else self._row - gone

    def go_on(self, rows: int, seconds: float) -> int | None:
        """Look on among `rows` rows for at most about `seconds`; the row, once it is found."""
        left = rows if self._left is None else self._left
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            for _ in range(min(ROWS, left)):
                left -= 1
                if not 0 <= self._row < rows:
                    self._row = 0 if self.step > 0 else rows - 1
                    self.wrapped = True
                if self._wanted(self._row):
                    self.over = True
                    return self._row
                self._row += self.step
            if left <= 0:
                self.over = True
                return None
        self._left = left
        return None
