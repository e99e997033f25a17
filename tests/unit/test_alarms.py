"""The rules of the watch, each by stories of a run: what must alarm, and the near miss that must stay silent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from backends.verdict.alarms import RULES, AlarmWatch, Drawing, Limits, Sight, Space
from backends.verdict.catalogue import catalogue

GB = 1 << 30
TOKENS, SAMPLES, TOKEN_BYTES = 10_000.0, 10.0, 50_000  # a second, and a token
TOTAL = 200_000_000  # tokens of the run
Story = Callable[[float], Sight]


def steady(at: float, done: float | None = None, **changes: Any) -> Sight:
    """A run that does well, `at` seconds after it began; `done` is how many seconds of it are written."""
    wrote = at if done is None else done
    drawing = Drawing(
        phase="extracting",
        samples=200_000,
        pending=200_000 - int(SAMPLES * wrote) - 40,
        sent=32,
        captured=8,
        written=int(SAMPLES * wrote),
        longest=4000,
        tokens=TOTAL,
        tokens_written=int(TOKENS * wrote),
        bytes_written=int(TOKENS * wrote) * TOKEN_BYTES,
    )
    own = {name: changes.pop(name) for name in list(changes) if name in Drawing.__struct_fields__}
    given: dict[str, Any] = {
        "batch_at": 1e9 + wrote,
        "drawing": msgspec.structs.replace(drawing, **own),
        "bytes_per_token": TOKEN_BYTES,
        "memory": Space("/dev/shm", 100 * GB, 20 * GB),
        "disk": Space("/data", 50_000 * GB - drawing.bytes_written, drawing.bytes_written),
    }
    return Sight(at=at, **given | changes)


def alarms(story: Story, seconds: float = 1200.0) -> dict[str, float]:
    """When each alarm was raised first, over a story."""
    watch, raised = AlarmWatch(), dict[str, float]()
    for at in range(0, int(seconds), 2):
        for alarm in watch.add(story(float(at)), 1e9 + at)[0]:
            raised.setdefault(alarm.id, float(at))
    return raised


def stands(since: float, until: float) -> Callable[[float], float]:
    """How many seconds are written of a run that writes nothing from `since` to `until`."""
    return lambda at: at if at < since else max(since, at - (until - since))


# --- A server ---


def verdict(word: str, since: float, **known: Any) -> Story:
    return lambda at: steady(
        at, min(at, since), **({"verdict": word, "said": "evidence", **known} if at >= since else {})
    )


def since(when: float, **known: Any) -> Story:
    """Something is so from a moment on, while the run goes on."""
    return lambda at: steady(at, **(known if at >= when else {}))


def between(begin: float, end: float, **known: Any) -> Story:
    return lambda at: steady(at, **(known if begin <= at < end else {}))


HEAT = {2: ["hw_thermal"]}
XID = "NVRM: Xid (PCI:0000:17:00): 79, pid=4711, GPU has fallen off the bus."


def failing(at: float, begun: float) -> dict[str, Any]:
    return {"verdict": "degraded", "health_failing_s": at - begun} if at >= begun else {}


def now_and_then(at: float) -> Sight:
    return steady(at, throttled=HEAT if at % 20 < 10 else {})


def long_prompts(at: float) -> Sight:
    """A prompt that takes a minute: nothing ends meanwhile, but batches are logged."""
    return steady(at, 60.0 * (at // 60), longest=600_000, batch_at=1e9 + at)


def longer_rows(at: float) -> Sight:
    """Rows become twenty times as long: fewer samples a second, as many tokens."""
    return steady(at, written=int(SAMPLES * min(at, 600) + SAMPLES / 20 * max(0, at - 600)))


def shorter_rows(at: float) -> Sight:
    """Rows become tiny: a tenth of the tokens a second, and more samples."""
    tokens = int(TOKENS * min(at, 600) + TOKENS / 10 * max(0, at - 600))
    return steady(at, tokens_written=tokens, bytes_written=tokens * TOKEN_BYTES)


def at_its_end(at: float) -> Sight:
    """The last long samples of a run, and then nothing is left to do."""
    last = {"pending": 0, "sent": 3 if at < 900 else 0, "batch_at": 1e9 + min(at, 900)}
    return steady(at, min(at, 600), **(last if at >= 600 else {}))


def sawtooth(at: float) -> Sight:
    """Dumps come and go in tmpfs, and at the start they only come."""
    ours = min(at, 60.0) / 60 * 60 + (10 if at % 20 < 10 else 0)
    return steady(at, memory=Space("/dev/shm", int((100 - ours) * GB), int((20 + ours) * GB)))


def others_fill(at: float, rate: float = 0.15, begin: float = 600.0, end: float = 2000.0) -> Sight:
    """Another process writes to tmpfs."""
    taken = rate * max(0.0, min(at, end) - begin)
    return steady(at, memory=Space("/dev/shm", int((100 - taken) * GB), 20 * GB))


def disk(free_at_start: float) -> Story:
    def story(at: float) -> Sight:
        sight = steady(at)
        assert sight.drawing
        wrote = sight.drawing.bytes_written
        sight.disk = Space("/data", int(free_at_start * GB) - wrote, wrote)
        return sight

    return story


def not_finite(each: float) -> Story:
    """A share of the samples fails from 600 s on."""
    return lambda at: steady(
        at, not_finite=int(max(0.0, at - 600) * SAMPLES * each), failed=int(max(0.0, at - 600) * SAMPLES * each)
    )


def three_bad(at: float) -> Sight:
    return steady(at, not_finite=sum(at > when for when in (500, 700, 900)))


TRUE = {
    "the scheduler dies": (verdict("crashed", 600), {"server-crashed": (600, 602)}),
    "the server hangs": (verdict("hang_suspected", 600), {"server-hangs": (614, 620)}),
    "the tap is gone": (since(600, verdict="unknown", said="tap not in"), {"server-unknown": (630, 636)}),
    "/health fails, and nothing comes": (
        lambda at: steady(at, min(at, 600), **failing(at, 600)),
        {"health-failed": (660, 666), "queue-stalled": (780, 790), "throughput-collapsed": (760, 790)},
    ),
    "nothing comes any more": (
        lambda at: steady(at, min(at, 600)),
        {"queue-stalled": (780, 790), "throughput-collapsed": (760, 790)},
    ),
    "throughput falls to a tenth": (
        lambda at: steady(at, min(at, 600) + max(0, at - 600) / 10),
        {"throughput-collapsed": (760, 800)},
    ),
    "an XID by the driver": (since(600, xids={3: [79]}), {"gpu-xid": (600, 602)}),
    "an XID in the kernel's log": (since(600, kernel=[XID]), {"gpu-xid": (600, 602)}),
    "a GPU that stays hot": (since(600, throttled=HEAT), {"gpu-throttled": (645, 662)}),
    "tmpfs without room for the longest sample": (
        since(600, memory=Space("/dev/shm", 100 << 20, 20 * GB)),
        {"memory-filling": (620, 624)},
    ),
    "others fill tmpfs": (others_fill, {"memory-filling": (660, 730)}),
    "the disk is too small": (disk(2000), {"disk-filling": (30, 40)}),
    "samples are not finite": (not_finite(0.05), {"states-not-finite": (606, 730)}),
}
SILENT = {
    "a run that does well": steady,
    "a flush to disk": lambda at: steady(at, stands(600, 690)(at)),
    "a pause (SIGSTOP)": lambda at: steady(at, stands(600, 1100)(at), paused=600 <= at < 1100),
    "long prompts": long_prompts,
    "long rows after short ones": longer_rows,
    "short rows after long ones": shorter_rows,
    "the end of a run": at_its_end,
    "a server that compiles": lambda at: steady(at, stands(600, 900)(at), verdict="slow_but_fine", pending=0),
    "a hang that was none": between(600, 610, verdict="hang_suspected"),
    "what is not known yet": between(600, 620, verdict="unknown"),
    "/health is late, while samples come": lambda at: steady(at, **failing(at, 600)),
    "/health fails for a moment": lambda at: steady(at, stands(600, 640)(at), **(failing(at, 600) if at < 640 else {})),
    "a GPU that is throttled now and then": now_and_then,
    "a GPU that is throttled for half a minute": between(600, 630, throttled=HEAT),
    "dumps come and go": sawtooth,
    "one large file in tmpfs": lambda at: others_fill(at, rate=30.0, begin=600, end=601),
    "others fill tmpfs slowly": lambda at: others_fill(at, rate=0.01),
    "a disk that just fits": disk(9500),
    "a few samples are not finite": three_bad,
}


@pytest.mark.parametrize("name", TRUE)
def test_what_must_alarm(name: str) -> None:
    story, expected = TRUE[name]
    raised = alarms(story)
    assert raised.keys() == expected.keys(), raised
    for alarm, (first, last) in expected.items():
        assert first <= raised[alarm] <= last, raised


@pytest.mark.parametrize("name", SILENT)
def test_what_must_stay_silent(name: str) -> None:
    assert alarms(SILENT[name]) == {}


def test_nothing_is_known_of_a_run_that_just_began() -> None:
    for rule in RULES:
        assert alarms(steady, 2.0) == {}, rule.id


# --- Alarms ---


def test_every_rule_says_what_it_means_and_is_tried() -> None:
    known = catalogue().by_id
    assert {rule.id for rule in RULES if not rule.of_verdict} <= known.keys()
    assert {one.id for one in catalogue().signatures if one.kind == "watch"} <= {rule.id for rule in RULES}
    assert {rule.id for rule in RULES} == {alarm for _, expected in TRUE.values() for alarm in expected}


def test_what_an_alarm_says() -> None:
    watch = AlarmWatch()
    for at in range(0, 700, 2):
        watch.add(steady(float(at), throttled=HEAT if at > 600 else {}), 1e9 + at)
    (alarm,) = watch.alarms
    assert (alarm.id, alarm.severity, alarm.evidence) == ("gpu-throttled", "warning", "for 60 s GPU 2: hw_thermal")
    assert alarm.cause == catalogue().by_id["gpu-throttled"].cause
    assert alarm.remedy == catalogue().by_id["gpu-throttled"].remedy


def test_an_alarm_of_the_verdict_speaks_its_words() -> None:
    watch = AlarmWatch()
    (alarm,), _ = watch.add(
        steady(0.0, verdict="crashed", cause="out of memory", remedy="lower it", said="log says: OOM"), 5.0
    )
    assert (alarm.cause, alarm.remedy, alarm.evidence, alarm.since) == (
        "out of memory",
        "lower it",
        "log says: OOM",
        5.0,
    )


def test_a_server_that_died_before_anybody_looked_is_dead_since_then() -> None:
    (alarm,), _ = AlarmWatch().add(steady(0.0, verdict="crashed", said="process gone", ended=77.0), 5000.0)
    assert alarm.since == 77.0


def test_an_alarm_ends_once_its_rule_has_not_held_for_a_while() -> None:
    watch, over = AlarmWatch(), list[tuple[float, str]]()
    for at in range(0, 1000, 2):
        hot = 600 <= at < 700 or 710 <= at < 800  # a break of 10 s ends nothing
        over += [
            (float(at), alarm.id) for alarm in watch.add(steady(float(at), throttled=HEAT if hot else {}), 1e9 + at)[1]
        ]
    assert [name for _, name in over] == ["gpu-throttled"]
    assert 800 <= over[0][0] <= 850


def test_the_most_severe_comes_first() -> None:
    watch = AlarmWatch()
    for at in range(0, 700, 2):
        watch.add(steady(float(at), throttled=HEAT, xids={1: [79]} if at > 650 else {}), 1e9 + at)
    assert [alarm.id for alarm in watch.alarms] == ["gpu-xid", "gpu-throttled"]


def test_patience_scales_seconds_and_nothing_else() -> None:
    twice = Limits().scaled(2.0)
    assert (twice.health, twice.pace_share, twice.bad_samples, twice.full) == (120.0, 0.3, 3, 600.0)
