"""A writer: a process of its own, one of several, that turns its part of arena slots into dumps.

It shares the scheduler's host but not its process, so that saving costs the forward nothing. Messages come over a
SEQPACKET socket pair, one `Forward` or `Fail` each; an `Ack` goes back when it is done with a slot and when requests
are settled, that is, `done` or `failed` on disk. End of file on either side means that the other process died.

usage: python -m capture.tap.writer SOCKET_FD SETTINGS_JSON
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec

from capture.dumps.dump import FORMAT, Line, Meta, request_folder, state_names, write_done, write_failed
from capture.dumps.spares import Spares
from capture.tap.arena import Arena, ArenaShape

# A message names requests; ids and states travel in the arena. 512 names stay far below what a socket takes at once.
MESSAGE_PIECES = 512
MESSAGE_BYTES = 1 << 20
JOURNAL_SECONDS = 1.0  # after which lines that dumps.jsonl had no room for are tried again
JOURNAL_TAIL = 1 << 20  # bytes of dumps.jsonl in which a new writer looks for what its predecessor settled


class Piece(msgspec.Struct, frozen=True):
    """Rows `start … start + length` of a slot: tokens `prefix … prefix + length` of request `number`, `total` long."""

    number: int
    rid: str
    start: int
    length: int
    prefix: int
    total: int


class Forward(msgspec.Struct, frozen=True, tag=True):
    """Rows of a forward, copied into `slot`; this writer reads it no longer after the `last` message about it."""

    slot: int
    pieces: list[Piece]
    last: bool


class Fail(msgspec.Struct, frozen=True, tag=True):
    """Request `number` cannot be dumped; whatever there is of it is to become `failed`, `busy` as in `Line`."""

    number: int
    rid: str
    reason: str
    busy: bool = False


class Ack(msgspec.Struct, frozen=True):
    """From the writer: it is done with `slot` (None for a `Fail`), requests `settled` are done or failed on disk.

    It gives one for each message, and an empty one at first, when it is ready.
    """

    slot: int | None
    settled: list[int] = []
    failed: int = 0


class WriterSettings(msgspec.Struct, frozen=True):
    """What the writers need to know; `reserve` bytes of the file system are left free for the failures' own words.

    `index` tells them apart, and each keeps at most `spare_bytes` in files to be written again.
    """

    dump_dir: str
    arena: ArenaShape
    boundaries: list[int]
    reserve: int
    model: str
    sglang: str
    tap: str
    index: int = 0
    spare_bytes: int = 0


class Writer:
    """Settles requests one after another; never raises for a single request."""

    def __init__(self, settings: WriterSettings) -> None:
        self.settings = settings
        self.dump_dir = Path(settings.dump_dir)
        self.arena = Arena.attach(self.dump_dir / "arena", settings.arena)
        self.names = state_names(len(settings.boundaries))
        self.partial: dict[int, tuple[Any, Any]] = {}  # number -> ids and states of a prompt that comes in chunks
        self.spares = Spares(self.dump_dir, f"spare_{settings.index}", settings.spare_bytes)
        self.unwritten: list[Line] = []
        self.journaled_before = _resume(self.dump_dir / "dumps.jsonl")

    def forward(self, message: Forward) -> Ack:
        """Settle what a forward made whole, keep the pieces of the rest."""
        lines = [line for piece in message.pieces if (line := self._piece(message.slot, piece)) is not None]
        self.journal(lines)
        settled = [piece.number for piece in message.pieces if piece.number not in self.partial]
        return Ack(message.slot if message.last else None, settled, sum(line.state == "failed" for line in lines))

    def fail(self, message: Fail) -> Ack:
        """Settle a request that the tap gave up, or that the writer before this one died with."""
        self.partial.pop(message.number, None)
        if message.number in self.journaled_before:  # it died before it said so; the dump may be in use, or gone
            return Ack(None, [message.number])
        folder = request_folder(self.dump_dir, message.number)
        if (folder / "done").exists():  # it died between dump and journal
            size = sum(path.stat().st_size for path in folder.glob("*.pt"))
            line = Line(message.number, message.rid, "done", size)
        else:
            line = self._failed(message.number, message.rid, message.reason, busy=message.busy)
        self.journal([line])
        return Ack(None, [message.number], int(line.state == "failed"))

    def _piece(self, slot: int, piece: Piece) -> Line | None:
        rows = slice(piece.start, piece.start + piece.length)
        ids, states = self.arena.ids(slot)[rows], self.arena.states(slot)[:, rows]
        if piece.length < piece.total:
            whole = self._put_together(piece, ids, states)
            if whole is None:
                return None
            ids, states = whole
        try:
            return Line(piece.number, piece.rid, "done", self._write(piece, ids, states))
        except OSError as error:
            reason = f"the dump could not be written: {error.strerror}"
            return self._failed(piece.number, piece.rid, reason, busy=error.errno == errno.ENOSPC)

    def _put_together(self, piece: Piece, ids: Any, states: Any) -> tuple[Any, Any] | None:
        if piece.prefix == 0:
            shape = (len(self.names), piece.total, self.settings.arena.hidden)
            self.partial[piece.number] = ids.new_empty(piece.total), states.new_empty(shape)
        if piece.number not in self.partial:  # it came to the writer before this one, and was failed there
            return None
        all_ids, all_states = self.partial[piece.number]
        rows = slice(piece.prefix, piece.prefix + piece.length)
        all_ids[rows], all_states[:, rows] = ids, states
        return self.partial.pop(piece.number) if rows.stop == piece.total else None

    def _write(self, piece: Piece, ids: Any, states: Any) -> int:
        needed = states.numel() * states.element_size()
        if self._free() < needed:
            self.spares.drop_idle()
        if (free := self._free()) < needed:
            raise OSError(errno.ENOSPC, f"{needed:,} bytes are needed, {max(free, 0):,} are free on {self.dump_dir}")
        meta = Meta(
            format=FORMAT,
            rid=piece.rid,
            ids=ids.tolist(),
            tokens=piece.total,
            hidden=self.settings.arena.hidden,
            dtype=self.settings.arena.dtype,
            boundaries=self.settings.boundaries,
            files={},
            model=self.settings.model,
            sglang=self.settings.sglang,
            tap=self.settings.tap,
        )
        tensors = dict(zip(self.names, states, strict=True))
        return write_done(request_folder(self.dump_dir, piece.number), tensors, meta, self.spares)

    def _free(self) -> int:
        return shutil.disk_usage(self.dump_dir).free - self.settings.reserve

    def _failed(self, number: int, rid: str, reason: str, *, busy: bool = False) -> Line:
        say(f"request {rid} is not dumped: {reason}")
        try:
            write_failed(request_folder(self.dump_dir, number), reason)
        except OSError as error:
            say(f"request {rid}: its failure could not be written either: {error}")
        return Line(number, rid, "failed", 0, reason, busy)

    def journal(self, lines: list[Line]) -> None:
        """Append to dumps.jsonl; lines that do not fit now go with the next ones."""
        self.unwritten += lines
        if not self.unwritten:
            return
        text = b"".join(msgspec.json.encode(line) + b"\n" for line in self.unwritten)
        try:
            _append(self.dump_dir / "dumps.jsonl", text)
        except OSError as error:
            if lines:
                say(f"dumps.jsonl: {error}")
        else:
            self.unwritten = []


def _resume(path: Path) -> set[int]:
    """The numbers in the last lines of dumps.jsonl, some of which this writer's predecessor left."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - JOURNAL_TAIL)
            file.seek(start)
            whole = file.read().rpartition(b"\n")[0]
    except FileNotFoundError:
        return set()
    lines = whole.splitlines()[1 if start else 0 :]  # the first may lack its beginning
    return {msgspec.json.decode(line, type=Line).n for line in lines}


def _append(path: Path, text: bytes) -> None:
    """Append all of `text` or, where the file system is full, nothing; one writer at a time, whole lines only."""
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        end = _cut_half_line(handle)
        if os.write(handle, text) != len(text):
            os.ftruncate(handle, end)
            raise OSError(errno.ENOSPC, "no room for a line")
    finally:
        os.close(handle)


def _cut_half_line(handle: int) -> int:
    """Cut off a line that a writer died in; returns the file's size."""
    size = os.fstat(handle).st_size
    if size and os.pread(handle, 1, size - 1) != b"\n":
        start = max(0, size - JOURNAL_TAIL)
        size = start + os.pread(handle, size - start, start).rfind(b"\n") + 1
        os.ftruncate(handle, size)
    return size


def say(text: str) -> None:
    """A line in the server's log."""
    print(f"layertap writer: {text}", file=sys.stderr, flush=True)  # noqa: T201


def main(argv: list[str]) -> None:
    """Serve until the scheduler closes its end."""
    import torch

    os.umask(0o077)
    # The server's process group is stopped as one; what is in flight is settled first, until the socket closes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
    link = socket.socket(fileno=int(argv[0]))
    writer = Writer(msgspec.json.decode(argv[1], type=WriterSettings))
    decoder = msgspec.json.Decoder(Forward | Fail)
    link.send(msgspec.json.encode(Ack(None)))
    while True:
        link.settimeout(JOURNAL_SECONDS if writer.unwritten else None)
        try:
            data = link.recv(MESSAGE_BYTES)
        except TimeoutError:
            writer.journal([])
            continue
        except OSError:  # the scheduler died without reading our last answers
            return
        if not data:
            return
        message = decoder.decode(data)
        answer = writer.forward(message) if isinstance(message, Forward) else writer.fail(message)
        link.settimeout(None)
        try:
            link.send(msgspec.json.encode(answer))
        except OSError:
            return


if __name__ == "__main__":
    main(sys.argv[1:])
