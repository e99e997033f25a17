"""Which server takes the next sample, and what becomes of samples whose server died."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from capture import lanes
from capture.lanes import Lane, Lanes
from capture.server import ServerGone

DEAD = ServerGone("it is dead")


class Drawer:
    """Draws for as long as nobody says that it is done."""

    def __init__(self, *_: Any) -> None:
        self.done = asyncio.Event()

    async def draw(self, *_: Any) -> str:
        await self.done.wait()
        return "drawn"


@pytest.fixture(autouse=True)
def made_drawers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "Drawer", Drawer)
    monkeypatch.setattr(lanes, "tokens_in_flight", lambda server, tap, share: tap // share)


def made(*tokens: int) -> Lanes:
    server: Any = SimpleNamespace(run="server")
    taps: list[Any] = [tokens[k] * len(tokens) for k in range(len(tokens))]
    return Lanes([Lane(server, tap, len(tokens)) for tap in taps])


def never() -> bool:
    return False


async def soon(awaitable: Any) -> Any:
    return await asyncio.wait_for(awaitable, 20)


def test_the_lane_that_is_least_busy_takes_the_next() -> None:
    async def go() -> list[int]:
        both = made(100, 200)
        places = [await soon(both.take(50, never)) for _ in range(5)]
        return [both.all.index(place.lane) for place in places]

    assert asyncio.run(go()) == [0, 1, 1, 0, 1]


def test_a_sample_waits_for_room_and_a_large_one_goes_alone() -> None:
    async def go() -> None:
        one = made(100)
        first = await soon(one.take(60, never))
        waiting = asyncio.create_task(one.take(500, never))
        await asyncio.sleep(0)
        assert not waiting.done()
        one.give_back(first)
        large = await soon(waiting)
        assert not one.all[0].fits(1)
        one.give_back(large)
        assert (one.all[0].taken, one.all[0].samples) == (0, 0)

    asyncio.run(go())


def test_at_most_so_many_samples_however_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MOST_IN_FLIGHT", 2)

    async def go() -> None:
        one = made(1000)
        for _ in range(2):
            await soon(one.take(1, never))
        assert not one.all[0].fits(1)

    asyncio.run(go())


def test_what_a_dead_server_had_moves_to_the_other() -> None:
    async def go() -> None:
        both = made(100, 100)
        places = [await soon(both.take(40, never)) for _ in range(4)]
        dead, other = both.all
        drawing = [asyncio.create_task(place.lane.draw(0, 1, [1])) for place in places]
        await asyncio.sleep(0)
        dead.lose(DEAD)
        ended = await soon(asyncio.gather(drawing[0], drawing[2], return_exceptions=True))
        assert ended == [DEAD, DEAD]
        assert not drawing[1].done(), "what the other draws goes on"
        with pytest.raises(ServerGone):
            await dead.draw(0, 2, [1])
        moving = asyncio.create_task(both.move(places[0], never))
        await asyncio.sleep(0)
        assert not moving.done(), "the other has no room yet"
        other.drawer.done.set()
        assert await soon(asyncio.gather(drawing[1], drawing[3])) == ["drawn", "drawn"]
        both.give_back(places[1])
        await soon(moving)
        assert (places[0].lane, dead.samples, other.samples, other.taken) == (other, 1, 2, 80)

    asyncio.run(go())


def test_without_a_server_left_nothing_is_taken() -> None:
    async def go() -> None:
        one = made(100)
        place = await soon(one.take(100, never))
        waiting = asyncio.create_task(one.take(100, never))
        await asyncio.sleep(0)
        one.all[0].lose(DEAD)
        one.wake()
        assert await soon(waiting) is None
        with pytest.raises(ServerGone, match="it is dead"):
            await soon(one.move(place, never))

    asyncio.run(go())


def test_who_waits_gives_up_when_the_run_stops() -> None:
    async def go() -> None:
        one, stopping = made(100), []
        await soon(one.take(100, never))
        waiting = asyncio.create_task(one.take(100, lambda: bool(stopping)))
        await asyncio.sleep(0)
        stopping.append(1)
        one.wake()
        assert await soon(waiting) is None

    asyncio.run(go())


def test_a_draw_that_is_called_off_is_no_death() -> None:
    async def go() -> None:
        one = made(100)
        drawing = asyncio.create_task(one.all[0].draw(0, 1, [1]))
        await asyncio.sleep(0)
        drawing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await drawing

    asyncio.run(go())
