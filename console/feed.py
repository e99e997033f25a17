"""One host, watched for as long as one likes: threads that ask it for samples and log bytes, and keep what they heard.

Whoever shows it takes `snapshot()`, `history` and the log buffers as they stand; no call here waits for the network.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import msgspec

from backends.errors import ConnectionFailed, LayertapError, UsageError
from backends.host import LinkState
from backends.logs import LogCursor
from backends.sglang import mask_text
from console.log_buffer import LogBuffer
from console.session import Session, empty_snapshot, going_on
from console.words import of_host

if TYPE_CHECKING:
    from backends.ssh import Ask, Question

SAMPLE_SECONDS = 0.5
STALE_SECONDS = 3.0  # after which what is shown is old enough to say so
LOG_SECONDS = 0.2  # between looks at a log that had nothing new
LOG_STEP = 1 << 20
FIRST_LOG = 16 << 20  # bytes of a log that is long already when one begins to look
HISTORY = 900  # points, one a second
LOGS = ("server", "job")

T = TypeVar("T")


class StreamState(msgspec.Struct, frozen=True, kw_only=True):
    """How one stream of a link is: `waiting` (nothing heard yet), `live` or `stale`.

    `heard_age`: seconds since it was last heard. `lost_bytes` of a log is what is gone for good; None where nobody can
    tell how much.
    """

    name: str
    state: Literal["waiting", "live", "stale"]
    heard_age: float | None = None
    lost_bytes: int | None = 0


class Point(NamedTuple):
    """A second of the time line; None where it is not known. Utilisation in percent, over all GPUs."""

    at: float
    gpu: float | None
    tokens: float | None
    dump_bytes: float | None
    written: float | None


class Pin(NamedTuple):
    """The server run that is shown: `chosen` by a person, else because several were live.

    `follows`: to its successor. One that had a successor already when it was chosen is what somebody wants to see.
    """

    run_id: str
    chosen: bool
    follows: bool = False


class Tail:
    """One log being followed into a buffer, over one run after the other."""

    def __init__(self, buffer: LogBuffer) -> None:
        self.buffer = buffer
        self.run: str | None = None
        self.path = ""
        self.cursor = LogCursor()
        self.rest = b""
        self.fresh = False
        self.heard: float | None = None
        self.lost: int | None = 0

    def aim(self, run: str, path: str) -> None:
        """Follow this run's log from now on."""
        if run != self.run:
            self.run, self.path, self.cursor, self.rest, self.fresh = run, path, LogCursor(), b"", True
            self.heard, self.lost = None, 0
            self.buffer.mark(f"run {run}")

    def step(self, session: Session) -> bool:
        """Take in what is new; whether there was anything. Raises LayertapError."""
        run = self.run
        if run is None:
            return False
        if self.fresh:
            head, _ = session.host.read(self.path, 0, 0)
            self.fresh = False
            if head["size"] > FIRST_LOG:
                self.cursor = LogCursor(offset=head["size"] - FIRST_LOG)
                self.buffer.mark(f"{self.cursor.offset:,} bytes before this are in {self.path}")
        step = session.log(self.path, self.cursor, LOG_STEP)
        if run != self.run:  # aimed elsewhere meanwhile
            return True
        self.heard = time.monotonic()
        if step.kind != "continue":
            self.lost = None if step.lost is None or self.lost is None else self.lost + step.lost
            self.buffer.mark(of_host.log_gap(step.kind, step.lost))
            return True
        if not step.data:
            return False
        data = self.rest + step.data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1  # loading bars end in \r
        self.rest = data[end:]
        if end:  # whole lines, since a secret may stand across two parts
            self.buffer.feed(mask_text(data[:end].decode(errors="replace")).encode())
        return True


class Feed:
    """Watches one host. `open_session` connects, and may put questions; it is called in a thread.

    `last` is shown until something newer is heard; without `logs` none is read.

    Raises nothing after construction: what goes wrong is in the snapshot.
    """

    def __init__(
        self,
        name: str,
        open_session: Callable[[Ask], Session],
        port: int | None = None,
        *,
        last: dict[str, Any] | None = None,
        logs: bool = True,
    ) -> None:
        self.name = name
        self.history: deque[Point] = deque(maxlen=HISTORY)
        self.gpu_history: dict[int, deque[float | None]] = {}
        self._open = open_session
        self._port = port
        self._pin: Pin | None = None
        self._tails = {key: Tail(LogBuffer()) for key in LOGS}
        self.logs: Mapping[str, LogBuffer] = {key: tail.buffer for key, tail in self._tails.items()}
        self._session: Session | None = None
        self._link = LinkState(state="connecting", since=time.time())
        self._last: dict[str, Any] = last or empty_snapshot()
        self._logs = logs
        self._heard: float | None = None
        self._trouble: str | None = None
        self._written: tuple[float, int] | None = None
        self._question: tuple[Question, Future[str | None]] | None = None
        self._closing = threading.Event()
        self._begin = threading.Event()

    def start(self) -> None:
        """Begin to connect and to watch."""
        self._begin.set()
        for target in (self._keep_sampling, self._keep_tailing):
            threading.Thread(target=target, name=f"layertap-{self.name}-{target.__name__}", daemon=True).start()

    def retry(self) -> None:
        """Connect again after a failure, of the first attempt or of a link that was up and has ended for good."""
        self._begin.set()

    def close(self) -> None:
        """Stop watching; runs go on. Does not wait for a link that is stuck."""
        self._closing.set()
        self._begin.set()
        self.answer(None)
        session = self._session
        if session:
            threading.Thread(target=session.host.close, daemon=True).start()

    def watch(self, run_id: str | None) -> None:
        """Show this server run, or what is launched in its place; None for the live one, or the one that ran last."""
        self._pin = Pin(run_id, chosen=True) if run_id else None

    # --- What a door takes ---

    def snapshot(self) -> dict[str, Any]:
        """What was heard last, with the link, the streams and the pending question as they are now."""
        session, question = self._session, self._question
        return self._last | {
            "at": time.time(),
            "link": msgspec.to_builtins(session.host.state if session else self._link),
            "streams": msgspec.to_builtins(self._streams()),
            "question": msgspec.to_builtins(question[0]) if question else None,
            "trouble": self._trouble,
        }

    def _streams(self) -> list[StreamState]:
        samples = _stream("samples", self._heard)
        logs = [_stream(f"{key} log", tail.heard, tail.lost) for key, tail in self._tails.items() if tail.run]
        return [samples, *logs]

    @property
    def session(self) -> Session | None:
        """The session, once there is one."""
        return self._session

    def call(self, act: Callable[[Session], T]) -> Future[T]:
        """Do something on the host, in a thread of its own. The future's error is what it raised."""

        def with_session() -> T:
            session = self._session  # it may go while somebody connects again
            if session is None:
                raise ConnectionFailed(f"{self.name} is not connected yet")
            return act(session)

        return aside(with_session)

    def answer(self, text: str | None) -> None:
        """Answer the pending question; None for no answer."""
        question, self._question = self._question, None
        if question and not question[1].done():
            question[1].set_result(text)

    # --- The threads ---

    def _ask(self, question: Question) -> str | None:
        """Put a question to whoever shows this, and wait for the answer."""
        if self._closing.is_set():
            return None
        waiting: Future[str | None] = Future()
        self._question = (question, waiting)
        return waiting.result()

    def _keep_sampling(self) -> None:
        while not self._closing.is_set():
            self._begin.wait()
            self._begin.clear()
            if not self._closing.is_set() and self._connect():
                self._sample_on()

    def _sample_on(self) -> None:
        """Until this is closed, or the link has ended for good and somebody asks for another."""
        assert self._session is not None
        while not self._closing.wait(SAMPLE_SECONDS):
            self._sample()
            if self._begin.is_set():
                if self._session.host.ended.is_set():
                    return
                self._begin.clear()  # it was asked for while the link needed no help

    def _connect(self) -> bool:
        self._link = LinkState(state="connecting", since=time.time())
        old, self._session, self._trouble = self._session, None, None
        if old:
            old.host.close()
        try:
            self._session = self._open(self._ask)
        except LayertapError as error:
            self._link = LinkState(state="failed", since=time.time(), why=str(error))
            return False
        if self._closing.is_set():
            self._session.host.close()
        else:
            self._sample()
        return True

    def _sample(self) -> None:
        assert self._session is not None
        pin = self._pin
        try:
            now = self._session.snapshot(self._port, pin.run_id if pin else None)
            moved = self._moved(self._session, pin, now["server"]) if pin else None
        except ConnectionFailed:  # the link's own state says it
            return
        except UsageError as error:
            self._choose_server(self._session, pin, error)
            return
        except LayertapError as error:
            self._trouble = str(error)
            return
        self._trouble = None
        self._heard = time.monotonic()
        self._last = now
        self._put(moved, instead_of=pin)
        for key, run in (("server", now["server"]), ("job", now["extraction"])):
            if run and self._logs:
                self._tails[key].aim(run["id"], run["log"])
        self._remember(now)

    def _choose_server(self, session: Session, pin: Pin | None, error: UsageError) -> None:
        """Where several servers are live, or the chosen one is gone: the newest."""
        self._trouble = str(error)
        try:
            servers = session.host.request("all", kind="server")
        except LayertapError:
            return
        newest = next((run["id"] for run in servers if going_on(run)), None)
        self._put(Pin(newest, chosen=False) if newest else None, instead_of=pin)

    @staticmethod
    def _moved(session: Session, pin: Pin, server: dict[str, Any]) -> Pin | None:
        """Where a pin goes: from a server that is over to its successor, or off, where nobody chose that server."""
        if going_on(server):
            return pin._replace(follows=True)
        if not pin.chosen:
            return None
        successor = session.host.request("successor", run_id=pin.run_id)
        if successor and pin.follows:
            return pin._replace(run_id=successor)
        return pin._replace(follows=not successor)

    def _put(self, pin: Pin | None, instead_of: Pin | None) -> None:
        """Pin another server, unless a person has meanwhile."""
        if self._pin is instead_of:
            self._pin = pin

    def _remember(self, now: dict[str, Any]) -> None:
        gpus = now["gpus"]["gpus"]
        for gpu in gpus:
            self.gpu_history.setdefault(gpu["index"], deque(maxlen=120)).append(gpu["utilisation_percent"])
        if self.history and now["at"] - self.history[-1].at < 1.0:
            return
        used = [gpu["utilisation_percent"] for gpu in gpus if gpu["utilisation_percent"] is not None]
        dumps, tap = now["dumps"], (now["server"] or {}).get("tap")
        rate = dumps["bytes_per_second"] if dumps else None
        tokens = rate / tap["bytes_per_token"] if rate is not None and tap and tap["bytes_per_token"] else None
        point = Point(now["at"], sum(used) / len(used) if used else None, tokens, rate, self._written_rate(now))
        self.history.append(point)

    def _written_rate(self, now: dict[str, Any]) -> float | None:
        """Samples written a second since the point before."""
        progress = (now["extraction"] or {}).get("progress")
        if not progress:
            self._written = None
            return None
        before, self._written = self._written, (now["at"], progress["written"])
        if before is None or progress["written"] < before[1]:
            return None
        return float((progress["written"] - before[1]) / max(now["at"] - before[0], 1e-3))

    def _keep_tailing(self) -> None:
        while not self._closing.is_set():
            session, more = self._session, False
            for tail in self._tails.values() if session else ():
                try:
                    assert session is not None
                    more = tail.step(session) or more
                except ConnectionFailed:
                    pass  # told by the link's state; the offset stays where it is
                except LayertapError as error:
                    self._trouble = str(error)
            if not more:
                self._closing.wait(LOG_SECONDS)

    def log_run(self, key: str) -> str | None:
        """The run that a log is of, None before there is one."""
        return self._tails[key].run

    def log_state(self, key: str) -> str:
        """How the stream of a log is, in words."""
        tail, session = self._tails[key], self._session
        link = session.host.state if session else self._link
        if link.state != "live":
            return " ".join(of_host.link(msgspec.to_builtins(link), time.time())).removeprefix("! link ")
        if tail.run is None:
            return "no run yet"
        return of_host.stream(msgspec.to_builtins(_stream(key, tail.heard, tail.lost)))


def aside(act: Callable[[], T]) -> Future[T]:
    """Do it in a thread that nobody waits for when the console is left."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # whoever awaits it may be gone before it is done

    def run() -> None:
        try:
            done.set_result(act())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done


def _stream(name: str, heard: float | None, lost: int | None = 0) -> StreamState:
    if heard is None:
        return StreamState(name=name, state="waiting", lost_bytes=lost)
    age = time.monotonic() - heard
    return StreamState(
        name=name, state="stale" if age > STALE_SECONDS else "live", heard_age=round(age, 1), lost_bytes=lost
    )
