"""Everything that ran on this host: when, how long, how it ended, and what happened in it."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

from rich.cells import cell_len
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Static
from textual.worker import WorkType

from backends.sglang import mask_text
from console.feed import Feed
from console.session import going_on
from console.tui.screens.base import HostScreen
from console.tui.widgets.panel import line
from console.tui.widgets.table import Table, cell
from console.words import of_run, of_server

RENEW_SECONDS = 2.0
MOST = 500  # runs in the table; a host may have thousands, and all of them are asked for again and again
COLUMNS = {"run": 27, "state": 10, "began": 8, "lasted": 10, "what": 16}  # and how wide each is at least
PADDING = 2
SCROLLBAR = 2


class RunsScreen(HostScreen):
    """A table of runs, and the chosen one below it."""

    BINDINGS = [  # noqa: RUF012
        Binding("w", "watch", "Watch this server", id="runs.watch"),
    ]

    def __init__(self, feed: Feed) -> None:
        super().__init__(feed)
        self._runs: list[dict[str, Any]] = []

    def compose_body(self) -> ComposeResult:
        """See `HostScreen`."""
        yield Static(f"the newest {MOST} runs; `layertap runs` lists the older ones too", markup=False, id="older")
        yield Table(zebra_stripes=True, id="runs")
        with VerticalScroll(id="one", can_focus=False):
            yield Static(markup=False, id="said")

    def on_mount(self) -> None:
        """Ask, again and again."""
        self.query_one(Table).focus()
        self.run_worker(self._keep_renewing(), exclusive=True, group="runs")

    async def _keep_renewing(self) -> None:
        """An answer may take longer than the time between two: the next one is asked for once it is there."""
        while True:
            await self._renew()
            await asyncio.sleep(RENEW_SECONDS)

    async def _renew(self) -> None:
        if self.feed.session is None:
            return
        found = await self.ask_host(lambda session: session.host.request("all", most=MOST + 1))
        if found is None:
            return
        self.query_one("#older").display = len(found) > MOST
        found = found[:MOST]
        if found != self._runs:
            chosen = self._chosen()
            self._runs = found
            self._fill(chosen)
            return
        table = self.query_one(Table)
        for run in filter(going_on, found):  # time goes on
            for name, text in of_run.row(run, now()).items():
                if name in table.columns:
                    table.update_cell(run["id"], name, cell(text, overflow="ellipsis"))

    def _fill(self, chosen: str | None) -> None:
        """Columns for the width that there is, and a row a run; the cursor goes to the chosen one."""
        table = self.query_one(Table)
        rows = {run["id"]: of_run.row(run, now()) for run in self._runs}
        fitting = widths([*rows.values()], table.size.width)
        table.clear(columns=True)
        for name, width in fitting.items():
            table.add_column(name, width=width, key=name)
        for name, cells in rows.items():
            table.add_row(*(cell(cells[column], overflow="ellipsis") for column in fitting), key=name)
        if chosen in rows:
            table.move_cursor(row=[*rows].index(chosen), animate=False)

    def on_resize(self) -> None:
        """Columns follow the width."""
        self.call_after_refresh(lambda: self._fill(self._chosen()))

    def _chosen(self) -> str | None:
        table = self.query_one(Table)
        return self._runs[table.cursor_row]["id"] if 0 <= table.cursor_row < len(self._runs) else None

    def action_watch(self) -> None:
        """Show the chosen server on the dashboard."""
        chosen = self._chosen()
        if chosen is None or not chosen.startswith("server-"):
            self.notify("only a server can be watched; choose one", severity="warning")
            return
        self.feed.watch(chosen)
        self.notify(f"the dashboard shows {chosen}", markup=False)

    @on(DataTable.RowHighlighted)
    def chosen(self, event: DataTable.RowHighlighted) -> None:
        """Show the run under the cursor."""
        if event.row_key.value:
            show: WorkType[None] = partial(self._show_one, event.row_key.value)  # no coroutine before its time
            self.run_worker(show, exclusive=True, group="one")

    async def _show_one(self, run_id: str) -> None:
        kind = "status" if run_id.startswith("server-") else "run"
        run = await self.ask_host(lambda session: session.host.request(kind, run_id=run_id))
        if run is not None:
            self.query_one("#said", Static).update(line("\n".join(told(run))))


def now() -> float:
    """Seconds since the epoch."""
    return time.time()


def widths(rows: list[dict[str, str]], width: int) -> dict[str, int]:
    """Columns with their widths; what a run is of gets the rest, and where that is too little, `lasted` goes."""
    fitting = {name: max([least, *(cell_len(cells[name]) for cells in rows)]) for name, least in COLUMNS.items()}
    rest = width - sum(wide + PADDING for name, wide in fitting.items() if name != "what") - PADDING - SCROLLBAR
    if rest < COLUMNS["what"]:
        rest += fitting.pop("lasted") + PADDING
    return fitting | {"what": max(rest, COLUMNS["what"])}


def told(run: dict[str, Any]) -> list[str]:
    """One run in lines: how it went, what happened, where its files are, and what was started."""
    lines = [*of_run.run(run)]
    if "phases" in run:
        lines += of_server.server(run)
    elif run["kind"] == "extract":
        lines += of_run.extraction(run)
    lines += [f"{name}: {value}" for name, value in run["details"].items() if name not in ("layers", "layers_words")]
    return [*lines, f"folder: {run['folder']}", f"argv: {mask_text(' '.join(run['argv']))}"]
