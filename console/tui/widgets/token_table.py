"""A sample token by token: what is in the loss, and the norm of every state."""

from __future__ import annotations

import asyncio
from typing import Any

from rich.style import Style
from rich.text import Text

from console.tui.widgets.table import Table, theme_style
from console.words import figures, of_dataset

BATCH = 100  # rows between looks at the keyboard


class TokenTable(Table):
    """A row a token; `odd_rows` are those in which a state is odd."""

    def __init__(self, **known: Any) -> None:
        super().__init__(**known)
        self.odd_rows: list[int] = []

    async def fill(self, seen: dict[str, Any]) -> None:
        """Show this sample."""
        states = seen["states"]
        odd = {
            (name, one["row"]): of_dataset.odd_sign(one["why"])
            for name, state in states.items()
            for one in state["odd"]
        }
        self.odd_rows = sorted({row for _, row in odd})
        self.clear(columns=True)
        for name, width in (("row", 6), ("id", 8), ("loss", 4), ("text", 20), *((name, 10) for name in states)):
            right = name not in ("loss", "text")
            self.add_column(
                Text(f"|{name}|" if name in states else name, justify="right" if right else "left"), width=width
            )
        in_loss = theme_style(self.app, "text-success", bold=True)
        wrong = {"!": theme_style(self.app, "text-error", bold=True), "?": theme_style(self.app, "text-warning")}
        for row, token in enumerate(seen["tokens"]):
            style = in_loss if token["in_loss"] else Style(dim=True)
            text = "" if token["text"] is None else repr(token["text"])
            norms = []
            for name, state in states.items():
                sign = odd.get((name, row), "")
                figure = f"{sign} {figures.norm(state['norms'][row])}".strip()
                norms.append(Text(figure, wrong.get(sign, ""), justify="right"))
            self.add_row(
                Text(f"{row:,}", justify="right"),
                Text(str(token["id"]), justify="right"),
                Text("yes" if token["in_loss"] else "-", style),
                Text(text, style, overflow="ellipsis"),
                *norms,
            )
            if row % BATCH == BATCH - 1:
                await asyncio.sleep(0)

    def next_odd(self) -> int | None:
        """The next odd row behind the cursor, from the top again after the last; None where there is none."""
        if not self.odd_rows:
            return None
        return next((row for row in self.odd_rows if row > self.cursor_row), self.odd_rows[0])
