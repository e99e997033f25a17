"""What the tests of logs share: an app around one widget, what is on the screen, and waiting for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from textual.app import App, ComposeResult
from textual.pilot import Pilot
from textual.widget import Widget

from console.log_buffer import LogBuffer
from console.tui.widgets.log_view import LogView

PATIENCE = 10.0  # seconds


class ViewApp(App[None]):
    """One log and nothing else."""

    def __init__(self, buffer: LogBuffer) -> None:
        super().__init__()
        self.view = LogView(buffer)

    def compose(self) -> ComposeResult:
        yield self.view

    def on_mount(self) -> None:
        self.view.focus()


def rows(widget: Widget) -> list[str]:
    """The text of a widget as it is drawn, a string a row."""
    return [widget.render_line(y).text.rstrip() for y in range(widget.size.height)]


def text(widget: Widget) -> str:
    return "\n".join(rows(widget))


def current(view: LogView) -> str:
    """The text of the row that the cursor is on; "" while there is none."""
    return next((row[2:] for row in rows(view) if row[1:2] == "▌"), "")


async def until(pilot: Pilot[None], condition: Callable[[], object], what: str = "") -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"still not: {what}\n" + text(pilot.app.screen)
        await pilot.pause()
        await asyncio.sleep(0.005)


def numbered(first: int, next: int) -> bytes:
    return b"".join(b"line %d\n" % number for number in range(first, next))
