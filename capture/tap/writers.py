"""The writers together: arena slots, and which writer gets which request.

A forward's requests are dealt out, so that all writers work on one slot; it is free again when the last of them has
said that it is done with its part. The chunks of one prompt go to the same writer, which puts them together.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import Counter

import msgspec

from capture.tap.writer import Fail, Piece, WriterSettings
from capture.tap.writer_link import WriterLink

MOST_WRITERS = 12
SLOW_SECONDS = 1.0  # without an answer, after which a writer gets new requests only where no other one is left


def default_count(ranks: int, replicas: int = 1) -> int:
    """Writers where none were asked for: three quarters of the cores that the scheduler processes leave.

    These are `ranks` for each of the `replicas`, which have the cores together. One that has nothing to write sleeps.
    """
    return max(1, min(MOST_WRITERS, (len(os.sched_getaffinity(0)) // replicas - ranks) * 3 // 4))


class Writers:
    """`count` writers and the arena's free slots; they share `settings.spare_bytes`."""

    def __init__(self, count: int, slots: int, settings: WriterSettings) -> None:
        self.free: queue.Queue[int] = queue.Queue()
        for slot in range(slots):
            self.free.put(slot)
        self.waited = 0.0  # seconds, by all forwards together
        self.lock = threading.Lock()
        self.readers: Counter[int] = Counter()  # slot -> writers that still read it
        self.begun: dict[int, WriterLink] = {}  # number -> who has the first chunks of a prompt that is not whole
        self.links = [
            WriterLink(
                msgspec.structs.replace(settings, index=index, spare_bytes=settings.spare_bytes // count), self._release
            )
            for index in range(count)
        ]

    def take_slot(self, seconds: float) -> int | None:
        """A free slot, None where none comes free in `seconds`."""
        started = time.monotonic()
        try:
            return self.free.get(timeout=seconds)
        except queue.Empty:
            return None
        finally:
            self.waited += time.monotonic() - started

    def put_back(self, slot: int) -> None:
        """Give a slot back unused."""
        self.free.put(slot)

    def send_forward(self, slot: int, pieces: list[Piece]) -> None:
        """Hand a filled slot over, each piece to one writer."""
        parts = self._deal(pieces)
        with self.lock:
            self.readers[slot] = len(parts)
        for link, part in parts:
            link.send_forward(slot, part)

    def _deal(self, pieces: list[Piece]) -> list[tuple[WriterLink, list[Piece]]]:
        """Each piece to who has the prompt's first chunk, else to the writer that has least to do, longest first."""
        parts: dict[WriterLink, list[Piece]] = {}
        rows = {link: link.load for link in self.links}
        late = {link: not link.ready or link.silent > SLOW_SECONDS for link in self.links}
        for piece in sorted(pieces, key=lambda piece: -piece.length):
            link = self.begun.pop(piece.number, None) if piece.prefix else None
            link = link or min(self.links, key=lambda link: (late[link], rows[link]))
            if piece.prefix + piece.length < piece.total:
                self.begun[piece.number] = link
            rows[link] += piece.length
            parts.setdefault(link, []).append(piece)
        return list(parts.items())

    def send_fail(self, message: Fail) -> None:
        """Have a request settled as failed, by who has its first chunks if anybody has."""
        link = self.begun.pop(message.number, None)
        (link or min(self.links, key=lambda link: (not link.ready, link.load))).send_fail(message)

    def _release(self, slot: int) -> None:
        """A writer reads `slot` no longer."""
        with self.lock:
            self.readers[slot] -= 1
            if self.readers[slot] == 0:
                self.free.put(slot)
