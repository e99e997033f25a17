"""The scheduler's end of one writer: starts it, follows it, starts another when it dies or hangs."""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from capture.tap.settings import SETTINGS_VARIABLE
from capture.tap.writer import MESSAGE_BYTES, MESSAGE_PIECES, Ack, Fail, Forward, Piece, WriterSettings

logger = logging.getLogger("sglang.layertap")

HUNG_SECONDS = 20.0  # without an answer, after which a writer is killed; it answers at least once for each slot …
SLOW_BYTES = 200e6  # … and has a second more for each of these that it has to write: a long prompt's states are many
START_SECONDS = 180.0  # until its first word, likewise: it imports torch, maybe from a slow disk
LOOK_MILLISECONDS = 1000


class WriterLink:
    """The scheduler's end of one writer: what is unsettled with it, and a new process when one dies or hangs.

    `release` is called with a slot once this writer reads it no longer, exactly once for each `send_forward`.
    """

    def __init__(self, settings: WriterSettings, release: Callable[[int], None]) -> None:
        self.settings, self.release = settings, release
        self.lock = threading.Lock()
        self.unsettled: dict[int, str] = {}  # number -> rid, sent and not yet on disk
        self.slots: dict[int, int] = {}  # slot -> rows of it that were sent and not yet answered
        self.owed: list[Fail | Forward] = []  # what no writer has been told yet
        self.load = 0  # rows in `slots`
        self.unanswered = 0  # messages; each has one answer
        self.heard = 0.0  # when it last answered, or was first asked after it had answered everything
        self.ready = False
        self.lost = self.failed = 0
        self.pid: int | None = None
        self.link: socket.socket | None = None
        threading.Thread(target=self._keep_one_alive, name="layertap-writer", daemon=True).start()

    @property
    def silent(self) -> float:
        """Seconds for which it has owed an answer without giving any."""
        return time.monotonic() - self.heard if self.ready and self.unanswered else 0.0

    @property
    def patience(self) -> float:
        """Seconds that it may owe an answer."""
        return HUNG_SECONDS + self.load * self.settings.arena.bytes_per_token / SLOW_BYTES

    def send_forward(self, slot: int, pieces: list[Piece]) -> None:
        """Hand pieces of a filled slot over. Where the writer is just dying, its successor fails these requests."""
        with self.lock:
            self._hold(slot, sum(piece.length for piece in pieces))
            for start in range(0, len(pieces), MESSAGE_PIECES):
                part = pieces[start : start + MESSAGE_PIECES]
                if not self._send(Forward(slot, part, last=start + MESSAGE_PIECES >= len(pieces))):
                    self._take_back(slot, pieces[start:], whole=start == 0)
                    return
                self.unsettled.update((piece.number, piece.rid) for piece in part)

    def _hold(self, slot: int, rows: int) -> None:
        self.slots[slot] = rows
        self.load += rows

    def _let_go(self, slot: int) -> None:
        rows = self.slots.pop(slot, None)
        if rows is not None:
            self.load -= rows
            self.release(slot)

    def _take_back(self, slot: int, pieces: list[Piece], *, whole: bool) -> None:
        """No writer took `pieces`, its `whole` part or the end: fail them, and see that the slot comes free."""
        self.owed += [Fail(piece.number, piece.rid, "the writer took no message") for piece in pieces]
        if whole:
            self._let_go(slot)
        else:
            self.owed.append(Forward(slot, [], last=True))

    def send_fail(self, message: Fail) -> None:
        """Have a request settled as failed, now or by the next writer."""
        with self.lock:
            self.unsettled.pop(message.number, None)
            self.owed.append(message)
            self._send_owed()

    def _send_owed(self) -> None:
        while self.owed and self._send(self.owed[0]):
            message = self.owed.pop(0)
            if isinstance(message, Fail):
                self.unsettled[message.number] = message.rid

    def _send(self, message: Forward | Fail) -> bool:
        """False where no writer takes it; a full socket is a writer that hangs, and a forward waits for none."""
        if self.link is None:
            return False
        try:
            self.link.send(msgspec.json.encode(message), socket.MSG_DONTWAIT)
        except OSError:
            return False
        if not self.unanswered:
            self.heard = time.monotonic()
        self.unanswered += 1
        return True

    def _lose(self, why: str) -> None:
        """What was with the dead writer is failed by the next one; its slots are free again."""
        self.link, self.pid, self.ready, self.unanswered = None, None, False, 0
        self.lost += 1
        self.owed = [message for message in self.owed if isinstance(message, Fail)]
        self.owed += [Fail(number, rid, f"{why} before its dump was whole") for number, rid in self.unsettled.items()]
        self.unsettled.clear()
        for slot in list(self.slots):
            self._let_go(slot)

    def _keep_one_alive(self) -> None:
        pause = 0.5
        while True:
            started = time.monotonic()
            try:
                process = self._start()
            except OSError as error:
                logger.error("layertap: the writer could not be started: %s", error)
            else:
                self._listen(process)
                how = _how(process.wait())
                with self.lock:
                    self._lose(f"the writer process {process.pid} ended ({how})")
                logger.error("layertap: writer %d ended (%s); starting another", process.pid, how)
            pause = 0.5 if time.monotonic() - started > 60 else min(2 * pause, 10.0)
            time.sleep(pause if self.lost > 1 else 0)

    def _start(self) -> subprocess.Popen[bytes]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES)
        engine = str(Path(__file__).resolve().parent.parent)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in (engine, os.environ.get("PYTHONPATH")) if path),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        environment.pop(SETTINGS_VARIABLE, None)
        try:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "capture.tap.writer",
                    str(theirs.fileno()),
                    msgspec.json.encode(self.settings).decode(),
                ],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
            )
        finally:
            theirs.close()
        with self.lock:
            self.link, self.pid = ours, process.pid
            self._send_owed()
        return process

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        """Take the writer's answers until it has died; kill one that owes one for `HUNG_SECONDS`, or never comes up."""
        link, begun = self.link, time.monotonic()
        assert link is not None
        poller = select.poll()
        poller.register(link, select.POLLIN)
        decoder = msgspec.json.Decoder(Ack)
        while True:
            if not poller.poll(LOOK_MILLISECONDS):
                silent, most = self.silent, self.patience
                if not self.ready:
                    silent, most = time.monotonic() - begun, START_SECONDS
                if silent > most:
                    logger.error("layertap: writer %d has hung for %.0f s; killing it", process.pid, most)
                    process.kill()
                continue
            try:
                data = link.recv(MESSAGE_BYTES)
            except ConnectionResetError:  # said once where it died with messages unread; its answers come after that
                continue
            except OSError:
                data = b""
            if not data:
                link.close()
                return
            ack = decoder.decode(data)
            with self.lock:
                self._take(ack)

    def _take(self, ack: Ack) -> None:
        self.heard = time.monotonic()
        if not self.ready:  # its first word, which answers nothing
            self.ready = True
            return
        self.unanswered -= 1
        for number in ack.settled:
            self.unsettled.pop(number, None)
        self.failed += ack.failed
        self._send_owed()
        if ack.slot is not None:
            self._let_go(ack.slot)


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
