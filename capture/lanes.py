"""Servers that one extraction draws from side by side: which takes the next sample, and what goes on when one dies.

All of them are of this host. What another host's server would take is a lane of its own kind, and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from capture.draw import Drawer, tokens_in_flight
from capture.dumps.dump import TapState
from capture.server import Server, ServerGone

MOST_IN_FLIGHT = 256  # samples of one lane


class Lane:
    """One server, with what of it is under way; an async context in which it can be drawn from.

    `share`: how many lanes there are, which have the free memory together.
    """

    def __init__(self, server: Server, tap: TapState, share: int = 1) -> None:
        self.server, self.tap = server, tap
        self.tokens = max(tokens_in_flight(server, tap, share), 1)
        self.taken = self.samples = 0
        self.gone: ServerGone | None = None
        self.drawer = Drawer(server, tap)
        self._drawing: set[asyncio.Task[tuple[str, Path]]] = set()

    async def __aenter__(self) -> Lane:
        await self.drawer.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.drawer.__aexit__(kind, error, at)

    def fits(self, tokens: int) -> bool:
        """Whether a sample may be drawn here now; one that is larger than the budget goes alone."""
        return self.gone is None and (
            not self.samples or (self.taken + tokens <= self.tokens and self.samples < MOST_IN_FLIGHT)
        )

    async def draw(self, number: int, attempt: int, ids: list[int]) -> tuple[str, Path]:
        """See `Drawer.draw`. Raises ServerGone also where the death of the server was seen elsewhere."""
        if self.gone:
            raise self.gone
        drawing = asyncio.create_task(self.drawer.draw(number, attempt, ids))
        self._drawing.add(drawing)
        try:
            return await drawing
        except asyncio.CancelledError:
            if self.gone and drawing.cancelled():
                raise self.gone from None
            raise
        finally:
            self._drawing.discard(drawing)

    def lose(self, why: ServerGone) -> None:
        """The server is dead: nothing more goes here, and what is being drawn fails with `why`."""
        self.gone = why
        for drawing in self._drawing:
            drawing.cancel()


class Place:
    """Room for one sample, on the lane that draws it."""

    def __init__(self, lane: Lane, tokens: int) -> None:
        self.lane, self.tokens = lane, tokens
        self._count(1)

    def change(self, lane: Lane) -> None:
        """Have the room on another lane."""
        self.leave()
        self.lane = lane
        self._count(1)

    def leave(self) -> None:
        """Give the room back."""
        self._count(-1)

    def _count(self, sign: int) -> None:
        self.lane.taken += sign * self.tokens
        self.lane.samples += sign


class Lanes:
    """The lanes of an extraction."""

    def __init__(self, lanes: list[Lane]) -> None:
        self.all = lanes
        self._freed = asyncio.Event()

    @property
    def alive(self) -> list[Lane]:
        """Those whose server was not seen to be dead."""
        return [lane for lane in self.all if lane.gone is None]

    async def take(self, tokens: int, give_up: Callable[[], bool]) -> Place | None:
        """Wait for room on the lane that is least busy; None where `give_up` says so, or where no lane is left."""
        lane = await self._find(tokens, give_up)
        return Place(lane, tokens) if lane else None

    async def move(self, place: Place, give_up: Callable[[], bool]) -> None:
        """Wait for room on another lane than the dead one. Raises its ServerGone as `take` gives None."""
        lane = await self._find(place.tokens, give_up)
        if lane is None:
            raise place.lane.gone or ServerGone("no server is left")
        place.change(lane)

    async def _find(self, tokens: int, give_up: Callable[[], bool]) -> Lane | None:
        while self.alive and not give_up():
            fitting = [lane for lane in self.alive if lane.fits(tokens)]
            if fitting:
                return min(fitting, key=lambda lane: lane.taken / lane.tokens)
            self._freed.clear()
            await self._freed.wait()
        return None

    def give_back(self, place: Place) -> None:
        """A sample has ended."""
        place.leave()
        self._freed.set()

    def wake(self) -> None:
        """Have who waits look whether to give up."""
        self._freed.set()
