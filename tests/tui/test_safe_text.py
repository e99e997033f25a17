"""Whatever stands in rows, logs and files, a screen shows it, and the terminal obeys none of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from consoles import console, shown, until_shown
from scenes import SCENES, alarm, extraction, snapshot
from screens_shown import OUTPUT, PLAN, ROWS, MadeJobs, made_console, with_extraction
from test_try_and_runs import RUN, TRIED, at_once, run
from textual.widgets import Input, Static

from console.words.printable import is_safe

SIZE = (159, 45)
EVIL = "\x1b[2J\x1b]0;pwned\x07\0\r\u202eend"
SEEN = r"\x1b[2J\x1b]0;pwned\x07\x00\r\u202eend"

pytestmark = pytest.mark.asyncio
__all__ = ["at_once"]


def safe(app: Any) -> str:
    """The text on the screen, of which a terminal obeys nothing."""
    text = shown(app)
    assert [char for char in text if char != "\n" and not is_safe(char)] == []
    return text


async def test_a_plan_shows_rows_with_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = copy.deepcopy(PLAN)
    plan["preview"]["parts"] = [[f"user {EVIL}", False], [f"loss {EVIL}", True]]
    plan["bad_rows"][0]["reason"] = f"bad {EVIL}"
    plan["alarms"][0]["rows"][0]["seen"] = f"odd {EVIL}"
    with_extraction(monkeypatch, None)
    app = made_console(MadeJobs(plan=plan))
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("x")
        await until_shown(pilot, "New extraction")
        app.screen.query_one("#rows", Input).value = ROWS
        app.screen.query_one("#output", Input).value = OUTPUT
        app.screen.query_one("#output", Input).focus()
        await pilot.press("enter")
        await until_shown(pilot, "is in the loss, the rest is not")
        text = safe(app)
    assert [name for name in ("user", "loss", "bad", "odd") if f"{name} {SEEN}" not in text] == []


async def test_the_dashboard_and_its_toasts(monkeypatch: pytest.MonkeyPatch) -> None:
    run = extraction(progress={"failures": [{"sample": 1, "reason": EVIL}]})
    run["details"]["output"] = f"/data/{EVIL}"
    alarms = [alarm("x", "critical", f"cause {EVIL}", "remedy", "evidence")]
    monkeypatch.setitem(SCENES, "made", snapshot(extraction=run, alarms=alarms))
    app = console("made")
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await until_shown(pilot, f"cause {SEEN}")
        app.notify(f"toast {EVIL}", markup=False)
        await until_shown(pilot, "toast ")
        assert f"toast {SEEN[:12]}" in safe(app)


async def test_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [run("plan-1", details={"rows": f"/r/{EVIL}"}, argv=["python", EVIL])]
    app = console(answers={"all": runs, "run": runs[0]})
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("r")
        await until_shown(pilot, "argv: ")
        text = safe(app)
    assert f"rows: /r/{SEEN}" in text
    assert f"argv: python {SEEN}" in text


async def test_an_error_and_the_fields() -> None:
    ended = RUN | {"state": "exited", "exit": {"code": 0, "signal": None, "at": 0.0}}
    result = TRIED | {"findings": [{"fatal": False, "what": f"what {EVIL}", "remedy": "none"}]}
    app = console(answers={"start": RUN, "run": ended | {"result": result}})
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("t")
        await until_shown(pilot, "a prompt")
        app.screen.query_one("#text", Input).value = f"typed {EVIL}"
        await pilot.press("enter")
        await until_shown(pilot, f"what {SEEN}")
        safe(app)


async def test_even_a_widget_that_nobody_made_safe() -> None:
    app = console()
    async with app.run_test(size=SIZE) as pilot:
        await until_shown(pilot, "Server")
        await app.screen.mount(Static(f"raw {EVIL} after\ud800\ue000 all", markup=False), before=0)
        await until_shown(pilot, "raw ")
        assert "raw [2J]0;pwnedend after\ufffd\ufffd all" in safe(app)
