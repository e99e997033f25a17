"""Run directories: the truth about everything that runs on a host, and readable with `cat`.

    <state>/runs/<id>/spec.json    what was asked: kind, argv, versions; no secret in it
                      env.json     the real argv and environment, 0600
                      run.json     who runs it: pids with their start times, boot and machine
                      <kind>.log   what it printed
                      progress.json, result.json     of jobs
                      events.jsonl   what happened to it, a line an event
                      stop.json    that somebody asked it to stop, exit.json  how it ended

A run is started by a small supervisor, the leader of a session of its own, which outlives every console and link and
writes exit.json. Every process of a run carries `LAYERTAP_RUN=<id>` in its environment, so that it is found even where
it left the session or lost its parent.

usage: python -m backends.runs RUN_FOLDER      (the supervisor)
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import psutil

import capture
from backends import shared_memory
from backends.errors import Locked, RunDied, UsageError
from backends.ports import port_free
from capture import events
from capture.dumps.dump import DumpError
from capture.server import Process

SCHEMA = 1
RUN_VARIABLE = "LAYERTAP_RUN"
ASK_SECONDS = 20.0  # after the polite request, before whatever is left is ended
TERM_SECONDS = 5.0
KILL_SECONDS = 10.0
PORT_SECONDS = 2.0
REMAINS_SECONDS = 80.0  # that ending what is left of a dead server may take
GPU_SECONDS = 30.0  # in which the driver takes back what a process held, which it may do only after the process's end
NOT_RUNNING = "it was not running"
START_SECONDS = 30.0  # without a run.json for longer, its supervisor died before it could write one

CODE = (Path(__file__).parents[1], Path(capture.__file__).parents[1])
"""The folders that `backends` and `capture` come from."""

State = Literal["starting", "running", "exited", "died", "elsewhere"]
T = TypeVar("T")


class Spec(msgspec.Struct, kw_only=True):
    """spec.json. `argv` is masked; `details` holds what the kind adds (profile, layers, rows file, …)."""

    schema: int = SCHEMA
    id: str
    kind: str
    argv: list[str]
    port: int | None = None
    dump_dir: str | None = None
    code: str = ""
    sglang: str | None = None
    created: float
    details: dict[str, Any] = {}


class Private(msgspec.Struct, kw_only=True):
    """env.json: what the process really gets."""

    argv: list[str]
    env: dict[str, str]
    lock: str | None = None


class Running(msgspec.Struct, kw_only=True):
    """run.json."""

    schema: int = SCHEMA
    id: str
    supervisor: Process
    child: Process
    boot: str
    machine: str
    started: float


class Exit(msgspec.Struct, kw_only=True):
    """exit.json: `code` or, where it was killed, `signal`; `at` in seconds since the epoch."""

    schema: int = SCHEMA
    code: int | None
    signal: int | None
    at: float


class Stopped(msgspec.Struct, kw_only=True):
    """What a stop came to; `left` names everything that is still there."""

    schema: int = SCHEMA
    id: str
    seconds: float
    how: str
    left: list[str]


class Run:
    """One run directory; `spec` is its spec.json where that was read already."""

    def __init__(self, folder: Path, spec: Spec | None = None) -> None:
        self.folder = folder
        self.id = folder.name
        self._spec = spec

    @property
    def spec(self) -> Spec:
        """What was asked. Raises UsageError where the folder is no run of ours."""
        spec = self._spec or _read(self.folder / "spec.json", Spec)
        if spec is None:
            raise UsageError(f"{self.folder} is no run: it has no readable spec.json")
        return spec

    @property
    def private(self) -> Private:
        """The real argv and environment."""
        private = _read(self.folder / "env.json", Private)
        if private is None:
            raise UsageError(f"{self.folder}/env.json is missing or damaged")
        return private

    @property
    def log(self) -> Path:
        """What the run printed."""
        return self.folder / f"{self.spec.kind}.log"

    @property
    def exit(self) -> Exit | None:
        """How it ended, None while it has not or where nobody could write it down."""
        return _read(self.folder / "exit.json", Exit)

    @property
    def running(self) -> Running | None:
        """Who runs it, None before its supervisor said so."""
        return _read(self.folder / "run.json", Running)

    @property
    def stop_asked(self) -> bool:
        """Whether somebody asked it to stop."""
        return (self.folder / "stop.json").exists()

    def state(self) -> State:
        """What is true now; `elsewhere` is a run of another machine that shares this home."""
        if self.exit is not None:
            return "exited"
        running = self.running
        if running is None:
            young = time.time() - self.spec.created < START_SECONDS
            return "starting" if young else "died"
        if running.machine != machine_id():
            return "elsewhere"
        if running.boot == boot_id() and any(process.alive() for process in (running.supervisor, running.child)):
            return "running"
        return "exited" if self.exit is not None else "died"

    def alive(self) -> bool:
        """Whether something of it runs here."""
        return self.state() in ("starting", "running")

    def processes(self, among: Iterable[int] | None = None) -> list[psutil.Process]:
        """Every live process of this run: by the session it began in, or by its mark in the environment.

        Looks at every process of the host, which takes long, or only at those whose numbers are `among` the given.
        """
        session, led = self._session()
        ended = self.exit
        found = []
        for process in psutil.process_iter() if among is None else _existing(among):
            try:
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                # A process that renames itself may overwrite its environment, one that leaves the session keeps it.
                in_session = os.getsid(process.pid) == session and (
                    ended is None or process.create_time() < ended.at + START_SECONDS  # else the number is another's
                )
                if in_session and (led or ended is not None):
                    found.append(process)
                    continue
                environment = process.environ()
                unmarked = "PATH" in environment and RUN_VARIABLE not in environment
                if environment.get(RUN_VARIABLE) == self.id or (in_session and not unmarked):
                    found.append(process)
            except (psutil.Error, ProcessLookupError):
                continue
        return found

    def _session(self) -> tuple[int | None, bool]:
        """The session that the supervisor began, and whether it leads it still.

        None where that number is another process's by now. Where the leader is gone, the session is the run's as long
        as a process of it is there; after that the number may be given to another session, whose leader is gone too.
        """
        running = self.running
        if running is None or running.boot != boot_id() or running.machine != machine_id():
            return None, False
        try:
            led = Process.of(running.supervisor.pid) == running.supervisor
        except OSError:
            return running.supervisor.pid, False
        return (running.supervisor.pid, True) if led else (None, False)


class Runs:
    """All runs below one state folder."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.folder = state / "runs"
        self.locks = state / "locks"
        for folder in (self.state, self.folder, self.locks):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._specs: dict[str, Spec] = {}  # by folder; written once, before anything of the run happens
        self._over: set[str] = set()  # folders of runs that will never live again

    def all(self, kind: str | None = None) -> list[Run]:
        """Runs, the newest first; a folder without a readable spec.json is none."""
        specs = ((name, self._spec(name)) for name in os.listdir(self.folder))
        chosen = [(spec.created, name, spec) for name, spec in specs if spec and kind in (None, spec.kind)]
        newest_first = sorted(chosen, key=lambda one: one[:2], reverse=True)
        return [Run(self.folder / name, spec) for _, name, spec in newest_first]

    def live(self, kind: str | None = None) -> list[Run]:
        """The runs that live, the newest first."""
        return [run for run, _ in self.live_states(kind)]

    def live_states(self, kind: str | None = None) -> list[tuple[Run, State]]:
        """The runs that live with their states, the newest first; one that is over is read once and never again."""
        found: list[tuple[Run, State]] = []
        for run in self.all(kind):
            if run.id in self._over:
                continue
            state = run.state()
            if state in ("starting", "running"):
                found.append((run, state))
            elif state != "died" or run.running:  # one that died without a run.json may still be starting, slowly
                self._over.add(run.id)
        return found

    def _spec(self, name: str) -> Spec | None:
        spec = self._specs.get(name) or _read(self.folder / name / "spec.json", Spec)
        if spec:
            self._specs[name] = spec
        return spec

    def get(self, run_id: str) -> Run:
        """The run of that id or unique start of an id. Raises UsageError where there is none, or several."""
        matches = [run for run in self.all() if run.id == run_id] or [
            run for run in self.all() if run.id.startswith(run_id)
        ]
        if len(matches) != 1:
            known = ", ".join(run.id for run in (matches or self.all())[:5]) or "none at all"
            raise UsageError(f"{'several runs begin' if matches else 'no run begins'} with {run_id!r}; runs: {known}")
        return matches[0]

    def lock_path(self, port: int, what: str = "") -> Path:
        """The lock of this machine's server on `port`; `what` names a lock of its own beside it."""
        return self.locks / f"{machine_id()}-{port}{what}"

    def server(self, port: int | None = None) -> Run:
        """The live server, on `port` if given. Raises RunDied where there is none, UsageError where several."""
        live = [run for run in self.live("server") if port in (None, run.spec.port)]
        if len(live) == 1:
            return live[0]
        if live:
            ports = ", ".join(str(run.spec.port) for run in live)
            raise UsageError(f"servers run on ports {ports}; say which with --port")
        raise RunDied(f"no server of ours runs here{'' if port is None else f' on port {port}'}; `layertap launch` it")

    def start(
        self,
        kind: str,
        argv: list[str],
        env: dict[str, str],
        *,
        code: str,
        shown_argv: list[str] | None = None,
        port: int | None = None,
        lock: Path | None = None,
        prepare: Callable[[Run], dict[str, str]] | None = None,
        sglang: str | None = None,
        dump_root: Path | None = None,
        details: dict[str, Any] | None = None,
        supervisor: str = "backends.runs",
    ) -> Run:
        """Start a detached run; returns once its supervisor has written run.json.

        `prepare` may put files into the folder and add to the environment before anything runs. `supervisor` is the
        module that supervises it. Raises Locked where `lock` is held, RunDied where the process could not be started,
        UsageError where its folder cannot be written.
        """
        created = time.time()
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(created))
        run = Run(self.folder / f"{kind}-{stamp}-{secrets.token_hex(2)}")
        spec = Spec(
            id=run.id,
            kind=kind,
            argv=shown_argv or argv,
            port=port,
            dump_dir=str(dump_root / run.id) if dump_root else None,
            code=code,
            sglang=sglang,
            created=created,
            details=details or {},
        )
        try:
            run.folder.mkdir(mode=0o700)
            env = {**env, RUN_VARIABLE: run.id, **(prepare(run) if prepare else {})}
            write_json(run.folder / "env.json", Private(argv=argv, env=env, lock=str(lock) if lock else None))
            write_json(run.folder / "spec.json", spec)
            self._supervise(run, spec, lock, supervisor)
        except (OSError, DumpError) as error:
            _remove(run, spec)
            why = str(error) if isinstance(error, DumpError) else f"{error.filename or run.folder}: {error.strerror}"
            raise UsageError(f"{kind} could not be started: {why}; make room there, or let us write there") from error
        return run

    def _supervise(self, run: Run, spec: Spec, lock: Path | None, module: str) -> None:
        """Start the supervisor and wait for its word."""
        with open(os.open(run.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:
            supervisor = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(run.folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=run.folder,
                env={**os.environ, RUN_VARIABLE: run.id, "PYTHONPATH": python_path(CODE, os.environ)},
            )
        while run.running is None and supervisor.poll() is None:
            time.sleep(0.02)
        if supervisor.poll() == Locked.exit_code:
            _remove(run, spec)
            self.refuse_second(spec.port)
            raise Locked(f"{lock} is held by another process")
        if run.running is None:
            _write_exit(run.folder, supervisor.wait())
            raise RunDied(f"{spec.kind} could not be started: {_tail(run.log)}")
        threading.Thread(target=supervisor.wait, daemon=True).start()  # so that it leaves no zombie

    def refuse_second(self, port: int | None) -> None:
        """Raise Locked where a server of ours runs on that port."""
        for run in self.live("server"):
            if run.spec.port == port:
                raise Locked(
                    f"a server of ours runs on port {port} already: {run.id}; `layertap stop {run.id}` stops it, "
                    "or choose another --port"
                )


def supervise(folder: Path, see_to: Callable[[Run, subprocess.Popen[bytes]], int] | None = None) -> int:
    """Run what `folder` asks for in this process's session, and write down how it ended; returns the exit code.

    `see_to` is given the child and returns the run's exit code once that is over, as `Popen.wait` does.
    """
    run = Run(folder)
    private = run.private
    handles = []
    if private.lock:
        handle = os.open(private.lock, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return Locked.exit_code
        handles = [handle]  # the child holds it too, in case this process is killed
    # A stop signals the child; this process stays to write down how it ended.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    try:
        child = start_child(run, handles)
    except OSError as error:
        what = error.filename or private.argv[0]
        print(f"layertap: {what}: {error.strerror}", file=sys.stderr, flush=True)  # noqa: T201
        return 127
    try:
        code = see_to(run, child) if see_to else child.wait()
    except Exception:  # a bug of ours must end no run
        traceback.print_exc()
        code = child.wait()
    _write_exit(folder, code)
    return 0


def start_child(run: Run, handles: Iterable[int] = ()) -> subprocess.Popen[bytes]:
    """Start the process of a run below this one, its supervisor, and write run.json. Raises OSError.

    `handles` are files that the child keeps open.
    """
    private = run.private
    child = subprocess.Popen(
        private.argv, env=private.env, cwd=run.folder, stdin=subprocess.DEVNULL, pass_fds=list(handles)
    )
    events.append(run.folder, "started", child=child.pid, supervisor=os.getpid())
    running = Running(
        id=run.id,
        supervisor=Process.of(os.getpid()),
        child=Process.of(child.pid),
        boot=boot_id(),
        machine=machine_id(),
        started=time.time(),
    )
    try:
        write_json(run.folder / "run.json", running)
    except OSError:  # nobody would ever find it
        child.kill()
        child.wait()
        raise
    return child


def stop(
    run: Run,
    why: str,
    first: signal.Signals = signal.SIGTERM,
    *,
    dead: bool = False,
    patience: float = ASK_SECONDS,
) -> Stopped:
    """Ask the run to end, then end it, then look whether anything is left; its dumps and shared memory are removed.

    Asks the main process with `first`, and ends every process that is left after `patience` seconds. Of a run that is
    `dead`, as a server without its scheduler, only the remains are ended: it died, and nobody stopped it. Raises
    UsageError for a run of another machine.
    """
    begun = time.monotonic()
    state = run.state()
    if state == "elsewhere":
        raise UsageError(f"{run.id} runs on another machine that shares this home; stop it from there")
    if state in ("starting", "running") and not dead:  # of one that is dead already, it would hide how it ended
        write_json(run.folder / "stop.json", {"schema": SCHEMA, "why": why, "at": time.time()})
        events.append(run.folder, "stop_asked", why=why)
    how = NOT_RUNNING
    known = {process.pid for process in run.processes()}
    shared = shared_memory.mapped(known)
    running = run.running
    supervisor = running.supervisor.pid if running else None
    if running is not None and running.boot == boot_id() and state == "running":
        how = "asked"
        if running.child.alive():
            _signal([running.child.pid], first)
        else:  # its supervisor heeds stop.json, and ends; it may just be ending what is left of a dead server
            patience = max(patience, REMAINS_SECONDS)
        _until(lambda: not run.processes(), patience)
    for number, seconds in ((signal.SIGTERM, TERM_SECONDS), (signal.SIGKILL, KILL_SECONDS)):
        remaining = run.processes()
        if not remaining:
            break
        how = f"ended by {number.name}"
        # The supervisor ends by itself, and writes down how the others did.
        pids = [process.pid for process in remaining]
        _signal([pid for pid in pids if pid != supervisor] or pids, number)
        _until(lambda: not run.processes(), seconds)
    left = [f"process {process.pid} ({_title(process)})" for process in run.processes()]
    holders = _gpu_holders(known, 0.0 if left else GPU_SECONDS)
    left += [f"GPU memory that NVML says process {pid} holds" for pid in sorted(holders)]
    if not left:
        for path in shared:  # SGLang removes what it shares only where it ends by itself
            path.unlink(missing_ok=True)
    spec = run.spec
    if spec.dump_dir:
        if not left:
            shutil.rmtree(spec.dump_dir, ignore_errors=True)
        if Path(spec.dump_dir).exists():
            left.append(f"dump folder {spec.dump_dir}")
    port = spec.port
    # Of a run that was over long ago, the port may be anybody's by now.
    if port is not None and how != NOT_RUNNING and not _until(lambda: port_free(port), PORT_SECONDS):
        left.append(f"port {port} is still open")
    made = Stopped(id=run.id, seconds=round(time.monotonic() - begun, 1), how=how, left=left)
    if how != NOT_RUNNING:
        events.append(run.folder, "stopped", how=made.how, seconds=made.seconds, left=made.left)
    return made


def boot_id() -> str:
    """This boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def machine_id() -> str:
    """This machine, stable over boots where it says so."""
    for path in (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id")):
        try:
            if text := path.read_text().strip():
                return text[:12]
        except OSError:
            continue
    return socket.gethostname()


def write_json(path: Path, value: Any) -> None:
    """Replace `path` (0600) atomically by `value` as JSON."""
    handle, scratch = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(handle, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")
        os.replace(scratch, path)
    except OSError:  # a full disk, which is tried again and again
        os.unlink(scratch)
        raise


def python_path(ours: Iterable[Path], env: Mapping[str, str]) -> str:
    """A PYTHONPATH of folders of ours, then of those in `env`."""
    inherited = env.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(dict.fromkeys([*map(str, ours), *filter(None, inherited)]))


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None


def _existing(pids: Iterable[int]) -> Iterator[psutil.Process]:
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            yield psutil.Process(pid)


def _write_exit(folder: Path, code: int) -> None:
    """Write down how a run ended; `code` as subprocess gives it: negative for a signal."""
    exit = Exit(code=code if code >= 0 else None, signal=-code if code < 0 else None, at=time.time())
    events.append(folder, "ended", code=exit.code, signal=exit.signal)  # first: it is there for whoever sees exit.json
    write_json(folder / "exit.json", exit)


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # what cannot be ended is named as left
            os.kill(pid, number)


def _until(true: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _remove(run: Run, spec: Spec) -> None:
    """Leave nothing of a run that did not come to be."""
    for folder in (str(run.folder), spec.dump_dir):
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:80] or str(process.name())
    except psutil.Error:
        return "gone"


def _gpu_holders(pids: set[int], seconds: float) -> set[int]:
    """Which of `pids` still hold GPU memory, waiting until none does for `seconds` at most."""
    holders = set(pids)

    def none_left() -> bool:
        holders.intersection_update(_gpu_pids())
        return not holders

    if pids:
        _until(none_left, seconds)
    return holders


def _gpu_pids() -> set[int]:
    """Processes that NVML says hold GPU memory; empty where there is no NVML, without a GPU that it has lost."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        return set()
    found: set[int] = set()
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            with contextlib.suppress(pynvml.NVMLError):
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                found |= {entry.pid for entry in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    except pynvml.NVMLError:
        pass
    finally:
        pynvml.nvmlShutdown()
    return found


def _tail(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it printed nothing"


if __name__ == "__main__":
    os.umask(0o077)
    sys.exit(supervise(Path(sys.argv[1])))
