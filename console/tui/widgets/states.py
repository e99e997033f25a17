"""The states of a sample: figures, and the norms along its tokens as a plot."""

from __future__ import annotations

from typing import Any

from textual.content import Content

from console.tui.widgets.overview import history_blocks, resample
from console.tui.widgets.panel import Panel, line
from console.words import figures, of_dataset

NARROW = 110  # cells below which a state's figures and its plot stand under each other


class StatesPanel(Panel):
    """A row a state; a second one where rows of it are odd."""

    title = "States"

    def __init__(self, **known: Any) -> None:
        super().__init__(**known)
        self.seen: dict[str, Any] | None = None
        self._painted: tuple[int, list[Content]] | None = None
        self.display = False

    def see(self, seen: dict[str, Any]) -> None:
        """Show the states of this sample from now on."""
        self.seen, self._painted = seen, None
        self.display = bool(seen["states"])

    def paint(self, now: dict[str, Any], width: int) -> list[Content]:
        """See `Panel`. Drawn once: the sample does not change with the snapshots."""
        if self.seen is None or not self.seen["states"]:
            return []
        if self._painted is None or self._painted[0] != width:
            self._painted = width, self._lines(self.seen, width)
        return self._painted[1]

    def _lines(self, seen: dict[str, Any], width: int) -> list[Content]:
        states = seen["states"]
        kinds = {f"{state['shape']} {state['dtype']}" for state in states.values()}
        same = kinds.pop() if len(kinds) == 1 else None
        self.border_title = f"States{' ' + same if same else ''} · {seen['layers_words']}"
        cells = aligned([state_cells(name, state, with_kind=same is None) for name, state in states.items()])
        lines: list[Content] = []
        for (name, state), text in zip(states.items(), cells, strict=True):
            lines += state_rows(name, state, text, width)
        if any(state["odd"] for state in states.values()):
            lines.append(line((f"! wrong, ? {seen['rule']}", "$foreground-muted")))
        return lines


def state_cells(name: str, state: dict[str, Any], *, with_kind: bool) -> list[str]:
    """A state in figures; shape and dtype only `with_kind`."""
    known = [value for value in state["norms"] if value is not None]
    least, most = (figures.norm(min(known)), figures.norm(max(known))) if known else ("?", "?")
    return [
        name,
        *([f"{state['shape']} {state['dtype']}"] if with_kind else []),
        f"mean {figures.norm(state['mean'])}",
        f"std {figures.norm(state['std'])}",
        f"norm {least} to {most}",
        f"median {figures.norm(state['median_norm'])}",
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
    plot = history_blocks(stretched(lifted(values)), 1.0)
    indent = "  " if narrow else " " * (len(figures) + 2)
    if narrow:
        lines = [Content(figures), line(indent, (plot, "$text-accent"))]
    else:
        lines = [line(figures, "  ", (plot, "$text-accent"))]
    if state["odd"]:
        text, marks = f"  {of_dataset.odd_rows(state)}", line((odd_marks(state, cells), "bold $text-error"))
        beside = not narrow and len(text) < len(figures)
        if not beside:
            lines.append(line(indent, marks))
        row = line((text.ljust(len(figures) + 2) if beside else text, "$text-warning"))
        lines.append(line(row, marks) if beside else row)
    return lines


def lifted(values: list[float | None]) -> list[float | None]:
    """Values as shares of their span, so that small differences are seen; no span is less than a tenth of the most."""
    known = [value for value in values if value is not None]
    if not known:
        return values
    most = max(known)
    span = max(most - min(known), most / 10) or 1.0
    return [None if value is None else 1.0 - (most - value) / span for value in values]


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
            marks[min(cells - 1, int(one["row"] / last * cells))] = of_dataset.odd_sign(one["why"])
    return "".join(marks).rstrip()
