"""A host as the console sees it: start the agent there, exchange frames with it, close.

`LocalHost` spawns the agent as a child. Whatever reaches a host some other way only has to bring the two ends of a
byte stream: everything above them is shared.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import Future
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from backends import payload
from backends.bootstrap import GREETING
from backends.errors import ConnectionFailed, by_code
from backends.frames import FrameError, pack, read_frame

REQUEST_SECONDS = 60.0
START_SECONDS = 60.0
BANNER_LINES = 200  # that a login shell may print before the agent speaks
LONGEST_LINE = 1 << 16


class Host(Protocol):
    """A place where runs live."""

    name: str

    def request(self, method: str, /, *, seconds: float = REQUEST_SECONDS, **parameters: Any) -> Any:
        """Ask the agent and wait for its answer.

        Raises the LayertapError that the agent met, or ConnectionFailed where it does not answer in `seconds`.
        """

    def read(self, path: str, offset: int, most: int = 1 << 20) -> tuple[dict[str, Any], bytes]:
        """Bytes of a file from `offset` on, with `{"size", "inode"}` of the file as it is now."""

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
                raise ConnectionFailed(f"the agent ended before it was up; can {self.python} be used?")
            if line.startswith(GREETING):
                return line.removeprefix(GREETING).decode().strip()
        raise ConnectionFailed("expected the agent's greeting, got a flood of other text")

    def request(self, method: str, /, *, seconds: float = REQUEST_SECONDS, **parameters: Any) -> Any:
        """See `Host`."""
        return self._ask(method, seconds, parameters)[0].get("result")

    def read(self, path: str, offset: int, most: int = 1 << 20) -> tuple[dict[str, Any], bytes]:
        """See `Host`."""
        head, body = self._ask("read", REQUEST_SECONDS, {"path": path, "offset": offset, "most": most})
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
            raise ConnectionFailed(f"{self.name}: the agent is gone ({error})") from error
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
            why = "the agent ended"
        except (ConnectionFailed, FrameError, OSError, ValueError) as error:
            why = str(error)
        with self._lock:
            self._broken = why
        waiting: list[Future[Any]] = [up, *self._waiting.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(ConnectionFailed(f"{self.name}: {why}"))


class LocalHost(AgentLink):
    """This machine. Raises ConnectionFailed where its Python cannot run the agent."""

    def __init__(self, python: str) -> None:
        name, archive = payload.pack()
        try:
            self._process = subprocess.Popen(
                [python, "-u", "-c", bootstrap_source(), name, str(len(archive))],
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
    # Not an import: a folder called sglang in the folder one stands in, such as a checkout, would do for that.
    probe = "from importlib.metadata import version; version('sglang')"
    try:
        return subprocess.run([python, "-c", probe], capture_output=True, timeout=20, cwd="/").returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
