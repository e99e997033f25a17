"""The screens of extraction and samples as pictures, at three sizes. Taken anew as `test_pictures.py` says."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from consoles import until_settled, until_shown
from scenes import extraction
from screens_shown import (
    OUTPUT,
    PLAN,
    ROWS,
    MadeJobs,
    ended,
    made_console,
    page,
    quick,
    seen,
    with_extraction,
)
from textual.pilot import Pilot
from textual.widgets import Input

from console.tui.screens.sample import SampleScreen

SIZES = [(80, 24), (120, 40), (200, 60)]
FOLDER = {"path": "/data/rows", "left_out": 0, "entries": [
    {"name": "older", "folder": True, "bytes": None},
    {"name": "gsm-mix.jsonl", "folder": False, "bytes": 168_906_000},
]}  # fmt: skip
__all__ = ["quick"]

Go = Callable[[Pilot[Any]], Awaitable[None]]


@pytest.fixture(autouse=True)
def fixed(monkeypatch: pytest.MonkeyPatch, quick: None) -> None:
    """No cursor that blinks, and one time zone."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    monkeypatch.setattr("textual.widgets.Input.cursor_blink", False, raising=False)


def keys(*pressed: str, text: str) -> Go:
    """Press these, and wait for a text."""

    async def go(pilot: Pilot[Any]) -> None:
        await until_shown(pilot, "READY")
        await pilot.press(*pressed)
        await until_shown(pilot, text)

    return go


async def plan(pilot: Pilot[Any]) -> None:
    """A form with its plan."""
    await keys("x", text="New extraction")(pilot)
    pilot.app.screen.query_one("#rows", Input).value = ROWS
    pilot.app.screen.query_one("#output", Input).value = OUTPUT
    await pilot.pause()
    await pilot.press("ctrl+r")
    await until_shown(pilot, "24 good")


async def samples(pilot: Pilot[Any]) -> None:
    """The samples, with one that failed under the cursor."""
    await keys("a", text="4,402")(pilot)
    await pilot.press("j", "j")
    await until_shown(pilot, "! sample 4,402")


async def sample(pilot: Pilot[Any]) -> None:
    """One sample, two rows of which are odd."""
    await until_shown(pilot, "READY")
    await pilot.app.push_screen(SampleScreen(pilot.app.feed, OUTPUT, 7))  # type: ignore[attr-defined]
    await until_shown(pilot, "'<|user|>'")


async def browser(pilot: Pilot[Any]) -> None:
    """The folders of the host."""
    await keys("x", text="New extraction")(pilot)
    await pilot.press("ctrl+o")
    await until_shown(pilot, "gsm-mix.jsonl")


SHOWN: dict[str, tuple[dict[str, Any] | None, Go]] = {
    "running": (extraction(), keys("x", text="RUNNING")),
    "ended": (
        ended(pending=0, sent=0, written=9_998, tokens_per_second=None, eta_seconds=None),
        keys("x", text="f draws"),
    ),
    "form": (None, keys("x", text="New extraction")),
    "plan": (None, plan),
    "browser": (None, browser),
    "samples": (ended(), samples),
    "sample": (ended(), sample),
}


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("name", SHOWN)
def test_extraction_and_samples(
    snap_compare: Any, monkeypatch: pytest.MonkeyPatch, name: str, size: tuple[int, int]
) -> None:
    run, go = SHOWN[name]
    with_extraction(monkeypatch, run)
    app = made_console(MadeJobs(plan=PLAN, sample=seen()), {"samples": page(), "folder": FOLDER})

    async def go_and_settle(pilot: Any) -> None:
        await go(pilot)
        await until_settled(pilot)

    assert snap_compare(app, terminal_size=size, run_before=go_and_settle)
