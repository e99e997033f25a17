"""One sample: tokens with the loss mask, norms of every state, odd rows, and what verification found."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from backends.errors import LayertapError
from console.extraction import trusted_model
from console.feed import Feed
from console.tui.jobs import finish_job
from console.tui.screens.base import HostScreen
from console.tui.widgets.panel import SIGN_STYLES, line
from console.tui.widgets.states import StatesPanel
from console.tui.widgets.token_table import TokenTable
from console.words import figures, of_dataset


class SampleScreen(HostScreen):
    """Asks the host for the sample, and shows it."""

    AUTO_FOCUS = "TokenTable"
    DEFAULT_CSS = """
    SampleScreen #head { height: auto; max-height: 30%; padding: 0 1; }
    SampleScreen #states { height: auto; max-height: 50%; scrollbar-size-vertical: 1; }
    SampleScreen TokenTable { height: 1fr; min-height: 4; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "leave", "Back", id="view.dashboard"),
        Binding("n", "step(1)", "Next sample", id="sample.next"),
        Binding("p", "step(-1)", "Previous", id="sample.previous"),
        Binding("e", "odd", "Next odd row", id="sample.odd"),
    ]

    def __init__(self, feed: Feed, path: str, number: int) -> None:
        super().__init__(feed)
        self.path, self.number = path, number

    def compose_body(self) -> ComposeResult:
        """See `HostScreen`."""
        with VerticalScroll(id="head", can_focus=False):
            yield Static(markup=False, id="said")
        with VerticalScroll(id="states", can_focus=False):
            yield StatesPanel()
        yield TokenTable(zebra_stripes=True)

    def on_mount(self) -> None:
        """Ask for it."""
        self._look()

    def _look(self) -> None:
        self.run_worker(self._read(self.number), exclusive=True, group="sample")

    async def _read(self, number: int) -> None:
        said = self.query_one("#said", Static)
        begun = time.monotonic()

        def tell() -> None:
            waited = f"{time.monotonic() - begun:.0f} s"
            said.update(line(("~ ", "$text-accent"), f"reading sample {number:,} of {self.path} …  {waited}"))

        tell()
        ticking = self.set_interval(0.5, tell)
        job = {
            "output": self.path,
            "number": number,
            "trusted_model": trusted_model(self.feed.snapshot()["server"]),
        }
        try:
            _, seen = await finish_job(self.feed, "sample", job)
        except LayertapError as error:
            said.update(line((f"! {error}", "$text-error")))
            return
        finally:
            ticking.stop()
        said.update(Content("\n").join(head_lines(seen)))
        panel = self.query_one(StatesPanel)
        panel.see(seen)
        self.call_after_refresh(lambda: panel.show(self.feed.snapshot()))
        await self.query_one(TokenTable).fill(seen)

    def action_step(self, by: int) -> None:
        """The sample beside this one."""
        if self.number + by >= 0:
            self.number += by
            self._look()

    def action_odd(self) -> None:
        """To the next odd row."""
        table = self.query_one(TokenTable)
        row = table.next_odd()
        if row is None:
            self.notify("no row is odd")
        else:
            table.move_cursor(row=row, animate=False)

    def action_leave(self) -> None:
        """Back to where it was opened."""
        self.app.pop_screen()


def head_lines(seen: dict[str, Any]) -> list[Content]:
    """The sample in a line, whether it is as it should be, and what is not shown."""
    head = of_dataset.sample_head(seen)
    lines = [line((head, f"bold {SIGN_STYLES.get(head[0], '')}"))]
    for failure in seen["failures"]:
        where = f"{failure['format']}: " if failure["format"] else ""
        lines.append(line((f"! {where}{failure['reason']}", "$text-error")))
    files = ", ".join(f"{file['format']} {figures.size(file['bytes'])}" for file in seen["files"])
    if not seen["failures"]:
        lines.append(line(("+ verified", "$text-success"), f" in {files}; the figures are of {seen['read']}"))
    elif files:
        lines.append(line((f"files: {files}; the figures are of {seen['read'] or 'none'}", "$foreground-muted")))
    if seen["no_text"]:
        lines.append(line((f"no texts: {seen['no_text']}", "$foreground-muted")))
    if seen["left_out"]:
        text = f"the first {len(seen['tokens']):,} tokens; {seen['left_out']:,} more are not shown"
        lines.append(line((text, "$text-warning")))
    return lines
