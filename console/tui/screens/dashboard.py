"""The first screen: one look answers whether the link, the server, the GPUs, the dumps and the extraction are well."""

from __future__ import annotations

from typing import Any, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Grid, VerticalScroll
from textual.widgets import Static

from console.tui.screens.base import HostScreen
from console.tui.widgets.overview import DumpsPanel, ExtractionPanel, GpuPanel, ServerPanel, TimelinePanel
from console.tui.widgets.panel import Panel, line


class Banner(Static):
    """What is wrong now, over everything else; not there while nothing is."""

    def show(self, now: dict[str, Any]) -> None:
        """Draw this snapshot."""
        said = worst(now)
        self.display = said is not None
        if said:
            self.update(line(("! ", "bold"), said))


def worst(now: dict[str, Any]) -> str | None:
    """The one thing to look at first."""
    link, server, extraction = now["link"], now["server"], now["extraction"]
    if link["state"] == "failed":
        return f"{link['why']} -- R connects again"
    if now["trouble"]:
        return str(now["trouble"])
    verdict = server["verdict"] if server else None
    if verdict and verdict["verdict"] in ("crashed", "unknown", "hang_suspected", "degraded"):
        name = verdict["verdict"].replace("_", " ")
        return f"server {name}: {verdict['cause'] or 'see its evidence'}" + (
            f" -> {verdict['remedy']}" if verdict["remedy"] else ""
        )
    dumps = now["dumps"]
    if dumps and dumps["seconds_to_full"] is not None and dumps["seconds_to_full"] < 600:
        return f"the dumps' tmpfs is full in {dumps['seconds_to_full']:.0f} s; is the extraction running?"
    if extraction and extraction["state"] == "died":
        return "the extraction died; start it again with x, nothing is lost"
    return None


class DashboardScreen(HostScreen, inherit_bindings=False):
    """All panels at once."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j,down", "scroll(2)", "Down", show=False, id="dashboard.down"),
        Binding("k,up", "scroll(-2)", "Up", show=False, id="dashboard.up"),
    ]

    def compose_body(self) -> ComposeResult:
        """See `HostScreen`."""
        yield Banner(markup=False)
        with VerticalScroll(can_focus=False), Grid():
            yield ServerPanel(id="server")
            yield ExtractionPanel(id="extraction")
            yield GpuPanel(self.feed, id="gpus")
            yield DumpsPanel(id="dumps")
            yield TimelinePanel(self.feed, id="timeline")

    def action_scroll(self, rows: int) -> None:
        """Where the panels are more than the screen holds."""
        self.query_one(VerticalScroll).scroll_relative(y=rows, animate=False)

    def show(self, now: dict[str, Any]) -> None:
        """See `HostScreen`."""
        super().show(now)
        self.query_one(Banner).show(now)

    @on(Panel.Grown)
    def level(self) -> None:
        """Panels side by side are equally high."""
        for pair in (("#server", "#extraction"), ("#gpus", "#dumps")):
            panels = [self.query_one(name, Panel) for name in pair]
            tallest = max(panel.height for panel in panels) if not self.has_class("-narrow") else 0
            for panel in panels:
                panel.styles.min_height = tallest or None
