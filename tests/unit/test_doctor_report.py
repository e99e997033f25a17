"""The doctor as both doors ask it: profile and clock beside the host's checks, what was measured, and words for it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from backends.doctor.measured import all_reduce, ceiling, copies, disk, judge_measured
from backends.doctor.report import GROUPS, judge, unknown
from backends.errors import NotReady
from backends.ports import free_port
from backends.sglang import Launch, load_profiles, resolve
from capture.measure import Copied, Measured, MiB, Reduced, Written
from console import doctor
from console.doctor import Wanted, clock, examine, measured, measuring
from console.words import of_host

LAYERTAP = Path(sys.executable).with_name("layertap")
FIRST_CASE = "kimi-k2_5-int4-8x-rtxpro6000"
GB = 10**9


class MadeSession:
    """A session whose host gives one answer, and whose SGLang has one version."""

    def __init__(self, checks: list[Any], version: str | None = "0.5.23") -> None:
        self.hello = {"host": "gpu-host-1"}
        self.dump_root = "/dev/shm/me"
        self.version = version
        self.answer = {"checks": msgspec.to_builtins(checks)}
        self.asked: dict[str, Any] = {}
        self.host = SimpleNamespace(request=self.request)

    def request(self, method: str, *, asked: dict[str, Any]) -> dict[str, Any]:
        assert method == "doctor"
        self.asked = asked
        return self.answer | {"arrived": time.time(), "answered": time.time()}

    def plan_launch(self, profile: str, model: str | None, port: int, overrides: Any) -> Launch:
        if self.version is None:
            raise NotReady("python has no sglang")
        return resolve(profile, load_profiles(), version=self.version, model=model, port=port)


def by_id(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {check["id"]: check for check in report["checks"]}


# --- What both doors ask ---


def test_a_report() -> None:
    session = MadeSession([judge("gpu.present", "8 x H200", ""), judge("leftovers.dumps", "3", "rm", warn=True)])
    report = examine(session, Wanted())
    assert (report["schema"], report["host"]) == (1, "gpu-host-1")
    assert report["counts"] == {"fail": 0, "warn": 1, "unknown": 0, "pass": 2}
    assert [check["id"] for check in report["checks"]] == ["gpu.present", "link.clock", "leftovers.dumps"]
    assert session.asked == {
        "profile": None,
        "embedded": False,
        "args": {},
        "model": None,
        "port": 30000,
        "output": None,
        "dump_root": "/dev/shm/me",
    }


@pytest.mark.parametrize("model", [None, "/models/kimi"])
def test_a_profile_with_or_without_a_model(model: str | None) -> None:
    session = MadeSession([])
    report = examine(session, Wanted(FIRST_CASE, model, 30001, "/data"))
    check = by_id(report)["sglang.profile"]
    assert check["status"] == "pass"
    assert re.fullmatch(rf"{FIRST_CASE}: \d+ arguments that SGLang 0.5.23 takes", check["seen"])
    assert session.asked["args"]["tp-size"] == 8
    assert session.asked["args"]["mem-fraction-static"] == 0.88
    assert {name: session.asked[name] for name in ("profile", "model", "port", "output")} == {
        "profile": FIRST_CASE,
        "model": model,
        "port": 30001,
        "output": "/data",
    }


def test_a_profile_that_is_embedded() -> None:
    session = MadeSession([])
    examine(session, Wanted("embedded-llama"))
    assert (session.asked["embedded"], session.asked["model"]) == (True, "embedded:llama")


@pytest.mark.parametrize(
    ("profile", "version", "status", "seen"),
    [
        (FIRST_CASE, "0.5.9", "fail", "SGLang 0.5.9 has no plugins"),
        ("kimi", "0.5.23", "fail", "profile kimi does not exist"),
        (FIRST_CASE, None, "unknown", "there is none"),
    ],
)
def test_a_profile_that_does_not_suit(profile: str, version: str | None, status: str, seen: str) -> None:
    session = MadeSession([], version)
    check = by_id(examine(session, Wanted(profile)))["sglang.profile"]
    assert check["status"] == status
    assert seen in check["seen"]
    assert session.asked["profile"] is None


def test_what_is_measured_is_measured_with_the_profiles_nccl() -> None:
    job = measuring(MadeSession([]), Wanted(FIRST_CASE, "/models/kimi", output="/data"))
    assert (job["output"], job["model"]) == ("/data", "/models/kimi")
    assert job["env"]["NCCL_P2P_LEVEL"] == "SYS"
    assert all(name.startswith("NCCL_") for name in job["env"])
    assert measuring(MadeSession([]), Wanted()) == {"output": None, "model": None, "env": {}}


@pytest.mark.parametrize(
    ("skew", "delay", "status"),
    [(0.0, 0.2, "pass"), (0.9, 0.0, "pass"), (1.2, 0.05, "warn"), (-6.0, 0.05, "fail"), (60.0, 0.0, "fail"), (2.0, 3.0, "pass")],
)  # fmt: skip
def test_the_clock_of_the_host(skew: float, delay: float, status: str) -> None:
    """However long the answer takes and whatever the link's delay hides."""
    sent = 1000.0
    arrived = sent + delay + skew
    answered = arrived + 4.0
    check = clock(sent, arrived, answered, answered - skew + delay)
    assert check.status == status
    assert check.numbers["skew_seconds"] == pytest.approx(skew)
    assert check.numbers["uncertain_seconds"] == pytest.approx(delay)
    assert ("ahead of" in check.seen) == (abs(skew) > delay and skew > 0)


# --- What was measured ---

MADE = Measured(
    disks=[Written("/state", GB, 1.0), Written("/data", GB, 0.5)],
    gpus=8,
    copies=[Copied(0, 52e9, 50e9), Copied(1, 52e9, 25e9)],
    copy_error=None,
    all_reduce=Reduced(8, "nccl", 2.5, {32 * MiB: 37.6e9, 128 * MiB: 39e9}),
    shape=(61, 7168),
)


def test_figures_that_are_good() -> None:
    assert [(check.id, check.status, check.seen) for check in judge_measured(MADE)] == [
        ("disks.state_speed", "pass", "/state: 1 GB/s over 1 GB, synced"),
        ("disks.output_speed", "pass", "/data: 2 GB/s over 1 GB, synced"),
        ("pcie.speed", "pass", "the slowest of 2, GPU 1: 52 GB/s to it, 25 GB/s from it"),
        (
            "network.all_reduce",
            "pass",
            "8 GPUs: bus bandwidth 37.6 GB/s at 32 MiB, 39 GB/s at 128 MiB; the first one, of 4 MiB, took 2.5 s; "
            "at most 12,285 tok/s of prefill",
        ),
    ]


def test_the_ceiling_is_that_of_the_facts() -> None:
    assert ceiling(15e9, 8, 61, 7168) == pytest.approx(4_900, rel=0.01)
    assert ceiling(37.6e9, 8, 94, 4096) == pytest.approx(13_950, rel=0.01)


@pytest.mark.parametrize(
    ("made", "status"),
    [
        (Written("/data", GB, 1.54), "pass"),
        (Written("/data", GB, 1.6), "warn"),
        (Written("/data", error="/data: Permission denied"), "fail"),
        (Written("/data"), "fail"),
    ],
)
def test_the_speed_of_a_disk(made: Written, status: str) -> None:
    assert disk("disks.output_speed", made, 645e6).status == status


@pytest.mark.parametrize(
    ("made", "error", "gpus", "status"),
    [
        ([], None, 0, "unknown"),
        ([], "the copies did not end within 120 s", 1, "fail"),
        ([Copied(0, 12e9, 12e9)], None, 1, "pass"),
        ([Copied(0, 12e9, 6e9)], None, 1, "warn"),
        ([Copied(0, 12e9, 12e9), Copied(1, 1e9, 12e9)], None, 2, "fail"),
    ],
)
def test_the_speed_of_copies(made: list[Copied], error: str | None, gpus: int, status: str) -> None:
    assert copies(made, error, gpus).status == status


@pytest.mark.parametrize(
    ("bus", "status"), [({32: 37e9, 128: 39e9}, "pass"), ({32: 15e9, 128: 39e9}, "warn"), ({32: 9e9, 128: 9e9}, "fail")]
)
def test_the_speed_of_an_all_reduce(bus: dict[int, float], status: str) -> None:
    made = Reduced(8, "nccl", 2.5, {size * MiB: speed for size, speed in bus.items()})
    check = all_reduce(made, 8, None)
    assert check.status == status
    assert check.numbers["bus_bytes_per_second"] == bus[32]


def test_an_all_reduce_that_did_not_come() -> None:
    assert all_reduce(None, 1, None).seen == "fewer than two GPUs"
    hung = all_reduce(Reduced(8, "nccl", error="the first all-reduce did not end within 30 s"), 8, None)
    assert hung.status == "fail"
    assert "NCCL_P2P_DISABLE=1" in hung.remedy
    later = all_reduce(Reduced(8, "nccl", 1.0, error="later ones did not within 60 s"), 8, None)
    assert later.status == "fail"
    assert "NCCL_DEBUG=INFO" in later.remedy


def test_figures_join_a_report_once() -> None:
    session = MadeSession([judge("gpu.present", "8 x H200", ""), judge("leftovers.dumps", "0", "")])
    result = json.loads(msgspec.json.encode(MADE))
    once = measured(session, examine(session, Wanted()), result)
    twice = measured(session, once, result)
    ids = [check["id"] for check in twice["checks"]]
    assert len(ids) == len(set(ids)) == 7
    assert [GROUPS.index(check["group"]) for check in twice["checks"]] == sorted(
        GROUPS.index(check["group"]) for check in twice["checks"]
    )
    assert twice["counts"]["pass"] == 7


# --- Words ---


def test_a_report_in_words() -> None:
    report = doctor.report(
        MadeSession([]),
        [
            judge("gpu.present", "8 x H200", ""),
            judge("gpu.xid", "XID 79: 1 times since boot", "look it up", fail=True),
            judge("leftovers.shared_memory", "3 segments", "rm them", warn=True),
            unknown("host.governor", "not shown here"),
        ],
    )
    assert list(of_host.doctor(report)) == [
        "gpu",
        "  + present          8 x H200",
        "  ! xid              XID 79: 1 times since boot",
        "      -> look it up",
        "host",
        "  - governor         not shown here",
        "leftovers",
        "  ? shared-memory    3 segments",
        "      -> rm them",
        "1 fail · 1 warn · 1 unknown · 1 pass",
    ]


# --- The verb ---


@pytest.fixture
def layertap(home: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., subprocess.CompletedProcess[str]]:
    monkeypatch.setenv("LAYERTAP_PYTHON", sys.executable)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [str(LAYERTAP), "doctor", *words]
        return subprocess.run(argv, capture_output=True, text=True, cwd=home, check=False, timeout=120)

    return run


def test_the_verb_ends_with_1_where_something_fails(layertap: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    ran = layertap("--json", "--profile", FIRST_CASE)
    report = json.loads(ran.stdout)
    assert (ran.returncode, ran.stderr) == (1, "")
    assert by_id(report)["sglang.version"]["status"] == "fail"  # the console's Python has none
    assert by_id(report)["sglang.profile"]["status"] == "unknown"
    assert report["counts"]["fail"] >= 1


def test_the_verb_on_a_host_that_is_well(
    layertap: Callable[..., subprocess.CompletedProcess[str]], fake_sglang: None, home: Path
) -> None:
    ran = layertap("--output", "out", "--port", str(free_port()))
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "\nsglang\n  + version          SGLang 0.5.23, torch missing, Python 3." in ran.stdout
    assert f"{home}/out: " in ran.stdout
    assert not (home / "out").exists()


def test_the_verb_measures_when_asked(
    layertap: Callable[..., subprocess.CompletedProcess[str]], fake_sglang: None, home: Path
) -> None:
    ran = layertap("--active", "--json", "--output", "out", "--port", str(free_port()))
    checks = by_id(json.loads(ran.stdout))
    assert (ran.returncode, ran.stderr) == (0, "")
    assert checks["disks.output_speed"]["numbers"]["bytes_per_second"] > 0
    assert checks["network.all_reduce"]["seen"] == "fewer than two GPUs"
    assert checks["pcie.speed"]["status"] == "unknown"
    (run,) = (home / "state" / "layertap" / "runs").iterdir()
    assert run.name.startswith("doctor-")
    assert not (home / "out").exists()


def test_options_that_are_not_understood(layertap: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    assert layertap("--port", "many").returncode == 2
