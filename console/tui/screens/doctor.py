"""What the doctor finds: checks by group, those that fail first, and what to do below each that needs it."""

from __future__ import annotations

from typing import Any

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from backends.errors import LayertapError
from console.doctor import STATUSES, Wanted, examine, measured, measuring
from console.feed import Feed
from console.session import Session
from console.tui.jobs import finish_job
from console.tui.screens.base import HostScreen
from console.tui.screens.dialogs import Confirm
from console.tui.widgets.panel import SIGN_STYLES, Panel, line, wrapped
from console.words import of_host

NAME = 16  # cells
MEASURE = (
    "Measure disks and GPUs?\nIt takes a minute or two, writes up to 1 GB to each folder and takes it away again, and "
    "uses every GPU; a server of ours that holds them is left alone, and nothing is measured then."
)


class ReportPanel(Panel):
    """The checks of a report."""

    title = "Doctor"

    def __init__(self, **known: Any) -> None:
        super().__init__(**known)
        self.report: dict[str, Any] | None = None

    def paint(self, now: dict[str, Any], width: int) -> list[Content]:
        """See `Panel`."""
        lines: list[Content] = []
        for group, checks in by_urgency(self.report["checks"]) if self.report else []:
            lines.append(line((group, "bold")))
            for check in checks:
                lines += _told(check, width)
        return lines


class DoctorScreen(HostScreen):
    """Asks when it opens, for the server and the dataset that the console shows."""

    BINDINGS = [  # noqa: RUF012
        Binding("u", "ask", "Ask again", id="doctor.ask"),
        Binding("A", "measure", "Measure", id="doctor.measure"),
        Binding("j", "scroll(1)", "Down", show=False, id="doctor.down"),
        Binding("k", "scroll(-1)", "Up", show=False, id="doctor.up"),
        Binding("g", "scroll(-100000)", "First", show=False, id="doctor.first"),
        Binding("G", "scroll(100000)", "Last", show=False, id="doctor.last"),
    ]

    def __init__(self, feed: Feed) -> None:
        super().__init__(feed)
        self._panel = ReportPanel(id="report")
        self._asked = False
        self._measuring = False
        self._result: dict[str, Any] | None = None

    def compose_body(self) -> ComposeResult:
        """See `HostScreen`."""
        yield Static("waiting for the host …", markup=False, id="state")
        with VerticalScroll(id="found"):
            yield self._panel

    def on_mount(self) -> None:
        """Scroll at once."""
        self.query_one("#found").focus()

    def show(self, now: dict[str, Any]) -> None:
        """See `HostScreen`."""
        if self.feed.session and now["host"] and not self._asked:
            self._asked = True
            self.action_ask()
        super().show(now)

    def action_ask(self) -> None:
        """Ask the checks that only look."""
        if not self._measuring:
            self.run_worker(self._ask(), exclusive=True, group="ask")

    async def _ask(self) -> None:
        self._say("asking …")
        wanted = meant(self.feed)
        report = await self.ask_host(lambda session: self._joined(session, examine(session, wanted)))
        if report is not None:
            self._panel.report = report
        self._say("")

    def _joined(self, session: Session, report: dict[str, Any]) -> dict[str, Any]:
        """The report, with what was measured before."""
        return measured(session, report, self._result) if self._result else report

    def action_measure(self) -> None:
        """Measure, once that is confirmed."""
        if not self.may_change():
            return
        if self._panel.report is None or self._measuring:
            self.notify("wait until what was asked is answered", severity="warning")
        else:
            self.app.push_screen(Confirm(MEASURE, "Measure"), self._confirmed)

    def _confirmed(self, yes: bool | None) -> None:
        if yes:
            self.run_worker(self._measure(), exclusive=True, group="measure")

    async def _measure(self) -> None:
        panel, wanted = self._panel, meant(self.feed)
        self._measuring = True
        self._say("measuring …")
        try:
            job = await self.ask_host(lambda session: measuring(session, wanted))
            if job is None:
                return
            _, self._result = await finish_job(
                self.feed, "doctor", job, progress=lambda now: self._say(f"{now['what']} …")
            )
            before = panel.report or {"checks": []}
            panel.report = await self.ask_host(lambda session: self._joined(session, before)) or panel.report
        except LayertapError as error:
            self.notify(str(error), severity="error", timeout=12, markup=False)
        finally:
            self._measuring = False
            self._say("")

    def action_scroll(self, lines: int) -> None:
        """Move by some lines."""
        self.query_one("#found").scroll_relative(y=lines, animate=False)

    def _say(self, what: str) -> None:
        """Tell what goes on, or what it came to."""
        if self.laid_out:
            report = self._panel.report
            came_to = of_host.doctor_counts(report) if report else "not asked; u asks"
            self.query_one("#state", Static).update(line((what or came_to, "$foreground-muted")))
            self._panel.show(self.feed.snapshot())


def meant(feed: Feed) -> Wanted:
    """What the checks are for: the server and the dataset that the console shows, where there are any."""
    now, session = feed.snapshot(), feed.session
    server, extraction = now["server"], now["extraction"]
    output = extraction["details"]["output"] if extraction else None
    if server is None or session is None:
        return Wanted(output=output)
    profile = server["details"]["profile"]
    known = profile if profile in session.profiles else None
    return Wanted(known, server["details"]["model"], server["port"], output)


def by_urgency(checks: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Groups with their checks, what is worst first in both."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for check in sorted(checks, key=_urgency):
        groups.setdefault(check["group"], []).append(check)
    return list(groups.items())


def _urgency(check: dict[str, Any]) -> int:
    return STATUSES.index(check["status"])


def _told(check: dict[str, Any], width: int) -> list[Content]:
    """A check over as many lines as it needs."""
    sign = of_host.CHECK_SIGNS[check["status"]]
    style = "" if sign == "+" else SIGN_STYLES[sign]
    first = f"  {sign} {of_host.check_name(check):<{NAME}} "
    lines = wrapped(check["seen"], width, style, first, " " * len(first))
    if check["remedy"]:
        lines += wrapped(check["remedy"], width, "", "      -> ", "         ")
    return lines
