"""Watching a server run: its log into phases, its processes and port into evidence, both into a verdict."""

from __future__ import annotations

import http.client
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil

from backends.diagnose import Evidence, Rank, diagnose
from backends.processes import open_files
from backends.runs import Run, Runs
from backends.startup import Startup
from capture.dump import DumpError, TapState, read_tap

HEALTH_SECONDS = 25.0  # SGLang itself gives up after 20
HEALTH_PAUSE = 5.0  # every 200 costs the server a generated token
FIRST_ANSWER = 5.0  # a healthy server takes about one second
LOG_STEP = 4 << 20
EARLIER_RUNS = 20  # that are looked at for one that came up
EARLIER_LOG = 8 << 20  # bytes of its log; a start writes about 100 kB


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
    """Evidence about one server run; look as often as you like, the log is read once."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.startup = Startup()
        self.offset = 0
        self.rest = b""
        self.health = Health(run.spec.port or 0)
        self.known: dict[int, psutil.Process] = {}
        self.lock = threading.Lock()

    def look(self) -> dict[str, Any]:
        """Phases, verdict with evidence and the tap's state, as they are now."""
        with self.lock:
            log_age = self._read_log()
            tap, tap_error = self._tap()
            evidence = self._evidence(log_age, tap, tap_error)
            verdict = diagnose(evidence)
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
        """Feed what is new in the log; returns how many seconds ago it last grew."""
        try:
            with self.run.log.open("rb") as file:
                file.seek(self.offset)
                while block := file.read(LOG_STEP):
                    self.offset += len(block)
                    text = self.rest + block
                    end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1  # loading bars end in \r
                    self.startup.feed(text[:end].decode(errors="replace"))
                    self.rest = text[end:]
            return max(0.0, time.time() - self.run.log.stat().st_mtime)
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
        state, ended, port = run.state(), run.exit, run.spec.port or 0
        processes = {process.pid: process for process in run.processes()} if state == "running" else {}
        listener = _listener(port, set(processes))
        current = startup.current
        return Evidence(
            process_alive=None if state == "elsewhere" else state in ("running", "starting"),
            exit_code=ended.code if ended else None,
            signal=ended.signal if ended else None,
            stop_requested=run.stop_asked,
            port=port,
            port_open=listener is not None,
            listener_is_ours=listener,
            health=self.health.ask() if listener else None,
            health_s=self.health.seconds if listener else None,
            log_silent_s=log_age,
            log_lines=startup.lines,
            phase=current.id if current else None,
            phase_s=max(0.0, time.time() - current.started) if current and current.started else None,
            crashed=startup.crashed,
            ready_seen=startup.ready,
            tap_in=tap.inside if tap else False if startup.ready else None,
            tap_error=tap_error or (tap.error if tap else None),
            ranks=self._ranks(processes),
        )

    def _ranks(self, processes: dict[int, psutil.Process]) -> list[Rank]:
        """Schedulers and detokenizer, told by the titles that SGLang gives them; their CPU since the last look."""
        ranks = []
        for pid, process in processes.items():
            known = self.known.get(pid)
            try:
                title = "".join((known or process).cmdline()[:1])
                if title.startswith("sglang::"):
                    percent = (known or process).cpu_percent()
                    state = (known or process).status()
                    name = title.removeprefix("sglang::")
                    ranks.append(Rank(name=name, pid=pid, cpu_percent=percent if known else None, state=state))
            except psutil.Error:
                continue
        self.known = {pid: self.known.get(pid, process) for pid, process in processes.items()}
        return ranks


class Health:
    """Asks /health in a thread of its own, since a stuck server takes 20 s to say so.

    `seconds` is how long the last answer took.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.seconds: float | None = None
        self._status: int | None = None
        self._asking = False
        self._answered = 0.0
        self._first = threading.Event()

    def ask(self) -> int | None:
        """The HTTP status of the last answer, None where none came; asks anew unless it is a recent 200.

        The first call waits `FIRST_ANSWER` seconds at most: who looks only once is to hear the answer.
        """
        rests = self._status == 200 and time.monotonic() - self._answered < HEALTH_PAUSE
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
            self._answered = time.monotonic()
            self.seconds = round(self._answered - begun, 3)
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
