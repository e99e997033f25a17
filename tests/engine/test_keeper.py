"""TP rank 0's half of the tap where copies into the arena end late, as they do on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from capture.tap.arena import Arena, ArenaShape
from capture.tap.copier import Pair
from capture.tap.keeper import Keeper
from capture.tap.writer import Fail, Piece

HIDDEN, STATES = 4, 2


class LateCopier:
    """Copies when it is told to; `broken` copies fail."""

    def __init__(self, broken: bool = False) -> None:
        self.broken = broken
        self.waiting: list[Callable[[], None]] = []

    def copy(self, pairs: Iterable[Pair], done: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        try:
            held = list(pairs)
        except Exception as error:
            failed(error)
            return

        def run() -> None:
            if self.broken:
                failed(RuntimeError("no such memory"))
                return
            for place, source in held:
                place.copy_(source)
            done()

        self.waiting.append(run)

    def then(self, done: Callable[[], None]) -> None:
        self.waiting.append(done)

    def run(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()


class Writers:
    """One slot, and what was sent."""

    def __init__(self) -> None:
        self.free = [0]
        self.sent: list[tuple[int, list[Piece]]] = []
        self.failed: list[Fail] = []

    def take_slot(self, _seconds: float) -> int:
        return self.free.pop()

    def put_back(self, slot: int) -> None:
        self.free.append(slot)

    def send_forward(self, slot: int, pieces: list[Piece]) -> None:
        self.sent.append((slot, pieces))

    def send_fail(self, message: Fail) -> None:
        self.failed.append(message)


def keeper_with(copier: LateCopier, folder: Path) -> Any:
    keeper: Any = object.__new__(Keeper)
    keeper.settings = SimpleNamespace(secret="s")
    keeper.requests, keeper.numbers, keeper.state = {}, 0, SimpleNamespace(shared_forwards=0)
    keeper.arena = Arena.create(folder / "arena", ArenaShape(1, 8, STATES, HIDDEN, "float32"))
    keeper.copier, keeper.writers = copier, Writers()
    return keeper


def forward(ids: list[int]) -> Any:
    return SimpleNamespace(
        rids=[f"s.x.0.0.{len(ids)}"],
        extend_prefix_lens_cpu=[0],
        extend_seq_lens_cpu=[len(ids)],
        input_ids=torch.tensor(ids),
    )


def test_ids_are_those_of_the_forward_though_sglang_fills_its_buffer_anew(tmp_path: Path) -> None:
    copier = LateCopier()
    keeper = keeper_with(copier, tmp_path)
    batch, states = forward([5, 6, 7]), [torch.full((3, HIDDEN), float(i)) for i in range(STATES)]
    keeper.take(batch, states)
    batch.input_ids.copy_(torch.tensor([1, 2, 3]))  # SGLang's buffer, at the next forward
    copier.run()
    assert keeper.arena.ids(0)[:3].tolist() == [5, 6, 7]
    assert torch.equal(keeper.arena.states(0)[:, :3], torch.stack(states))
    assert [slot for slot, _ in keeper.writers.sent] == [0]


def test_a_copy_that_fails_fails_its_requests_and_frees_its_slot(tmp_path: Path) -> None:
    copier = LateCopier(broken=True)
    keeper = keeper_with(copier, tmp_path)
    keeper.take(forward([5, 6, 7]), [torch.zeros(3, HIDDEN)] * STATES)
    copier.run()
    assert [fail.reason for fail in keeper.writers.failed] == ["copying its states failed: no such memory"]
    assert (keeper.writers.free, keeper.writers.sent) == ([0], [])


def test_a_forward_for_whose_ids_there_is_no_memory_fails_its_requests_and_frees_its_slot(tmp_path: Path) -> None:
    class Full:
        def clone(self) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

    keeper = keeper_with(LateCopier(), tmp_path)
    batch = forward([5, 6, 7])
    batch.input_ids = Full()
    keeper.take(batch, [torch.zeros(3, HIDDEN)] * STATES)
    keeper.copier.run()
    assert [fail.reason for fail in keeper.writers.failed] == ["copying its states failed: CUDA out of memory"]
    assert (keeper.writers.free, keeper.writers.sent) == ([0], [])
