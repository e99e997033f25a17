"""The hosts that can be reached; one of them is shown by the whole console."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.message import Message
from textual.widgets import DataTable, Static

from console.feed import Feed, aside
from console.tui.screens.base import HostScreen
from console.tui.widgets.panel import line
from console.tui.widgets.table import Table, cell
from console.words import of_host

ASKING = "~ asking …"


class HostsScreen(HostScreen):
    """Every known host, each asked once; nobody is asked for a password meanwhile."""

    BINDINGS = [  # noqa: RUF012
        Binding("u", "look", "Ask again", id="hosts.look"),
    ]

    class Chosen(Message):
        """The console is to show this host."""

        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

    def __init__(self, feed: Feed, names: list[str], look: Callable[[str], dict[str, Any]]) -> None:
        super().__init__(feed)
        self.names = names
        self.look = look

    def compose_body(self) -> ComposeResult:
        """See `HostScreen`."""
        table = Table(id="hosts")
        table.add_column("host", width=24, key="host")
        table.add_column("how it is", key="state")
        yield table
        yield Static(line(("Enter shows that host. Runs on this one go on.", "$foreground-muted")), markup=False)

    def on_mount(self) -> None:
        """Ask all of them."""
        table = self.query_one(Table)
        for name in self.names:
            table.add_row(cell(name), cell(ASKING), key=name)
        table.focus()
        self.action_look()

    def action_look(self) -> None:
        """Ask every host how it is."""
        for name in self.names:
            self.run_worker(self._look(name), group=name, exclusive=True)

    async def _look(self, name: str) -> None:
        table = self.query_one(Table)
        table.update_cell(name, "state", cell(ASKING))
        found = await asyncio.wrap_future(aside(lambda: self.look(name)))
        here = "  (shown)" if name == self.feed.name else ""
        said = f"{' '.join(of_host.host_state(found))}{here}"
        table.update_cell(name, "state", cell(said), update_width=True)

    @on(DataTable.RowSelected)
    def chosen(self, event: DataTable.RowSelected) -> None:
        """Show that host."""
        if event.row_key.value and event.row_key.value != self.feed.name:
            self.post_message(self.Chosen(event.row_key.value))
