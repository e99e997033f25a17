"""The doctor as both doors ask it: the host's checks, with those that only the console can make."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any, NamedTuple

import msgspec

from backends.doctor.measured import judge_measured
from backends.doctor.report import GROUPS, Check, Status, judge, unknown
from backends.errors import NotReady
from backends.sglang import Launch, Overrides, ProfileError
from capture.measure import Measured
from console import DEFAULT_PORT
from console.session import Session

SKEW_WARN, SKEW_FAIL = 1.0, 5.0  # seconds
STATUSES: tuple[Status, ...] = ("fail", "warn", "unknown", "pass")
NO_MODEL = "the model"  # where neither a person nor the profile names one, the other arguments can still be merged


class Wanted(NamedTuple):
    """What the checks are for; paths are the host's."""

    profile: str | None = None
    model: str | None = None
    port: int = DEFAULT_PORT
    output: str | None = None


def examine(session: Session, wanted: Wanted) -> dict[str, Any]:
    """Ask the checks that only look; the answer is a report as JSON has it, with `schema`, `checks` and `counts`."""
    merged, checks = merge(session, wanted)
    sent = time.time()
    answer = session.host.request("doctor", asked=asked(session, wanted, merged))
    heard = time.time()
    checks += msgspec.convert(answer["checks"], list[Check])
    checks.append(clock(sent, answer["arrived"], answer["answered"], heard))
    return report(session, checks)


def measuring(session: Session, wanted: Wanted) -> dict[str, Any]:
    """The job that measures, as `Session.start("doctor", ...)` takes it."""
    merged, _ = merge(session, wanted)
    env = merged.environ() if merged else {}
    return {
        "output": wanted.output,
        "model": asked(session, wanted, merged)["model"],
        "env": {name: value for name, value in env.items() if name.startswith("NCCL_")},
    }


def measured(session: Session, before: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """A report together with what the job that measures came to."""
    checks = msgspec.convert(before["checks"], list[Check])
    new = judge_measured(msgspec.convert(result, Measured, strict=False))
    replaced = {check.id for check in new}
    return report(session, [check for check in checks if check.id not in replaced] + new)


def merge(session: Session, wanted: Wanted) -> tuple[Launch | None, list[Check]]:
    """The profile merged for this host's SGLang, and the check that says whether it could be."""
    if wanted.profile is None:
        return None, []
    try:
        merged = _merged(session, wanted, wanted.model)
    except NotReady:
        return None, [unknown("sglang.profile", "a profile is merged for the host's SGLang, and there is none")]
    except ProfileError as error:
        return None, [judge("sglang.profile", str(error), "choose another profile, or another SGLang", fail=True)]
    seen = f"{merged.profile}: {len(merged.args)} arguments that SGLang {merged.version} takes"
    return merged, [judge("sglang.profile", seen, "")]


def _merged(session: Session, wanted: Wanted, model: str | None) -> Launch:
    assert wanted.profile is not None
    try:
        return session.plan_launch(wanted.profile, model, wanted.port, Overrides())
    except ProfileError:
        if model is not None:
            raise
        return session.plan_launch(wanted.profile, NO_MODEL, wanted.port, Overrides())


def asked(session: Session, wanted: Wanted, merged: Launch | None) -> dict[str, Any]:
    """What the host is asked, a `backends.doctor.report.Asked`."""
    model = merged.model if merged and merged.model != NO_MODEL else wanted.model
    return {
        "profile": merged.profile if merged else None,
        "embedded": bool(merged and merged.embedded),
        "args": {line.name: line.value for line in merged.args} if merged else {},
        "model": model,
        "port": wanted.port,
        "output": wanted.output,
        "dump_root": session.dump_root,
    }


def clock(sent: float, arrived: float, answered: float, heard: float) -> Check:
    """How far the host's clock is from ours, as NTP reckons it; what the link's delay hides counts for nothing."""
    skew = ((arrived - sent) + (answered - heard)) / 2
    hidden = max(0.0, (heard - sent) - (answered - arrived)) / 2
    certain = max(0.0, abs(skew) - hidden)
    way = "ahead of" if skew > 0 else "behind"
    seen = f"the host's clock is {certain:.1f} s or more {way} ours" if certain else "the host's clock is as ours"
    return judge(
        "link.clock",
        f"{seen}, to within {hidden:.2f} s",
        "set both clocks right with NTP: times in logs and time left are wrong by as much",
        fail=certain > SKEW_FAIL,
        warn=certain > SKEW_WARN,
        skew_seconds=round(skew, 3),
        uncertain_seconds=round(hidden, 3),
    )


def report(session: Session, checks: list[Check]) -> dict[str, Any]:
    """Checks by group, and how many of each status."""
    counts = Counter(check.status for check in checks)
    return {
        "schema": 1,
        "host": session.hello["host"],
        "counts": {status: counts[status] for status in STATUSES},
        "checks": msgspec.to_builtins(sorted(checks, key=lambda check: GROUPS.index(check.group))),
    }
