"""The extraction: what runs or ran last, and the form that starts another."""

from __future__ import annotations

import posixpath
import time
from typing import Any, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.reactive import var
from textual.widgets import Button, Checkbox, ContentSwitcher, Input, Static

from backends.errors import LayertapError
from console.extraction import again, live_port, trusted_model
from console.feed import Feed
from console.session import going_on
from console.tui.jobs import ask, finish_job
from console.tui.screens.base import HostScreen
from console.tui.screens.browser import FolderBrowser
from console.tui.screens.dialogs import Confirm
from console.tui.widgets.extract_form import ExtractForm
from console.tui.widgets.extraction import FailuresPanel, WatchPanel
from console.tui.widgets.overview import TimelinePanel
from console.tui.widgets.panel import line
from console.tui.widgets.planned import plan_lines

BEFORE_PLAN = "Enter plans: rows are read and tokenised, mask and sizes shown. It takes seconds, and no GPU time."


class ExtractScreen(HostScreen):
    """Watches the newest extraction, or asks for a new one."""

    AUTO_FOCUS = ""  # the form's fields are there from the start
    DEFAULT_CSS = """
    ExtractScreen ContentSwitcher { height: 1fr; }
    ExtractScreen #watch, ExtractScreen #new { height: 1fr; scrollbar-size-vertical: 1; }
    ExtractScreen #plan { border: round $panel-lighten-2; border-title-color: $text-muted; padding: 0 1; height: auto; }
    ExtractScreen.-huge #new { layout: horizontal; }
    ExtractScreen.-huge ExtractForm { width: 92; }
    ExtractScreen.-huge #plan { width: 1fr; }
    ExtractScreen .trouble { color: $text-error; padding: 0 1; height: auto; display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f", "again", "Go on / retry", id="extract.again"),
        Binding("n", "new", "New", id="extract.new"),
        Binding("a", "samples", "Samples", id="view.samples"),
        Binding("X", "stop", "Stop", id="extract.stop"),
        Binding("ctrl+o", "browse", "Browse", id="extract.browse"),
        Binding("ctrl+r", "plan", "Plan", id="extract.plan"),
        Binding("ctrl+l", "start", "Start", id="extract.start"),
        Binding("pagedown", "scroll(10)", "Scroll down", show=False, id="extract.scroll_down"),
        Binding("pageup", "scroll(-10)", "Scroll up", show=False, id="extract.scroll_up"),
        Binding("escape", "back", "Back", id="view.dashboard"),
    ]
    WATCHING = ("again", "new", "samples", "stop")
    ASKING = ("browse", "plan", "start")

    asking: var[bool] = var(False)
    """Whether the form is shown."""

    def __init__(self, feed: Feed) -> None:
        super().__init__(feed)
        self._run: dict[str, Any] | None = None
        self._known = False
        self._planned: dict[str, Any] | None = None
        self._planning = False

    def compose_body(self) -> ComposeResult:
        """See `HostScreen`."""
        with ContentSwitcher(initial="watch"):
            with VerticalScroll(id="watch", can_focus=False):
                yield WatchPanel()
                yield Static(classes="trouble", markup=False, id="trouble")
                yield FailuresPanel()
                yield TimelinePanel(self.feed)
            with VerticalScroll(id="new", can_focus=False):
                yield ExtractForm()
                yield Static(BEFORE_PLAN, markup=False, id="plan")

    def on_mount(self) -> None:
        """See `HostScreen`."""
        self.query_one("#plan").border_title = "Plan"

    def show(self, now: dict[str, Any]) -> None:
        """See `HostScreen`."""
        super().show(now)
        run, before = now["extraction"], self._run
        self._run = run
        self.query_one(ExtractForm).show(now)
        if not self._known and now["host"] is not None:
            self._known = True
            if run is None:
                self.action_new()
        if (before and before["id"], going_on(before)) != (run and run["id"], going_on(run)):
            self.refresh_bindings()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Keys of the form only in the form, and those of a run only where there is one to act on."""
        if action in self.ASKING:
            return self.asking and (action != "start" or self._planned is not None)
        if action in self.WATCHING:
            known = action == "new" or self._run is not None
            return (
                not self.asking
                and known
                and {"again": not going_on(self._run), "stop": going_on(self._run)}.get(action, True)
            )
        return True

    def watch_asking(self, asking: bool) -> None:
        """Form or run."""
        if self.is_mounted:
            self.query_one(ContentSwitcher).current = "new" if asking else "watch"
            self.refresh_bindings()

    def action_scroll(self, lines: int) -> None:
        """Scroll the run, or form and plan."""
        self.query_one("#new" if self.asking else "#watch").scroll_relative(y=lines, animate=False)

    # --- The run ---

    def action_samples(self) -> None:
        """The samples of its dataset."""
        self.run_worker(self.app.run_action("command('view.samples')"))

    def action_stop(self) -> None:
        """Stop it, after a question."""
        self.run_worker(self.app.run_action("command('extract.stop')"))

    def action_again(self) -> None:
        """Start the same extraction again."""
        if self._run and self.may_change():
            self.run_worker(self._again(self._run), exclusive=True, group="start")

    async def _again(self, run: dict[str, Any]) -> None:
        self._tell("")
        port = live_port(self.feed.snapshot()["server"])
        try:
            started = await ask(self.feed, lambda session: session.start("extract", again(run), port))
        except LayertapError as error:
            self._tell(str(error))
        else:
            self.notify(f"started {started['id']}", markup=False)

    def _tell(self, trouble: str) -> None:
        said = self.query_one("#trouble", Static)
        said.display = bool(trouble)
        said.update(line(f"! {trouble}"))

    # --- The form ---

    def action_new(self) -> None:
        """Ask for another extraction."""
        form = self.query_one(ExtractForm)
        session = self.feed.session
        form.fill(self._run["details"] if self._run else {}, session.defaults if session else None)
        self._set_plan(None)  # what was planned before was for another one
        self.query_one("#plan", Static).update(BEFORE_PLAN)
        self.asking = True
        form.begin()

    def action_back(self) -> None:
        """From the form to the run, else to the dashboard."""
        if self.asking and self._run is not None:
            self.asking = False
            self.set_focus(None)
        else:
            self.run_worker(self.app.run_action("command('view.dashboard')"))

    @on(Button.Pressed, "#browse")
    def action_browse(self) -> None:
        """Choose the rows file among the host's files."""
        field = self.query_one("#rows", Input)

        def chosen(path: str | None) -> None:
            if path:
                field.value = path
                field.focus()

        self.app.push_screen(FolderBrowser(self.feed, posixpath.dirname(field.value)), chosen)

    @on(Input.Changed)
    @on(Checkbox.Changed)
    def changed(self) -> None:
        """A plan is for what was asked, and for nothing else."""
        if self._planned is not None:
            self._set_plan(None)
            self.query_one("#plan", Static).update("what is asked for has changed; Enter plans it anew")

    @on(Input.Submitted)
    def _enter(self) -> None:
        self.action_plan()

    @on(Button.Pressed, "#plan-it")
    def action_plan(self) -> None:
        """Plan what the form says."""
        if not self._planning and self.may_change():
            self.run_worker(self._plan(), exclusive=True, group="plan")

    async def _plan(self) -> None:
        shown = self.query_one("#plan", Static)
        now = self.feed.snapshot()
        server = now["server"]
        self._planning = True
        self._set_plan(None)
        begun = time.monotonic()
        rows_read = 0

        def tell() -> None:
            read = f"{rows_read:,} rows read, " if rows_read else ""
            shown.update(line(("~ planning: ", "$text-accent"), f"{read}{time.monotonic() - begun:.0f} s"))

        def progress(said: dict[str, Any]) -> None:
            nonlocal rows_read
            rows_read = said["rows"]

        ticking = self.set_interval(0.5, tell)
        tell()
        try:
            asked = self.query_one(ExtractForm).asked(now)
            job = {key: asked[key] for key in ("rows", "output", "formats", "options")} | {
                "model": None,
                "layers": len(server["tap"]["layers"]["boundaries"]),
                "trust_remote_code": trusted_model(server) is not None,
            }
            _, made = await finish_job(self.feed, "plan", job, live_port(server), progress)
        except LayertapError as error:
            shown.update(line((f"! {error}", "$text-error")))
        else:
            shown.update(Content("\n").join(plan_lines(made)))
            if made["samples"] and self.query_one(ExtractForm).is_same(asked, now):
                self._set_plan(asked | {"fits": made["fits"]})
        finally:
            self._planning = False
            ticking.stop()

    def _set_plan(self, planned: dict[str, Any] | None) -> None:
        self._planned = planned
        start = self.query_one("#start", Button)
        start.disabled = planned is None
        if planned is not None:
            start.focus()
        self.refresh_bindings()

    @on(Button.Pressed, "#start")
    def action_start(self) -> None:
        """Start what was planned."""
        if self._planned is None or not self.may_change():
            return
        job = {key: value for key, value in self._planned.items() if key != "fits"}
        if self._planned["fits"] is False:
            question = f"It does not fit on the disk of {job['output']}.\nIt would stop once the disk is full."
            self.app.push_screen(Confirm(question, "Start it anyway"), lambda yes: self._start(job) if yes else None)
        else:
            self._start(job)

    def _start(self, job: dict[str, Any]) -> None:
        self.run_worker(self._started(job), exclusive=True, group="start")

    async def _started(self, job: dict[str, Any]) -> None:
        port = live_port(self.feed.snapshot()["server"])
        try:
            run = await ask(self.feed, lambda session: session.start("extract", job, port))
        except LayertapError as error:
            self.query_one("#plan", Static).update(line((f"! {error}", "$text-error")))
            return
        self.notify(f"started {run['id']}", markup=False)
        self._run = run
        self._set_plan(None)
        self.asking = False
        self.set_focus(None)
