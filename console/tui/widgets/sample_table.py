"""A page of a dataset's samples as a table."""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from typing import Any, ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.message import Message

from console.tui.widgets.table import Table, cell, theme_style
from console.words import of_dataset

COLUMNS = (("sample", 9), ("state", 9), ("tokens", 7), ("from", 22), ("tries", 5), ("reason", None))
STYLES = {"sent": "text-accent", "written": "text-success", "failed": "text-error"}


class SampleTable(Table):
    """Holds one page; whoever moves beyond its ends asks for the next one."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "Open", id="samples.open")]

    class Beyond(Message):
        """Another page is wanted: "next", "previous", "first" or "last"."""

        def __init__(self, which: str) -> None:
            super().__init__()
            self.which = which

    def on_mount(self) -> None:
        """Its columns."""
        self.samples: list[dict[str, Any]] = []
        for name, width in COLUMNS:
            right = name in ("sample", "tokens", "tries")
            self.add_column(Text(name, justify="right" if right else "left"), width=width, key=name)

    @property
    def current(self) -> dict[str, Any] | None:
        """The sample under the cursor."""
        return self.samples[self.cursor_row] if 0 <= self.cursor_row < len(self.samples) else None

    def fill(self, samples: list[dict[str, Any]], row: int | None = None) -> None:
        """Show these; the cursor goes to `row`, else stays on its sample where that is still here."""
        current = self.current
        if samples != self.samples:
            self.samples = samples
            self.clear()
            for sample in samples:
                self.add_row(*self._cells(sample))
        numbers = [sample["number"] for sample in samples]
        if row is None and current and current["number"] in numbers:
            row = numbers.index(current["number"])
        self.move_cursor(row=row or 0, animate=False)

    def _cells(self, sample: dict[str, Any]) -> list[Text]:
        state = sample["state"]
        style = theme_style(self.app, STYLES.get(state, ""))
        tries = str(sample["attempts"]) if sample["attempts"] else ""
        return [
            cell(f"{sample['number']:,}", justify="right"),
            cell(f"{of_dataset.SAMPLE_SIGNS[state]} {state}", style),
            cell(f"{sample['tokens']:,}", justify="right"),
            cell(f"{posixpath.basename(sample['file'])}:{sample['line']}", overflow="ellipsis"),
            cell(tries, justify="right"),
            cell(sample["reason"] or "", style),
        ]

    def action_cursor_down(self) -> None:
        """See `DataTable`."""
        self._move("next", super().action_cursor_down)

    def action_page_down(self) -> None:
        """See `DataTable`."""
        self._move("next", super().action_page_down)

    def action_cursor_up(self) -> None:
        """See `DataTable`."""
        self._move("previous", super().action_cursor_up)

    def action_page_up(self) -> None:
        """See `DataTable`."""
        self._move("previous", super().action_page_up)

    def action_scroll_top(self) -> None:
        """The first of all."""
        self.post_message(self.Beyond("first"))

    def action_scroll_bottom(self) -> None:
        """The last of all."""
        self.post_message(self.Beyond("last"))

    def _move(self, which: str, move: Callable[[], None]) -> None:
        if self.cursor_row == (self.row_count - 1 if which == "next" else 0):
            self.post_message(self.Beyond(which))
        else:
            move()
