"""The agent: the host's side of a link. Answers requests on stdio, keeps nothing, dies with its link.

Every request is a function below; its name is the request's, its parameters the request's. Each runs in a thread of
its own, so that a slow one delays no other.
"""

from __future__ import annotations

import getpass
import importlib.metadata
import os
import platform
import shutil
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from backends import runs
from backends.errors import ExitCode, LayertapError, UsageError
from backends.frames import read_frame, write_frame
from backends.jobs import JOBS, start_job
from backends.launch import Launching, launch
from backends.watch import ServerWatch

Request = Callable[..., Any]


class Agent:
    """The requests; a public method is one."""

    def __init__(self, payload: Path) -> None:
        self.payload = payload
        state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        self.runs = runs.Runs(Path(state) / "layertap")
        self.watches: dict[str, ServerWatch] = {}
        self.lock = threading.Lock()

    def hello(self) -> dict[str, Any]:
        """Who and what is here."""
        return {
            "payload": self.payload.name,
            "payload_folder": str(self.payload),
            "host": socket.gethostname(),
            "user": getpass.getuser(),
            "python": sys.executable,
            "python_version": platform.python_version(),
            "sglang": sglang_version(),
            "machine": runs.machine_id(),
            "boot": runs.boot_id(),
            "home": str(Path.home()),
            "state": str(self.runs.state),
            "cores": os.cpu_count(),
        }

    def read(self, path: str, offset: int, most: int) -> tuple[dict[str, Any], bytes]:
        """Up to `most` bytes of a file from `offset` on, and the file's size and inode."""
        try:
            with open(path, "rb") as file:
                found = os.fstat(file.fileno())
                file.seek(offset)
                return {"size": found.st_size, "inode": found.st_ino}, file.read(min(most, 16 << 20))
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}") from error

    def launch(self, launching: dict[str, Any]) -> dict[str, Any]:
        """Launch a server; answers once its process runs, not when it is ready."""
        run = launch(self.runs, self.payload, msgspec.convert(launching, Launching), sglang_version())
        return self.run(run.id)

    def start(self, kind: str, job: dict[str, Any], port: int | None = None) -> dict[str, Any]:
        """Start a job (try, plan, extract, verify)."""
        if kind not in JOBS:
            raise UsageError(f"no job is called {kind!r}; there are {', '.join(JOBS)}")
        return self.run(start_job(self.runs, self.payload, kind, job, port).id)

    def all(self, kind: str | None = None) -> list[dict[str, Any]]:
        """All runs, the newest first."""
        return [self._summary(run) for run in self.runs.all(kind)]

    def run(self, run_id: str) -> dict[str, Any]:
        """One run, with its progress, its result and how it ended."""
        run = self.runs.get(run_id)
        return self._summary(run) | {
            "details": run.spec.details,
            "argv": run.spec.argv,
            "progress": _json(run.folder / "progress.json"),
            "result": _json(run.folder / "result.json"),
        }

    def server(self, port: int | None = None) -> dict[str, Any]:
        """The live server of that port, or the only one."""
        return self.run(self.runs.server(port).id)

    def status(self, run_id: str) -> dict[str, Any]:
        """A server run's phases, verdict, tap and dumps."""
        run = self.runs.get(run_id)
        if run.spec.kind != "server":
            raise UsageError(f"{run.id} is no server")
        with self.lock:
            watch = self.watches.setdefault(run.id, ServerWatch(run))
        return self.run(run.id) | watch.look()

    def stop(self, run_id: str, why: str = "asked for") -> dict[str, Any]:
        """Stop a run, and what draws from it; answers what is left."""
        run = self.runs.get(run_id)
        if run.spec.kind == "server":
            for job in self._drawing_from(run):
                runs.stop(job, f"its server {run.id} is stopped", signal.SIGINT)
        first = signal.SIGTERM if run.spec.kind == "server" else signal.SIGINT
        return msgspec.to_builtins(runs.stop(run, why, first))  # type: ignore[no-any-return]

    def drawing(self, run_id: str) -> list[dict[str, Any]]:
        """The live jobs that draw from a server."""
        return [self.run(job.id) for job in self._drawing_from(self.runs.get(run_id))]

    def extraction(self, output: str | None = None) -> dict[str, Any] | None:
        """The newest extraction, into `output` if given."""
        for run in self.runs.all("extract"):
            if output is None or run.spec.details.get("output") == output:
                return self.run(run.id)
        return None

    def exists(self, path: str) -> dict[str, Any]:
        """What lies at a path: file, folder or nothing, and whether a folder is empty."""
        place = Path(path).expanduser()
        kind = "folder" if place.is_dir() else "file" if place.is_file() else "nothing"
        return {"path": str(place), "kind": kind, "empty": kind == "folder" and not any(place.iterdir())}

    def replace_folder(self, path: str, holding: str) -> None:
        """Delete a folder that holds the file `holding`, which shows that it is ours to delete."""
        place = Path(path)
        if place.is_dir():
            if any(place.iterdir()) and not (place / holding).exists():
                raise UsageError(f"{place} is not empty and holds no {holding}: it is not ours to replace")
            shutil.rmtree(place)

    def _drawing_from(self, server: runs.Run) -> list[runs.Run]:
        return [
            run
            for kind in JOBS
            for run in self.runs.all(kind)
            if run.alive() and run.spec.details.get("server") == server.id
        ]

    def _summary(self, run: runs.Run) -> dict[str, Any]:
        spec = run.spec
        return {
            "id": run.id,
            "kind": spec.kind,
            "state": run.state(),
            "folder": str(run.folder),
            "log": str(run.log),
            "port": spec.port,
            "dump_dir": spec.dump_dir,
            "code": spec.code,
            "sglang": spec.sglang,
            "created": spec.created,
            "stop_asked": run.stop_asked,
            "exit": msgspec.to_builtins(run.exit),
        }


def sglang_version() -> str | None:
    """The version of SGLang in this Python, None where there is none."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def serve(payload: str) -> None:
    """Answer requests until the link closes."""
    from_console = sys.stdin.buffer
    to_console = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a stray print must not land between frames
    agent = Agent(Path(payload))
    lock = threading.Lock()
    while frame := read_frame(from_console):
        threading.Thread(target=_answer, args=(agent, frame[0], to_console, lock), daemon=True).start()
    os._exit(0)  # whatever is still being answered has nobody to hear it


def _answer(agent: Agent, head: dict[str, Any], to_console: BinaryIO, lock: threading.Lock) -> None:
    answer: dict[str, Any] = {"id": head["id"]}
    body = b""
    try:
        method: Request | None = None if head["method"].startswith("_") else getattr(agent, head["method"], None)
        if not callable(method):
            raise UsageError(f"the agent knows no request {head['method']!r}")
        answer["result"] = method(**head["parameters"])
        if isinstance(answer["result"], tuple):
            answer["result"], body = answer["result"]
    except LayertapError as error:
        answer["error"] = {"exit_code": int(error.exit_code), "message": str(error)}
    except Exception:
        answer["error"] = {"exit_code": int(ExitCode.OUR_BUG), "message": traceback.format_exc()}
    with lock:
        try:
            write_frame(to_console, answer, body)
        except OSError:
            os._exit(0)


def _json(path: Path) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.MsgspecError):
        return None
