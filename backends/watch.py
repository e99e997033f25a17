"""Watching a server run: its log into phases, its processes and port into evidence, both into a verdict."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import msgspec

from backends.activity import Activity, ActivityWatch
from backends.catalogue import catalogue
from backends.diagnose import HEAT, Limits, diagnose
from backends.evidence import Evidence, Rank
from backends.gpus import Gpu
from backends.kernel import KernelLog
from backends.processes import ProcessSample, RunProcesses, open_files
from backends.reading import LogReader
from backends.runs import Run, Runs
from backends.startup import Phase, Startup
from capture.dump import DumpError, TapState, read_tap

HEALTH_SECONDS = 25.0  # SGLang itself gives up after 20
HEALTH_PAUSE = 5.0  # every 200 costs the server a generated token
FIRST_ANSWER = 5.0  # a healthy server takes about one second
LOG_STEP = 4 << 20
EARLIER_RUNS = 20  # that are looked at for one that came up
EARLIER_LOG = 8 << 20  # bytes of its log; a start writes about 100 kB
OF_A_KILL = frozenset({43, 45})  # XIDs that come when a process is ended
ENDED = ("zombie", "dead")  # states of a process that runs no more
TITLED = "sglang::"  # how SGLang titles its processes, except for the launcher


class EarlierStart(msgspec.Struct):
    """How long an earlier start of the same profile and model took: seconds in all, and in each phase by its id."""

    run: str
    seconds: float
    phases: dict[str, float]


def earlier_start(runs: Runs, run: Run) -> EarlierStart | None:
    """The newest start before `run`, of its profile and model, that came up; None where none did."""
    kind = _kind(run)
    before = [other for other in runs.all("server") if other.spec.created < run.spec.created and _kind(other) == kind]
    for other in before[:EARLIER_RUNS]:
        startup = Startup()
        try:
            with other.log.open("rb") as file:
                startup.feed(file.read(EARLIER_LOG).decode(errors="replace"))
        except OSError:
            continue
        ready = startup.phases[-1].started if startup.ready else None
        if ready is None:
            continue
        took = {
            phase.id: max(0.0, phase.ended - phase.started)
            for phase in startup.phases
            if phase.started is not None and phase.ended is not None
        }
        return EarlierStart(other.id, max(0.0, ready - other.spec.created), took)
    return None


def _kind(run: Run) -> tuple[Any, Any]:
    return run.spec.details.get("profile"), run.spec.details.get("model")


class ServerWatch:
    """Evidence about one server run; look as often as you like, the log is read once.

    `gpus` reads the GPUs, given the run's processes; without it nothing is known of them. `earlier` is the start that
    this one is held against.
    """

    def __init__(
        self,
        run: Run,
        gpus: Callable[[Collection[int]], list[Gpu]] | None = None,
        earlier: EarlierStart | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.run = run
        self.limits = limits or Limits()
        self.earlier = earlier
        self.reader = LogReader()
        self.offset = 0
        self.rest = b""
        self.health = Health(run.spec.port or 0)
        self.processes = RunProcesses(run)
        self.activity = ActivityWatch()
        self.kernel = KernelLog(run.spec.created)
        self.lock = threading.Lock()
        self._gpus = gpus
        self._said: float | None = None  # when the log last said something, epoch seconds
        self._bar: tuple[str, str] | None = None
        self._bar_moved: float | None = None
        self._ready_at: float | None = None
        self._ranks: dict[int, str] = {}
        self._gone: dict[str, float] = {}

    @property
    def startup(self) -> Startup:
        """The phases of its start."""
        return self.reader.startup

    def look(self) -> dict[str, Any]:
        """Phases, verdict with evidence and the tap's state, as they are now."""
        with self.lock:
            log_age = self._read_log()
            tap, tap_error = self._tap()
            evidence = self._evidence(log_age, tap, tap_error)
            verdict = diagnose(evidence, self.limits)
            current = self.startup.current
            return {
                "phase": current.id if current else None,
                "phase_seconds": evidence.phase_s,
                "phases": msgspec.to_builtins(self.startup.phases),
                "verdict": msgspec.to_builtins(verdict),
                "tap": msgspec.to_builtins(tap),
                "layers": tap.layers.words() if tap and tap.layers else None,
                "log_lines": self.startup.lines,
                "log_bytes": self.offset,
                "health": evidence.health,
            }

    def _read_log(self) -> float | None:
        """Feed what is new in the log; returns for how many seconds it has said nothing but answers to /health."""
        try:
            first = self._said is None
            with self.run.log.open("rb") as file:
                file.seek(self.offset)
                while block := file.read(LOG_STEP):
                    self.offset += len(block)
                    data = self.rest + block
                    end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1  # loading bars end in \r
                    text = data[:end].decode(errors="replace")
                    self.reader.feed(text)
                    self.rest = data[end:]
                    if _says(text):
                        self._said = time.time()
            if first or self._said is None:
                self._said = self.run.log.stat().st_mtime
            return max(0.0, time.time() - self._said)
        except OSError:
            return None

    def _tap(self) -> tuple[TapState | None, str | None]:
        folder = self.run.spec.dump_dir
        if folder is None:
            return None, None
        try:
            return read_tap(Path(folder)), None
        except DumpError as error:
            return None, str(error)

    def _evidence(self, log_age: float | None, tap: TapState | None, tap_error: str | None) -> Evidence:
        run, startup = self.run, self.startup
        state, ended, port, running = run.state(), run.exit, run.spec.port or 0, run.running
        processes = self.processes.look() if state == "running" else []
        listener = _listener(port, {process.pid for process in processes})
        current, batch = startup.current, self.reader.batch
        gpus = self._our_gpus(processes)
        ours = [process for process in processes if process.title.startswith(TITLED) and process.state not in ENDED]
        launcher = [process for process in processes if running and process.pid == running.child.pid]
        activity = self.activity.look(processes, gpus, [process.pid for process in [*ours, *launcher]])
        health, failing = self._health() if listener else (None, None)
        return Evidence(
            process_alive=None if state == "elsewhere" else state in ("running", "starting"),
            exit_code=ended.code if ended else None,
            signal=ended.signal if ended else None,
            stop_requested=run.stop_asked,
            port=port,
            port_open=listener is not None,
            listener_is_ours=listener,
            health=health,
            health_s=self.health.seconds if health is not None else None,
            health_failing_s=failing,
            log_silent_s=log_age,
            log_lines=startup.lines,
            phase=current.id if current else None,
            phase_s=max(0.0, time.time() - current.started) if current and current.started else None,
            earlier_s=self.earlier.phases.get(current.id) if self.earlier and current else None,
            detail=current.detail if current else "",
            detail_s=self._bar_age(current),
            crashed=startup.crashed,
            crashed_line=startup.crashed_line,
            stopping=startup.stopping,
            weights_loaded="weights_gb" in startup.effective,
            hits=list(self.reader.hits.values()),
            last_lines=[name for name in self.reader.hits if self.reader.last_line(catalogue().by_id[name])],
            ready_seen=startup.ready,
            tap_in=tap.inside if tap else False if startup.ready else None,
            tap_error=tap_error or (tap.error if tap else None),
            ranks=[_rank(process, activity) for process in ours],
            launcher=_rank(launcher[0], activity) if launcher else None,
            missing=self._missing(ours),
            laggard=startup.laggard,
            activity=activity,
            batch=batch,
            batch_s=max(0.0, time.time() - batch.at) if batch and batch.at else None,
            throttled={gpu.index: why for gpu in gpus if (why := sorted(HEAT & set(gpu.throttle or [])))},
            narrow={
                gpu.index: f"x{gpu.pcie_width} instead of x{gpu.pcie_max_width}"
                for gpu in gpus
                if gpu.pcie_width and gpu.pcie_max_width and gpu.pcie_width < gpu.pcie_max_width
            },
            xids={gpu.index: codes for gpu in gpus if (codes := self._xids(gpu))},
            kernel=self.kernel.read(),
        )

    def _health(self) -> tuple[int | None, float | None]:
        """What /health answered since the log said ready, and for how many seconds it fails."""
        status = self.health.ask()
        if not self.startup.ready:
            return status, None
        if self._ready_at is None:
            self._ready_at = time.monotonic()
        if status != 200 and self.health.answered < self._ready_at:
            return None, None  # a 503 from before says nothing
        since = self.health.failing_since
        return status, None if since is None else time.monotonic() - max(since, self._ready_at)

    def _bar_age(self, current: Phase | None) -> float | None:
        """Seconds since the progress bar of this phase moved; None where none was seen moving."""
        bar = (current.id, current.detail) if current and current.detail else None
        if bar and self._bar and bar != self._bar and bar[0] == self._bar[0]:
            self._bar_moved = time.monotonic()
        elif bar is None or (self._bar and bar[0] != self._bar[0]):
            self._bar_moved = None
        self._bar = bar
        return None if self._bar_moved is None else time.monotonic() - self._bar_moved

    def _our_gpus(self, processes: list[ProcessSample]) -> list[Gpu]:
        """The GPUs that this run uses; in a container that hides owners, those that hold memory."""
        if self._gpus is None or not processes:
            return []
        gpus = [gpu for gpu in self._gpus({process.pid for process in processes}) if gpu.error is None]
        users = {gpu.index: gpu.processes or [] for gpu in gpus}
        ours = [gpu for gpu in gpus if any(process.ours for process in users[gpu.index])]
        hidden = [gpu for gpu in gpus if users[gpu.index] and not any(process.visible for process in users[gpu.index])]
        return ours or hidden

    def _missing(self, ours: list[ProcessSample]) -> list[str]:
        """Ranks that were there and have been gone for a while: a stop takes them away just before it says so."""
        now = time.monotonic()
        here = {process.pid: process.title.removeprefix(TITLED) for process in ours}
        for pid in self._ranks.keys() - here.keys():
            self._gone.setdefault(self._ranks[pid], now)
        self._ranks = here
        return [name for name, since in self._gone.items() if now - since >= self.limits.stopped]

    def _xids(self, gpu: Gpu) -> list[int]:
        return [one.code for one in gpu.xid or [] if one.at >= self.run.spec.created and one.code not in OF_A_KILL]


def _rank(process: ProcessSample, activity: Activity) -> Rank:
    """A process as evidence: its CPU over the last seconds; in disk sleep only if it was all the time."""
    state = process.state
    if state == "disk-sleep" and process.pid not in activity.waiting:
        state = "sleeping"
    cpu = activity.cpu_percent.get(process.pid)
    return Rank(name=process.title.removeprefix(TITLED), pid=process.pid, cpu_percent=cpu, state=state)


def _says(text: str) -> bool:
    """Whether a part of the log holds more than answers to /health, which are of our own asking."""
    return text.count("\n") + text.count("\r") > text.count('"GET /health')


class Health:
    """Asks /health in a thread of its own, since a stuck server takes 20 s to say so.

    `seconds` is how long the last answer took, `answered` when it came and `failing_since` when the first one of those
    was asked for that were no 200, both on the monotonic clock.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.seconds: float | None = None
        self.answered = 0.0
        self.failing_since: float | None = None
        self._status: int | None = None
        self._asking = False
        self._first = threading.Event()

    def ask(self) -> int | None:
        """The HTTP status of the last answer, None where none came; asks anew unless it is a recent 200.

        The first call waits `FIRST_ANSWER` seconds at most: who looks only once is to hear the answer.
        """
        rests = self._status == 200 and time.monotonic() - self.answered < HEALTH_PAUSE
        if not self._asking and not rests:
            self._asking = True
            threading.Thread(target=self._ask, daemon=True).start()
        self._first.wait(FIRST_ANSWER)
        self._first.set()
        return self._status

    def _ask(self) -> None:
        begun = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HEALTH_SECONDS)
        try:
            connection.request("GET", "/health")
            self._status = connection.getresponse().status
        except (OSError, http.client.HTTPException):
            self._status = None
        finally:
            connection.close()
            self.answered = time.monotonic()
            self.seconds = round(self.answered - begun, 3)
            self.failing_since = None if self._status == 200 else self.failing_since or begun
            self._asking = False
            self._first.set()


def _listener(port: int, ours: set[int]) -> bool | None:
    """Who listens on `port`: True for one of `ours`, False for another process, None for nobody."""
    inodes = _listening_inodes(port)
    if not inodes:
        return None
    return any(not inodes.isdisjoint(open_files(pid)) for pid in ours)


def _listening_inodes(port: int) -> set[str]:
    found = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(f"socket:[{fields[9]}]")
    return found
