"""The server: what runs and whether it is safe to draw from; and a launch, shown whole before it starts."""

from __future__ import annotations

import asyncio
import shlex
from typing import Any

from rich.console import Group
from rich.table import Table
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Button, Input, Label, Select, Static

from backends.errors import LayertapError, UsageError
from backends.sglang import Launch, Overrides, mask_argv
from backends.situation import Situation
from capture.layers import LayerChoice
from console import DEFAULT_PORT
from console.feed import Feed
from console.launching import differences, flags, layer_choice, pairs, shown
from console.session import Session, going_on
from console.tui.jobs import finish_job
from console.tui.screens.base import HostScreen
from console.tui.widgets.overview import ServerPanel
from console.tui.widgets.panel import SIGN_STYLES, Panel, line, wrapped
from console.tui.widgets.table import cell
from console.typed import whole, wholes
from console.words import figures, of_server

TYPING = 0.3  # seconds between two letters of a model's folder, which is asked for when it is written
WAYS = (
    ("outputs of layers", "outputs"),
    ("boundaries", "boundaries"),
    ("EAGLE-3 ids", "eagle_ids"),
    ("a drafter's config.json", "draft"),
)


class ToldPanel(Panel):
    """What was heard of the server that runs, once it was asked; all of it is forgotten for another server."""

    def __init__(self, **known: Any) -> None:
        super().__init__(**known)
        self.forget()

    def forget(self) -> None:
        """Know nothing, as of a server that was not asked."""
        raise NotImplementedError

    def paint(self, now: dict[str, Any], width: int) -> list[Content]:
        """See `Panel`."""
        server = now["server"]
        return self.tell(server, width) if going_on(server) else [line(("no server runs", "$foreground-muted"))]

    def tell(self, server: dict[str, Any], width: int) -> list[Content]:
        """The lines to show of the server that runs; see `Panel.paint`."""
        raise NotImplementedError


class GatePanel(ToldPanel):
    """Whether this server is safe to draw from, by its resolved arguments and the tap's own word."""

    title = "Gate"

    def forget(self) -> None:
        """See `ToldPanel`."""
        self.findings: list[dict[str, Any]] | None = None
        self.why = "not asked yet"

    def tell(self, server: dict[str, Any], width: int) -> list[Content]:
        """See `ToldPanel`."""
        if self.findings is None:
            return [line((self.why, "$foreground-muted"))]
        if not self.findings:
            return [line(("+ safe to draw from", "$text-success"), ": no rule of the gate objects")]
        lines = []
        for finding in self.findings:
            sign = figures.sign(finding["fatal"])
            lines += wrapped(finding["what"], width, SIGN_STYLES[sign], f"{sign} ", "  ")
            lines += wrapped(finding["remedy"], width, "", "  -> ", "     ")
        return lines


class ProbePanel(ToldPanel):
    """What drawing from this server has shown: which tensors they are, and that they are whole."""

    title = "Probe"

    def forget(self) -> None:
        """See `ToldPanel`."""
        self.found: dict[str, Any] | None = None
        self.doing: str | None = None

    def follow(self, progress: dict[str, Any] | None) -> None:
        """Take in what a probe under way does; None once it has ended."""
        self.doing = progress["what"] if progress else None

    def tell(self, server: dict[str, Any], width: int) -> list[Content]:
        """See `ToldPanel`."""
        tap, found = server["tap"], self.found
        resolved = (found or tap or {}).get("layers")
        said = list(of_server.layers(resolved)) if resolved else []
        if self.doing:
            head = line(("~ probing ", "$text-warning"), f"{self.doing} …")
        elif found is None:
            head = line(("not probed yet: ctrl+r, or the next extraction, does it", "$foreground-muted"))
        else:
            sign, style = ("+", "$text-success") if found["passed"] else ("!", "$text-error")
            head = line((f"{sign} {of_server.probe_head(found)}", style), f", {figures.when(found['at'])}")
            said += of_server.probe_findings(found)
        lines = [head]
        for text in said:
            style = "$text-error" if text.startswith("! ") else "$text-warning" if text.startswith("? ") else ""
            lines += wrapped(text, width, style, "", "    ")
        return lines


class RunningPanel(ToldPanel):
    """What the server was started with, and what it says that it made of that; secrets are masked."""

    title = "What runs"

    def forget(self) -> None:
        """See `ToldPanel`."""
        self.effective: dict[str, str] = {}

    def tell(self, server: dict[str, Any], width: int) -> list[Content]:
        """See `ToldPanel`."""
        argv = [f"{name} {value}".rstrip() for name, value in flags(server["argv"]).items()]
        env = [f"{name}={value}" for name, value in server["details"].get("env", {}).items()]
        resolved = [f"{name}={value}" for name, value in sorted(self.effective.items())]
        lines = []
        for title, words_said in (("arguments", argv), ("environment", env), ("resolved", resolved)):
            if words_said:
                lines.append(line((title, "bold $text-accent")))
                lines += wrapped("   ".join(words_said), width, "", "  ", "  ")
        return lines


class ServerScreen(HostScreen):
    """Server and gate on top; below them the form of a launch and what it comes to, then what runs now."""

    BINDINGS = [  # noqa: RUF012
        Binding("ctrl+l", "launch", "Launch", id="server.launch"),
        Binding("ctrl+g", "gate", "Ask the gate", id="server.gate"),
        Binding("ctrl+r", "probe", "Probe", id="server.probe"),
    ]

    def __init__(self, feed: Feed) -> None:
        super().__init__(feed)
        self._filled = False
        self._about: str | None = None  # the server that runs: what gate and probe said is of this one
        self._asked_gate = False
        self._merged: tuple[Launch, LayerChoice] | None = None
        self._situation: Situation | None = None  # of the host, and of the model `_looked_at`
        self._looked_at: str | None = None

    def compose_body(self) -> ComposeResult:
        """See `HostScreen`."""
        with VerticalScroll(id="all", can_focus=False):
            with Horizontal(id="state"):
                yield ServerPanel(id="server")
                yield GatePanel(id="gate")
            yield ProbePanel(id="probe")
            with Horizontal(id="launching"):
                with Vertical(id="form"):
                    yield Label("profile")
                    yield Select[str]([], id="profile", prompt="choose a profile", compact=True)
                    yield Label("model: its folder on the host; empty takes the profile's")
                    yield Input(id="model", compact=True)
                    yield Label("port on the host's loopback")
                    yield Input(str(DEFAULT_PORT), id="port", type="integer", compact=True)
                    yield Label("layers, named as")
                    yield Select(WAYS, value="outputs", allow_blank=False, id="way", compact=True)
                    yield Input(placeholder="2 30 58", id="layers", compact=True)
                    yield Label("more arguments: NAME=VALUE, NAME=unset takes one away")
                    yield Input(placeholder="mem-fraction-static=0.85", id="set", compact=True)
                    yield Button("Launch", id="launch", variant="primary", compact=True)
                yield Static(markup=False, id="preview")
            yield RunningPanel(id="running")

    def on_mount(self) -> None:
        """See `HostScreen`."""
        self.query_one("#preview").border_title = "What would start"

    def show(self, now: dict[str, Any]) -> None:
        """See `HostScreen`."""
        server = now["server"]
        running = server["id"] if server and server["state"] == "running" else None
        if running != self._about:  # stopped, or another one runs, of which nobody was asked
            self._about, self._asked_gate = running, False
            for panel in self.query(ToldPanel):
                panel.forget()
        super().show(now)
        if self.feed.session and now["host"] and not self._filled:
            self._filled = True
            self._fill(self.feed.session, server)
        if server and server["verdict"]["verdict"] == "healthy" and not self._asked_gate:
            self.action_gate()

    def _fill(self, session: Session, last: dict[str, Any] | None) -> None:
        profiles = self.query_one("#profile", Select)
        profiles.set_options((name, name) for name in session.profiles)
        if last is None:
            return
        details = last["details"]
        if details["profile"] in session.profiles:
            profiles.value = details["profile"]
        if not details["profile"].startswith("embedded-"):
            self.query_one("#model", Input).value = details["model"]
        self.query_one("#port", Input).value = str(last["port"])
        ((way, layers),) = details["layers"].items()
        self.query_one("#way", Select).value = way
        self.query_one("#layers", Input).value = layers if way == "draft" else " ".join(map(str, layers))

    def action_gate(self) -> None:
        """Ask the gate about the live server."""
        if self._about:
            self._asked_gate = True
            self.run_worker(self._ask_gate(self._about), exclusive=True, group="gate")

    async def _ask_gate(self, run_id: str) -> None:
        panel = self.query_one(GatePanel)
        answer = await self.ask_host(lambda session: session.host.request("gate", run_id=run_id))
        if run_id != self._about:
            return
        panel.findings = answer["findings"] if answer else None
        panel.why = "it could not be asked"
        self.query_one(RunningPanel).effective = answer["effective"] if answer else {}
        self.query_one(ProbePanel).found = answer["probe"] if answer else None

    def action_probe(self) -> None:
        """Probe the live server."""
        server = self.feed.snapshot()["server"]
        if server and server["id"] == self._about and self.may_change():
            self.run_worker(self._probe(server["id"], server["port"]), exclusive=True, group="probe")

    async def _probe(self, run_id: str, port: int) -> None:
        panel, found = self.query_one(ProbePanel), None

        def follow(progress: dict[str, Any] | None) -> None:
            if run_id == self._about:
                panel.follow(progress)

        try:
            _, found = await finish_job(self.feed, "probe", {}, port, follow)
        except LayertapError as error:
            self.notify(str(error), severity="error", timeout=12, markup=False)
        follow(None)
        if found and run_id == self._about:
            panel.found = found

    @on(Select.Changed)
    @on(Input.Changed)
    def preview(self) -> None:
        """Merge what the form says, and show it."""
        session = self.feed.session
        profile = self.query_one("#profile", Select).value
        if session is None or not isinstance(profile, str):
            return
        shown_at = self.query_one("#preview", Static)
        try:
            merged, layers = self._merge(session, profile)
        except LayertapError as error:
            self._merged = None
            shown_at.update(line((f"! {error}", "$text-error")))
            return
        self._merged = merged, layers
        table = settings_table(shown(merged, layers.words()))
        shown_at.update(Group(*self._suits(merged), *self._changes(merged), table))

    def _suits(self, merged: Launch) -> list[str]:
        """Whether host and model are what the profile is for, as soon as that is known."""
        if merged.match is None:
            return []
        if merged.model != self._looked_at:
            self._looked_at, self._situation = merged.model, None
            self.run_worker(self._look_at(merged.model), exclusive=True, group="situation")
        if self._situation is None:
            return []
        return [*of_server.suits(merged.match.differs(self._situation)), ""]

    async def _look_at(self, model: str) -> None:
        await asyncio.sleep(TYPING)  # the next letter ends this worker
        found = await self.ask_host(lambda session: session.situation(model))
        if found is not None and self._looked_at == model:
            self._situation = found
            self.preview()

    def _changes(self, merged: Launch) -> list[str]:
        """What differs from the server's launch before."""
        last = self.feed.snapshot()["server"]
        if last is None:
            return []
        argv = [last["details"]["model"] if word == merged.model else word for word in merged.argv("python")]
        changed = differences(last["argv"], mask_argv(argv))
        title = f"differs from {last['id']}:" if changed else f"the same arguments as {last['id']}"
        return [title, *[f"  {one}" for one in changed], ""]

    def _merge(self, session: Session, profile: str) -> tuple[Launch, LayerChoice]:
        port = whole(self.query_one("#port", Input).value, "port", "30000", least=1)
        try:
            more = shlex.split(self.query_one("#set", Input).value)
        except ValueError as error:
            raise UsageError(f"more arguments: {error}") from error
        merged = session.plan_launch(
            profile,
            self.query_one("#model", Input).value.strip() or None,
            port,
            Overrides(args=pairs(more, "more arguments"), env={}),
        )
        return merged, layer_choice(self._layers(), merged.layers)

    def _layers(self) -> dict[str, Any]:
        said = self.query_one("#layers", Input).value.strip()
        way = str(self.query_one("#way", Select).value)
        if not said:
            return {}
        if way == "draft":
            return {way: said}
        return {way: wholes(said, "layers", "2 30 58")}

    @on(Button.Pressed, "#launch")
    def action_launch(self) -> None:
        """Launch what is shown."""
        if not self.may_change():
            return
        if self._merged is None:
            self.notify("there is nothing to launch yet: choose a profile and layers", severity="warning")
        else:
            self.run_worker(self._launch(*self._merged), exclusive=True, group="launch")

    async def _launch(self, merged: Launch, layers: LayerChoice) -> None:
        run = await self.ask_host(lambda session: session.launch(merged, layers))
        if run is None:
            return
        self.feed.watch(None)
        self.notify(f"launched {run['id']} on port {run['port']}", markup=False)
        danger = self.feed.session.hello["danger"] if self.feed.session else None
        if danger:
            self.notify(danger, severity="warning", timeout=20, markup=False)
        self.dismiss()


def settings_table(launch: dict[str, Any]) -> Table:
    """Every setting of a merged launch beside its reason."""
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    table.add_column(ratio=5)
    table.add_column(ratio=6, style="dim")
    for name, value, why in launch["env"]:
        table.add_row(cell(f"{name}={value}"), cell(why))
    for name, value, why in launch["tap"]:
        if value is not None:
            table.add_row(cell(f"tap {name} {value}"), cell(why))
    for name, value, why in launch["args"]:
        table.add_row(cell(f"--{name}" if value is True else f"--{name} {value}"), cell(why))
    return table
