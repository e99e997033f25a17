"""What the logs of the extractions say of one sample."""

from __future__ import annotations

from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from backends.sglang import mask_text
from console.tui.screens.dialogs import Dialog
from console.tui.widgets.panel import line


class SampleLog(Dialog[None]):
    """The lines that name it, and those around them."""

    DEFAULT_CSS = "SampleLog .dialog { width: 96%; height: auto; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,l,q", "dismiss", "Close", id="sample_log.close"),
        Binding("j,down", "scroll(1)", show=False, id="sample_log.down"),
        Binding("k,up", "scroll(-1)", show=False, id="sample_log.up"),
    ]

    def __init__(self, number: int, logs: list[dict[str, Any]]) -> None:
        super().__init__()
        self.number, self.logs = number, logs

    def compose(self) -> ComposeResult:
        """The lines."""
        with VerticalScroll(classes="dialog", can_focus=False) as dialog:
            dialog.border_title = f"What the logs say of sample {self.number:,}"
            dialog.border_subtitle = "esc closes"
            yield Static(Content("\n").join(log_lines(self.number, self.logs)))

    def action_scroll(self, lines: int) -> None:
        """Scroll them."""
        self.query_one(VerticalScroll).scroll_relative(y=lines, animate=False)


def log_lines(number: int, logs: list[dict[str, Any]]) -> list[Content]:
    """The logs one after the other, secrets masked."""
    if not logs:
        return [
            line(
                (
                    f"no log here names sample {number:,}: it was neither drawn again nor has it failed",
                    "$foreground-muted",
                )
            )
        ]
    lines = []
    for log in logs:
        lines.append(line((log["run"], "bold"), (f"  {log['log']}", "$foreground-muted")))
        if log["left_out"]:
            lines.append(line((f"{log['left_out']:,} earlier lines are only in the file", "$foreground-muted")))
        for one in log["lines"]:
            style = "$text-error" if one["named"] else "$foreground-muted"
            lines.append(line((f"{one['line']:>7}  ", "$foreground-muted"), (mask_text(one["text"]), style)))
    return lines
