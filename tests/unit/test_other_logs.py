"""Logs of other releases and of failures that take many GPUs, made from SGLang's own templates: what each one means.

A name ends in the release; `logs/` holds them. They end where the trouble is, and are judged some time after that.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import pytest

from backends.verdict.diagnose import Limits
from backends.verdict.log_report import Report, judge, read

LOGS = Path(__file__).parent / "logs"
HOUR = 3600.0


class Truth(NamedTuple):
    """What is to be said of a log `later` seconds after its last line: verdict, first finding, phase, since when."""

    verdict: str
    first: str | None
    phase: str | None
    since: str | None = None
    later: float = HOUR


TABLE = {
    # Starts that are well, whatever they look like.
    "healthy-0.5.9": Truth("healthy", None, "ready"),
    "healthy-0.5.16-with-a-draft": Truth("healthy", None, "ready"),
    "healthy-0.5.20": Truth("healthy", None, "ready"),
    "healthy-0.5.23-deepgemm": Truth("healthy", None, "ready"),
    "soft-watchdog-0.5.16": Truth("healthy", None, "ready"),
    "stopped-0.5.23": Truth("stopped", None, "ready"),
    "weights-load-0.5.16": Truth("starting", None, "weights", later=30.0),
    "deepgemm-compiles-0.5.11": Truth("slow_but_fine", "deepgemm-precompile", "tune", "09:05:17", later=600.0),
    # Hangs: the log ends, and it has been long.
    "nccl-group-never-forms-0.5.9": Truth("hang_suspected", "nccl-init-stall", "dist", "09:00:09"),
    "first-collective-hangs-0.5.16": Truth("hang_suspected", "first-collective", "dist", "09:00:10"),
    "one-rank-still-loads-0.5.16": Truth("hang_suspected", "rank-behind", "weights"),
    "custom-all-reduce-wedge-0.5.11": Truth("hang_suspected", "custom-ar-wedge", "graphs"),
    "jit-lock-0.5.16": Truth("hang_suspected", "jit-lock-stale", "graphs"),
    "autotune-stands-0.5.16": Truth("hang_suspected", "autotune-stuck", "tune"),
    "warm-up-stands-0.5.23": Truth("hang_suspected", "warmup-hang", "warm_up"),
    # Crashes: the first rank's own words, not what the others say of it.
    "oom-on-one-rank-0.5.16": Truth("crashed", "cuda-oom-load", "weights", "09:00:53"),
    "oom-in-capture-0.5.11": Truth("crashed", "cuda-oom-capture", "graphs"),
    "nccl-time-out-0.5.11": Truth("crashed", "nccl-timeout", "weights"),
    "illegal-access-0.5.16": Truth("crashed", "illegal-access", "ready"),
    "xid-79-0.5.23": Truth("crashed", "gpu-lost", "ready"),
    "killed-rank-0.5.9": Truth("crashed", "host-oom-kill", "weights", "09:01:43"),
    "killed-rank-0.5.23": Truth("crashed", "host-oom-kill", "weights"),
    "rank-skew-0.5.16": Truth("crashed", "rank-skew-load", "weights"),
    "watchdog-0.5.9": Truth("crashed", "sched-watchdog", "ready"),
    "watchdog-0.5.16": Truth("crashed", "sched-watchdog", "ready"),
    "false-ready-0.5.23": Truth("crashed", "http-port-in-use", "ready"),
    "warm-up-by-proxy-0.5.16": Truth("crashed", "warmup-proxy", "warm_up"),
    "warm-up-never-returns-0.5.16": Truth("crashed", "warmup-failed", "warm_up"),
    "small-dev-shm-0.5.16": Truth("crashed", "shm-too-small", "dist"),
    "unbalanced-memory-0.5.11": Truth("crashed", "mem-unbalanced", "dist"),
    "no-room-for-kv-0.5.16": Truth("crashed", "static-mem-too-small", "weights"),
    "deepgemm-on-sm120-0.5.11": Truth("crashed", "sm120-deepgemm", "graphs"),
    "bad-flag-0.5.23": Truth("crashed", "bad-flag", None),
    # Up, and not well.
    "retracts-0.5.16": Truth("degraded", "kv-retract", "ready"),
    "health-fails-0.5.16": Truth("degraded", "health-failed", "ready"),
}


def judged(name: str, later: float) -> Report:
    reader = read(LOGS / f"{name}.log")
    stamp = reader.startup.last_stamp or 0.0
    return judge(reader, stamp + later, Limits(), stamp)


TIME_LINES = {
    "healthy-0.5.9": "args 9 dist 5 weights 303 kv 1 graphs 10 limits 1 http 1 warm_up 5",
    "healthy-0.5.16-with-a-draft": "args 9 dist 6 weights 303 kv 1 tune 121 graphs 14 draft 18 limits 1 http 1 warm_up 5",
    "healthy-0.5.20": "args 9 dist 4 weights 63 kv 1 graphs 44 limits 1 http 1 warm_up 5",
    "healthy-0.5.23-deepgemm": "args 9 dist 7 weights 3 kv 1 tune 480 graphs 73 limits 1 http 1 warm_up 5",
}


@pytest.mark.parametrize(("name", "took"), TIME_LINES.items(), ids=TIME_LINES)
def test_how_long_each_phase_took(name: str, took: str) -> None:
    phases = [phase for phase in judged(name, 1.0).phases if phase.ended is not None]
    assert " ".join(f"{phase.id} {(phase.ended or 0) - (phase.started or 0):g}" for phase in phases) == took


@pytest.mark.parametrize(
    ("name", "phase", "doing", "last"),
    [
        ("weights-load-0.5.16", "weights", "shard 43 of 64", None),
        ("deepgemm-compiles-0.5.11", "tune", "kernel 2048 of 16384", None),
        ("one-rank-still-loads-0.5.16", "weights", "76.00 GB a rank", "TP5"),
    ],
)
def test_what_a_start_is_doing(name: str, phase: str, doing: str, last: str | None) -> None:
    startup = read(LOGS / f"{name}.log").startup
    assert startup.current is not None
    assert (startup.current.id, startup.current.detail, startup.laggard) == (phase, doing, last)


def test_a_draft_model_does_not_pass_for_the_model() -> None:
    startup = read(LOGS / "healthy-0.5.16-with-a-draft.log").startup
    assert (startup.effective["architecture"], startup.effective["weights_gb"]) == ("DeepseekV3ForCausalLM", 76.0)


def test_every_log_has_its_truth() -> None:
    assert {path.stem for path in LOGS.glob("*.log")} == set(TABLE)


@pytest.mark.parametrize(("name", "truth"), TABLE.items(), ids=TABLE)
def test_what_a_log_means(name: str, truth: Truth) -> None:
    made = judged(name, truth.later)
    first = made.findings[0] if made.findings else None
    phase = made.phases[-1].id if made.phases else None
    assert (made.verdict, first and first.id, phase) == (truth.verdict, truth.first, truth.phase)
    if truth.since and first:
        assert first.since is not None
        assert clock(first.since) == truth.since
    if first:
        assert first.evidence and first.cause and first.remedy


def clock(moment: float) -> str:
    return f"{datetime.fromtimestamp(moment):%H:%M:%S}"
