"""Recorded starts that were healthy, told again at fifty paces: nothing is ever called wrong on the way."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec
import pytest

from backends.verdict.catalogue import catalogue
from backends.verdict.observation import Observation
from tests.recorded import replay as recorded
from tests.recorded.record import FINE, Entry, Head, Heard
from tests.recorded.replay import STAMP, Pace, replay

RECORDS = sorted(Path(recorded.__file__).parent.glob("*.jsonl.gz"))
STRETCHES = (1.0, 1.0, 0.5, 2.0, 4.0)  # the last two: a machine on which a start gets a half, a quarter of its CPU
PACES = [Pace(stretch=STRETCHES[seed % 5], jitter=0.5, missed=0.3, seed=seed) for seed in range(50)]
read = cache(recorded.read)


def test_there_are_records_of_one_rank_and_of_two() -> None:
    ranks = {sum("scheduler" in process.title for process in last_seen(path).processes) for path in RECORDS}
    assert ranks >= {1, 2}


def knows_who_starves(path: Path) -> bool:
    """Whether a record says how long processes waited for a core, without which it tells nothing of a busier host."""
    return any(one.starved_percent is not None for one in last_seen(path).processes)


@pytest.mark.parametrize("pace", PACES, ids=lambda pace: f"{pace.seed}-x{pace.stretch:g}")
@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_a_healthy_start_raises_nothing(path: Path, pace: Pace) -> None:
    if pace.stretch > 1 and not knows_who_starves(path):
        pace = replace(pace, stretch=1.0)
    told = list(replay(*read(path), pace))
    for one in told:
        not_known_yet = one.verdict.verdict == "unknown" and "not known yet" in (one.verdict.cause or "")
        assert one.verdict.verdict in FINE or not_known_yet, one
    assert told[-1].verdict.verdict == "healthy"


def test_a_cold_start_on_two_gpus_is_slow_while_kernels_are_compiled_and_else_just_starting() -> None:
    """SGLang 0.5.16 on two H200s, TP=2, with no kernel in any cache: nothing is logged for minutes."""
    (path,) = (path for path in RECORDS if "2xh200-cold" in path.name)
    told = list(replay(*read(path), Pace()))
    verdicts = [one.verdict.verdict for one in told]
    compiling = [one for one in told if one.verdict.verdict == "slow_but_fine"]
    assert {one.verdict.findings[0] for one in compiling} == {"jit-compile"}
    assert compiling[-1].seconds - compiling[0].seconds > 30
    assert verdicts.index("healthy") > verdicts.index("slow_but_fine")


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_every_benign_line_in_a_healthy_start_raises_nothing(path: Path) -> None:
    head, entries = read(path)
    told = list(replay(head, [Entry(heard=with_benign_lines(e.heard)) if e.heard else e for e in entries], Pace()))
    assert {one.verdict.verdict for one in told} <= {*FINE, "unknown"}
    assert told[-1].verdict.verdict == "healthy"


def with_benign_lines(heard: Heard) -> Heard:
    """A part of a log with every line behind it that means nothing, tracebacks included."""
    stamps = STAMP.findall(heard.text)
    if not stamps or not heard.text.endswith("\n"):
        return heard
    traceback = "Traceback (most recent call last):\nRuntimeError: CUDA out of memory\n"
    lines = [
        f"[{stamps[-1]}] {line}\n{traceback if one.traceback else ''}"
        for one in catalogue().signatures
        if one.kind == "benign"
        for line in one.examples
        if "Health check request received during shutdown" not in line  # of a stop
    ]
    return Heard(heard.at, heard.text + "".join(lines))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_a_start_that_is_cut_off_is_told(path: Path) -> None:
    """The same record with its end left out, and nothing moving from there on: the replay can see a hang."""
    head, entries = read(path)
    begun = next(
        index for index, entry in enumerate(entries) if entry.heard and "Load weight begin" in entry.heard.text
    )
    still = next(entry.seen for entry in entries[begun:] if entry.seen)
    frozen = [Entry(seen=later(still, seconds)) for seconds in range(2, 400, 2)]
    last = list(replay(head, [*entries[: begun + 1], *frozen], Pace()))[-1]
    assert last.verdict.verdict == "hang_suspected"


def later(seen: Observation, seconds: float) -> Observation:
    """The same, with nothing having happened meanwhile."""
    still = {"cpu_percent": 0.0, "starved_percent": 0.0, "state": "sleeping", "compiler": False}
    idle = [msgspec.structs.replace(one, **still) for one in seen.processes]
    return msgspec.structs.replace(seen, at=seen.at + seconds, tick=seen.tick + seconds, processes=idle)


def last_seen(path: Path) -> Observation:
    return [entry.seen for entry in read(path)[1] if entry.seen][-1]


def test_a_record_says_nothing_of_its_machine() -> None:
    for path in RECORDS:
        head, entries = read(path)
        assert isinstance(head, Head)
        text = "".join(entry.heard.text for entry in entries if entry.heard)
        assert "/tmp/" not in text and "/root" not in text and str(Path.home()) not in text
