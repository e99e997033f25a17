"""The console in a real terminal, on a host behind a real sshd, by keys alone: launch, watch, extract, lose the link,
come back, leave, come back, stop.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import until
from remote import Console, write_rows
from sshd import Relay, Sshd
from terminal import Terminal

from backends.ports import free_port

ROWS = 400
SLOW = 300.0  # seconds that a busy machine may take for an engine's start


@pytest.fixture
def terminal(engine_console: Console) -> Iterator[Callable[[], Terminal]]:
    started: list[Terminal] = []

    def start() -> Terminal:
        started.append(
            Terminal([Path(sys.executable).with_name("layertap")], engine_console.environment, engine_console.folder)
        )
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.mark.slow
def test_a_day_at_the_console(
    engine_console: Console, terminal: Callable[[], Terminal], relay: Relay, tmp_path: Path
) -> None:
    rows, output, port = write_rows(tmp_path / "rows.jsonl", ROWS), tmp_path / "dataset", free_port()
    shown = terminal()
    shown.until("live", "no server of ours ever ran here")

    # Launch.
    shown.press("s")
    shown.until("choose a profile")
    shown.press("Enter")
    shown.until("embedded-deepseek-v3")
    shown.type("embedded-ll")
    shown.press("Enter")
    shown.until("--port 30000")
    shown.tab()
    shown.tab()
    shown.type(str(port))
    shown.until("--disable-radix-cache", f"--port {port}")
    shown.press("C-l")
    shown.until("STARTING", "embedded-llama", seconds=SLOW)
    shown.until("READY", "tap in, 3 layers", f"port {port}", seconds=SLOW)

    # Its log.
    shown.press("l")
    shown.until("The server is fired up and ready to roll!", "nothing missing")
    shown.press("Escape")
    shown.until("Extraction")  # with another key right behind it, Escape would be Alt

    # Extract: a form, a plan, a start.
    shown.press("x")
    shown.until("New extraction")
    shown.type(str(rows))
    shown.tab()
    shown.type(str(output))
    shown.press("C-r")
    shown.until(f"{ROWS} rows · {ROWS} good", seconds=SLOW)
    shown.press("C-l")
    shown.until("RUNNING", seconds=SLOW)

    # The link goes, and comes.
    relay.refuses = True
    relay.cut()
    shown.until("reconnecting")
    relay.refuses = False
    shown.until("+ live")
    shown.until("DONE", f"{ROWS} / {ROWS}", seconds=SLOW)

    # Leave: nothing stops. Come back: everything is there.
    shown.press("Escape")
    shown.until("Dumps")
    shown.press("C-q")
    shown.wait(lambda _: shown.code is not None, "its end")
    assert shown.code == 0
    assert "goes on; `layertap --host gpu` comes back to it" in shown.screen
    again = terminal()
    again.until("READY", "DONE", f"{ROWS} / {ROWS}", seconds=SLOW)
    again.press("a")
    again.until("0", "written", "rows.jsonl:1")
    again.press("Escape")
    again.until("Dumps")

    # Stop.
    again.press("K")
    again.until("Stop the server")
    again.press("Right", "Enter")
    again.until("nothing left", seconds=SLOW)
    again.until("STOPPED")
    again.press("C-q")
    again.wait(lambda _: again.code is not None, "its end")
    assert again.code == 0
    assert "goes on" not in again.screen, again.screen
    report = engine_console.json("verify", output)
    assert (report["samples"], report["verified"], report["failed"]) == (ROWS, ROWS, 0)
    until(lambda: engine_console.json("runs")["runs"][-1]["state"] == "exited", "the server is gone")


def test_a_dead_link_holds_up_no_key(sshd: Sshd, relay: Relay, tmp_path: Path) -> None:
    """Frozen, not cut: nobody says that anything is wrong, and the console is as quick as ever."""

    remote = Console(tmp_path / "console", sshd, sys.executable, port=relay.port)
    shown = Terminal([Path(sys.executable).with_name("layertap")], remote.environment, remote.folder, (80, 24))
    try:
        shown.until("+ live")
        relay.freeze()
        for key, text in (("?", "Everywhere"), ("r", "began")):
            shown.press(key)
            shown.until(text, seconds=10)
            shown.press("Escape")
            shown.until_gone(text, seconds=10)
        shown.until("stale for")
        shown.press("C-q")
        shown.wait(lambda _: shown.code is not None, "its end", seconds=10)
        assert shown.code == 0
    finally:
        relay.thaw()
        shown.close()
