"""What was read of a server at one moment, and one such look after another into evidence.

Nothing here reads anything of a host: a record of observations comes to the same verdicts later, and on another one.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from backends.gpus import Gpu
from backends.processes import ProcessSample
from backends.sglang import mask_text
from backends.verdict.activity import MOST_STARVED, Activity, ActivityWatch
from backends.verdict.catalogue import catalogue
from backends.verdict.diagnose import HEAT, Limits
from backends.verdict.evidence import Evidence, Rank
from backends.verdict.reading import LogReader
from backends.verdict.startup import Phase, Startup
from capture.dumps.dump import TapState

OF_A_KILL = frozenset({43, 45})  # XIDs that come when a process is ended
ENDED = ("zombie", "dead")  # states of a process that runs no more
TITLED = "sglang::"  # how SGLang titles its processes, except for the launcher


class EarlierStart(msgspec.Struct):
    """How long an earlier start of the same profile and model took: seconds in all, and in each phase by its id."""

    run: str
    seconds: float
    phases: dict[str, float]


class Standing(msgspec.Struct):
    """Where a server's processes stood at `at` (epoch seconds), in sentences; `apart`: not all ranks in one place."""

    at: float
    summary: list[str]
    apart: bool


class HealthAnswer(msgspec.Struct, omit_defaults=True):
    """What /health said last: the HTTP status, None for no answer; how long that took, and how long ago it was.

    `failing_for`: seconds since the first one was asked for of those that were no 200. All in seconds.
    """

    status: int | None = None
    seconds: float | None = None
    age: float | None = None
    failing_for: float | None = None


class Observation(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Everything that was read of one server at the moment `at` (epoch seconds) except for its log.

    `tick` is the same moment on a clock that is never set. `created` is when the run began, `log_age` how long its log
    has not changed, `health` None while nobody of ours listens, `listener_is_ours` None where nobody does. `gpus` are
    those that the run uses, `kernel` what the kernel said since the run began, and `standing` the newest stacks.
    """

    at: float
    tick: float
    created: float
    state: Literal["starting", "running", "exited", "died", "elsewhere"]
    stop_asked: bool = False
    exit_code: int | None = None
    signal: int | None = None
    launcher: int | None = None
    port: int = 0
    listener_is_ours: bool | None = None
    health: HealthAnswer | None = None
    log_age: float | None = None
    tap: TapState | None = None
    tap_error: str | None = None
    processes: list[ProcessSample] = []
    gpus: list[Gpu] = []
    kernel: list[str] = []
    standing: Standing | None = None


class Follower:
    """Takes the log and the observations of one server as they come; `earlier` is the start it is held against."""

    def __init__(self, limits: Limits, earlier: EarlierStart | None = None) -> None:
        self.limits = limits
        self.earlier = earlier
        self.reader = LogReader()
        self._tick = 0.0
        self._activity = ActivityWatch(lambda: self._tick)
        self._said: float | None = None  # when the log last said something, epoch seconds
        self._fair = 0.0  # seconds of silence since, as long as they would be on an idle host
        self._looked: float | None = None
        self._bar: tuple[str, str] | None = None
        self._bar_moved: float | None = None
        self._ready_at: float | None = None
        self._ranks: dict[int, str] = {}
        self._gone: dict[str, float] = {}

    @property
    def startup(self) -> Startup:
        """The phases of its start."""
        return self.reader.startup

    def hear(self, text: str, at: float) -> None:
        """Take in the next part of the log, which came at `at`, cut behind a newline or the carriage return of a bar.

        Answers to /health do not count as something said: they are of our own asking.
        """
        self.reader.feed(text)
        if self._said is None or text.count("\n") + text.count("\r") > text.count('"GET /health'):
            self._said = at
            self._fair = 0.0
            self._looked = None

    def evidence(self, seen: Observation) -> Evidence:
        """What is known of the server now."""
        self._tick = seen.tick
        startup, batch = self.startup, self.reader.batch
        current = startup.current
        ours = [one for one in seen.processes if one.title.startswith(TITLED) and one.state not in ENDED]
        launcher = [one for one in seen.processes if one.pid == seen.launcher]
        ranks = [one.pid for one in ours]
        activity = self._activity.look(seen.processes, seen.gpus, [*ranks, *(one.pid for one in launcher)], ranks)
        health, failing = self._health(seen.health)
        tap, silent = seen.tap, self._silent(seen)
        standing = seen.standing if seen.standing and seen.standing.at > (self._said or 0.0) else None
        return Evidence(
            process_alive=None if seen.state == "elsewhere" else seen.state in ("running", "starting"),
            exit_code=seen.exit_code,
            signal=seen.signal,
            stop_requested=seen.stop_asked,
            port=seen.port,
            port_open=seen.listener_is_ours is not None,
            listener_is_ours=seen.listener_is_ours,
            health=health,
            health_s=seen.health.seconds if seen.health and health is not None else None,
            health_failing_s=failing,
            log_silent_s=silent,
            starved=self._starved(silent, activity),
            log_lines=startup.lines,
            phase=current.id if current else None,
            phase_s=max(0.0, seen.at - current.started) if current and current.started else None,
            earlier_s=self.earlier.phases.get(current.id) if self.earlier and current else None,
            detail=current.detail if current else "",
            detail_s=self._bar_age(current),
            crashed=_shown(startup.crashed),
            crashed_line=startup.crashed_line,
            stopping=startup.stopping,
            weights_loaded="weights_gb" in startup.effective,
            hits=list(self.reader.hits.values()),
            last_lines=[name for name in self.reader.hits if self.reader.last_line(catalogue().by_id[name])],
            ready_seen=startup.ready,
            tap_in=tap.inside if tap else False if startup.ready else None,
            tap_error=_shown(seen.tap_error or (tap.error if tap else None)),
            ranks=[_rank(process, activity) for process in ours],
            launcher=_rank(launcher[0], activity) if launcher else None,
            missing=self._missing(ours),
            laggard=startup.laggard,
            stacks=standing.summary if standing else [],
            ranks_apart=standing is not None and standing.apart,
            activity=activity,
            batch=batch,
            batch_s=max(0.0, seen.at - batch.at) if batch and batch.at else None,
            throttled={gpu.index: why for gpu in seen.gpus if (why := sorted(HEAT & set(gpu.throttle or [])))},
            narrow={
                gpu.index: f"x{gpu.pcie_width} instead of x{gpu.pcie_max_width}"
                for gpu in seen.gpus
                if gpu.pcie_width and gpu.pcie_max_width and gpu.pcie_width < gpu.pcie_max_width
            },
            xids={gpu.index: codes for gpu in seen.gpus if (codes := _xids(gpu, seen.created))},
            kernel=seen.kernel,
        )

    def _silent(self, seen: Observation) -> float | None:
        """For how many seconds the log has said nothing but answers to /health; None where there is no log."""
        if seen.log_age is None:
            return None
        return max(0.0, seen.log_age if self._said is None else seen.at - self._said)

    def _starved(self, silent: float | None, activity: Activity) -> float:
        """How many times longer the silence is than it would be if the server got the CPU that it wants."""
        if not silent:
            return 1.0
        step = silent if self._looked is None else max(0.0, self._tick - self._looked)
        self._looked = self._tick
        self._fair += step / activity.starved
        return max(1.0, silent / max(self._fair, silent / MOST_STARVED))

    def _health(self, answer: HealthAnswer | None) -> tuple[int | None, float | None]:
        """What /health answered since the log said ready, and for how many seconds it fails."""
        if answer is None:
            return None, None
        if not self.startup.ready:
            return answer.status, None
        if self._ready_at is None:
            self._ready_at = self._tick
        since_ready = self._tick - self._ready_at
        if answer.status != 200 and (answer.age is None or answer.age > since_ready):
            return None, None  # a 503 from before says nothing
        return answer.status, None if answer.failing_for is None else min(answer.failing_for, since_ready)

    def _bar_age(self, current: Phase | None) -> float | None:
        """Seconds since the progress bar of this phase moved; None where none was seen moving."""
        bar = (current.id, current.detail) if current and current.detail else None
        if bar and self._bar and bar != self._bar and bar[0] == self._bar[0]:
            self._bar_moved = self._tick
        elif bar is None or (self._bar and bar[0] != self._bar[0]):
            self._bar_moved = None
        self._bar = bar
        return None if self._bar_moved is None else self._tick - self._bar_moved

    def _missing(self, ours: list[ProcessSample]) -> list[str]:
        """Ranks that were there and have been gone for a while: a stop takes them away just before it says so.

        A child of a rank has its title until it is another program: the rank is there as long as one of that name is.
        """
        here = {process.pid: process.title.removeprefix(TITLED) for process in ours}
        for pid in self._ranks.keys() - here.keys():
            self._gone.setdefault(self._ranks[pid], self._tick)
        self._ranks = here
        self._gone = {name: since for name, since in self._gone.items() if name not in here.values()}
        return [name for name, since in self._gone.items() if self._tick - since >= self.limits.stopped]


def _xids(gpu: Gpu, since: float) -> list[int]:
    return [one.code for one in gpu.xid or [] if one.at >= since and one.code not in OF_A_KILL]


def _rank(process: ProcessSample, activity: Activity) -> Rank:
    """A process as evidence: its CPU over the last seconds; in disk sleep only if it was all the time."""
    state = process.state
    if state == "disk-sleep" and process.pid not in activity.waiting:
        state = "sleeping"
    cpu = activity.cpu_percent.get(process.pid)
    return Rank(name=process.title.removeprefix(TITLED), pid=process.pid, cpu_percent=cpu, state=state)


def _shown(text: str | None) -> str | None:
    """What a log or a tap said, as a verdict may repeat it: it is shown, and kept in a run's history."""
    return None if text is None else mask_text(text)
