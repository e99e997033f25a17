"""A console over a made feed, and what stands on its screen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any

from helpers import ROOT
from scenes import SCENES, MadeFeed
from textual._context import visible_screen_stack
from textual.app import App
from textual.pilot import Pilot
from textual.screen import Screen

from console.config import ConsoleConfig
from console.tui.app import Console, Hosts

PATIENCE = 15.0  # seconds
SETTLED = 5  # looks at a screen that stays as it is


def look(name: str) -> dict[str, Any]:
    return {"name": name, "state": "live", "why": None, "sglang": "0.5.16", "gpus": ["H200", "H200"]}


def console(
    scene: str = "live", answers: dict[str, Any] | None = None, config: ConsoleConfig | None = None, **known: Any
) -> Console:
    """A console that shows a scene; its feed is `app.feed`."""
    hosts = Hosts(["local", "gpu-host-1"], lambda name: MadeFeed(SCENES[scene], name, answers), look)
    return Console(hosts, "gpu-host-1", config or ConsoleConfig(animations=False), **known)


def ignored(name: str) -> bool:
    """Whether a checkout in which the console was started leaves this file alone."""
    return any(fnmatch(f"/{name}", pattern) for pattern in (ROOT / ".gitignore").read_text().splitlines())


def shown(app: Console) -> str:
    """The text on the screen, a line a row."""
    width, height = app.size
    rows = [[" "] * width for _ in range(height)]
    visible_screen_stack.set(app._background_screens)  # else a question is drawn over nothing, and kept that way
    for y, strip in enumerate(app.screen._compositor.render_strips()):
        text = "".join(segment.text for segment in strip)
        rows[y] = list(text)
    return "\n".join("".join(row).rstrip() for row in rows)


async def until(pilot: Pilot[Any], condition: Callable[[], object], what: str = "") -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"still not: {what}\n{shown(pilot.app)}"  # type: ignore[arg-type]
        await pilot.pause()
        await asyncio.sleep(0.01)


async def until_shown(pilot: Pilot[Any], text: str) -> None:
    """Wait until a text is on the screen."""
    await until(pilot, lambda: text in shown(pilot.app), f"shown: {text!r}")  # type: ignore[arg-type]


async def until_said(pilot: Pilot[Any], text: str) -> None:
    """Wait until words are on the screen, over however many lines."""
    await until(pilot, lambda: text in " ".join(shown(pilot.app).split()), f"said: {text!r}")  # type: ignore[arg-type]


def drawn(app: App[Any]) -> bool:
    """Whether a screen of ours stands there; Textual's own empty one comes before the first of them."""
    laid_out = type(app.screen) is not Screen and getattr(app.screen, "laid_out", True)
    return laid_out and bool(shown(app).strip())  # type: ignore[arg-type]


async def until_settled(pilot: Pilot[Any]) -> None:
    """Wait until the screen is laid out and draws the same again and again: sizes follow contents a little later."""
    before, same = "", 0
    deadline = time.monotonic() + PATIENCE
    while same < SETTLED:
        assert time.monotonic() < deadline, "the screen never settles"
        getattr(pilot.app, "show_now", lambda: None)()
        await pilot.pause()
        await asyncio.sleep(0.02)
        now = pilot.app.export_screenshot() if drawn(pilot.app) else ""
        same = same + 1 if now and now == before else 0
        before = now
