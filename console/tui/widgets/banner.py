"""The one thing to look at first, on every screen of a host: what is wrong now, and what to do."""

from __future__ import annotations

from typing import Any

from textual.content import Content
from textual.widgets import Static

from console.tui.widgets.panel import line
from console.words import figures


class Banner(Static):
    """Not there while nothing is wrong."""

    DEFAULT_CSS = """
    Banner { background: $error 30%; color: $text; padding: 0 1; height: auto; max-height: 5; display: none; }
    Banner.-warning { background: $warning 25%; }
    """

    def __init__(self) -> None:
        super().__init__(markup=False)
        self._said: Content | None = None

    def show(self, now: dict[str, Any]) -> None:
        """Draw this snapshot."""
        said, warning = worst(now)
        if said != self._said:
            self._said = said
            self.display = said is not None
            self.set_class(warning, "-warning")
            self.update(said or "")


def worst(now: dict[str, Any]) -> tuple[Content | None, bool]:
    """The most severe thing, and whether it is only a warning."""
    link, extraction, alarms = now["link"], now["extraction"], now["alarms"]
    if link["state"] == "failed":
        return line(("! ", "bold"), f"{link['why']} -- R connects again"), False
    if now["trouble"]:
        return line(("! ", "bold"), str(now["trouble"])), False
    if alarms:
        return _alarm(alarms), alarms[0]["severity"] == "warning"
    if extraction and extraction["state"] == "died":
        return line(("! ", "bold"), "the extraction died; start it again with x, nothing is lost"), False
    return None, False


def _alarm(alarms: list[dict[str, Any]]) -> Content:
    first = alarms[0]
    more = f"  and {len(alarms) - 1} more (layertap status)" if len(alarms) > 1 else ""
    sign = "?" if first["severity"] == "warning" else "!"
    return line(
        (f"{sign} {first['cause']}", "bold"),
        f" since {figures.clock(first['since'])} ({first['evidence']}){more}\n",
        ("-> ", "bold"),
        first["remedy"],
    )
