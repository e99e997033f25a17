"""The agent: the host's side of a link. Answers requests on stdio, keeps nothing, dies with its link.

Every request is a function below; its name is the request's, its parameters the request's. `AT_ONCE` of them run at a
time, so that a slow one delays no other.
"""

from __future__ import annotations

import contextlib
import getpass
import importlib.metadata
import os
import platform
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from backends import bundle, datasets, earlier_demo, folders, payloads, ports, runs
from backends.doctor.examine import Doctor, Report
from backends.doctor.report import Asked, Place
from backends.errors import ExitCode, LayertapError, RunDied, UsageError
from backends.folders import absolute
from backends.frames import FrameError, pack, read_frame
from backends.jobs import JOBS, describe, draws_from, refuse_second, require_same, start_job
from backends.launch import EMBEDDED, Launching, check_layers, launch, named_folder
from backends.logs import PartHead, read_part
from backends.outbox import Outbox
from backends.sample import Sampler
from backends.sglang import masked
from backends.situation import Situation, read_situation
from backends.survival import danger
from backends.tune.servers import stop_tuning
from backends.verdict import patience, stacks
from backends.verdict.alarms import AlarmWatch
from backends.verdict.alarms import Limits as AlarmLimits
from backends.verdict.diagnose import Limits
from backends.verdict.observation import Standing
from backends.verdict.sights import read_alarms, sight
from backends.verdict.watch import ServerWatch, earlier_start
from capture import events, gate, probe
from capture.dataset.ledger import State
from capture.dumps.dump import DumpError
from capture.server import ServerGone

AT_ONCE = 32
GATE_SECONDS = 15.0

Request = Callable[..., Any]


class Agent:
    """The requests; a public method is one."""

    def __init__(self, payload: Path) -> None:
        self.payload = payload
        state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        self.runs = runs.Runs(Path(state) / "layertap")
        self.sampler = Sampler(self.runs)
        self.examiner = Doctor(Place(self.runs, payload))
        self.watches: dict[str, ServerWatch] = {}
        self.limits = patience.scaled(Limits())
        self.alarms: dict[str, AlarmWatch] = {}
        self.reported: set[tuple[str, str | None]] = set()  # runs, and phases in which they seemed to hang
        self.lock = threading.Lock()

    def hello(self) -> dict[str, Any]:
        """Who and what is here."""
        return {
            "payload": self.payload.name,
            "payload_folder": str(self.payload),
            "host": socket.gethostname(),
            "user": _user(),
            "python": sys.executable,
            "python_version": platform.python_version(),
            "sglang": sglang_version(),
            "machine": runs.machine_id(),
            "boot": runs.boot_id(),
            "home": str(Path.home()),
            "state": str(self.runs.state),
            "cores": os.cpu_count(),
            "danger": danger(),
        }

    def read(
        self, path: str, offset: int, most: int, inode: int | None = None, before: int = 0
    ) -> tuple[PartHead, bytes]:
        """Up to `most` bytes of a file from `offset` on, and the file's size and inode; a log that rotates as well.

        What `inode` and `before` are for is said in `backends.logs`, whose `LogCursor` knows what to ask for.
        """
        try:
            return read_part(path, offset, most, inode, before)
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}") from error

    def sample(self, run_id: str | None = None, paths: Sequence[str] = ()) -> dict[str, Any]:
        """CPU, memory, disks, GPUs and live runs now, with processes and dumps of one run; may be asked at 5 Hz."""
        return self.sampler.sample(run_id, paths)

    def free_port(self) -> int:
        """A port of the loopback address that nobody listens on now."""
        return ports.free_port()

    def situation(self, model: str | None = None) -> Situation:
        """This host's GPUs, and what the config of the model in that folder says; see `backends.situation`."""
        return read_situation(Path(model).expanduser() if model else None)

    def check_model(self, model: str) -> None:
        """Refuse a model that is none; its weights may still be missing."""
        if not model.startswith(EMBEDDED):
            named_folder(model)

    def check_layers(self, launching: dict[str, Any]) -> None:
        """Refuse layers that a launch could not draw, as far as that is seen here; see `backends.launch`."""
        check_layers(msgspec.convert(launching, Launching))

    def launch(self, launching: dict[str, Any]) -> dict[str, Any]:
        """Launch a server; answers once its process runs, not when it is ready."""
        run = launch(self.runs, self.payload, msgspec.convert(launching, Launching), sglang_version())
        return self.run(run.id)

    def start(self, kind: str, job: dict[str, Any], port: int | None = None) -> dict[str, Any]:
        """Start a job; JOBS has the kinds."""
        if kind not in JOBS:
            raise UsageError(f"no job is called {kind!r}; there are {', '.join(JOBS)}")
        return self.run(start_job(self.runs, self.payload, kind, job, port).id)

    def all(self, kind: str | None = None, most: int | None = None) -> list[dict[str, Any]]:
        """All runs, the newest first, or only the newest `most` of them."""
        return [self._summary(run) for run in self.runs.all(kind)[:most]]

    def run(self, run_id: str) -> dict[str, Any]:
        """One run, with its progress, its result, how it ended, and its last events."""
        run = self.runs.get(run_id)
        return self._summary(run) | {
            "argv": run.spec.argv,
            "progress": _json(run.folder / "progress.json"),
            "result": _json(run.folder / "result.json"),
            "events": events.latest(run.folder),
        }

    def server(self, port: int | None = None) -> dict[str, Any]:
        """The live server of that port, or the only one."""
        return self.run(self.runs.server(port).id)

    def newest_server(self, port: int | None = None) -> dict[str, Any] | None:
        """The live server, of that port if given; else the one that ran last, None where none ever did."""
        found = self._newest_server(port)
        return self.run(found.id) if found else None

    def successor(self, run_id: str) -> str | None:
        """The server that was launched in place of one that died, and so on to the last; None where none was."""
        instead = {run.spec.details.get("relaunch_of"): run.id for run in reversed(self.runs.all("server"))}
        found = None
        while run_id in instead:
            run_id = found = instead[run_id]
        return found

    def status(self, run_id: str) -> dict[str, Any]:
        """A server run's phases, verdict, tap and dumps."""
        run = self.runs.get(run_id)
        if run.spec.kind != "server":
            raise UsageError(f"{run.id} is no server")
        with self.lock:
            if run.id not in self.watches:
                earlier = earlier_start(self.runs, run)
                self.watches[run.id] = ServerWatch(run, self.sampler.gpus, earlier, self.limits)
            watch = self.watches[run.id]
        seen = watch.look()
        if seen["verdict"]["verdict"] == "hang_suspected":
            self._report_once(watch, seen["phase"])
        newest = stacks.newest_report(run)
        return self.run(run.id) | seen | {"earlier": watch.earlier, "stacks": str(newest) if newest else None}

    def stacks(self, run_id: str) -> stacks.HangReport:
        """Where the processes of a live server stand; see `backends.verdict.stacks.make_report`."""
        return stacks.make_report(self.runs.get(run_id))

    def stop(self, run_id: str, why: str = "asked for") -> runs.Stopped:
        """Stop a run, and what draws from it; answers what is left of either."""
        run = self.runs.get(run_id)
        if run.spec.kind == "tune":
            return stop_tuning(self.runs, run, why)
        if run.spec.kind != "server":
            return runs.stop(run, why, signal.SIGINT)
        left = [
            f"{thing} of {job.id}"
            for job in self._drawing_from(run)
            for thing in runs.stop(job, f"its server {run.id} is stopped", signal.SIGINT).left
        ]
        made = runs.stop(run, why)
        made.left[:0] = left
        return made

    def overview(self, run_id: str | None = None, port: int | None = None) -> dict[str, Any]:
        """What a look at this host shows, in one answer: a sample, a server, an extraction, what is wrong.

        The server is that of `run_id`; else the live one, of `port` if given; else the one that ran last.
        """
        server = self.runs.get(run_id) if run_id else self._newest_server(port)
        sample = self.sample(server.id if server else None)
        status = self.status(server.id) if server else None
        extraction = self._extraction()
        return {
            "sample": sample,
            "server": status,
            "extraction": self.run(extraction.id) if extraction else None,
            "alarms": self._alarms(status, sample, extraction),
        }

    def _alarms(self, status: dict[str, Any] | None, sample: dict[str, Any], extraction: runs.Run | None) -> list[Any]:
        """What is wrong now: by the supervisor of the extraction if it runs, else by what is seen from here."""
        said = read_alarms(extraction) if extraction else None
        if said is not None or status is None:
            return said or []
        with self.lock:
            if status["id"] not in self.alarms:
                self.alarms[status["id"]] = AlarmWatch(patience.scaled(AlarmLimits()))
            watch = self.alarms[status["id"]]
            watch.add(sight(self.watches[status["id"]], status, sample, None), time.time())
            return list(watch.alarms)

    def gate(self, run_id: str) -> dict[str, Any]:
        """What the gate says of a live server, the arguments that it resolved to (secrets masked), and its last probe.

        Raises RunDied where it is dead or does not answer.
        """
        server = describe(self.runs.get(run_id))
        try:
            info, _, findings = gate.look(server, seconds=GATE_SECONDS)
        except (ServerGone, DumpError) as error:
            raise RunDied(str(error)) from error
        plain = {name: masked(name, value) for name, value in info.items() if isinstance(value, (str, int, float))}
        return {
            "findings": findings,
            "effective": plain,
            "probe": probe.last(server),
        }

    def doctor(self, asked: dict[str, Any]) -> Report:
        """Pre-flight checks that only look, in under 5 s; `asked` is a `backends.doctor.report.Asked`."""
        arrived = time.time()
        checks = self.examiner.examine(msgspec.convert(asked, Asked))
        return Report(arrived=arrived, answered=time.time(), checks=checks)

    def folder(self, path: str) -> folders.Folder:
        """What a folder of this host holds."""
        return folders.read_folder(path)

    def extraction(self, output: str | None = None, asked: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """The newest extraction that runs, else the one that ran last, into `output` if given.

        A relative path starts at the home folder. Raises Locked where one runs that draws something else than `asked`.
        """
        found = self._extraction(None if output is None else absolute(output))
        if found and asked and found.alive():
            require_same(found, asked)
        return self.run(found.id) if found else None

    def dataset(self, path: str) -> datasets.Described:
        """A dataset that may be copied from here, finished or not."""
        return datasets.describe(path)

    def dataset_samples(
        self, path: str, after: int, ranges: Sequence[datasets.Range] | None = None
    ) -> list[datasets.WrittenSample]:
        """The next page of a dataset's written samples, with their files; see `backends.datasets.written`."""
        return datasets.written(path, after, ranges)

    def samples(
        self,
        path: str,
        after: int = -1,
        before: int | None = None,
        state: State | None = None,
        most: int = 200,
    ) -> datasets.Page:
        """Some of a dataset's samples, in whatever state; see `backends.datasets.samples`."""
        return datasets.samples(path, after, before, state, most)

    def sample_log(self, path: str, number: int) -> list[datasets.SampleLog]:
        """What the logs of the extractions into a dataset say of one of its samples, the newest first."""
        place = absolute(path)
        drawn = (run for run in self.runs.all("extract") if run.spec.details.get("output") == place)
        logs = (datasets.log_of_sample(run.id, run.log, number) for run in drawn)
        return [log for log in logs if log.lines]

    def bundle(self, run_id: str | None, extra: dict[str, str], port: int | None = None) -> bundle.Bundle:
        """What a support bundle holds of a run and its server, secrets masked; `extra` are texts of the console's own.

        Without a run it is about the newest server, of `port` if given, and the extraction that `extraction` gives.
        """
        chosen = self._of_bundle(run_id, port)
        server = next((run for run in chosen if run.spec.kind == "server"), None)
        shown = server or self._last_server(port)  # of several that are live too
        asked: dict[str, Any] = {"overview": self.overview(shown.id if shown else None, port)}
        if server:
            asked["diagnosis"] = self.status(server.id)
            try:
                asked["effective"] = self.gate(server.id)
            except LayertapError as error:
                asked["effective"] = {"error": str(error)}
        return bundle.make(chosen, asked, extra)

    def _of_bundle(self, run_id: str | None, port: int | None) -> list[runs.Run]:
        if run_id is None:
            return [run for run in (self._last_server(port), self._extraction()) if run]
        run = self.runs.get(run_id)
        servers = [server for server in self.runs.all("server") if server.id != run.id and draws_from(run, server)]
        return [*servers, run]

    def remove_demo(self, path: str) -> None:
        """Delete the dataset of an earlier demo. Raises UsageError for a folder that holds anything else, Locked."""
        place = Path(absolute(path))
        refuse_second(self.runs, str(place))
        earlier_demo.remove(place)

    def _report_once(self, watch: ServerWatch, phase: str | None) -> None:
        """Read the stacks of a run that seems to hang, once a phase: a hang that was none must not hide the next one.

        In a thread of its own: the status does not wait, and the next one knows where the ranks stand.
        """
        run = watch.run

        def report() -> None:
            with contextlib.suppress(LayertapError, OSError):  # whoever asks for the stacks is told why there are none
                made = stacks.make_report(run)
                watch.standing = Standing(made.at, made.summary, made.apart)

        with self.lock:
            if (run.id, phase) in self.reported:
                return
            self.reported.add((run.id, phase))
        threading.Thread(target=report, daemon=True).start()

    def _newest_server(self, port: int | None) -> runs.Run | None:
        """The live one, else the one that ran last. Raises UsageError where several are live."""
        try:
            return self.runs.server(port)
        except RunDied:
            return self._last_server(port)

    def _last_server(self, port: int | None) -> runs.Run | None:
        """The server that was launched last, on that port if given."""
        return next((run for run in self.runs.all("server") if port in (None, run.spec.port)), None)

    def _extraction(self, output: str | None = None) -> runs.Run | None:
        """The newest extraction that lives, else the one that was started last, into `output` if given."""
        live_first = [*self.runs.live("extract"), *self.runs.all("extract")]
        return next((run for run in live_first if output in (None, run.spec.details.get("output"))), None)

    def _drawing_from(self, server: runs.Run) -> list[runs.Run]:
        return [run for run in self.runs.live() if draws_from(run, server)]

    def _summary(self, run: runs.Run) -> dict[str, Any]:
        spec = run.spec
        return {
            "schema": runs.SCHEMA,
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
            "details": spec.details,
            "stop_asked": run.stop_asked,
            "exit": run.exit,
        }


def sglang_version() -> str | None:
    """The version of SGLang in this Python, None where there is none."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def serve(agent: Agent) -> None:
    """Answer requests until the link closes."""
    from_console = sys.stdin.buffer
    outbox = Outbox(os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)  # a stray print must not land between frames
    threading.Thread(target=payloads.prune, args=(agent.payload, agent.runs), daemon=True).start()
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        while frame := read_frame(from_console):
            pool.submit(_answer, agent, frame[0], outbox)
    except FrameError:
        pass  # the console died over a request
    os._exit(0)  # whatever is still being answered has nobody to hear it


def _answer(agent: Agent, head: dict[str, Any], outbox: Outbox) -> None:
    try:
        frame = _result(agent, head)
    except LayertapError as error:
        frame = _failure(head, error.exit_code, str(error))
    except Exception:
        frame = _failure(head, ExitCode.OUR_BUG, traceback.format_exc())
    try:
        outbox.send(frame)
    except OSError:
        os._exit(0)


def _result(agent: Agent, head: dict[str, Any]) -> bytes:
    method: Request | None = None if head["method"].startswith("_") else getattr(agent, head["method"], None)
    if not callable(method):
        raise UsageError(f"the agent knows no request {head['method']!r}")
    result, body = method(**head["parameters"]), b""
    if isinstance(result, tuple):
        result, body = result
    return pack({"id": head["id"], "result": result}, body)


def _failure(head: dict[str, Any], code: ExitCode, message: str) -> bytes:
    return pack({"id": head["id"], "error": {"exit_code": code, "message": message}})


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run under a number that has no name
        return str(os.geteuid())


def _json(path: Path) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.MsgspecError):
        return None
