"""Work that is shared out to processes and comes back in its order."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

CHUNK = 64
MOST = 16
AHEAD = 3  # chunks a worker that are read, at work or done before they are asked for
PR_SET_PDEATHSIG = 1  # of prctl(2): the signal that a process gets when its parent dies

T = TypeVar("T")
R = TypeVar("R")
_work: Callable[[Any], Any]  # what a worker does, as it was when it was forked


class WorkerLost(Exception):
    """A process that shared the work is gone; the sentence says what to do."""


def default_workers() -> int:
    """A worker for each core that this process may use; more than `MOST` wait for the one that reads and writes."""
    return min(len(os.sched_getaffinity(0)), MOST)


def ordered(work: Callable[[T], R], items: Iterable[T], workers: int) -> Iterator[R]:
    """`map(work, items)`, with the work done by `workers` processes.

    They are forked, so `work` need not be pickled and takes its memory with it; items and results are. What `work`
    raises is raised here. Raises WorkerLost where a process was killed.
    """
    global _work
    _work = work
    context = multiprocessing.get_context("fork")
    executor = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(os.getpid(),))
    under_way = deque[Future[list[Any]]]()
    try:
        for chunk in _chunks(items):
            under_way.append(executor.submit(_do, chunk))
            if len(under_way) >= workers * AHEAD:
                yield from under_way.popleft().result()
        while under_way:
            yield from under_way.popleft().result()
    except BrokenProcessPool as error:
        raise WorkerLost("a process that tokenises was killed; was memory short? give the command again") from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _chunks(items: Iterable[T]) -> Iterator[list[T]]:
    iterator = iter(items)
    while chunk := list(itertools.islice(iterator, CHUNK)):
        yield chunk


def _begin(parent: int) -> None:
    """A worker leaves stopping to its parent, and ends with it."""
    import ctypes

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _do(chunk: list[Any]) -> list[Any]:
    return [_work(item) for item in chunk]
