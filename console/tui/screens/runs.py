"""Everything that ran on this host: when, how long, how it ended, and what happened in it."""

from __future__ import annotations

import time
from typing import Any

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Static

from backends.sglang import mask_text
from console.feed import Feed
from console.session import going_on
from console.tui.screens.base import HostScreen
from console.tui.widgets.panel import line
from console.tui.widgets.table import Table, cell
from console.words import figures, of_run, of_server

RENEW_SECONDS = 2.0
COLUMNS = (("run", 34), ("state", 12), ("began", 12), ("lasted", 10), ("what", 60))


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
        table = Table(zebra_stripes=True, id="runs")
        for name, width in COLUMNS:
            table.add_column(name, width=width, key=name)
        yield table
        with VerticalScroll(id="one", can_focus=False):
            yield Static(markup=False, id="said")

    def on_mount(self) -> None:
        """Ask, again and again."""
        self.query_one(Table).focus()
        self.run_worker(self._renew(), exclusive=True, group="runs")
        self.set_interval(RENEW_SECONDS, lambda: self.run_worker(self._renew(), exclusive=True, group="runs"))

    async def _renew(self) -> None:
        if self.feed.session is None:
            return
        found = await self.ask_host(lambda session: session.host.request("all"))
        if found is None:
            return
        table = self.query_one(Table)
        if found == self._runs:  # but time goes on
            for run in filter(going_on, found):
                for (name, _), text in zip(COLUMNS, row(run, now()), strict=True):
                    table.update_cell(run["id"], name, cell(text))
            return
        chosen = self._chosen()
        self._runs = found
        table.clear()
        for run in found:
            table.add_row(*map(cell, row(run, now())), key=run["id"])
        ids = [run["id"] for run in found]
        if chosen in ids:
            table.move_cursor(row=ids.index(chosen), animate=False)

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
            self.run_worker(self._show_one(event.row_key.value), exclusive=True, group="one")

    async def _show_one(self, run_id: str) -> None:
        kind = "status" if run_id.startswith("server-") else "run"
        run = await self.ask_host(lambda session: session.host.request(kind, run_id=run_id))
        if run is not None:
            self.query_one("#said", Static).update(line("\n".join(told(run))))


def now() -> float:
    """Seconds since the epoch."""
    return time.time()


def row(run: dict[str, Any], at: float) -> list[str]:
    """A run's cells."""
    ended = run["exit"]
    if ended is None:
        state = {"running": "~ running", "starting": "~ starting", "died": "! died"}.get(run["state"], run["state"])
    elif ended["signal"] is not None:
        state = f"- signal {ended['signal']}" if run["stop_asked"] else f"! signal {ended['signal']}"
    else:
        state = "+ ended" if ended["code"] == 0 else "- stopped" if run["stop_asked"] else f"! exit {ended['code']}"
    lasted = (ended["at"] if ended else at) - run["created"]
    known = ended is not None or going_on(run)
    what = run["details"].get("profile") or run["details"].get("output") or run["details"].get("rows") or ""
    port = f"port {run['port']}  " if run["port"] else ""
    return [run["id"], state, _when(run["created"], at), figures.duration(lasted) if known else "?", f"{port}{what}"]


def told(run: dict[str, Any]) -> list[str]:
    """One run in lines: how it went, what happened, where its files are, and what was started."""
    lines = [*of_run.run(run)]
    if "phases" in run:
        lines += of_server.server(run)
    elif run["kind"] == "extract":
        lines += of_run.extraction(run)
    lines += [f"{name}: {value}" for name, value in run["details"].items() if name not in ("layers", "layers_words")]
    return [*lines, f"folder: {run['folder']}", f"argv: {mask_text(' '.join(run['argv']))}"]


def _when(created: float, at: float) -> str:
    day = "%H:%M:%S" if time.localtime(created)[:3] == time.localtime(at)[:3] else "%d %b %H:%M"
    return time.strftime(day, time.localtime(created))
