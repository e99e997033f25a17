"""What goes wrong while a run goes on: rules over the last sights of a server and of the extraction that draws from it.

A rule is a function of what was seen and the limits. It says its evidence in one sentence, or None where all is well or
where one cannot tell; what that means and what to do is the entry of its id in signatures.toml, except for what the
verdict on the server says itself. A rule that is sure at once holds for 0 seconds, the others for a while before they
alarm, so that a flush to disk, a few long prompts or the end of a run raise nothing.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec

from backends.verdict.catalogue import catalogue

SPACING = 2.0  # seconds between two sights that are kept
KEPT = 400  # sights: over 13 minutes
PACE_SECONDS = 30.0  # over which one pace is taken
FEWEST_PACES = 10  # before a run has a usual pace
MOST_PACES = 20_000  # a week
RELEASE_SECONDS = 30.0  # for which a rule must not hold until its alarm is over

DOWN = ("crashed", "hang_suspected")  # verdicts on a server of which nothing comes, and that is all there is to say

Severity = Literal["warning", "critical"]
ORDER: tuple[Severity, ...] = ("critical", "warning")


class Limits(msgspec.Struct, kw_only=True):
    """When a rule alarms; seconds, where nothing else is said.

    `linger`: a driver may go on without its server, since SGLang takes 75 s to end; `hang`: a suspected hang stays one;
    `unknown`: so long it is not known whether a server that is up is well; `health`: /health fails, and nothing is
    drawn meanwhile; `stall`: nothing comes of requests that are under way, at least and in times of what the longest
    sample takes (`stall_longest`); `pace`: over which throughput is compared with the run's own median, of which
    `pace_share` is a collapse that lasts for `collapse`; `throttle`: over which `throttle_share` of the looks show a
    GPU throttled; `full`: time until the dump folder's memory is full as other processes fill it, taken over `fill`;
    `room`: it has no room for the longest sample; `disk`: the output's disk will not take the rest of the run; `bad`:
    over which `bad_samples` samples, and `bad_share` of those that ended, failed since their states are not finite.
    """

    linger: float = 120.0
    hang: float = 15.0
    unknown: float = 30.0
    health: float = 60.0
    stall: float = 180.0
    stall_longest: float = 5.0
    pace: float = 60.0
    pace_share: float = 0.3
    collapse: float = 120.0
    throttle: float = 60.0
    throttle_share: float = 0.8
    full: float = 600.0
    fill: float = 120.0
    room: float = 20.0
    disk: float = 30.0
    bad: float = 600.0
    bad_samples: int = 3
    bad_share: float = 0.01

    def scaled(self, factor: float) -> Limits:
        """The same, so many times as patient."""
        seconds = (
            "linger",
            "hang",
            "unknown",
            "health",
            "stall",
            "pace",
            "collapse",
            "throttle",
            "fill",
            "room",
            "disk",
            "bad",
        )
        return msgspec.structs.replace(self, **{name: getattr(self, name) * factor for name in seconds})


class Drawing(msgspec.Struct, kw_only=True):
    """An extraction's progress.json, as far as rules look at it; `paused` where its driver was stopped (SIGSTOP)."""

    phase: str
    samples: int = 0
    pending: int = 0
    sent: int = 0
    captured: int = 0
    written: int = 0
    failed: int = 0
    not_finite: int = 0
    longest: int = 0
    tokens: int = 0
    tokens_written: int = 0
    bytes_written: int = 0
    paused: bool = False

    @property
    def busy(self) -> bool:
        """Whether it draws as fast as it can: samples wait, and some are under way."""
        return self.phase == "extracting" and not self.paused and self.pending > 0 and self.sent + self.captured > 0


class Space(msgspec.Struct):
    """A file system in bytes: what is free for us, and how much of it is taken by us."""

    path: str
    free: int
    ours: int


class Sight(msgspec.Struct, kw_only=True):
    """What was seen at the moment `at` (a clock in seconds that is never set).

    `verdict`, `cause`, `remedy` and `said`, its evidence, are the server's; `batch_at` is when it logged a batch last,
    `ended` when it ended (epoch seconds). `xids` are by GPU, `kernel` lines of the kernel's log about XIDs. `memory` is
    the dump folder's file system, in which a token takes `bytes_per_token`, `disk` the output's. None: not known, or
    there is none.
    """

    at: float
    verdict: str = "healthy"
    cause: str | None = None
    remedy: str | None = None
    said: str = ""
    ended: float | None = None
    health_failing_s: float | None = None
    batch_at: float | None = None
    throttled: dict[int, list[str]] = {}
    xids: dict[int, list[int]] = {}
    kernel: list[str] = []
    drawing: Drawing | None = None
    bytes_per_token: int = 0
    memory: Space | None = None
    disk: Space | None = None


class Alarm(msgspec.Struct, kw_only=True):
    """What is wrong now; `since` in epoch seconds."""

    id: str
    severity: Severity
    cause: str
    remedy: str
    evidence: str
    since: float


class Pace(NamedTuple):
    """How fast a run that was busy wrote: tokens and samples a second."""

    tokens: float
    samples: float


class Seen:
    """The last sights, the newest last, and the paces of the whole run."""

    def __init__(self) -> None:
        self.sights: deque[Sight] = deque(maxlen=KEPT)
        self.paces: deque[Pace] = deque(maxlen=MOST_PACES)
        self._pace_from: Sight | None = None

    def add(self, sight: Sight) -> None:
        """Take in a sight; of two that are closer than `SPACING` the newer one is kept."""
        if len(self.sights) > 1 and sight.at - self.sights[-2].at < SPACING:
            self.sights.pop()
        self.sights.append(sight)
        if sight.drawing is None or not sight.drawing.busy:
            self._pace_from = None
        elif self._pace_from is None:
            self._pace_from = sight
        elif sight.at - self._pace_from.at >= PACE_SECONDS:
            self.paces.append(pace(self._pace_from, sight))
            self._pace_from = sight

    @property
    def now(self) -> Sight:
        """The newest sight."""
        return self.sights[-1]

    @property
    def usual(self) -> Pace | None:
        """The run's own median; None before it has one."""
        if len(self.paces) < FEWEST_PACES:
            return None
        return Pace(
            statistics.median(one.tokens for one in self.paces), statistics.median(one.samples for one in self.paces)
        )

    def last(self, seconds: float) -> list[Sight]:
        """The sights of the last `seconds`; none where they do not reach so far back."""
        begin = self.now.at - seconds
        if self.sights[0].at > begin:
            return []
        return [sight for sight in self.sights if sight.at >= begin]

    def longest_takes(self) -> float:
        """Seconds that the longest sample takes at the usual pace; 0 where that is not known."""
        usual, drawing = self.usual, self.now.drawing
        return drawing.longest / usual.tokens if usual and usual.tokens and drawing else 0.0


# --- The rules ---


def server_crashed(seen: Seen, limits: Limits) -> str | None:
    """The scheduler, the detokenizer or the whole server is dead."""
    return seen.now.said if seen.now.verdict == "crashed" else None


def server_hangs(seen: Seen, limits: Limits) -> str | None:
    """By the verdict's own evidence."""
    return seen.now.said if seen.now.verdict == "hang_suspected" else None


def server_unknown(seen: Seen, limits: Limits) -> str | None:
    """It says that it is ready, and something does not fit: without the tap, or its port closed."""
    return seen.now.said if seen.now.verdict == "unknown" else None


def health_failed(seen: Seen, limits: Limits) -> str | None:
    """While long prompts are computed /health may take long, but then something is drawn."""
    failing = seen.now.health_failing_s or 0.0
    if failing < limits.health or seen.now.verdict != "degraded" or _moved(seen, limits.health):
        return None
    return f"/health fails for {failing:.0f} s, and nothing was drawn meanwhile"


def queue_stalled(seen: Seen, limits: Limits) -> str | None:
    """Requests are under way, and neither a sample nor a line about a batch came for long."""
    now = seen.now.drawing
    if now is None or now.phase != "extracting" or now.sent == 0 or seen.now.verdict in (*DOWN, "slow_but_fine"):
        return None
    allowed = max(limits.stall, limits.stall_longest * seen.longest_takes())
    window = seen.last(allowed)
    if not window or _moved(seen, allowed) or any(one.batch_at != seen.now.batch_at for one in window):
        return None
    if any(one.drawing is None or one.drawing.paused or one.drawing.sent == 0 for one in window):
        return None
    return f"{now.sent} requests are under way, and none ended for {allowed:.0f} s"


def throughput_collapsed(seen: Seen, limits: Limits) -> str | None:
    """Both tokens and samples a second: rows of another length change only one of them."""
    usual = seen.usual
    window = seen.last(max(limits.pace, limits.stall_longest * seen.longest_takes()))
    if usual is None or not window or seen.now.verdict in DOWN:
        return None
    if not all(one.drawing and one.drawing.busy for one in window):
        return None
    now = pace(window[0], window[-1])
    if now.tokens >= limits.pace_share * usual.tokens or now.samples >= limits.pace_share * usual.samples:
        return None
    return f"{now.tokens:,.0f} tokens/s, the run's median is {usual.tokens:,.0f}"


def gpu_xid(seen: Seen, limits: Limits) -> str | None:
    """The driver's events, and the kernel's log where it may be read."""
    said = [f"GPU {index} reported XID {', '.join(map(str, codes))}" for index, codes in seen.now.xids.items()]
    return "; ".join([*said, *(f"kernel: {line}" for line in seen.now.kernel)]) or None


def gpu_throttled(seen: Seen, limits: Limits) -> str | None:
    """By heat or power supply, nearly all the time; a short dip is normal."""
    window = seen.last(limits.throttle)
    often = {
        index: why
        for index, why in seen.now.throttled.items()
        if window and sum(index in one.throttled for one in window) >= limits.throttle_share * len(window)
    }
    said = "; ".join(f"GPU {index}: {', '.join(why)}" for index, why in often.items())
    return f"for {limits.throttle:.0f} s {said}" if said else None


def memory_filling(seen: Seen, limits: Limits) -> str | None:
    """No room for the longest sample, or others fill it. Our own dumps come and go, and are no sign."""
    now, drawing = seen.now.memory, seen.now.drawing
    if now is None:
        return None
    needed = drawing.longest * seen.now.bytes_per_token if drawing and drawing.pending + drawing.sent else 0
    window = [one.memory for one in seen.last(limits.room)]
    if window and all(one is not None and one.free <= needed for one in window):
        longest = f", and the longest sample takes {_size(needed)}" if needed else ""
        return f"{_size(max(0, now.free))} are left on {now.path}{longest}"
    rate = _others(seen, limits.fill, lambda sight: sight.memory)
    if rate is None or rate <= 0 or now.free / rate > limits.full:
        return None
    return f"{now.path} is full in {now.free / rate:.0f} s: other processes fill it, {_size(now.free)} are left"


def disk_filling(seen: Seen, limits: Limits) -> str | None:
    """What is still to be written, and what others write meanwhile, against what is free."""
    now, drawing = seen.now.disk, seen.now.drawing
    if now is None or drawing is None or drawing.phase != "extracting" or drawing.written < 2:
        return None
    left = drawing.tokens - drawing.tokens_written
    needed = left * drawing.bytes_written / max(1, drawing.tokens_written)
    usual, others = seen.usual, _others(seen, limits.fill, lambda sight: sight.disk) or 0.0
    ours = usual.tokens * drawing.bytes_written / max(1, drawing.tokens_written) if usual else 0.0
    if usual and usual.tokens and others > 0:
        needed += others * left / usual.tokens
    if not left or needed <= now.free:
        return None
    rate = ours + max(others, 0.0)
    full = f" and is full in {now.free / rate:.0f} s" if rate else ""
    return f"{now.path} has {_size(now.free)} free{full}, {_size(needed)} are still to be written"


def states_not_finite(seen: Seen, limits: Limits) -> str | None:
    """More and more samples; a few rows that the model cannot take are rows to look at."""
    window = [one.drawing for one in seen.sights if one.drawing and one.at >= seen.now.at - limits.bad]
    if not window:
        return None
    first, last = window[0], window[-1]
    bad = last.not_finite - first.not_finite
    ended = bad + last.written - first.written
    if bad < limits.bad_samples or bad < limits.bad_share * ended:
        return None
    return f"{bad} of the last {ended} samples hold NaN or infinity, after every attempt"


class Rule(NamedTuple):
    """A rule with the id of what it means in signatures.toml; `hold` is how long it must hold, given the limits."""

    id: str
    severity: Severity
    holds: Callable[[Seen, Limits], str | None]
    hold: Callable[[Limits], float] = lambda _: 0.0
    of_verdict: bool = False


RULES = (
    Rule("server-crashed", "critical", server_crashed, of_verdict=True),
    Rule("server-hangs", "critical", server_hangs, lambda limits: limits.hang, of_verdict=True),
    Rule("gpu-xid", "critical", gpu_xid),
    Rule("states-not-finite", "critical", states_not_finite),
    Rule("queue-stalled", "critical", queue_stalled),
    Rule("health-failed", "critical", health_failed),
    Rule("memory-filling", "critical", memory_filling),
    Rule("server-unknown", "warning", server_unknown, lambda limits: limits.unknown, of_verdict=True),
    Rule("disk-filling", "warning", disk_filling, lambda limits: limits.disk),
    Rule("throughput-collapsed", "warning", throughput_collapsed, lambda limits: limits.collapse),
    Rule("gpu-throttled", "warning", gpu_throttled),
)


class AlarmWatch:
    """Takes sights, and keeps the alarms; `alarms` are those of now, the most severe first."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.seen = Seen()
        self.alarms: list[Alarm] = []
        self._held: dict[str, float] = {}  # since when a rule holds
        self._last: dict[str, float] = {}  # when it held last

    def add(self, sight: Sight, at: float) -> tuple[list[Alarm], list[Alarm]]:
        """Take in what is seen at `at`, in epoch seconds; returns the alarms that are new and those that are over."""
        self.seen.add(sight)
        before = {alarm.id: alarm for alarm in self.alarms}
        now = {alarm.id: alarm for rule in RULES if (alarm := self._alarm(rule, sight, at, before.get(rule.id)))}
        self.alarms = sorted(now.values(), key=lambda alarm: (ORDER.index(alarm.severity), alarm.since))
        new = [alarm for alarm in self.alarms if alarm.id not in before]
        return new, [alarm for name, alarm in before.items() if name not in now]

    def _alarm(self, rule: Rule, sight: Sight, at: float, before: Alarm | None) -> Alarm | None:
        evidence = rule.holds(self.seen, self.limits)
        if evidence is None:
            self._held.pop(rule.id, None)
            over = rule.of_verdict or sight.at - self._last.get(rule.id, 0.0) >= RELEASE_SECONDS
            return None if over else before
        self._last[rule.id] = sight.at
        if sight.at - self._held.setdefault(rule.id, sight.at) < rule.hold(self.limits) and before is None:
            return None
        cause, remedy = (sight.cause, sight.remedy) if rule.of_verdict else _meaning(rule.id)
        return Alarm(
            id=rule.id,
            severity=rule.severity,
            cause=cause or evidence,
            remedy=remedy or "see `layertap status`",
            evidence=evidence,
            since=before.since if before else sight.ended or at,
        )


def pace(first: Sight, last: Sight) -> Pace:
    """How fast was written between two sights of an extraction."""
    assert first.drawing and last.drawing
    seconds = max(last.at - first.at, 1e-3)
    tokens = last.drawing.tokens_written - first.drawing.tokens_written
    return Pace(tokens / seconds, (last.drawing.written - first.drawing.written) / seconds)


def _meaning(name: str) -> tuple[str, str]:
    one = catalogue().by_id[name]
    return one.cause, one.remedy


def _moved(seen: Seen, seconds: float) -> bool:
    """Whether samples came on in the last `seconds`."""
    window = [one.drawing for one in seen.last(seconds) or seen.sights if one.drawing]
    return any((one.pending, one.captured, one.written) != _counts(window[-1]) for one in window)


def _counts(drawing: Drawing) -> tuple[int, int, int]:
    return drawing.pending, drawing.captured, drawing.written


def _others(seen: Seen, seconds: float, pick: Callable[[Sight], Space | None]) -> float | None:
    """Bytes a second by which other processes fill a file system, None where they were not watched for so long.

    Taken where both halves of the time show it: one file of a gigabyte is no trend.
    """
    window = [(one.at, space) for one in seen.last(seconds) if (space := pick(one))]
    if len(window) < 3:
        return None
    middle = window[len(window) // 2]
    rates = [_fall(window[0], middle), _fall(middle, window[-1])]
    return min(rates)


def _fall(first: tuple[float, Space], last: tuple[float, Space]) -> float:
    others = (first[1].free + first[1].ours) - (last[1].free + last[1].ours)
    return others / max(last[0] - first[0], 1e-3)


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
