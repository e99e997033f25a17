"""The scheduler's end of the writer: starts it, follows it, starts another when it dies."""

from __future__ import annotations

import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec

from capture.settings import SETTINGS_VARIABLE
from capture.writer import MESSAGE_BYTES, MESSAGE_PIECES, Ack, Fail, Forward, Piece, WriterSettings

logger = logging.getLogger("sglang.layertap")


class WriterLink:
    """The scheduler's end of the writer: free slots, what is unsettled, and a new writer when one dies."""

    def __init__(self, slots: int, settings: WriterSettings) -> None:
        self.slots, self.settings = slots, settings
        self.free: queue.Queue[int] = queue.Queue()
        for slot in range(slots):
            self.free.put(slot)
        self.lock = threading.Lock()
        self.unsettled: dict[int, str] = {}  # number -> rid, sent and not yet on disk
        self.sent_slots: set[int] = set()
        self.owed: list[Fail | Forward] = []  # what no writer has been told yet
        self.lost = self.failed = 0
        self.pid: int | None = None
        self.link: socket.socket | None = None
        threading.Thread(target=self._keep_one_alive, name="layertap-writer", daemon=True).start()

    def take_slot(self, seconds: float) -> int | None:
        """A free slot, None where none comes free in `seconds`."""
        try:
            return self.free.get(timeout=seconds)
        except queue.Empty:
            return None

    def put_back(self, slot: int) -> None:
        """Give a slot back unused."""
        self.free.put(slot)

    def send_forward(self, slot: int, pieces: list[Piece]) -> None:
        """Hand a filled slot over. Where the writer is just dying, its successor fails these requests."""
        with self.lock:
            self.sent_slots.add(slot)
            for start in range(0, len(pieces), MESSAGE_PIECES):
                part = pieces[start : start + MESSAGE_PIECES]
                if not self._send(Forward(slot, part, last=start + MESSAGE_PIECES >= len(pieces))):
                    self._take_back(slot, pieces[start:], whole=start == 0)
                    return
                self.unsettled.update((piece.number, piece.rid) for piece in part)

    def _take_back(self, slot: int, pieces: list[Piece], *, whole: bool) -> None:
        """No writer took `pieces`, the `whole` forward or its end: fail them, and see that the slot comes free."""
        self.owed += [Fail(piece.number, piece.rid, "the writer took no message") for piece in pieces]
        if whole:
            self.sent_slots.discard(slot)
            self.free.put(slot)
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
        return True

    def _lose(self, why: str) -> None:
        """What was with the dead writer is failed by the next one; its slots are free again."""
        self.owed = [message for message in self.owed if isinstance(message, Fail)]
        self.owed += [Fail(number, rid, f"{why} before its dump was whole") for number, rid in self.unsettled.items()]
        self.unsettled.clear()
        for slot in self.sent_slots:
            self.free.put(slot)
        self.sent_slots.clear()

    def _keep_one_alive(self) -> None:
        pause = 0.5
        while True:
            started = time.monotonic()
            try:
                process = self._start()
            except OSError as error:
                logger.error("layertap: the writer could not be started: %s", error)
            else:
                self._listen()
                how = process.wait()
                with self.lock:
                    self.link, self.pid = None, None
                    self.lost += 1
                    self._lose(f"the writer process {process.pid} ended ({_how(how)})")
                logger.error("layertap: writer %d ended (%s); starting another", process.pid, _how(how))
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
                    "capture.writer",
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

    def _listen(self) -> None:
        link = self.link
        assert link is not None
        decoder = msgspec.json.Decoder(Ack)
        while True:
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
                for number in ack.settled:
                    self.unsettled.pop(number, None)
                self.failed += ack.failed
                self._send_owed()
                if ack.slot is not None and ack.slot in self.sent_slots:
                    self.sent_slots.discard(ack.slot)
                    self.free.put(ack.slot)


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
