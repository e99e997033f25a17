"""The first screen: one look answers whether the link, the server, the GPUs, the dumps and the extraction are well."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Grid, VerticalScroll

from console.tui.screens.base import HostScreen
from console.tui.widgets.overview import DumpsPanel, ExtractionPanel, GpuPanel, ServerPanel, TimelinePanel
from console.tui.widgets.panel import Panel


class DashboardScreen(HostScreen, inherit_bindings=False):
    """All panels at once."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j,down", "scroll(2)", "Down", show=False, id="dashboard.down"),
        Binding("k,up", "scroll(-2)", "Up", show=False, id="dashboard.up"),
    ]

    def compose_body(self) -> ComposeResult:
        """See `HostScreen`."""
        with VerticalScroll(can_focus=False), Grid():
            yield ServerPanel(id="server")
            yield ExtractionPanel(id="extraction")
            yield GpuPanel(self.feed, id="gpus")
            yield DumpsPanel(id="dumps")
            yield TimelinePanel(self.feed, id="timeline")

    def action_scroll(self, rows: int) -> None:
        """Where the panels are more than the screen holds."""
        self.query_one(VerticalScroll).scroll_relative(y=rows, animate=False)

    @on(Panel.Grown)
    def level(self) -> None:
        """Panels side by side are equally high."""
        for pair in (("#server", "#extraction"), ("#gpus", "#dumps")):
            panels = [self.query_one(name, Panel) for name in pair]
            tallest = max(panel.height for panel in panels) if not self.has_class("-narrow") else 0
            for panel in panels:
                panel.styles.min_height = tallest or None
