"""Judges a recorded start again: as it was, or with its time stretched and jittered, as on a machine that is starved."""

from __future__ import annotations

import bisect
import gzip
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from backends.processes import ProcessSample
from backends.verdict.diagnose import Limits, Verdict, diagnose
from backends.verdict.observation import Follower, Observation
from tests.recorded.record import Entry, Head

STAMP = re.compile(r"(?m)(?<=^\[)\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")
START = 1_790_000_000.0  # epoch seconds: when a replay begins, whenever its record was made


@dataclass(frozen=True)
class Pace:
    """How a start is told again: `stretch` times as long, which leaves its processes as much less of a core.

    Each step between two looks takes up to `jitter` longer or shorter, and a look is left out with the chance `missed`.
    """

    stretch: float = 1.0
    jitter: float = 0.0
    missed: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Told:
    """What was said at `seconds` after the launch."""

    seconds: float
    phase: str | None
    verdict: Verdict


def read(path: Path) -> tuple[Head, list[Entry]]:
    """A record. Raises msgspec.MsgspecError."""
    with gzip.open(path, "rb") as file:
        first, *lines = file.read().splitlines()
    return msgspec.json.decode(first, type=Head), [msgspec.json.decode(line, type=Entry) for line in lines]


def replay(head: Head, entries: list[Entry], pace: Pace, limits: Limits | None = None) -> Iterator[Told]:
    """Every verdict of a record, told at a pace."""
    limits = limits or Limits()
    chance = random.Random(pace.seed)
    time = Time(head, entries, pace, chance)
    follower = Follower(limits)
    for entry in entries:
        if entry.heard is not None:
            follower.hear(time.stamps(entry.heard.text), time.at(entry.heard.at))
        elif entry.seen is not None and chance.random() >= pace.missed:
            seen = _seen(entry.seen, time, pace)
            evidence = follower.evidence(seen)
            yield Told(seen.at - time.created, evidence.phase, diagnose(evidence, limits))


class Time:
    """The times of a record, as they are in its replay."""

    def __init__(self, head: Head, entries: list[Entry], pace: Pace, chance: random.Random) -> None:
        self.zone = head.zone
        self.created = START
        moments = [entry.heard.at if entry.heard else entry.seen.at for entry in entries if entry.heard or entry.seen]
        self._before = [head.created, *sorted(moment for moment in set(moments) if moment > head.created)]
        self._after = [START]
        for earlier, later in zip(self._before, self._before[1:], strict=False):
            step = (later - earlier) * pace.stretch * (1 + chance.uniform(-pace.jitter, pace.jitter))
            self._after.append(self._after[-1] + step)
        self._stretch = pace.stretch

    def at(self, moment: float) -> float:
        """A moment, in epoch seconds."""
        index = max(0, bisect.bisect_right(self._before, moment) - 1)
        return self._after[index] + (moment - self._before[index]) * self._stretch

    def stamps(self, text: str) -> str:
        """A part of the log, with its time stamps moved; they are in this machine's time, as a log's are in its own."""
        return STAMP.sub(lambda found: self._stamp(found[0]), text)

    def _stamp(self, text: str) -> str:
        moment = datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() - self.zone
        return f"{datetime.fromtimestamp(self.at(moment)):%Y-%m-%d %H:%M:%S}"


def _seen(seen: Observation, time: Time, pace: Pace) -> Observation:
    at = time.at(seen.at)
    health = seen.health and msgspec.structs.replace(
        seen.health,
        age=None if seen.health.age is None else seen.health.age * pace.stretch,
        failing_for=None if seen.health.failing_for is None else seen.health.failing_for * pace.stretch,
    )
    return msgspec.structs.replace(
        seen,
        at=at,
        tick=at - time.created,
        created=time.created,
        health=health,
        log_age=None if seen.log_age is None else seen.log_age * pace.stretch,
        processes=[_starved(process, pace) for process in seen.processes],
    )


def _starved(process: ProcessSample, pace: Pace) -> ProcessSample:
    """A process that does the same in a longer time."""
    cpu, starved = process.cpu_percent, process.starved_percent
    return msgspec.structs.replace(
        process,
        cpu_percent=None if cpu is None else cpu / pace.stretch,
        starved_percent=None if starved is None else 100 - (100 - starved) / pace.stretch,
    )
