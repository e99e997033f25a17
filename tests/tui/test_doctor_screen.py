"""The doctor's screen: what is worst first, asked again by a key, measured only when that is confirmed."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest
from consoles import console, shown, until, until_shown
from scenes import AT

from backends.doctor.report import judge, unknown
from backends.errors import Locked
from capture.measure import Copied, Measured, Reduced, Written
from console.tui import jobs
from console.tui.screens.doctor import by_urgency

SIZE = (120, 40)
CHECKS = [
    judge("gpu.present", "8 x NVIDIA H200, driver 580.159.03", ""),
    judge("host.memory", "12 GB available, of 1 TB", "make room", fail=True),
    judge("host.swap", "0 B of 8 GB swap in use", ""),
    unknown("host.governor", "the kernel shows no CPU governor here"),
    judge("leftovers.dumps", "3 folders whose server is gone, 1.2 GB", "the next launch removes those", warn=True),
]
MEASURED = Measured(
    disks=[Written("/state", 10**9, 1.0), Written("/data", 10**9, 0.5)],
    gpus=8,
    copies=[Copied(0, 52e9, 50e9)],
    copy_error=None,
    all_reduce=Reduced(8, "nccl", None, error="the first all-reduce did not end within 30 s"),
    shape=None,
)
RUN: dict[str, Any] = {
    "id": "doctor-1",
    "kind": "doctor",
    "state": "running",
    "progress": {"what": "writing to /state"},
}
ENDED = {
    "state": "exited",
    "exit": {"code": 0, "signal": None, "at": AT},
    "result": msgspec.to_builtins(MEASURED, str_keys=True),
}

pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0.01)


def answer(checks: list[Any] = CHECKS) -> Any:
    return lambda asked: {"arrived": time.time(), "answered": time.time(), "checks": msgspec.to_builtins(checks)}


def asked(app: Any, method: str) -> list[dict[str, Any]]:
    return [parameters for name, parameters in app.feed.asked if name == method]


async def test_the_worst_stands_first_with_what_to_do() -> None:
    app = console(answers={"doctor": answer()})
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await pilot.press("d")
        await until_shown(pilot, "1 fail · 1 warn · 1 unknown")
        text = shown(app)
        for line in (
            "! memory           12 GB available, of 1 TB",
            "-> make room",
            "- governor         the kernel shows no CPU governor here",
            "? dumps            3 folders whose server is gone, 1.2 GB",
            "+ present          8 x NVIDIA H200",
        ):
            assert line in text
        assert text.index("! memory") < text.index("? dumps") < text.index("+ present")
        assert text.index("! memory") < text.index("- governor") < text.index("+ swap")


async def test_it_is_asked_for_the_server_and_the_dataset_that_are_shown() -> None:
    app = console(answers={"doctor": answer()})
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await pilot.press("d")
        await until_shown(pilot, "1 fail")
        (first,) = asked(app, "doctor")
        assert (first["asked"]["port"], first["asked"]["output"]) == (30000, "/data/hs/kimi-v3")
        assert first["asked"]["profile"] is None  # the scene's is none that this console knows
        await pilot.press("u")
        await until(pilot, lambda: len(asked(app, "doctor")) == 2)


async def test_a_host_on_which_nothing_ran() -> None:
    app = console("live", answers={"doctor": answer()})
    app.feed.scene |= {"server": None, "extraction": None}
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await pilot.press("d")
        await until_shown(pilot, "1 fail")
        assert asked(app, "doctor")[0]["asked"]["output"] is None


async def test_no_key_waits_for_a_slow_host() -> None:
    app = console(answers={"doctor": answer()})
    slow: Future[Any] = Future()
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        app.feed.call = lambda act: slow  # type: ignore[method-assign, assignment]
        await pilot.press("d")
        await until_shown(pilot, "asking …")
        await pilot.press("A")
        await until_shown(pilot, "wait until what was asked is answered")
        await pilot.press("escape")
        await until(pilot, lambda: len(app.screen_stack) == 2)


async def test_an_error_of_the_host_is_shown() -> None:
    app = console(answers={"doctor": Locked("the host is away")})
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await pilot.press("d")
        await until_shown(pilot, "the host is away")
        await until_shown(pilot, "not asked; u asks")


async def measure(pilot: Any) -> None:
    await pilot.press("d")
    await until_shown(pilot, "1 fail")
    await pilot.press("A")
    await until_shown(pilot, "Measure disks and GPUs?")


async def test_measuring_is_confirmed_and_cancel_is_first() -> None:
    app = console(answers={"doctor": answer()})
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await measure(pilot)
        await pilot.press("enter")
        await until(pilot, lambda: "Measure disks" not in shown(app))
        assert asked(app, "start") == []


async def test_what_is_measured_joins_what_was_seen_and_stays() -> None:
    app = console(answers={"doctor": answer(), "start": RUN, "run": RUN})
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await measure(pilot)
        await pilot.press("tab", "enter")
        await until_shown(pilot, "writing to /state …")
        app.feed.answers["run"] = RUN | ENDED
        await until_shown(pilot, "2 fail")
        assert asked(app, "start") == [
            {
                "kind": "doctor",
                "job": {"output": "/data/hs/kimi-v3", "model": "/models/kimi-k2.5", "env": {}},
                "port": None,
            }
        ]
        assert "! all-reduce       8 GPUs: the first all-reduce did not end within 30 s" in shown(app)
        assert "+ state-speed      /state: 1 GB/s over 1 GB, synced" in shown(app)
        await pilot.press("u")
        await until(pilot, lambda: len(asked(app, "doctor")) == 2)
        await until_shown(pilot, "2 fail")


async def test_gpus_that_are_in_use_are_not_measured() -> None:
    app = console(answers={"doctor": answer(), "start": Locked("server-1 uses the GPUs; stop it, and measure then")})
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await measure(pilot)
        await pilot.press("tab", "enter")
        await until_shown(pilot, "server-1 uses the GPUs")
        await until_shown(pilot, "1 fail")


async def test_leaving_stops_what_measures() -> None:
    app = console(answers={"doctor": answer(), "start": RUN, "run": RUN, "stop": {"left": []}})
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await measure(pilot)
        await pilot.press("tab", "enter")
        await until_shown(pilot, "writing to /state …")
        await pilot.press("escape")
        await until(pilot, lambda: asked(app, "stop"))
        assert asked(app, "stop")[0]["run_id"] == "doctor-1"


async def test_a_console_that_only_reads_measures_nothing() -> None:
    app = console(answers={"doctor": answer()}, read_only=True)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await pilot.press("d")
        await until_shown(pilot, "1 fail")
        await pilot.press("A")
        await until_shown(pilot, "this console was started with --read-only")


async def test_a_long_report_is_scrolled_by_keys() -> None:
    many = [judge(f"host.check_{number}", f"number {number}", "") for number in range(60)]
    app = console(answers={"doctor": answer(many)})
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await pilot.press("d")
        await until_shown(pilot, "number 0")
        await pilot.press("G")
        await until_shown(pilot, "number 59")
        await pilot.press("g")
        await until_shown(pilot, "number 0")


async def test_groups_and_checks_by_urgency() -> None:
    found = by_urgency(msgspec.to_builtins(CHECKS))
    assert [(group, [check["status"] for check in checks]) for group, checks in found] == [
        ("host", ["fail", "unknown", "pass"]),
        ("leftovers", ["warn"]),
        ("gpu", ["pass"]),
    ]
