"""Copying a forward's rows into the arena, by device.

On a CPU a copy is done when it returns. On CUDA it runs on a stream of its own into pinned memory, beside the next
kernels, and nothing in the forward waits for it; a thread does, and then passes the slot on.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

logger = logging.getLogger("sglang.layertap")


class Copier(Protocol):
    """`copy` takes (place in the arena, source) pairs and calls `done` once all of them are in the arena."""

    def copy(self, pairs: Iterable[tuple[Any, Any]], done: Callable[[], None]) -> None:
        """Copy; returns at once where the device copies by itself. Raises what torch raises."""

    def then(self, done: Callable[[], None]) -> None:
        """Call `done` after that of every earlier `copy`."""


class CpuCopier:
    """Source and arena are both plain memory."""

    def copy(self, pairs: Iterable[tuple[Any, Any]], done: Callable[[], None]) -> None:
        """See `Copier`."""
        for place, source in pairs:
            place.copy_(source)
        done()

    def then(self, done: Callable[[], None]) -> None:
        """See `Copier`."""
        done()


class CudaCopier:
    """Device to pinned memory: the arena's mapping is registered with the driver once, here."""

    def __init__(self, arena: Any, device: Any) -> None:
        import torch

        error = torch.cuda.cudart().cudaHostRegister(arena.data_ptr(), arena.numel(), 0)
        if int(error) != 0:
            raise RuntimeError(f"layertap: the arena's {arena.numel():,} bytes could not be pinned: CUDA error {error}")
        self.stream = torch.cuda.Stream(device)
        self.copied: queue.SimpleQueue[tuple[Any, Callable[[], None]]] = queue.SimpleQueue()
        threading.Thread(target=self._pass_on, name="layertap-copied", daemon=True).start()

    def copy(self, pairs: Iterable[tuple[Any, Any]], done: Callable[[], None]) -> None:
        """See `Copier`."""
        import torch

        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for place, source in pairs:
                place.copy_(source, non_blocking=True)
                source.record_stream(self.stream)  # its memory is not given away before the copy has run
            event = torch.cuda.Event(blocking=True)  # the thread that waits for it sleeps
            event.record(self.stream)
        self.copied.put((event, done))

    def then(self, done: Callable[[], None]) -> None:
        """See `Copier`."""
        self.copied.put((None, done))

    def _pass_on(self) -> None:
        while True:
            event, done = self.copied.get()
            try:
                if event is not None:
                    event.synchronize()
                done()
            except Exception:
                logger.exception("layertap: a copy to the arena failed")


def copier_for(arena: Any, device: Any) -> Copier:
    """The copier for states on `device`; `arena` is the mapping, uint8. Raises RuntimeError where it cannot pin it."""
    return CudaCopier(arena, device) if device.type == "cuda" else CpuCopier()
