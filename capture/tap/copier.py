"""Copying a forward's rows into the arena, by device.

On a CPU a copy is done when it returns. On CUDA a thread makes it on a stream of its own into pinned memory, beside the
next kernels, and then passes the slot on; nothing in the forward waits for it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

logger = logging.getLogger("sglang.layertap")

STRETCH_BYTES = 64 << 20  # a little over a millisecond on PCIe 5
UNDER_WAY = 2  # the device has the next one when it is done with one


Pair = tuple[Any, Any]
"""Place in the arena and source, of one shape."""


class Copier(Protocol):
    """`copy` calls `done` once all `pairs` are in the arena, or `failed` with what kept one of them from it."""

    def copy(self, pairs: Iterable[Pair], done: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        """Copy; returns at once where the device copies by itself. Never raises."""

    def then(self, done: Callable[[], None]) -> None:
        """Call `done` after that of every earlier `copy`."""


class CpuCopier:
    """Source and arena are both plain memory."""

    def copy(self, pairs: Iterable[Pair], done: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        """See `Copier`."""
        try:
            for place, source in pairs:
                place.copy_(source)
        except Exception as error:
            failed(error)
        else:
            done()

    def then(self, done: Callable[[], None]) -> None:
        """See `Copier`."""
        done()


class Copy(NamedTuple):
    """A forward to copy once its event `computed` has come."""

    computed: Any
    pairs: list[Pair]
    done: Callable[[], None]
    failed: Callable[[Exception], None]


class CudaCopier:
    """Device to pinned memory: the arena's mapping is registered with the driver once, here.

    A device copies to the host one thing after another, so what SGLang asks for after a forward would wait behind the
    whole of its states, and the next forward with it. So a thread copies them in stretches, a few at a time.
    """

    def __init__(self, arena: Any, device: Any) -> None:
        import torch

        error = torch.cuda.cudart().cudaHostRegister(arena.data_ptr(), arena.numel(), 0)
        if int(error) != 0:
            raise RuntimeError(f"layertap: the arena's {arena.numel():,} bytes could not be pinned: CUDA error {error}")
        self.stream = torch.cuda.Stream(device)
        self.waiting: queue.SimpleQueue[Copy | Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="layertap-copier", daemon=True).start()

    def copy(self, pairs: Iterable[Pair], done: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        """See `Copier`. The sources are held until they are copied, so that their memory is not given away before."""
        import torch

        try:
            computed = torch.cuda.Event(blocking=True)  # the thread that waits for it sleeps
            computed.record()
            self.waiting.put(Copy(computed, list(pairs), done, failed))
        except Exception as error:
            failed(error)

    def then(self, done: Callable[[], None]) -> None:
        """See `Copier`."""
        self.waiting.put(done)

    def _run(self) -> None:
        while True:
            item = self.waiting.get()
            try:
                if isinstance(item, Copy):
                    self._take(item)
                else:
                    item()
            except Exception:
                logger.exception("layertap: what follows a copy to the arena failed")
            del item  # it would hold the states until the next forward

    def _take(self, item: Copy) -> None:
        try:
            item.computed.synchronize()
            self._copy(item.pairs)
        except Exception as error:
            item.failed(error)
        else:
            item.done()

    def _copy(self, pairs: list[Pair]) -> None:
        import torch

        under_way: deque[Any] = deque()
        with torch.cuda.stream(self.stream):
            for place, source in stretches(pairs):
                if len(under_way) == UNDER_WAY:
                    under_way.popleft().synchronize()
                place.copy_(source, non_blocking=True)
                event = torch.cuda.Event(blocking=True)
                event.record()
                under_way.append(event)
        for event in under_way:
            event.synchronize()


def stretches(pairs: Iterable[Pair]) -> Iterator[Pair]:
    """`pairs` of tensors `[rows, …]`, in pieces of as many rows as fit into `STRETCH_BYTES`, one at least."""
    for place, source in pairs:
        rows = max(1, STRETCH_BYTES * len(source) // source.nbytes)
        yield from zip(place.split(rows), source.split(rows), strict=True)


def copier_for(arena: Any, device: Any) -> Copier:
    """The copier for states on `device`; `arena` is the mapping, uint8. Raises RuntimeError where it cannot pin it."""
    return CudaCopier(arena, device) if device.type == "cuda" else CpuCopier()
