"""The server screen: the gate's word, the form of a launch, what it comes to, and that nothing starts by itself."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
from consoles import console, shown, until, until_shown
from scenes import SCENES, server
from textual.widgets import Input, Select

from backends.errors import Locked
from backends.situation import Situation

SIZE = (140, 60)
SAFE: dict[str, Any] = {"findings": [], "effective": {}, "probe": None}
UNSAFE = {
    "findings": [
        {"id": "radix", "fatal": True, "what": "the prefix cache is on", "remedy": "start with --disable-radix-cache"},
        {"id": "kv_cache", "fatal": False, "what": "the KV cache is fp8", "remedy": "serve with the same"},
    ],
    "effective": {},
    "probe": None,
}
PROBED: dict[str, Any] = {
    "at": 1_700_000_000.0,
    "passed": True,
    "ranks": 8,
    "lengths": [3, 64, 1500, 2500, 8192],
    "layers": {
        "outputs": [2, 30, 58],
        "boundaries": [3, 31, 59],
        "serve_ids": [3, 31, 59],
        "serve_ids_elsewhere": [{"ids": [2, 30, 58], "sglang": ">=0.5.9,<0.5.13"}],
    },
    "shared_forwards": 2,
    "tolerance": {"near": 0.999, "strays": 0.0, "floor": 0.999, "why": "16 bits"},
    "compared": [{"tokens": 64, "state": "aux_1", "least": 0.99987, "strays": 0}],
    "against_hf": None,
    "failures": [],
}

pytestmark = pytest.mark.asyncio


def made(gate: Any = SAFE, scene: str = "live", **known: Any) -> Any:
    app = console(scene, {"gate": gate, "launch": launched}, **known)
    app.feed.scene["server"] = server(
        details={
            "profile": "embedded-llama",
            "model": "/models/llama",
            "layers": {"outputs": [2, 30, 58]},
            "layers_words": "outputs of layers 2, 30, 58",
        },
        argv=["python", "-m", "sglang.launch_server", "--model-path", "/models/llama", "--port", "30000", "--old-flag"],
    )
    return app


def launched(launching: dict[str, Any]) -> dict[str, Any]:
    return {"id": "server-20261129-150000-ffff", "port": launching["port"]}


def asked(app: Any, method: str) -> list[dict[str, Any]]:
    return [parameters for name, parameters in app.feed.asked if name == method]


async def opened(pilot: Any) -> None:
    await pilot.press("s")
    await until_shown(pilot, "What would start")
    await until_shown(pilot, "--disable-radix-cache")


async def test_the_gate_s_word() -> None:
    app = made()
    async with app.run_test(size=SIZE) as pilot:
        await opened(pilot)
        await until_shown(pilot, "safe to draw from")


async def test_what_runs_with_what_it_resolved() -> None:
    app = made(SAFE | {"effective": {"tp_size": "8", "api_key": "***"}})
    app.feed.scene["server"]["details"]["env"] = {"NCCL_DEBUG": "WARN", "HF_TOKEN": "***"}
    async with app.run_test(size=(140, 120)) as pilot:
        await opened(pilot)
        for text in (
            "What runs",
            "--model-path /models/llama   --port 30000   --old-flag",
            "NCCL_DEBUG=WARN   HF_TOKEN=***",
        ):
            await until_shown(pilot, text)
        await until_shown(pilot, "api_key=***   tp_size=8")


async def test_what_the_gate_objects_to() -> None:
    app = made(UNSAFE)
    async with app.run_test(size=SIZE) as pilot:
        await opened(pilot)
        for text in ("! the prefix cache is on", "-> start with --disable-radix-cache", "? the KV cache is fp8"):
            await until_shown(pilot, text)


async def test_what_was_said_is_of_the_server_that_runs() -> None:
    said = {"server-1": SAFE | {"effective": {"tp_size": "8"}, "probe": PROBED}, "server-2": UNSAFE}
    app = made(lambda run_id: said[run_id])
    now = app.feed.scene["server"]
    now["id"] = "server-1"
    of_the_first = ("safe to draw from", "probe passed", "tp_size=8", "--model-path /models/llama   --port 30000")
    async with app.run_test(size=(140, 120)) as pilot:
        await opened(pilot)
        for text in of_the_first:
            await until_shown(pilot, text)
        now |= {"state": "exited", "verdict": now["verdict"] | {"verdict": "stopped"}}
        await until(pilot, lambda: shown(app).count("no server runs") == 3, "of no server")
        assert not any(text in shown(app) for text in of_the_first)
        await pilot.press("ctrl+g", "ctrl+r")
        now |= {"id": "server-2", "state": "running", "verdict": now["verdict"] | {"verdict": "starting"}}
        await until_shown(pilot, "not asked yet")
        await until_shown(pilot, "not probed yet")
        now["verdict"] |= {"verdict": "healthy"}
        await until_shown(pilot, "the prefix cache is on")
        now["id"] = "server-1"  # without a look between two of which one was launched instead of the other
        await until_shown(pilot, "probe passed")
        assert "the prefix cache is on" not in shown(app)
    assert [one["run_id"] for one in asked(app, "gate")] == ["server-1", "server-2", "server-1"]
    assert asked(app, "start") == []


async def test_an_answer_of_a_server_that_is_gone_says_nothing_of_the_next_one() -> None:
    app = made(UNSAFE)
    now = app.feed.scene["server"]
    now["id"] = "server-1"
    at_once, late = app.feed.call, Future()

    def call(act: Any) -> Future[Any]:
        answer = at_once(act)
        return late if app.feed.asked[-1][0] == "gate" else answer

    app.feed.call = call
    run = {"id": "probe-1", "state": "running", "exit": None, "result": None, "progress": {"what": "64 tokens alone"}}
    ended = run | {"state": "exited", "exit": {"code": 0, "signal": None}, "result": PROBED}
    stages = [run]
    app.feed.answers |= {"start": run, "run": lambda run_id: stages[-1]}
    async with app.run_test(size=SIZE) as pilot:
        await opened(pilot)
        await until(pilot, lambda: asked(app, "gate"), "asked")
        await pilot.press("ctrl+r")
        await until_shown(pilot, "~ probing 64 tokens alone …")
        now |= {"id": "server-2", "verdict": now["verdict"] | {"verdict": "starting"}}
        await until_shown(pilot, "not probed yet")
        late.set_result(UNSAFE)
        stages.append(ended)
        both = {"gate", "probe"}
        await until(pilot, lambda: both.isdisjoint(worker.group for worker in app.workers), "both were answered")
        app.show_now()
        await pilot.pause()
        for text in ("not asked yet", "not probed yet"):
            assert text in shown(app)


async def test_whether_host_and_model_are_what_a_profile_is_for() -> None:
    app = made()
    async with app.run_test(size=SIZE) as pilot:
        await opened(pilot)  # the embedded engine's profile is for any host
        app.screen.query_one("#model", Input).value = "/models/another"
        app.screen.query_one("#profile", Select).value = "kimi-k2_5-int4-8x-rtxpro6000"
        await until_shown(pilot, "? it is for compute capability 12.0, and here is 9.0")
        assert asked(app, "situation")[-1] == {"model": "/models/another"}
        await until_shown(pilot, "? it is for GPUs without NVLink, and these are not")
        suited = Situation(
            gpus=8, cc="12.0", vram_gib=95.6, nvlink=False, architecture="KimiK25ForConditionalGeneration"
        )
        app.feed.answers["situation"] = suited
        app.screen.query_one("#model", Input).value = "/models/kimi"
        await until_shown(pilot, "# host and model are what the profile is for")
        assert "? it is for" not in shown(app)


async def test_what_a_probe_showed() -> None:
    app = made(SAFE | {"probe": PROBED})
    async with app.run_test(size=SIZE) as pilot:
        await opened(pilot)
        for text in (
            "+ probe passed: prompts of 3, 64, 1,500, 2,500 and 8,192 tokens on 8 ranks",
            "tensors: outputs of layers 2, 30, 58, which are Hugging Face's hidden_states[3, 31, 59]",
            "drafter's config: eagle_aux_hidden_state_layer_ids = [3, 31, 59] under this SGLang",
            "[2, 30, 58] under SGLang >=0.5.9,<0.5.13",
            "all 8 ranks saw the same bits of every state",
            "alone against together: least cosine 0.99987 (64 tokens, aux_1)",
        ):
            await until_shown(pilot, text)


async def test_a_probe_by_key_and_what_it_finds_wrong() -> None:
    app = made()
    failed = PROBED | {"passed": False, "failures": ["64 tokens alone: aux_1 differs between rank 0 and rank 1"]}
    run = {"id": "probe-1", "state": "running", "exit": None, "result": None, "progress": {"what": "64 tokens alone"}}
    ended = run | {"state": "exited", "exit": {"code": 6, "signal": None}, "result": failed}
    stages = [run] * 3 + [ended]
    app.feed.answers |= {"start": run, "run": lambda run_id: stages.pop(0) if len(stages) > 1 else ended}
    async with app.run_test(size=SIZE) as pilot:
        await opened(pilot)
        await until_shown(pilot, "not probed yet: ctrl+r")
        await pilot.press("ctrl+r")
        await until_shown(pilot, "~ probing 64 tokens alone …")
        await until_shown(pilot, "! probe FAILED: prompts of 3, 64, 1,500, 2,500 and 8,192 tokens on 8 ranks")
        await until_shown(pilot, "! 64 tokens alone: aux_1 differs between rank 0 and rank 1")
    assert asked(app, "start") == [{"kind": "probe", "job": {}, "port": 30000}]


async def test_a_probe_during_an_extraction_says_why_not() -> None:
    app = made()
    app.feed.answers |= {"start": Locked("another job draws from the server")}
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await opened(pilot)
        await pilot.press("ctrl+r")
        await until_shown(pilot, "another job draws from the server")
        await until_shown(pilot, "not probed yet: ctrl+r")


async def test_the_form_begins_as_the_launch_before_was() -> None:
    app = made()
    async with app.run_test(size=SIZE) as pilot:
        await opened(pilot)
        assert app.screen.query_one("#profile", Select).value == "embedded-llama"
        assert app.screen.query_one("#port", Input).value == "30000"
        assert app.screen.query_one("#way", Select).value == "outputs"
        assert app.screen.query_one("#layers", Input).value == "2 30 58"
        await until_shown(pilot, "differs from server-20261129-135548-a1b2:")
        assert "- --old-flag" in shown(app)
        assert asked(app, "launch") == []


async def test_what_would_start_follows_the_form() -> None:
    app = made()
    async with app.run_test(size=SIZE) as pilot:
        await opened(pilot)
        app.screen.query_one("#set", Input).value = "mem-fraction-static=0.5 --oops"
        await until_shown(pilot, "--mem-fraction-static 0.5")
        app.screen.query_one("#port", Input).value = "31000"
        await until_shown(pilot, "~ --port 30000 -> 31000")


@pytest.mark.parametrize(
    ("field", "value", "fault"),
    [
        ("#layers", "2 x", "layers: expected a whole number, 0 or more, such as 2 30 58, and not 'x'"),
        ("#layers", "2 2", "at least one layer, and none twice"),
        ("#port", "70000", "port 70000: there are ports 1 to 65535, choose one of them"),
        ("#port", "", "port: expected a positive whole number, such as 30000, and not ''"),
        ("#set", "'", "more arguments: No closing quotation"),
        ("#set", "host=0.0.0.0", "loopback"),
    ],
)
async def test_what_is_wrong_is_said_and_starts_nothing(field: str, value: str, fault: str) -> None:
    app = made()
    async with app.run_test(size=SIZE) as pilot:
        await opened(pilot)
        app.screen.query_one(field, Input).value = value
        await until_shown(pilot, fault)
        await pilot.press("ctrl+l")
        await pilot.pause()
        assert asked(app, "launch") == []


async def test_a_launch_takes_what_is_shown() -> None:
    app = made()
    async with app.run_test(size=SIZE) as pilot:
        await opened(pilot)
        app.screen.query_one("#port", Input).value = "31000"
        await until_shown(pilot, "31000")
        await pilot.press("ctrl+l")
        await until(pilot, lambda: asked(app, "launch"), "launched")
        (launch,) = asked(app, "launch")
        assert launch["launching"]["profile"] == "embedded-llama"
        assert launch["launching"]["port"] == 31000
        assert launch["launching"]["layers"] == {"outputs": [2, 30, 58]}
        await until(pilot, lambda: type(app.screen).__name__ == "DashboardScreen", "back to the dashboard")
        assert asked(app, "watch") == [{"run_id": None}]


async def test_a_launch_that_is_refused_says_why() -> None:
    app = made()
    app.feed.answers["launch"] = Locked("a server of ours runs on port 30000 already")
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await opened(pilot)
        await pilot.press("ctrl+l")
        await until_shown(pilot, "a server of ours runs on port")
        assert type(app.screen).__name__ == "ServerScreen"


async def test_read_only_launches_nothing() -> None:
    app = made(read_only=True)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await opened(pilot)
        await pilot.press("ctrl+l")
        await until_shown(pilot, "--read-only")
        await pilot.press("ctrl+r")
        await pilot.pause()
        assert asked(app, "launch") == asked(app, "start") == []


async def test_without_a_server_before_there_is_a_form_to_fill() -> None:
    app = console("live", {"launch": launched})
    app.feed.scene = SCENES["live"] | {"server": None, "dumps": None}  # type: ignore[attr-defined]
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await pilot.press("s")
        await until_shown(pilot, "choose a profile")
        await pilot.press("ctrl+l")
        await until_shown(pilot, "there is nothing to launch yet")
        app.screen.query_one("#profile", Select).value = "embedded-llama"
        await until_shown(pilot, "--disable-radix-cache")
