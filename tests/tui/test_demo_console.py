"""Leaving the demo's console."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from consoles import look, shown, until, until_shown
from scenes import AT, SCENES, MadeFeed, server, snapshot

from console.config import ConsoleConfig
from console.tui.app import Hosts
from console.tui.demo import DemoConsole

pytestmark = pytest.mark.asyncio
OURS = server()["id"]


def demo_console(scene: str) -> Any:
    """A console of a demo that is done; its server is the scene's."""
    made = SimpleNamespace(server={"id": OURS}, run=lambda: None, stop=lambda: None, outcome=dict)
    hosts = Hosts(["gpu-host-1"], lambda name: MadeFeed(SCENES[scene], name), look)
    return DemoConsole(hosts, "gpu-host-1", ConsoleConfig(animations=False), lambda *_: made)  # type: ignore[arg-type]


async def test_a_running_server_is_stopped_after_a_question() -> None:
    app = demo_console("live")
    async with app.run_test(notifications=True) as pilot:
        await until_shown(pilot, "the demo is done")
        await pilot.press("ctrl+q")
        await until_shown(pilot, "Stop it and leave")
        assert "Cancel" in shown(app)  # the message that it is done does not lie over it


@pytest.mark.parametrize("end", [{"code": None, "signal": 15, "at": AT}, {"code": 1, "signal": None, "at": AT}])
async def test_nothing_is_asked_where_it_is_stopped_already(
    monkeypatch: pytest.MonkeyPatch, end: dict[str, Any]
) -> None:
    monkeypatch.setitem(SCENES, "made", snapshot(server=server(state="exited", exit=end)))
    app = demo_console("made")
    async with app.run_test(notifications=True) as pilot:
        await until_shown(pilot, "the demo is done")
        await pilot.press("ctrl+q")
        await until(pilot, lambda: app._exit, "left")
