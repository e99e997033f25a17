"""Frames leave whole and one at a time, the small ones first."""

from __future__ import annotations

import io
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import until

from backends.outbox import SMALL, Outbox


class Slow(io.RawIOBase):
    """A stream whose every write waits until it is let go."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.let_go = threading.Semaphore(0)
        self.writing = 0

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.writing += 1
        assert self.let_go.acquire(timeout=60)
        self.written.append(data)
        return len(data)


def large(letter: bytes) -> bytes:
    return letter * (SMALL + 1)


def test_small_frames_go_before_large_ones_that_wait() -> None:
    stream = Slow()
    outbox = Outbox(stream)  # type: ignore[arg-type]
    with ThreadPoolExecutor(8) as pool:
        pool.submit(outbox.send, large(b"a"))
        until(lambda: stream.writing == 1, "the first is under way")
        for letter in (b"b", b"c"):
            pool.submit(outbox.send, large(letter))
        for number in range(3):
            pool.submit(outbox.send, b"%d" % number)
        until(lambda: outbox._small_ones == 3, "all wait")
        for _ in range(6):
            stream.let_go.release()
    assert stream.written[0] == large(b"a")
    assert sorted(stream.written[1:4]) == [b"0", b"1", b"2"]
    assert sorted(stream.written[4:]) == [large(b"b"), large(b"c")]


def test_a_stream_that_breaks_holds_nobody_up() -> None:
    stream = io.BytesIO()
    outbox = Outbox(stream)
    outbox.send(b"x")
    assert stream.getvalue() == b"x"
    stream.close()
    for frame in (b"y", large(b"z")):
        with pytest.raises(ValueError, match="closed"):
            outbox.send(frame)
