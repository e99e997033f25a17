"""The newest extraction: how far it is, what it was asked for, what failed last, and what can be done now."""

from __future__ import annotations

import time
from typing import Any

from textual.content import Content

from console.session import going_on
from console.tui.widgets.overview import extraction_lines
from console.tui.widgets.panel import Panel, line, wrapped
from console.words import of_run

FAILURES_SHOWN = 12


class WatchPanel(Panel):
    """How far it is, and what it was asked for."""

    title = "Extraction"

    def paint(self, now: dict[str, Any], width: int) -> list[Content]:
        """See `Panel`."""
        run = now["extraction"]
        if run is None:
            return [line(("nothing was extracted here yet; n starts", "$foreground-muted"))]
        progress = run["progress"]
        shown = run | {"progress": progress | {"failures": []}} if progress else run
        return [*extraction_lines(shown, width), *asked_lines(run, width), *what_next(run, width)]


def asked_lines(run: dict[str, Any], width: int) -> list[Content]:
    """What it was asked for, and from which server."""
    details = run["details"]
    options = details.get("options") or {}
    longest = options.get("max_length")
    said = [
        f"longest {longest:,} tokens, longer ones {options['overlong']}" if longest else "",
        "only the last turn in the loss" if options.get("last_turn_only") else "",
        f"columns {options['prompt_column']}, {options['response_column']}" if options.get("prompt_column") else "",
    ]
    began = time.strftime("%d %b %H:%M:%S", time.localtime(run["created"]))
    parts = [f"{run['id']}, began {began}", f"from {details['server']}" if "server" in details else "", *said]
    return wrapped(" · ".join(part for part in parts if part), width, "$foreground-muted")


def what_next(run: dict[str, Any], width: int) -> list[Content]:
    """What can be done now, in a sentence."""
    progress = run["progress"] or {}
    if going_on(run):
        return []
    if "error" in (run["result"] or {}) and progress.get("phase", "preparing") in of_run.BEFORE_DRAWING:
        text = "once that is put right, f starts it again; n asks for other rows, or another folder"
    elif progress.get("failed"):
        text = f"f draws the {progress['failed']:,} failed samples again; a shows each with its reason"
    elif progress.get("samples") and progress["written"] == progress["samples"]:
        bad = f", and l names the {progress['bad_rows']:,} bad rows" if progress["bad_rows"] else ""
        text = f"all is written; a shows the samples{bad}; f takes up rows that the file has got since"
    else:
        text = "f goes on: what is written stays, the rest is drawn"
    return [Content(""), *wrapped(text, width, "bold", "-> ", "   ")]


class FailuresPanel(Panel):
    """What failed last; not there while nothing has."""

    title = "Failed last"

    def paint(self, now: dict[str, Any], width: int) -> list[Content]:
        """See `Panel`."""
        progress = (now["extraction"] or {}).get("progress")
        failures = progress["failures"] if progress else []
        self.display = bool(failures)
        lines = [line((f"! sample {one['sample']:>7,}  ", "$text-error"), one["reason"]) for one in failures]
        more = (progress["failed"] if progress else 0) - len(lines[:FAILURES_SHOWN])
        rest = [line((f"and {more:,} more: a shows them all", "$foreground-muted"))] if failures and more > 0 else []
        return [*lines[:FAILURES_SHOWN], *rest]
