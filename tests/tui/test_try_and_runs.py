"""One prompt, and the list of runs."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
from consoles import console, shown, until, until_shown
from scenes import AT, SCENES

from backends.errors import RunDied
from console.tui import jobs
from console.tui.screens import runs as runs_screen
from console.tui.widgets.table import Table

SIZE = (120, 40)
TRIED = {
    "schema": 1,
    "seconds": 0.12,
    "tokens": [{"id": 19180, "text": "Hello"}, {"id": 2695, "text": " world"}],
    "rows": 2,
    "layers": {"boundaries": [3], "outputs": [2], "serve_ids": [3]},
    "states": {
        "aux_0": {"shape": [2, 7168], "dtype": "bfloat16", "mean": 0.1, "std": 1.5, "norms": [41.2, 38.8]},
        "final": {"shape": [2, 7168], "dtype": "bfloat16", "mean": 0.2, "std": 2.5, "norms": [88.7, 90.2]},
    },
    "findings": [],
}
RUN: dict[str, Any] = {"id": "try-1", "kind": "try", "state": "running", "progress": None, "result": None, "exit": None}

pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0.01)


def asked(app: Any, method: str) -> list[dict[str, Any]]:
    return [parameters for name, parameters in app.feed.asked if name == method]


async def test_a_prompt_with_its_tokens_and_tensors() -> None:
    ended = RUN | {"state": "exited", "exit": {"code": 0, "signal": None, "at": AT}, "result": TRIED}
    app = console(answers={"start": RUN, "run": ended})
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("t")
        await until_shown(pilot, "a prompt")
        await pilot.press(*"Hello world", "enter")
        await until_shown(pilot, "2 tokens sent · 2 rows in every tensor")
        assert "19180" in shown(app)
        assert "output of layer 2" in shown(app)
    assert asked(app, "start") == [{"kind": "try", "job": {"text": "Hello world", "chat": False}, "port": 30000}]


async def test_as_a_chat_message() -> None:
    ended = RUN | {"state": "exited", "exit": {"code": 0, "signal": None, "at": AT}, "result": TRIED}
    app = console(answers={"start": RUN, "run": ended})
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("t")
        await until_shown(pilot, "a prompt")
        assert "[ ] as a chat message" in shown(app)  # a sign, which also a terminal without colours has
        await pilot.press("ctrl+t")
        await until_shown(pilot, "[x] as a chat message")
        await pilot.press(*"Hi", "enter")
        await until(pilot, lambda: asked(app, "start"), "asked")
    assert asked(app, "start")[0]["job"] == {"text": "Hi", "chat": True}


async def test_an_empty_prompt_asks_nothing() -> None:
    app = console()
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("t")
        await until_shown(pilot, "a prompt")
        await pilot.press("enter")
        await pilot.pause()
        assert asked(app, "start") == []


async def test_read_only_sends_no_prompt() -> None:
    app = console(read_only=True)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await pilot.press("t")
        await until_shown(pilot, "a prompt")
        await pilot.press("x", "enter")
        await until_shown(pilot, "--read-only")
    assert asked(app, "start") == []


async def test_a_try_that_fails_says_why_in_the_screen() -> None:
    app = console(answers={"start": RunDied("no server of ours runs here; `layertap launch` it")})
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("t")
        await until_shown(pilot, "a prompt")
        await pilot.press("x", "enter")
        await until_shown(pilot, "! no server of ours runs here")


def run(name: str, **known: Any) -> dict[str, Any]:
    return {
        "id": name,
        "kind": name.partition("-")[0],
        "state": "exited",
        "folder": f"/state/runs/{name}",
        "log": "x",
        "port": None,
        "created": AT - 90.0,
        "stop_asked": False,
        "exit": {"code": 0, "signal": None, "at": AT},
        "details": {"output": "/data/hs"},
        "argv": ["python", "--api-key", "***"],
        "events": [{"at": AT - 90.0, "event": "started", "supervisor": 1, "child": 2}],
        "progress": None,
        "result": None,
    } | known


RUNS = [
    run("verify-1", exit={"code": 1, "signal": None, "at": AT}),
    run("extract-2", state="died", exit=None),
    run("server-3", details={"profile": "p"}, port=30000, exit={"code": None, "signal": 9, "at": AT}),
    run("plan-4", stop_asked=True, exit={"code": None, "signal": 15, "at": AT}),
]


async def test_runs_with_how_they_went(monkeypatch: pytest.MonkeyPatch) -> None:
    by_id = {one["id"]: one for one in RUNS}
    answers = {
        "all": RUNS,
        "run": lambda run_id: by_id[run_id],
        "status": lambda run_id: SCENES["live"]["server"] | by_id[run_id],
    }
    app = console(answers=answers)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await pilot.press("r")
        for text in ("! exit 1", "! died", "! signal 9", "- stopped", "90 s", "port 30000  p"):
            await until_shown(pilot, text)
        await until_shown(pilot, "folder: /state/runs/verify-1")  # the first is chosen
        await pilot.press("w")
        await until_shown(pilot, "only a server can be watched")
        await pilot.press("j", "j")
        await until_shown(pilot, "folder: /state/runs/server-3")
        await until_shown(pilot, "outputs of layers 2, 30, 58")
        await pilot.press("w")
        await until(pilot, lambda: asked(app, "watch") == [{"run_id": "server-3"}], "watched")
        await pilot.press("G")
        await until_shown(pilot, "folder: /state/runs/plan-4")
        await pilot.press("g")
        await until_shown(pilot, "folder: /state/runs/verify-1")
        assert "hunter2" not in shown(app)


async def test_a_run_that_goes_on_lasts_longer_and_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [AT]
    monkeypatch.setattr(runs_screen, "now", lambda: clock[0])
    monkeypatch.setattr(runs_screen, "RENEW_SECONDS", 0.05)
    going = run("extract-1", state="running", exit=None)
    app = console(answers={"all": [going, run("verify-2")], "run": going})
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await pilot.press("r")
        await until_shown(pilot, "verify-2")
        await pilot.press("j")
        clock[0] = AT + 7110.0
        await until_shown(pilot, "2 h 0 m")
        assert shown(app).count("90 s") == 1  # what has ended lasts no longer
        assert app.screen.query_one(Table).cursor_row == 1


async def test_a_list_that_is_slow_is_waited_for_and_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_screen, "RENEW_SECONDS", 0.001)
    app = console(answers={"all": RUNS, "run": RUNS[0]})
    at_once, waiting = app.feed.call, []

    def slow(act: Any) -> Future[Any]:
        answer = at_once(act)
        if app.feed.asked[-1][0] != "all":  # type: ignore[attr-defined]
            return answer
        waiting.append(Future())
        return waiting[-1]

    monkeypatch.setattr(app.feed, "call", slow)
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("r")
        await until(pilot, lambda: waiting, "asked")
        for _ in range(30):
            await pilot.pause(0.001)
        assert len(waiting) == 1
        waiting[0].set_result(RUNS)
        await until_shown(pilot, "verify-1")
        await until(pilot, lambda: len(waiting) == 2, "asked again")


async def test_of_thousands_of_runs_the_newest_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_screen, "MOST", 3)
    monkeypatch.setattr(runs_screen, "RENEW_SECONDS", 0.01)
    answers = {"all": lambda most: RUNS[:most], "run": RUNS[0]}
    app = console(answers=answers)
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("r")
        await until_shown(pilot, "server-3")
        await until_shown(pilot, "the newest 3 runs; `layertap runs` lists the older ones too")
        assert "plan-4" not in shown(app)
        answers["all"] = lambda most: RUNS[:2]
        app.feed.answers |= answers  # type: ignore[attr-defined]
        await until(pilot, lambda: "the newest 3 runs" not in shown(app), "there are no older ones")
        assert "extract-2" in shown(app)


@pytest.mark.parametrize(("width", "lasted"), [(80, False), (100, True), (160, True)])
async def test_what_a_run_is_of_has_room_at_every_width(width: int, lasted: bool) -> None:
    runs = [
        run("extract-20261129-140200-e5f6", details={"output": "/data/hs/kimi-v3"}),
        run("server-20261129-135548-a1b2", details={"profile": "kimi-k2_5-int4-8x"}, port=30000),
    ]
    app = console(answers={"all": runs, "run": runs[0]})
    async with app.run_test(size=(110, 30)) as pilot:
        await pilot.press("r")
        await until_shown(pilot, "lasted")
        await pilot.resize_terminal(width, 30)
        await until(pilot, lambda: ("lasted" in head(app)) == lasted, "columns follow the width")
        assert "/data/hs/kimi-v3" in shown(app)
        assert "port 30000  kimi-k2" in shown(app)
        await until_shown(pilot, ", lasted 90 s")


def head(app: Any) -> str:
    return next((row for row in shown(app).splitlines() if "began" in row), "lasted?")
