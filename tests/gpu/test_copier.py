"""Copies of states on this machine's GPU into pinned memory."""

from __future__ import annotations

import queue
from typing import Any

import pytest
import torch

from capture.tap import copier as module
from capture.tap.copier import CudaCopier

SECONDS = 60.0


class Arena:
    """A copier, places for three forwards, and what has ended."""

    def __init__(self) -> None:
        self.bytes = torch.zeros(3 << 22, dtype=torch.uint8)
        self.copier = CudaCopier(self.bytes, torch.device("cuda"))
        self.places = self.bytes.view(torch.int32).view(3, 1 << 10, 1 << 10)
        self.ended: queue.Queue[tuple[int, Any]] = queue.Queue()

    def copy(self, slot: int, source: torch.Tensor) -> None:
        self.copier.copy(
            [(self.places[slot], source)],
            lambda: self.ended.put((slot, self.places[slot].clone())),
            lambda error: self.ended.put((slot, error)),
        )

    def wait(self) -> tuple[int, Any]:
        return self.ended.get(timeout=SECONDS)


@pytest.fixture
def arena() -> Arena:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return Arena()


def states(value: int) -> torch.Tensor:
    return torch.full((1 << 10, 1 << 10), value, dtype=torch.int32, device="cuda")


def test_a_forward_is_copied_when_the_next_one_is_launched(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ALONE_SECONDS", SECONDS)
    for slot in range(3):
        arena.copier.before_forward()
        torch.cuda._sleep(100_000_000)  # the forward
        made = states(slot) + 7
        arena.copy(slot, made)
        del made  # its memory is given away only after the copy
        states(99)
    for slot in range(2):
        at, found = arena.wait()
        assert at == slot and torch.equal(found, torch.full_like(found, slot + 7))
    assert arena.ended.empty()
    arena.copier.before_forward()
    assert arena.wait()[0] == 2


def test_a_forward_that_no_other_follows_is_copied_all_the_same(arena: Arena) -> None:
    arena.copy(1, states(5))
    slot, found = arena.wait()
    assert slot == 1 and torch.equal(found, torch.full_like(found, 5))
    arena.copier.before_forward()  # once is enough
    arena.copy(2, states(6))
    assert arena.wait()[0] == 2 and arena.ended.empty()


def test_what_comes_after_a_copy_waits_for_it(arena: Arena) -> None:
    torch.cuda._sleep(100_000_000)
    arena.copy(0, states(5))
    arena.copier.then(lambda: arena.ended.put((-1, None)))
    assert [arena.wait()[0], arena.wait()[0]] == [0, -1]


def test_a_copy_that_cannot_be_made_says_why_and_the_next_is_made(arena: Arena) -> None:
    arena.copy(0, states(5)[:, :3])
    slot, error = arena.wait()
    assert slot == 0 and "must match" in str(error)
    arena.copy(1, states(5))
    slot, found = arena.wait()
    assert slot == 1 and torch.equal(found, torch.full_like(found, 5))


def test_a_forward_in_inference_mode_is_copied_whether_another_follows_or_not(arena: Arena) -> None:
    with torch.inference_mode():
        arena.copy(0, states(5))
        assert arena.wait()[0] == 0
        arena.copy(1, states(6))
        arena.copier.before_forward()
        slot, found = arena.wait()
    assert slot == 1 and torch.equal(found, torch.full_like(found, 6))
