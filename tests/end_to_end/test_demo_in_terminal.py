"""`layertap demo` in a terminal: the console with the demo in it, left by a key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command import Layertap
from terminal import Terminal

pytestmark = pytest.mark.slow


@pytest.fixture
def terminal(layertap: Layertap) -> Iterator[Callable[..., Terminal]]:
    started: list[Terminal] = []

    def start(*words: str | Path) -> Terminal:
        environment = {name: value for name, value in layertap.env.items() if name != "CI"}
        started.append(Terminal([*layertap.command, *words], environment, layertap.folder))
        return started[-1]

    yield start
    for one in started:
        one.close()


def test_the_demo_runs_in_the_console_and_ends_with_it(layertap: Layertap, terminal: Callable[..., Terminal]) -> None:
    shown = terminal("demo", "--output", "demo-shown")
    shown.until("STARTING", "embedded-kimi-k2_5", seconds=300)
    shown.until("READY", "outputs of layers 2, 30, 58", "tap in, 3 layers", seconds=300)
    shown.until("DONE", "24 / 24", seconds=300)
    shown.until("the demo is done", seconds=300)
    shown.press("C-q")
    shown.until("Leave, and stop the demo's server?")
    shown.press("Enter")  # Cancel is first
    shown.until_gone("Leave, and stop")
    assert shown.code is None
    shown.press("C-q")
    shown.until("Leave, and stop the demo's server?")
    shown.press("Right", "Enter")
    shown.wait(lambda _: shown.code is not None, "its end", 120)
    assert shown.code == 0
    assert "demo: 24 samples written, 24 verified, 0 failed; native and specforge in" in shown.screen
    assert layertap.run_of("server")["state"] == "exited"


def test_leaving_early_stops_its_server_and_is_no_success(
    layertap: Layertap, terminal: Callable[..., Terminal]
) -> None:
    shown = terminal("demo", "--output", "demo-left")
    shown.until("STARTING", seconds=300)
    shown.press("C-q")
    shown.until("Leave, and stop the demo's server?")
    shown.press("Right", "Enter")
    shown.wait(lambda _: shown.code is not None, "its end", 120)
    assert shown.code not in (None, 0)
    assert "the demo was left before it was done; its server is stopped" in shown.screen
    assert layertap.run_of("server")["state"] == "exited"
