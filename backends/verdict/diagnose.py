"""What was observed of a server, into a verdict with its cause, a remedy and the evidence in sentences.

What is true is decided here, by evidence: a log line alone is never a hang, and silence alone is none either. What it
means and what to do about it is the catalogue's to say.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import Literal

import msgspec

from backends.verdict.catalogue import Need, Signature, catalogue
from backends.verdict.evidence import Evidence, port_words, sentences, signal_name, signal_number
from backends.verdict.reading import Hit

# Seconds for which a log is silent in a healthy start, by phase; "launch" is before the first.
SILENCE = {
    "launch": 120.0,
    "args": 120.0,
    "dist": 300.0,
    "weights": 180.0,
    "kv": 120.0,
    "tune": 900.0,
    "graphs": 300.0,
    "draft": 300.0,
    "limits": 120.0,
    "http": 600.0,
    "warm_up": 600.0,
}
LONGER = 1.5  # times what a phase took last time: until then it is as usual
NEAR = 2000  # lines: what is farther from a crash did not cause it
REPEATED = 2  # times that a line of a degraded server stands in the log before it counts
RECENT = 60.0  # seconds for which such a line counts
FAST = 5.0  # seconds: SGLang waits 20 for the scheduler, so an answer that is faster says nothing of it
WORKING_PERCENT = 20.0  # CPU of a rank that computes
BUSY_PERCENT = 50.0
BUSY_HOST = 2.0  # times as long as on an idle one
IDLE_PERCENT = 5.0
HEAT = frozenset({"hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake"})


class Limits(msgspec.Struct, kw_only=True):
    """How patient the verdict is, in seconds.

    `silence` of the log by phase; `quiet`: silence after which a start that works is called slow; `bar`: how long a
    progress bar may stand; `usual`: length of a phase after which it is slow; `window`: how long one must look to say
    that nothing moves; `spin`: silence while every GPU spins; `stopped`: how long a process is stopped;
    `health`: how long /health fails; `queue`: how long a queue does not move.
    """

    silence: dict[str, float] = msgspec.field(default_factory=SILENCE.copy)
    quiet: float = 30.0
    bar: float = 60.0
    usual: float = 120.0
    window: float = 10.0
    spin: float = 60.0
    stopped: float = 5.0
    health: float = 60.0
    queue: float = 60.0

    def scaled(self, factor: float) -> Limits:
        """The same, so many times as patient."""
        scaled = {name: value * factor for name, value in msgspec.structs.asdict(self).items() if name != "silence"}
        return Limits(silence={phase: value * factor for phase, value in self.silence.items()}, **scaled)


State = Literal["starting", "slow_but_fine", "healthy", "degraded", "hang_suspected", "crashed", "stopped", "unknown"]


class Verdict(msgspec.Struct):
    """How a server is, why, and what to do about it; `cause` and `remedy` are None where there is nothing to say.

    `findings` are the ids of the signatures that hold, the one that speaks first.
    """

    verdict: State
    cause: str | None = None
    remedy: str | None = None
    evidence: list[str] = []
    findings: list[str] = []


READ_THE_LOG = "read the log around the first traceback (layertap logs)"
LOOK_AGAIN = "look again for ten seconds (layertap status --watch)"


def diagnose(evidence: Evidence, limits: Limits | None = None) -> Verdict:
    """Judge a server. Healthy takes all of: ready in the log, /health 200, our own listener, and the tap seen."""
    verdict = _judge(evidence, limits or Limits())
    verdict.evidence = sentences(evidence, idle=verdict.verdict == "healthy")
    return verdict


def _judge(e: Evidence, limits: Limits) -> Verdict:
    # SGLang logs its own stop like a crash (exit codes, SIGQUIT), so a stop that was asked for comes first.
    if e.stop_requested:
        return Verdict("stopped", "stop was asked for" + ("; the process is still ending" if e.process_alive else ""))
    if e.crashed is not None and e.tap_error is not None and e.tap_error in e.crashed:
        return _named("crashed", "tap-failed", f"the tap failed: {e.tap_error}")
    if e.crashed is not None:
        return crash(e.crashed, e.phase, e.hits, e.crashed_line, e.kernel)
    if e.process_alive is False:
        return _ended(e)
    if e.process_alive is None:
        return Verdict("unknown", "whether the process is alive is not known", "check the link to the host")
    if e.stopping:
        return Verdict("stopped", "it is shutting down, which was not asked for from here")
    dead = [rank.name for rank in e.ranks if rank.state in ("zombie", "dead")] + e.missing
    if dead:
        # SGLang before 0.5.11 does not watch its children, and the port stays open without them.
        return _named("crashed", "rank-gone", f"{', '.join(dead)} is dead while the launcher still runs")
    return _up(e, limits) if e.ready_seen else _starting(e, limits)


def _ended(e: Evidence) -> Verdict:
    number = signal_number(e)
    if number in (signal.SIGTERM, signal.SIGINT):
        return Verdict(
            "stopped",
            f"ended by {signal_name(number)}, which was not sent from here",
            "look for what stops processes on that host: a job scheduler, a container, another session",
        )
    if number is not None:
        line = f"the server was ended by {signal_name(number)} (exit code -{number})"
        return crash(line, e.phase, e.hits, e.log_lines, e.kernel)
    if e.exit_code == 0:
        return Verdict("stopped", "the server ended by itself, with exit code 0")
    if e.exit_code is None:
        return Verdict("crashed", "the process is gone, and its exit code is not known", READ_THE_LOG)
    return crash(f"the server ended with exit code {e.exit_code}", e.phase, e.hits, e.log_lines, e.kernel)


def crash(line: str, phase: str | None, hits: Iterable[Hit], at: int | None, kernel: Iterable[str] = ()) -> Verdict:
    """What ended a server: the line that says so at number `at`, else what else was seen, else the line itself."""
    known = catalogue()
    of_line = known.of_crash(line, phase)
    near = [(known.by_id[hit.id], hit.line) for hit in hits if at is None or abs(at - hit.last) <= NEAR]
    of_kernel = [(known.of_crash(message, phase), None) for message in kernel]
    found: dict[str, int | None] = {}
    told = [(one, number) for one, number in [(of_line, at), *near, *of_kernel] if one is not None]
    for one, number in sorted(told, key=lambda pair: (not pair[0].root, pair[0].generic)):
        # Of one line only the most specific meaning counts, and a generic one only where there is no other.
        taken = number is not None and number in found.values()
        if one.kind == "crash" and not taken and not (found and one.generic):
            found.setdefault(one.id, number)
    if not found:
        return Verdict("crashed", line, READ_THE_LOG)
    first = known.by_id[next(iter(found))]
    # What is only generic says less than the line itself, unless it is about that line.
    cause = line if first.generic and first is not of_line else first.cause
    return Verdict("crashed", cause, first.remedy, findings=list(found))


# --- Starting ---


def _starting(e: Evidence, limits: Limits) -> Verdict:
    if e.tap_error is not None:
        cause = f"the tap failed ({e.tap_error}), and the server will come up without it"
        return _named("starting", "tap-failed", cause)
    if e.port_open and e.listener_is_ours is False:
        cause = f"{port_words(e)} belongs to another process, so this start will fail"
        return _named("starting", "port-foreign", cause)
    seen = conditions(e, limits)
    if "rank_stopped" in seen:
        return _found("hang_suspected", "hang", e, seen)
    usual = max(limits.usual, LONGER * (e.earlier_s or 0.0))
    slow = (e.log_silent_s or 0.0) > limits.quiet or (e.phase_s or 0.0) > usual
    if slow and ("works" in seen or ("host_busy" in seen and "silent" not in seen)):
        return _found("slow_but_fine", "slow", e, seen)
    if "works" in seen or "silent" not in seen:
        return Verdict("starting")
    if e.activity is None or e.activity.seconds < limits.window:
        return Verdict("starting", "the log is silent for long; whether anything moves is not known yet", LOOK_AGAIN)
    return _found("hang_suspected", "hang", e, seen)


# --- Up ---


def _up(e: Evidence, limits: Limits) -> Verdict:
    """The log says ready; that alone is not enough."""
    if e.listener_is_ours is False:
        cause = f"{port_words(e)} belongs to another process; this server never got it"
        return _named("crashed", "port-foreign", cause)
    if e.port_open is False:
        return Verdict("unknown", f"the log says ready, but {port_words(e)} is closed", READ_THE_LOG)
    seen = conditions(e, limits)
    if "rank_stopped" in seen:
        return _found("hang_suspected", "hang", e, seen)
    if "health_fails" in seen:
        return _sick(e, seen, limits)
    if e.tap_error is not None:
        return _named("unknown", "tap-failed", f"the tap failed: {e.tap_error}")
    if e.tap_in is False:
        return _named("unknown", "tap-missing")
    missing = [
        name
        for name, value in (("/health", e.health), ("who listens", e.listener_is_ours), ("the tap", e.tap_in))
        if value is None
    ]
    if missing:
        return Verdict("unknown", f"the log says ready; not known yet: {', '.join(missing)}")
    found = _holding("degraded", e, seen)
    return _spoken("degraded", found) if found else Verdict("healthy")


def _sick(e: Evidence, seen: set[Need], limits: Limits) -> Verdict:
    """/health fails though the server was ready: compiling, overloaded, or hung."""
    if "compiler" in seen:
        return _found("slow_but_fine", "slow", e, seen)
    waited = e.health is None or (e.health_s or 0.0) >= FAST
    still = e.activity is not None and e.activity.seconds >= limits.window and "computes" not in seen
    draws = e.activity is not None and e.activity.gpus_draw  # what spins does not
    if waited and (still or ("silent" in seen and not draws)):
        return _found("hang_suspected", "hang", e, seen)
    if waited and (found := _holding("degraded", e, seen)):
        return _spoken("degraded", found)
    answer = "does not answer" if e.health is None else f"answers {e.health}"
    return Verdict(
        "degraded",
        f"the log says ready, but /health {answer}",
        "wait if a long prefill runs; if it stays, stop the server and launch it again",
    )


# --- What holds ---


def conditions(e: Evidence, limits: Limits) -> set[Need]:
    """What is seen of a live server, in the catalogue's words."""
    activity = e.activity
    seen: set[Need] = _process_conditions(e, limits) | _gpu_conditions(e)
    if activity is not None and activity.gpu_seconds >= limits.window:
        # An idle scheduler spins too, so where GPUs are known, they tell whether something is computed.
        seen.discard("computes")
        seen |= {"gpus_spin"} if activity.gpus_spin else {"computes"} if activity.gpus_work else set()
        seen |= set() if activity.idle_gpu is None else {"one_gpu_idle"}
    failing = _failing(e)
    if activity is not None:
        seen |= {"compiler"} if activity.compilers else {"no_compiler"}
        if activity.read_bytes_per_second is not None:
            seen.add("reads_move" if activity.reads_move else "reads_flat")
        if activity.memory_grows:
            seen.add("memory_grows")
    allowed = max(limits.silence.get(e.phase or "launch", 0.0), LONGER * (e.earlier_s or 0.0))
    if not e.weights_loaded:
        seen.add("weights_missing")
    if e.detail_s is not None and e.detail_s <= limits.bar:
        seen.add("bar_moves")
    if activity is not None and activity.written_s is not None and activity.written_s <= limits.bar:
        seen.add("writes_files")
    if not seen.isdisjoint({"compiler", "reads_move", "memory_grows", "bar_moves", "writes_files"}):
        seen.add("works")
    silent, starved = e.log_silent_s or 0.0, e.starved
    if failing is not None:
        seen.add("health_fails")
        silent, allowed, starved = failing, limits.health, activity.starved if activity else 1.0
    elif e.ready_seen:
        silent = 0.0  # nothing to do is nothing to say
    if silent > allowed * starved or ("gpus_spin" in seen and silent > limits.spin):
        seen.add("silent")
    waits = e.batch is not None and e.batch.queue > 0 and e.batch.running == 0
    if waits and (e.batch_s or 0.0) > limits.queue:
        seen.add("queue_stuck")
    return seen


def _failing(e: Evidence) -> float | None:
    """Seconds since when /health fails though the server was ready; None where it does not."""
    if not e.ready_seen or e.health == 200 or (e.health is None and e.health_failing_s is None):
        return None
    return e.health_failing_s or 0.0


def _process_conditions(e: Evidence, limits: Limits) -> set[Need]:
    seen: set[Need] = set()
    everyone = [*e.ranks, *([e.launcher] if e.launcher else [])]
    cpu = [rank.cpu_percent for rank in e.ranks or everyone if rank.cpu_percent is not None]
    running = e.activity is not None and any(rank.pid in e.activity.running for rank in e.ranks or everyone)
    if cpu:
        if max(cpu) >= BUSY_PERCENT or running:
            seen.add("ranks_busy")
        if max(cpu) >= WORKING_PERCENT or running:
            seen.add("computes")
        if max(cpu) <= IDLE_PERCENT and not running:
            seen |= {"ranks_idle", "cpu_idle"}
    if e.launcher and (e.launcher.cpu_percent or 0.0) >= BUSY_PERCENT:
        seen.add("main_busy")
        seen.discard("cpu_idle")
    stopped_s = e.activity.stopped_s if e.activity else {}
    stopped = [max(e.log_silent_s or 0.0, stopped_s.get(rank.pid, 0.0)) for rank in everyone if rank.state == "stopped"]
    if max(stopped, default=0.0) >= limits.stopped:
        seen.add("rank_stopped")
    if any(rank.state == "disk-sleep" for rank in e.ranks):
        seen.add("rank_disk_sleep")
    if e.laggard:
        seen.add("rank_behind")
    if e.starved >= BUSY_HOST:
        seen.add("host_busy")
    if e.ranks_apart:
        seen.add("ranks_apart")
    return seen


def _gpu_conditions(e: Evidence) -> set[Need]:
    seen: set[Need] = set()
    if e.throttled:
        seen.add("throttled")
    if e.narrow:
        seen.add("pcie_narrow")
    if e.xids:
        seen.add("xid")
    return seen


def _holding(kind: str, e: Evidence, seen: set[Need]) -> list[Signature]:
    """The signatures of a kind that hold now, the one that speaks first."""
    hits = {hit.id: hit for hit in e.hits}
    found = []
    for one in catalogue().signatures:
        if one.kind != kind or not one.in_phase(e.phase) or not seen.issuperset(one.needs):
            continue
        if one.lines and (one.id not in hits or (one.last_line and one.id not in e.last_lines)):
            continue
        if one.lines and not one.needs and not _repeated(hits[one.id], e):
            continue
        if one.lines or one.needs:
            found.append(one)
    return sorted(found, key=lambda one: one.generic)


def _repeated(hit: Hit, e: Evidence) -> bool:
    """Whether a line that needs no other evidence comes again and again, up to now."""
    age = None if e.log_lines is None or e.log_silent_s is None else e.log_lines - hit.last
    return hit.count >= REPEATED and age is not None and age <= NEAR and (e.log_silent_s or 0.0) <= RECENT


def _named(state: State, name: str, cause: str | None = None) -> Verdict:
    """What one signature says, in more exact words where there are some."""
    one = catalogue().by_id[name]
    return Verdict(state, cause or one.cause, one.remedy, findings=[name])


def _found(state: State, kind: str, e: Evidence, seen: set[Need]) -> Verdict:
    return _spoken(state, _holding(kind, e, seen))


def _spoken(state: State, found: list[Signature]) -> Verdict:
    if not found:
        return Verdict(state, "nothing moves, and why is not known", "read the stacks (layertap stacks)")
    return Verdict(state, found[0].cause, found[0].remedy, findings=[one.id for one in found])
