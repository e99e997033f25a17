"""Copying a forward's rows into the arena, by device.

On a CPU a copy is done when it returns. On CUDA it is made on a stream of its own into pinned memory, beside the next
forward's kernels, and then the slot is passed on; nothing in the forward waits for it:

    SGLang's thread    launches N, waits for its tokens │ launches N + 1, waits for its tokens │
    device                 N                            │     N + 1                            │
    copying stream                                          states of N
    our thread         waits until N is computed, then for the copy ──┘ and tells the writers
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

logger = logging.getLogger("sglang.layertap")

ALONE_SECONDS = 0.05  # after which a forward's states are copied although no other forward has come
LOOK_SECONDS = 0.001
ASK_SECONDS = 5.0  # after which CUDA is asked what became of a copy


Pair = tuple[Any, Any]
"""Place in the arena and source, of one shape."""


class Copier(Protocol):
    """`copy` calls `done` once all `pairs` are in the arena, or `failed` with what kept one of them from it.

    It goes through `pairs` before it returns.
    """

    def copy(self, pairs: Iterable[Pair], done: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        """Copy; returns at once where the device copies by itself. Never raises."""

    def then(self, done: Callable[[], None]) -> None:
        """Call `done` after that of every earlier `copy`."""

    def before_forward(self) -> None:
        """A forward is about to be launched, which gives the device time to copy the one before. Never raises."""


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

    def before_forward(self) -> None:
        """See `Copier`."""


class Copy:
    """A forward to copy, once its event `computed` has come; `there` turns true in pinned memory when it is copied."""

    def __init__(self, pairs: list[Pair], done: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        import torch

        self.pairs, self.done, self.failed = pairs, done, failed
        self.computed = torch.cuda.Event(blocking=True)  # the thread that waits for it sleeps
        self.computed.record()
        with torch.inference_mode(False):  # the forward may be in it, and another thread writes here
            self.there = torch.zeros(1, dtype=torch.bool, pin_memory=True)
        self.started = threading.Event()
        self.error: Exception | None = None


class CudaCopier:
    """Device to pinned memory: the arena's mapping is registered with the driver once, here.

    When a forward is launched, the one before is put into the copying stream: SGLang has that one's tokens by then.
    Put in earlier, its states would go before them, since a device copies to the host one thing after another. Later,
    SGLang waits for the next tokens, and no other thread's call to CUDA returns until it has them; so whether a copy
    has ended is not asked of CUDA either, but told by a byte that is copied last.
    """

    def __init__(self, arena: Any, device: Any) -> None:
        import torch

        error = torch.cuda.cudart().cudaHostRegister(arena.data_ptr(), arena.numel(), 0)
        if int(error) != 0:
            raise RuntimeError(f"layertap: the arena's {arena.numel():,} bytes could not be pinned: CUDA error {error}")
        self.stream = torch.cuda.Stream(device)
        self.yes = torch.ones(1, dtype=torch.bool, device=device)
        self.last: Copy | None = None
        self.starting = threading.Lock()
        self.waiting: queue.SimpleQueue[Copy | Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="layertap-copier", daemon=True).start()

    def copy(self, pairs: Iterable[Pair], done: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        """See `Copier`. The sources are held until they are copied, so that their memory is not given away before."""
        try:
            self.last = Copy(list(pairs), done, failed)
            self.waiting.put(self.last)
        except Exception as error:
            failed(error)

    def then(self, done: Callable[[], None]) -> None:
        """See `Copier`."""
        self.waiting.put(done)

    def before_forward(self) -> None:
        """See `Copier`."""
        import torch

        if self.last is not None:
            self._start(self.last, after=torch.cuda.current_stream())
            self.last = None

    def _start(self, copy: Copy, after: Any = None) -> None:
        """Put `copy` into the stream unless it is there already: behind its forward and what is in `after` by now."""
        import torch

        with self.starting:
            if copy.started.is_set():
                return
            try:
                if after is not None:
                    self.stream.wait_stream(after)
                with torch.cuda.stream(self.stream):
                    copy.computed.wait()
                    for place, source in copy.pairs:
                        place.copy_(source, non_blocking=True)
                    copy.there.copy_(self.yes, non_blocking=True)
            except Exception as error:
                copy.error = error
            copy.started.set()

    def _run(self) -> None:
        import torch

        torch.cuda.set_device(self.stream.device)  # else this thread would take memory of the first GPU
        while True:
            item = self.waiting.get()
            try:
                if isinstance(item, Copy):
                    self._end(item)
                else:
                    item()
            except Exception:
                logger.exception("layertap: what follows a copy to the arena failed")
            del item  # it would hold the states until the next forward

    def _end(self, copy: Copy) -> None:
        try:
            copy.computed.synchronize()
            if not copy.started.wait(ALONE_SECONDS):
                self._start(copy)
            if copy.error is not None:
                self.stream.synchronize()  # what was put in before goes into a slot that is about to be given back
                raise copy.error
            self._wait_for(copy)
        except Exception as error:
            copy.failed(error)
        else:
            copy.done()
        finally:
            copy.pairs.clear()  # `self.last` may hold it for long

    def _wait_for(self, copy: Copy) -> None:
        asked = time.monotonic() + ASK_SECONDS
        while not copy.there.item():
            time.sleep(LOOK_SECONDS)
            if time.monotonic() > asked:
                self.stream.synchronize()  # raises where the device has failed
                asked += ASK_SECONDS


def copier_for(arena: Any, device: Any) -> Copier:
    """The copier for states on `device`; `arena` is the mapping, uint8. Raises RuntimeError where it cannot pin it."""
    return CudaCopier(arena, device) if device.type == "cuda" else CpuCopier()
