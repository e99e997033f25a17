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
from backends.errors import BY_CODE, ConnectionFailed, LayertapError
from backends.frames import FrameError, read_frame, write_frame

REQUEST_SECONDS = 60.0
START_SECONDS = 60.0


class OurBug(LayertapError):
    """The agent met something that nobody foresaw; the text is its traceback."""

    exit_code = 70  # type: ignore[assignment]


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

    def __init__(self, name: str, to_agent: BinaryIO, from_agent: BinaryIO) -> None:
        self.name = name
        self._to_agent, self._from_agent = to_agent, from_agent
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[tuple[dict[str, Any], bytes]]] = {}
        self._lock = threading.Lock()
        self._broken: str | None = None

    def greet(self) -> None:
        """Bring the payload over and wait until the agent is up. Raises ConnectionFailed."""
        name, archive = payload.pack()
        answer = self._greeting()
        if answer == "need":
            self._to_agent.write(archive)
            self._to_agent.flush()
        elif answer != "have":
            raise ConnectionFailed(f"{self.name}: {answer.removeprefix('error ')}")
        threading.Thread(target=self._listen, name=f"layertap-{self.name}", daemon=True).start()
        hello = self.request("hello", seconds=START_SECONDS)
        assert hello["payload"] == name

    def _greeting(self) -> str:
        # A login shell may print what it likes first, but not for ever.
        for _ in range(200):
            line = self._from_agent.readline()
            if not line:
                raise ConnectionFailed(f"{self.name}: the agent ended before it said anything; is that Python usable?")
            if line.startswith(GREETING):
                return line.removeprefix(GREETING).decode().strip()
        raise ConnectionFailed(f"{self.name}: expected the agent's greeting, got a flood of other text")

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
        with self._lock:
            if self._broken:
                raise ConnectionFailed(f"{self.name}: {self._broken}")
            self._waiting[number] = answer
            try:
                write_frame(self._to_agent, {"id": number, "method": method, "parameters": parameters})
            except (OSError, ValueError) as error:
                raise ConnectionFailed(f"{self.name}: the agent is gone ({error})") from error
        try:
            head, body = answer.result(seconds)
        except TimeoutError:
            raise ConnectionFailed(f"{self.name}: no answer to {method!r} within {seconds:.0f} s") from None
        finally:
            self._waiting.pop(number, None)
        if failed := head.get("error"):
            raise BY_CODE.get(failed["exit_code"], OurBug)(failed["message"])
        return head, body

    def _listen(self) -> None:
        try:
            while frame := read_frame(self._from_agent):
                if answer := self._waiting.get(frame[0]["id"]):
                    answer.set_result(frame)
            why = "the agent ended"
        except (FrameError, OSError, ValueError) as error:
            why = str(error)
        with self._lock:
            self._broken = why
        for answer in list(self._waiting.values()):
            if not answer.done():
                answer.set_exception(ConnectionFailed(f"{self.name}: {why}"))


class LocalHost(AgentLink):
    """This machine. Raises ConnectionFailed where its Python cannot run the agent."""

    def __init__(self, python: str) -> None:
        self.python = python
        name, archive = payload.pack()
        try:
            self._process = subprocess.Popen(
                [python, "-u", "-c", bootstrap_source(), name, str(len(archive))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd="/",  # with -c, the folder one stands in would come first on sys.path
                start_new_session=True,  # Ctrl+C is the console's
            )
        except OSError as error:
            raise ConnectionFailed(f"{python}: {error.strerror}") from error
        assert self._process.stdin is not None and self._process.stdout is not None
        super().__init__("local", self._process.stdin, self._process.stdout)  # type: ignore[arg-type]
        try:
            self.greet()
        except BaseException:
            self._process.kill()
            self._process.wait()
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
    own environment; else the first one on PATH that imports sglang. Raises ConnectionFailed where there is none.
    """
    if asked:
        found = shutil.which(os.path.expanduser(asked))
        if found is None:
            raise ConnectionFailed(f"{asked} is no program that can be run; set --python to SGLang's Python")
        return found
    beside = Path(sys.prefix).parent / ".venv-engine" / "bin" / "python"
    if beside.exists():
        return str(beside)
    for candidate in (sys.executable, *_pythons_on_path()):
        if _imports_sglang(candidate):
            return candidate
    raise ConnectionFailed(
        "no Python here imports sglang: name SGLang's own with --python, LAYERTAP_PYTHON or [host].python"
    )


def _pythons_on_path() -> list[str]:
    found = (shutil.which(name, path=folder) for folder in os.get_exec_path() for name in ("python3", "python"))
    return list(dict.fromkeys(path for path in found if path))


def _imports_sglang(python: str) -> bool:
    probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('sglang') is None)"
    try:
        return subprocess.run([python, "-c", probe], capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
