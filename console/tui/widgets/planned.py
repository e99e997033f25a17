"""A plan as it is shown: the words of `console.words.plan`, with what is in the loss really visible."""

from __future__ import annotations

from typing import Any

from textual.content import Content

from console.tui.widgets.panel import line
from console.words import of_dataset


def plan_lines(made: dict[str, Any]) -> list[Content]:
    """A plan in lines; each may be longer than the screen is wide."""
    bad = {f"{row['file']}:{row['line']}: {row['reason']}" for row in made["bad_rows"]}
    preview = made["preview"]
    shown = list(of_dataset.plan(made))
    lines = [_line(text, text in bad) for text in (shown[:-2] if preview else shown)]
    if made["bad"] > len(made["bad_rows"]):
        lines.append(line((f"! and {made['bad'] - len(made['bad_rows']):,} more bad rows", "$text-error")))
    if preview:
        where = f"line {preview['line']}, "
        lines += [line(where, ("[ ]", IN_LOSS), " is in the loss, the rest is not:"), mask(preview["parts"])]
    return lines


IN_LOSS = "bold $text-success"


def mask(parts: list[list[Any]]) -> Content:
    """Stretches of text, those in the loss in brackets and in a style of their own."""
    return line(*((f"[{text}]", IN_LOSS) if in_loss else (text, "$foreground-muted") for text, in_loss in parts))


def _line(text: str, bad: bool) -> Content:
    if bad:
        return line((f"! {text}", "$text-error"))
    if text.startswith(("! ", "? ")):
        return line((text, "bold $text-error" if text.startswith("!") else "$text-warning"))
    if text.endswith("DOES NOT FIT"):
        return line((f"! {text}", "bold $text-error"))
    return line(text)
