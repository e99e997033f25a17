"""The states of a sample: figures, and the norms along its tokens as a plot."""

from __future__ import annotations

from typing import Any

from textual.content import Content

from console import words
from console.tui.widgets.overview import history_blocks, resample
from console.tui.widgets.panel import Panel, line

NARROW = 110  # cells below which a state's figures and its plot stand under each other


class StatesPanel(Panel):
    """A row a state; a second one where rows of it are odd."""

    title = "States"

    def __init__(self, **known: Any) -> None:
        super().__init__(**known)
        self.seen: dict[str, Any] | None = None

    def paint(self, now: dict[str, Any], width: int) -> list[Content]:
        """See `Panel`."""
        states = self.seen["states"] if self.seen else {}
        self.display = bool(states)
        if not states:
            return []
        figures = aligned([state_cells(name, state) for name, state in states.items()])
        lines: list[Content] = []
        for (name, state), text in zip(states.items(), figures, strict=True):
            lines += state_rows(name, state, text, width)
        if any(state["odd"] for state in states.values()):
            assert self.seen is not None
            lines.append(line((f"! wrong, ? {self.seen['rule']}", "$text-muted")))
        return lines


def state_cells(name: str, state: dict[str, Any]) -> list[str]:
    """A state in figures."""
    known = [value for value in state["norms"] if value is not None]
    least, most = (words.norm(min(known)), words.norm(max(known))) if known else ("?", "?")
    return [
        name,
        f"{state['shape']} {state['dtype']}",
        f"mean {words.norm(state['mean'])}",
        f"std {words.norm(state['std'])}",
        f"norm {least} to {most}",
        f"median {words.norm(state['median_norm'])}",
    ]


def aligned(rows: list[list[str]]) -> list[str]:
    """Rows of cells as lines, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(wide) for cell, wide in zip(row, widths, strict=True)) for row in rows]


def state_rows(name: str, state: dict[str, Any], figures: str, width: int) -> list[Content]:
    """A state's figures with the plot beside or below them, its odd rows marked under it."""
    narrow = width < NARROW
    cells = max(10, width - 2 if narrow else width - len(figures) - 2)
    norms = state["norms"]
    values = resample([(float(row), value) for row, value in enumerate(norms)], 0.0, len(norms) - 1.0, cells)
    most = max([value for value in values if value is not None], default=0.0)
    plot = history_blocks(stretched(values), most)
    indent = "  " if narrow else " " * (len(figures) + 2)
    if narrow:
        lines = [Content(figures), line(indent, (plot, "$text-accent"))]
    else:
        lines = [line(figures, "  ", (plot, "$text-accent"))]
    if state["odd"]:
        lines.append(line(f"{indent}", (odd_marks(state, cells), "bold $text-error")))
        lines.append(line(("  " if narrow else " " * (len(name) + 2)), (words.odd_rows(state), "$text-warning")))
    return lines


def stretched(values: list[float | None]) -> list[float | None]:
    """The same with gaps filled from the left: fewer tokens than cells are no unknown norms."""
    filled: list[float | None] = []
    for value in values:
        filled.append(value if value is not None or not filled else filled[-1])
    return filled


def odd_marks(state: dict[str, Any], cells: int) -> str:
    """The sign of each odd row under its place in the plot; the worse one where two share a cell."""
    marks = [" "] * cells
    last = max(1, len(state["norms"]) - 1)
    for one in reversed(state["odd"]):
        if one["row"] <= last:
            marks[min(cells - 1, int(one["row"] / last * cells))] = words.odd_sign(one["why"])
    return "".join(marks).rstrip()
