"""Ways to bring a forward's states to the host, as an SGLang plugin: what `tap_limits.py copies` compares the tap's with.

The file that `LAYERTAP_COPIER` names holds the way to go, and is read at each forward. Beside it, `forwards.jsonl` gets a
line for each forward: the way, and the milliseconds of every step that its slot went through.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIABLE = "LAYERTAP_COPIER"
AS_IT_IS = "as it is"
AT_ONCE = "at once"  # all of a forward, as soon as it is computed, with nothing to do for a thread in between
TOLD = "at once, told"  # ... and a number that is copied behind it tells when it is there, so that CUDA is not asked
URGENT = "at once, told, urgent"  # ... on a stream that goes before others
QUEUED = "queued, told"  # ... in the queue when the forward is launched, before SGLang asks for its tokens
WAYS = [AS_IT_IS, AT_ONCE, TOLD, URGENT, QUEUED]
NUMBERS = 1 << 16
LOOK_SECONDS = 0.0005
STEPS = ["slot_wait", "computing", "copying", "writing"]


def environment(folder: Path) -> dict[str, str]:
    """What a server's environment needs for the plugin to be in; makes its entry point and the way's file there."""
    from engines import entry_point

    (folder / "way").write_text(AS_IT_IS)
    return {
        "SGLANG_PLUGINS": "layertap,layertap_copiers",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), entry_point(folder, "layertap_copiers", "copiers")]),
        VARIABLE: str(folder / "way"),
    }


def register() -> None:
    """SGLang's entry point: before the tap makes its copier."""
    from capture.tap.copier import CudaCopier
    from capture.tap.writers import Writers

    own_copy, own_take, own_pairs = CudaCopier.copy, CudaCopier._take, CudaCopier._copy
    take_slot, send_forward, release = Writers.take_slot, Writers.send_forward, Writers._release
    steps = Steps(Path(os.environ[VARIABLE]).with_name("forwards.jsonl"))
    others = functools.cache(Others)  # one for each copier, made when it is first wanted

    def timed_slot(writers: Any, seconds: float) -> int | None:
        begun = time.perf_counter()
        slot = take_slot(writers, seconds)
        if slot is not None:
            steps.at[slot] = [begun, time.perf_counter()]
        return slot

    def copy(copier: Any, pairs: Any, done: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        steps.way = Path(os.environ[VARIABLE]).read_text()
        if steps.way == QUEUED:
            steps.computed = time.perf_counter()  # it is not known when, so `copying` counts from here
            others(copier).queue(list(pairs), done)
        else:
            own_copy(copier, pairs, done, failed)

    def take(copier: Any, item: Any) -> None:
        if steps.way == AS_IT_IS:
            own_take(copier, item)
            return
        item.computed.synchronize()
        steps.computed = time.perf_counter()
        others(copier).copy(item.pairs, steps.way)
        item.done()

    def timed_pairs(copier: Any, pairs: Any) -> None:
        steps.computed = time.perf_counter()
        own_pairs(copier, pairs)

    def timed_send(writers: Any, slot: int, pieces: Any) -> None:
        now = time.perf_counter()
        steps.at[slot] += [steps.computed or now, now]
        send_forward(writers, slot, pieces)

    def timed_release(writers: Any, slot: int) -> None:
        release(writers, slot)
        if writers.readers[slot] == 0:
            steps.write(slot)

    CudaCopier.copy, CudaCopier._take, CudaCopier._copy = copy, take, timed_pairs  # type: ignore[method-assign]
    Writers.take_slot, Writers.send_forward, Writers._release = timed_slot, timed_send, timed_release  # type: ignore[method-assign]


class Steps:
    """When each slot that is under way was asked for, taken, computed, copied."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.way = AS_IT_IS
        self.at: dict[int, list[float]] = {}
        self.computed = 0.0

    def write(self, slot: int) -> None:
        at = [*self.at.pop(slot), time.perf_counter()]
        spans = [round(1000 * (after - before), 2) for before, after in itertools.pairwise(at)]
        with self.path.open("a") as file:
            file.write(json.dumps({"way": self.way} | dict(zip(STEPS, spans, strict=True))) + "\n")


class Others:
    """The other ways than the copier's own."""

    def __init__(self, copier: Any) -> None:
        import torch

        device = copier.stream.device
        self.waiting, self.stream = copier.waiting, copier.stream
        self.urgent = torch.cuda.Stream(device, priority=-1)
        self.numbers = torch.arange(NUMBERS, device=device)
        self.there = torch.zeros(1, dtype=torch.int64).pin_memory()
        self.seen, self.number = self.there.numpy(), 0
        torch.cuda.synchronize(device)

    def copy(self, pairs: list[Any], way: str) -> None:
        event, number = self._put(pairs, self.urgent if way == URGENT else self.stream)
        if way == AT_ONCE:
            event.synchronize()
        else:
            self._wait_for(number)

    def queue(self, pairs: list[Any], done: Callable[[], None]) -> None:
        import torch

        self.stream.wait_stream(torch.cuda.current_stream())
        _, number = self._put(pairs, self.stream)
        self.waiting.put(functools.partial(self._end, number, pairs, done))

    def _end(self, number: int, _sources: list[Any], done: Callable[[], None]) -> None:
        self._wait_for(number)
        done()

    def _put(self, pairs: list[Any], stream: Any) -> tuple[Any, int]:
        import torch

        self.number = (self.number + 1) % NUMBERS
        with torch.cuda.stream(stream):
            for place, source in pairs:
                place.copy_(source, non_blocking=True)
            event = torch.cuda.Event(blocking=True)
            event.record()
            self.there.copy_(self.numbers[self.number : self.number + 1], non_blocking=True)
        return event, self.number

    def _wait_for(self, number: int) -> None:
        while self.seen[0] != number:
            time.sleep(LOOK_SECONDS)
