"""The form that asks for an extraction. What the server decides (layers, dtype) it shows."""

from __future__ import annotations

from typing import Any

from textual.app import ComposeResult
from textual.containers import Grid, Horizontal
from textual.content import Content
from textual.events import Key
from textual.widgets import Button, Input, Label, Static

from backends.errors import UsageError
from capture.dataset.formats import FORMATS
from console.config import ExtractConfig
from console.extraction import job
from console.session import going_on
from console.tui.widgets.check import Check
from console.tui.widgets.panel import line
from console.typed import whole, wholes

DEFAULTS = ExtractConfig()


class ExtractForm(Grid):
    """Labels on the left, what is asked on the right."""

    DEFAULT_CSS = """
    ExtractForm {
        grid-size: 2; grid-columns: 13 1fr; grid-rows: auto; grid-gutter: 0 1;
        height: auto; padding: 0 1; keyline: none;
        border: round $panel-lighten-2; border-title-color: $text-muted;
    }
    ExtractForm > Label { color: $text-muted; width: 13; }
    ExtractForm Horizontal { height: auto; }
    ExtractForm Horizontal Input { width: 1fr; }
    ExtractForm Horizontal Input.short { width: 14; }
    ExtractForm Horizontal Label { color: $text-muted; margin: 0 1 0 2; }
    ExtractForm Horizontal Label.first { margin: 0 1 0 0; }
    ExtractForm Check { margin: 0 2 0 0; }
    ExtractForm #formats { grid-size: 3; grid-columns: 20 23 1fr; grid-rows: 1; grid-gutter: 0 1; height: auto; }
    ExtractForm #formats Check { margin: 0; }
    ExtractForm Button { margin: 0 0 0 1; }
    ExtractForm #buttons Button { margin: 0 2 0 0; }
    """

    def compose(self) -> ComposeResult:
        """The fields."""
        self.border_title = "New extraction"
        yield Label("rows")
        with Horizontal():
            yield Input(placeholder="JSONL, JSON, Parquet or a folder of them, on the host", id="rows", compact=True)
            browse = Button("Browse", id="browse", compact=True)
            browse.can_focus = False  # ctrl+o does it too, and tab leads to the next field
            yield browse
        yield Label("dataset")
        yield Input(placeholder="folder on the host: new, empty, or a dataset to go on with", id="output", compact=True)
        yield Label("formats")
        with Grid(id="formats"):
            for name in FORMATS:
                yield Check(name, id=f"format-{name}")
        yield Label("tensors")
        yield Static(markup=False, id="tensors")
        yield Label("max length")
        with Horizontal():
            yield Input(placeholder="the server's", id="max-length", type="integer", compact=True, classes="short")
            yield Label("tokens")
            yield Check("longer rows are cut, not skipped", id="truncate")
        yield Label("loss")
        with Horizontal():
            yield Check("only the last assistant turn", id="last-turn-only")
            yield Check("roles may be ignored", id="allow-ignored-roles")
        yield Label("columns")
        with Horizontal():
            yield Label("prompt", classes="first")
            yield Input(placeholder="as found", id="prompt-column", compact=True, classes="short")
            yield Label("response")
            yield Input(placeholder="as found", id="response-column", compact=True, classes="short")
        yield Label("tmpfs")
        yield Check("the dataset may lie in memory; a reboot takes it", id="allow-volatile")
        yield Label("dead server")
        with Horizontal():
            yield Label("launch it again", classes="first")
            yield Input(placeholder="0", id="restart-server", type="integer", compact=True, classes="short")
            yield Label("times")
        yield Label("also from")
        with Horizontal():
            yield Label("ports", classes="first")
            yield Input(placeholder="of further servers of this model and layers", id="beside-ports", compact=True)
        yield Label("")
        with Horizontal(id="buttons"):
            yield Button("Plan", id="plan-it", variant="primary", compact=True)
            yield Button("Start", id="start", variant="success", compact=True, disabled=True)

    def on_key(self, event: Key) -> None:
        """A letter that misses its field must not lead away from what was typed."""
        if event.is_printable and event.character not in (" ", "?"):
            event.stop()

    def begin(self) -> None:
        """Type in the first field that is empty."""
        fields = [self.query_one(name, Input) for name in ("#rows", "#output")]
        next((field for field in fields if not field.value), fields[0]).focus()

    def fill(self, details: dict[str, Any], defaults: ExtractConfig | None) -> None:
        """What an earlier extraction was asked for, but for its folder; else the defaults."""
        given = defaults or DEFAULTS
        options = details.get("options") or {"max_length": given.max_length, "overlong": given.overlong}
        self._set("rows", details.get("rows"))
        self._set("output", None)
        self._set("max-length", options.get("max_length"))
        self._set("prompt-column", options.get("prompt_column"))
        self._set("response-column", options.get("response_column"))
        for name in FORMATS:
            self._check(f"format-{name}", name in details.get("formats", given.format))
        self._check("truncate", options.get("overlong") == "truncate")
        self._check("last-turn-only", bool(options.get("last_turn_only")))
        self._check("allow-ignored-roles", bool(options.get("allow_ignored_roles")))
        self._check("allow-volatile", bool(details.get("allow_volatile")))
        self._set("restart-server", details.get("restart_server") or None)
        self._set("beside-ports", " ".join(map(str, details.get("beside_ports") or [])) or None)

    def show(self, now: dict[str, Any]) -> None:
        """Which tensors this snapshot's server gives."""
        self.query_one("#tensors", Static).update(tensors(now))

    def asked(self, now: dict[str, Any]) -> dict[str, Any]:
        """The extraction that it asks for, of the server of this snapshot. Raises UsageError."""
        if why := no_tensors(now):
            raise UsageError(why)
        rows, output = self._text("rows"), self._text("output")
        missing = [*([] if rows else ["a rows file"]), *([] if output else ["a folder for the dataset"])]
        if missing:
            raise UsageError(f"give {' and '.join(missing)}")
        tap = now["server"]["tap"]
        formats = [name for name in FORMATS if self._checked(f"format-{name}")]
        if not formats:
            raise UsageError("choose at least one format")
        for name in formats:
            if reason := FORMATS[name].refuse(tap["dtype"], len(tap["layers"]["boundaries"])):
                raise UsageError(reason)
        longest = self._text("max-length")
        options = {
            "prompt_column": self._text("prompt-column") or None,
            "response_column": self._text("response-column") or None,
            "max_length": whole(longest, "max length", "4096", least=1) if longest else None,
            "overlong": "truncate" if self._checked("truncate") else "skip",
            "last_turn_only": self._checked("last-turn-only"),
            "allow_ignored_roles": self._checked("allow-ignored-roles"),
        }
        return job(
            rows,
            output,
            formats,
            options,
            allow_volatile=self._checked("allow-volatile"),
            restart_server=whole(self._text("restart-server") or "0", "launch it again", "2"),
            beside_ports=wholes(self._text("beside-ports"), "ports", "30001 30002", least=1),
        )

    def is_same(self, asked: dict[str, Any], now: dict[str, Any]) -> bool:
        """Whether it still asks for that."""
        try:
            return self.asked(now) == asked
        except UsageError:
            return False

    def _text(self, name: str) -> str:
        return self.query_one(f"#{name}", Input).value.strip()

    def _checked(self, name: str) -> bool:
        return self.query_one(f"#{name}", Check).value

    def _set(self, name: str, value: Any) -> None:
        self.query_one(f"#{name}", Input).value = "" if value is None else str(value)

    def _check(self, name: str, value: bool) -> None:
        self.query_one(f"#{name}", Check).value = value


def tensors(now: dict[str, Any]) -> Content:
    """The layers that the server of this snapshot gives, in words, or why none."""
    if why := no_tensors(now):
        return line((f"! {why}", "$text-warning"))
    tap = now["server"]["tap"]
    return line(str(now["server"]["layers"]), (f"  {tap['dtype']}, hidden {tap['hidden']:,}", "$foreground-muted"))


def no_tensors(now: dict[str, Any]) -> str | None:
    """Why nothing can be drawn from the server of this snapshot; None where it can."""
    server = now["server"]
    if server is None or not going_on(server):
        return "no server runs; s launches one"
    if not server["tap"] or not server["tap"]["inside"] or not server["tap"]["layers"]:
        return "the tap is not in the server yet; s shows why"
    return None
