"""Doing many things at once, some at a time, and taking their results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def in_order(threads: int, work: Callable[[T], R], items: Iterable[T]) -> Iterator[tuple[T, R]]:
    """Each item with what `work` made of it, in the items' order; never more than twice `threads` items are under way.

    `items` is gone through by whoever asks, so that it may read a database. Whoever stops asking early waits for what
    is under way and no more.
    """
    under_way: deque[tuple[T, Future[R]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                under_way.append((item, pool.submit(work, item)))
                while len(under_way) >= 2 * threads:
                    done, future = under_way.popleft()
                    yield done, future.result()
            while under_way:
                done, future = under_way.popleft()
                yield done, future.result()
        finally:
            for _, future in under_way:
                future.cancel()
