"""A host as the console sees it: start the agent there, exchange frames with it, close.

`LocalHost` spawns the agent as a child. Whatever reaches a host some other way only has to bring the two ends of a
byte stream: everything above them is shared. `Reconnecting` keeps a link to any of them.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

import msgspec

from backends import payload
from backends.bootstrap import GREETING
from backends.errors import ConnectionFailed, by_code
from backends.frames import FrameError, pack, read_frame

REQUEST_SECONDS = 60.0
START_SECONDS = 60.0
BANNER_LINES = 200  # that a login shell may print before the agent speaks
LONGEST_LINE = 1 << 16
ENDED = "the agent ended"

FIRST_DELAY = 0.5  # seconds before a broken link is dialled again; doubles up to the longest
LONGEST_DELAY = 15.0
# Requests that change nothing: asking one of them twice is safe.
READING = frozenset(
    {
        "hello",
        "overview",
        "read",
        "all",
        "run",
        "server",
        "newest_server",
        "status",
        "extraction",
        "sample",
        "free_port",
    }
    | {"dataset", "dataset_samples", "doctor", "folder", "gate", "samples", "sample_log", "stacks"}
)


class LinkState(msgspec.Struct, frozen=True, kw_only=True):
    """How a link is; `since` in seconds since the epoch, what else is a time in seconds."""

    state: Literal["live", "stale", "connecting", "reconnecting", "failed", "closed"]
    since: float
    heard_age: float | None = None  # since the other side was last heard; None where that is not measured
    why: str | None = None  # what broke it
    attempt: int = 0  # of dialling again
    next_in: float | None = None  # until the next attempt
    notes: list[str] = []  # sentences that a person should see, such as that a host key was accepted unasked


class Host(Protocol):
    """A place where runs live."""

    name: str
    ended: threading.Event  # set once the link is over, for whatever reason

    @property
    def state(self) -> LinkState:
        """How the link is now."""

    def request(self, method: str, /, *, seconds: float = REQUEST_SECONDS, **parameters: Any) -> Any:
        """Ask the agent and wait for its answer.

        Raises the LayertapError that the agent met, or ConnectionFailed where it does not answer in `seconds`.
        """

    def read(self, path: str, offset: int, most: int = 1 << 20, **rotating: Any) -> tuple[dict[str, Any], bytes]:
        """Bytes of a file from `offset` on, with `{"size", "inode"}` of the file as it is now.

        `rotating` is what a `backends.logs.LogCursor` asks beside the offset.
        """

    def close(self) -> None:
        """End the agent; runs go on."""


class AgentLink:
    """Frames over the agent's stdin and stdout; requests may be asked from any thread."""

    def __init__(self, name: str, python: str, to_agent: BinaryIO, from_agent: BinaryIO) -> None:
        self.name, self.python = name, python
        self._to_agent, self._from_agent = to_agent, from_agent
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[tuple[dict[str, Any], bytes]]] = {}
        self._lock = threading.Lock()
        self._broken: str | None = None
        self._since = time.time()
        self.ended = threading.Event()

    @property
    def state(self) -> LinkState:
        """See `Host`."""
        if self.ended.is_set():
            return LinkState(state="failed", since=self._since, why=self._broken)
        return LinkState(state="live", since=self._since)

    def greet(self, archive: bytes) -> None:
        """Bring the payload over unless it is there, and wait until the agent is up. Raises ConnectionFailed."""
        up: Future[None] = Future()
        threading.Thread(target=self._listen, args=(archive, up), name=f"layertap-{self.name}", daemon=True).start()
        try:
            up.result(START_SECONDS)
        except TimeoutError:
            raise ConnectionFailed(f"{self.name}: the agent said nothing for {START_SECONDS:g} s") from None

    def _greeted(self, archive: bytes) -> None:
        answer = self._greeting()
        if answer == "need":
            self._to_agent.write(archive)
            self._to_agent.flush()
            answer = self._greeting()
        if answer != "have":
            raise ConnectionFailed(answer.removeprefix("error "))

    def _greeting(self) -> str:
        for _ in range(BANNER_LINES):
            line = self._from_agent.readline(LONGEST_LINE)
            if not line:
                raise ConnectionFailed(f"{ENDED} before it was up; can {self.python} be used?")
            if line.startswith(GREETING):
                return line.removeprefix(GREETING).decode().strip()
        raise ConnectionFailed("expected the agent's greeting, got a flood of other text")

    def request(self, method: str, /, *, seconds: float = REQUEST_SECONDS, **parameters: Any) -> Any:
        """See `Host`."""
        return self._ask(method, seconds, parameters)[0].get("result")

    def read(self, path: str, offset: int, most: int = 1 << 20, **rotating: Any) -> tuple[dict[str, Any], bytes]:
        """See `Host`."""
        head, body = self._ask("read", REQUEST_SECONDS, {"path": path, "offset": offset, "most": most, **rotating})
        return head["result"], body

    def _ask(self, method: str, seconds: float, parameters: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        answer: Future[tuple[dict[str, Any], bytes]] = Future()
        number = next(self._numbers)
        frame = pack({"id": number, "method": method, "parameters": parameters})
        try:
            with self._lock:
                if self._broken:
                    raise ConnectionFailed(f"{self.name}: {self._broken}")
                self._waiting[number] = answer
                self._to_agent.write(frame)
                self._to_agent.flush()
            head, body = answer.result(seconds)
        except TimeoutError:
            raise ConnectionFailed(f"{self.name}: no answer to {method!r} within {seconds:g} s") from None
        except (OSError, ValueError) as error:  # the other end of the stream is gone, or this end is closed
            self.ended.wait(1)  # whoever listens is about to know why
            raise ConnectionFailed(f"{self.name}: {self._broken or f'the agent is gone ({error})'}") from error
        finally:
            self._waiting.pop(number, None)
        if failed := head.get("error"):
            raise by_code(failed["exit_code"], failed["message"])
        return head, body

    def _listen(self, archive: bytes, up: Future[None]) -> None:
        """The thread that reads what the agent says, until it ends."""
        try:
            self._greeted(archive)
            up.set_result(None)
            while frame := read_frame(self._from_agent):
                if answer := self._waiting.get(frame[0]["id"]):
                    answer.set_result(frame)
            why = ENDED
        except (ConnectionFailed, FrameError) as error:
            why = str(error)
        except (OSError, ValueError) as error:  # it did not read its payload to the end, or this end is closed
            why = f"{ENDED} ({error})"
        why = self._cause(why)
        with self._lock:
            self._broken, self._since = why, time.time()
        self.ended.set()
        waiting: list[Future[Any]] = [up, *self._waiting.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(ConnectionFailed(f"{self.name}: {why}"))

    def _cause(self, why: str) -> str:
        """Called once, when the stream is over: what ended it. `why` is how the stream itself looked."""
        return why


class LocalHost(AgentLink):
    """This machine. Raises ConnectionFailed where its Python cannot run the agent."""

    def __init__(self, python: str) -> None:
        name, archive = payload.pack()
        try:
            self._process = subprocess.Popen(
                agent_command(python, name, len(archive)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd="/",  # the folder one stands in means nothing on a host
                start_new_session=True,  # Ctrl+C is the console's
            )
        except OSError as error:
            raise ConnectionFailed(f"{python}: {error.strerror}") from error
        assert self._process.stdin is not None and self._process.stdout is not None
        super().__init__("local", python, self._process.stdin, self._process.stdout)  # type: ignore[arg-type]
        try:
            self.greet(archive)
        except BaseException:
            self._process.kill()
            self.close()
            raise

    def close(self) -> None:
        """See `Host`."""
        try:
            self._to_agent.close()
        except OSError:
            pass
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Reconnecting:
    """A host that is dialled again whenever its link breaks, for ever, until it is closed.

    `dial` makes a live host. The first call is made here and its errors are raised; of the later ones a
    ConnectionFailed leads to the next attempt, and anything else (a changed host key) ends it.
    """

    def __init__(
        self, dial: Callable[[], Host], *, first_delay: float = FIRST_DELAY, longest_delay: float = LONGEST_DELAY
    ) -> None:
        self._dial = dial
        self._first_delay, self._longest_delay = first_delay, longest_delay
        self._closing = threading.Event()
        self._changed = threading.Condition()
        self._host = dial()
        self.name = self._host.name
        self.ended = threading.Event()
        self._down: LinkState | None = None  # while there is no live link, and the other thread knows
        self._next = 0.0  # time.monotonic() of the next attempt
        self._gave_up: Exception | None = None
        threading.Thread(target=self._keep, name=f"layertap-{self.name}-keep", daemon=True).start()

    @property
    def state(self) -> LinkState:
        """See `Host`."""
        with self._changed:
            if self._down is None:
                return self._broken() if self._host.ended.is_set() else self._host.state
            if self._down.state == "reconnecting":
                return msgspec.structs.replace(self._down, next_in=max(self._next - time.monotonic(), 0.0))
            return self._down

    def request(
        self, method: str, /, *, seconds: float = REQUEST_SECONDS, retry: bool = True, **parameters: Any
    ) -> Any:
        """See `Host`. Waits for a link, `seconds` in all.

        Where the link breaks over it, a request that only reads is asked again (not with `retry=False`). One that
        acts is not: ConnectionFailed says that it is not known whether it happened, and the reading ones tell.
        """
        return self._ask(
            method,
            seconds,
            retry and method in READING,
            lambda host, left: host.request(method, seconds=left, **parameters),
        )

    def read(self, path: str, offset: int, most: int = 1 << 20, **rotating: Any) -> tuple[dict[str, Any], bytes]:
        """See `Host`; asked again where the link breaks over it."""
        found: tuple[dict[str, Any], bytes] = self._ask(
            "read", REQUEST_SECONDS, True, lambda host, _: host.read(path, offset, most, **rotating)
        )
        return found

    def close(self) -> None:
        """See `Host`. Does not wait for an attempt that is under way; what it reaches is closed."""
        with self._changed:
            self._closing.set()
            self._down = LinkState(state="closed", since=time.time())
            host = self._host
            self._changed.notify_all()
        host.close()
        self.ended.set()

    def _ask(self, method: str, seconds: float, again: bool, ask: Callable[[Host, float], Any]) -> Any:
        deadline = time.monotonic() + seconds
        while True:
            host = self._live(seconds, deadline)
            try:
                return ask(host, max(deadline - time.monotonic(), 0.0))
            except ConnectionFailed as error:
                if not host.ended.is_set():  # it took too long, or the agent met it: the link is fine
                    raise
                if self._closing.is_set():
                    raise
                if not again:
                    raise ConnectionFailed(f"{error}; it is not known whether {method!r} still happened") from error

    def _live(self, seconds: float, deadline: float) -> Host:
        """The host once its link is live. Raises ConnectionFailed at the deadline, and what ended it all."""
        with self._changed:
            while self._host.ended.is_set():
                if self._closing.is_set():
                    raise ConnectionFailed(f"{self.name}: closed")
                if self._gave_up:
                    raise self._gave_up
                if time.monotonic() >= deadline:
                    why = (self._down or self._broken()).why
                    raise ConnectionFailed(f"{self.name}: no link for {seconds:g} s, still trying: {why}")
                self._changed.wait(deadline - time.monotonic())
            return self._host

    def _keep(self) -> None:
        """The thread that dials again."""
        while True:
            self._host.ended.wait()
            if self._closing.is_set():
                return
            self._host.close()
            if not self._dial_again():
                return

    def _dial_again(self) -> bool:
        """Until it works; False: it never will."""
        down, delay = self._broken(), self._first_delay
        while not self._closing.is_set():
            self._say(down, delay)
            if self._closing.wait(delay):
                break
            self._say(msgspec.structs.replace(down, state="connecting", next_in=None))
            try:
                return self._take(self._dial())
            except ConnectionFailed as error:
                down = msgspec.structs.replace(down, why=str(error), attempt=down.attempt + 1)
                delay = min(2 * delay, self._longest_delay)
            except Exception as error:
                self._give_up(error)
                break
        return False

    def _broken(self) -> LinkState:
        broken = self._host.state
        return LinkState(state="reconnecting", since=broken.since, why=broken.why, attempt=1, next_in=self._first_delay)

    def _say(self, down: LinkState, delay: float = 0.0) -> None:
        with self._changed:
            if not self._closing.is_set():
                self._down, self._next = down, time.monotonic() + delay

    def _take(self, host: Host) -> bool:
        with self._changed:
            if not self._closing.is_set():
                self._host, self._down = host, None
                self._changed.notify_all()
                return True
        host.close()
        return False

    def _give_up(self, error: Exception) -> None:
        self._say(LinkState(state="failed", since=time.time(), why=str(error)))
        with self._changed:
            self._gave_up = error
            self._changed.notify_all()
        self.ended.set()


def agent_command(python: str, payload_name: str, payload_size: int) -> list[str]:
    """The command that becomes the agent on a host, with the payload on its stdin."""
    return [python, "-u", "-c", bootstrap_source(), payload_name, str(payload_size)]


def bootstrap_source() -> str:
    """The program that `python -c` runs on a host."""
    return (resources.files("backends") / "bootstrap.py").read_text(encoding="utf-8")


def find_python(asked: str | None) -> str:
    """The Python whose SGLang is meant, on this machine.

    `asked` (an option, the environment or the config, in that order) wins; else `.venv-engine` beside the console's
    own environment; else the first one on PATH that has sglang. Raises ConnectionFailed where there is none.
    """
    if asked:
        found = shutil.which(os.path.expanduser(asked))
        if found is None:
            raise ConnectionFailed(f"{asked} is no program that can be run; set --python to SGLang's Python")
        return os.path.abspath(found)  # the agent stands elsewhere
    beside = Path(sys.prefix).parent / ".venv-engine" / "bin" / "python"
    if beside.exists():
        return str(beside)
    for candidate in (sys.executable, *_pythons_on_path()):
        if _has_sglang(candidate):
            return candidate
    raise ConnectionFailed(
        "no Python here has sglang: name SGLang's own with --python, LAYERTAP_PYTHON or [host].python"
    )


def _pythons_on_path() -> list[str]:
    found = (shutil.which(name, path=folder) for folder in os.get_exec_path() for name in ("python3", "python"))
    return list(dict.fromkeys(path for path in found if path))


def _has_sglang(python: str) -> bool:
    # Not an import, which takes seconds; and not from the folder one stands in, which may be a checkout.
    probe = "from importlib.metadata import version; version('sglang')"
    try:
        return subprocess.run([python, "-c", probe], capture_output=True, timeout=20, cwd="/").returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
