"""Watching a server run: its log into phases, its processes and port into evidence, both into a verdict."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from backends.gpus import Gpu
from backends.processes import ProcessSample, RunProcesses, open_files
from backends.runs import Run, Runs
from backends.verdict import health
from backends.verdict.diagnose import Limits, diagnose
from backends.verdict.evidence import Evidence
from backends.verdict.health import Health
from backends.verdict.kernel import KernelLog
from backends.verdict.observation import EarlierStart, Follower, Observation, Standing
from backends.verdict.startup import Startup
from capture.dumps.dump import DumpError, TapState, read_tap

RECENT = 30.0  # seconds: an answer to /generate that is so old says that the server is well
QUIET = 10.0  # seconds without a batch, of a server that has work
GENERATED = '"POST /generate HTTP/1.1" 200'
AFTERLIFE = 0.3  # seconds that a socket may outlive its process
LOG_STEP = 4 << 20
LOG_HEAD = 8 << 20  # bytes in which a start stands, which writes about 100 kB
LOG_TAIL = 8 << 20  # bytes in which is what is the matter now
LISTENING = {  # /proc/net's addresses that take what comes to 127.0.0.1: itself, any, both as IPv6 has them, and ::
    "0100007F",
    "00000000",
    "0000000000000000FFFF00000100007F",
    "0000000000000000FFFF000000000000",
    "0" * 32,
}
EARLIER_RUNS = 20  # that are looked at for one that came up


def earlier_start(runs: Runs, run: Run) -> EarlierStart | None:
    """The newest start before `run`, of its profile and model, that came up; None where none did."""
    kind = _kind(run)
    before = [other for other in runs.all("server") if other.spec.created < run.spec.created and _kind(other) == kind]
    for other in before[:EARLIER_RUNS]:
        startup = Startup()
        try:
            with other.log.open("rb") as file:
                startup.feed(file.read(LOG_HEAD).decode(errors="replace"))
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


def settled(seen: dict[str, Any]) -> bool:
    """Whether a launch has come to something, by what a look at its server saw."""
    verdict = seen["verdict"]["verdict"]
    # A suspected hang goes on being followed: it may be none. A degraded server that answers is up.
    up = verdict == "degraded" and seen["health"] == 200
    without_tap = seen["phase"] == "ready" and not (seen["tap"] and seen["tap"]["inside"])
    return up or without_tap or verdict in ("healthy", "crashed", "stopped")


def _kind(run: Run) -> tuple[Any, Any]:
    return run.spec.details.get("profile"), run.spec.details.get("model")


class ServerWatch:
    """Evidence about one server run; look as often as you like, the log is read once.

    `gpus` reads the GPUs, given the run's processes; without it nothing is known of them. `earlier` is the start that
    this one is held against, `evidence` what the last look saw. `first_answer` is how long the first look waits for
    /health.
    """

    def __init__(
        self,
        run: Run,
        gpus: Callable[[Collection[int]], list[Gpu]] | None = None,
        earlier: EarlierStart | None = None,
        limits: Limits | None = None,
        first_answer: float = health.FIRST_ANSWER,
    ) -> None:
        self.run = run
        self.limits = limits or Limits()
        self.earlier = earlier
        self.follower = Follower(self.limits, earlier)
        self.evidence: Evidence | None = None
        self.offset = 0
        self.rest = b""
        self.health = Health(run.spec.port or 0, first_answer)
        self.processes = RunProcesses(run)
        self.kernel = KernelLog(run.spec.created)
        self.standing: Standing | None = None
        self.pids: set[int] = set()  # of all processes that were seen of it
        self.lock = threading.Lock()
        self._gpus = gpus
        self._generated = -RECENT  # when it answered /generate last, on the monotonic clock

    def look(self) -> dict[str, Any]:
        """Phases, verdict with evidence and the tap's state, as they are now."""
        with self.lock:
            log_age = self._read_log()
            return self.judge(self._observe(log_age))

    def hear(self, text: str, at: float) -> None:
        """Take in the next part of the log, read at `at` (epoch seconds)."""
        self.follower.hear(text, at)
        if GENERATED in text:
            self._generated = time.monotonic() - max(0.0, time.time() - at)

    def judge(self, seen: Observation) -> dict[str, Any]:
        """What was seen, as `look` says it."""
        self.evidence = evidence = self.follower.evidence(seen)
        startup = self.follower.startup
        current = startup.current
        return {
            "phase": current.id if current else None,
            "phase_seconds": evidence.phase_s,
            "phases": msgspec.to_builtins(startup.phases),
            "verdict": msgspec.to_builtins(diagnose(evidence, self.limits)),
            "tap": msgspec.to_builtins(seen.tap),
            "layers": seen.tap.layers.words() if seen.tap and seen.tap.layers else None,
            "log_lines": startup.lines,
            "log_bytes": self.offset,
            "health": evidence.health,
        }

    def _read_log(self) -> float | None:
        """Take in what is new in the log; returns for how many seconds it has not changed, None where there is none."""
        try:
            with self.run.log.open("rb") as file:
                written = os.fstat(file.fileno()).st_mtime
                first = self.offset == 0  # what stands there may be old
                file.seek(self.offset)
                while block := file.read(LOG_STEP if self.offset else LOG_HEAD):
                    self.offset += len(block)
                    data = self.rest + block
                    end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1  # loading bars end in \r
                    self.rest = data[end:]
                    if end:
                        self.hear(data[:end].decode(errors="replace"), written if first else time.time())
                    if first and self.follower.startup.ready:
                        self._pass_over(file, os.fstat(file.fileno()).st_size - LOG_TAIL)
                return max(0.0, time.time() - written)
        except OSError:
            return None

    def _pass_over(self, file: BinaryIO, until: int) -> None:
        """Count the lines up to about byte `until`: what a server that has come up said long ago is not read again."""
        if until <= self.offset:
            return
        lines = 0
        while (left := until - file.tell()) > 0 and (block := file.read(min(LOG_STEP, left))):
            lines += block.count(b"\n")
        lines += file.readline().count(b"\n")
        self.offset, self.rest = file.tell(), b""
        self.follower.startup.lines += lines

    def _tap(self) -> tuple[TapState | None, str | None]:
        folder = self.run.spec.dump_dir
        if folder is None:
            return None, None
        try:
            return read_tap(Path(folder)), None
        except DumpError as error:
            return None, str(error)

    def _observe(self, log_age: float | None) -> Observation:
        run = self.run
        tap, tap_error = self._tap()
        port, processes = run.spec.port or 0, self._look_at_processes()
        listener = _listener(port, {process.pid for process in processes})
        if listener is False and processes:
            # The one of ours that listened may have died a moment ago, and its socket not yet gone with it.
            time.sleep(AFTERLIFE)
            processes = self._look_at_processes()
            listener = _listener(port, {process.pid for process in processes})
        state, ended, running = run.state(), run.exit, run.running
        if state not in ("starting", "running"):  # it may have said why after the log was read, and before it ended
            log_age = self._read_log()
        return Observation(
            at=time.time(),
            tick=time.monotonic(),
            created=run.spec.created,
            state=state,
            stop_asked=run.stop_asked,
            exit_code=ended.code if ended else None,
            signal=ended.signal if ended else None,
            launcher=running.child.pid if running else None,
            port=port,
            listener_is_ours=listener,
            health=self.health.answer(self._rest()) if listener else None,
            log_age=log_age,
            tap=tap,
            tap_error=tap_error,
            processes=processes,
            gpus=self._our_gpus(processes),
            kernel=self.kernel.read(self.pids),
            standing=self.standing,
        )

    def _rest(self) -> float:
        """For how many seconds a good answer of /health is good."""
        batch = self.follower.reader.batch
        if batch and batch.at and (batch.running or batch.queue) and time.time() - batch.at > QUIET:
            return health.SUSPICIOUS
        return health.FLOWING if time.monotonic() - self._generated < RECENT else health.IDLE

    def _look_at_processes(self) -> list[ProcessSample]:
        processes = self.processes.look() if self.run.state() == "running" else []
        self.pids |= {process.pid for process in processes}
        return processes

    def _our_gpus(self, processes: list[ProcessSample]) -> list[Gpu]:
        """The GPUs that this run uses; in a container that hides owners, those that hold memory."""
        if self._gpus is None or not processes:
            return []
        gpus = [gpu for gpu in self._gpus({process.pid for process in processes}) if gpu.error is None]
        users = {gpu.index: gpu.processes or [] for gpu in gpus}
        ours = [gpu for gpu in gpus if any(process.ours for process in users[gpu.index])]
        hidden = [gpu for gpu in gpus if users[gpu.index] and not any(process.visible for process in users[gpu.index])]
        return ours or hidden


def _listener(port: int, ours: set[int]) -> bool | None:
    """Who listens on `port`: True for one of `ours`, False for another process, None for nobody."""
    inodes = _listening_inodes(port)
    if not inodes:
        return None
    return any(not inodes.isdisjoint(open_files(pid)) for pid in ours)


def _listening_inodes(port: int) -> set[str]:
    """Sockets that take what comes to `port` of 127.0.0.1."""
    found = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            address, _, number = fields[1].rpartition(":")
            if fields[3] == "0A" and int(number, 16) == port and address in LISTENING:
                found.add(f"socket:[{fields[9]}]")
    return found
