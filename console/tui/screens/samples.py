"""The samples of a dataset, a page at a time: their states, and why those that failed did."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import DataTable, Input, Static

from backends.errors import LayertapError, UsageError
from console.extraction import again, live_port
from console.feed import Feed
from console.session import Session, going_on
from console.tui.jobs import ask
from console.tui.screens.base import HostScreen
from console.tui.screens.browser import FolderBrowser
from console.tui.screens.sample import SampleScreen
from console.tui.screens.sample_log import SampleLog
from console.tui.widgets.panel import SIGN_STYLES, joined, line
from console.tui.widgets.sample_table import SampleTable
from console.typed import whole
from console.words import of_dataset

PAGE = 200  # samples that the table holds at a time
RENEW_SECONDS = 2.0  # while an extraction writes to the dataset
LAST = (1 << 63) - 1
STATES = ("pending", "sent", "written", "failed")


class SamplesScreen(HostScreen):
    """The samples of the newest extraction's dataset, or of one that was chosen."""

    AUTO_FOCUS = "SampleTable"
    DEFAULT_CSS = """
    SamplesScreen #where { height: auto; padding: 0 1; }
    SamplesScreen #states { height: auto; padding: 0 1; }
    SamplesScreen SampleTable { height: 1fr; }
    SamplesScreen #one { height: auto; max-height: 30%; border-top: solid $panel-lighten-2; padding: 0 1; }
    SamplesScreen Input { display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            Binding(str(key), f"only('{state}')", f"Only {state}", show=False, id=f"samples.{state}")
            for key, state in enumerate(STATES, start=1)
        ),
        Binding("0", "only('')", "All states", show=False, id="samples.all"),
        Binding("slash", "number", "Go to a number", show=False, id="samples.number"),
        Binding("l", "log", "Its log", id="samples.log"),
        Binding("f", "again", "Retry failed", id="samples.again"),
        Binding("b", "browse", "Other dataset", id="samples.browse"),
        Binding("escape", "back", "Dashboard", id="view.dashboard"),
    ]

    def __init__(self, feed: Feed) -> None:
        super().__init__(feed)
        self._path: str | None = None
        self._chosen = False
        self._state: str | None = None
        self._place = {"after": -1}
        self._page: dict[str, Any] | None = None
        self._asked = 0.0
        self._written_to = False

    def compose_body(self) -> ComposeResult:
        """See `HostScreen`."""
        yield Static(markup=False, id="where")
        yield Static(markup=False, id="states")
        yield SampleTable(zebra_stripes=True)
        yield Input(placeholder="a sample's number", type="integer", compact=True)
        with VerticalScroll(id="one", can_focus=False):
            yield Static(markup=False, id="said")

    def show(self, now: dict[str, Any]) -> None:
        """See `HostScreen`."""
        super().show(now)
        run = now["extraction"]
        if not self._chosen and run is not None and run["details"]["output"] != self._path:
            self._look_at(run["details"]["output"])
        elif self._path is None and now["host"] is not None:
            self._say_where(line(("nothing was extracted here yet; b chooses a dataset", "$foreground-muted")))
        elif self._path is not None:
            self._renew(going_on(run) and run is not None and run["details"]["output"] == self._path)

    def _renew(self, written_to: bool) -> None:
        """Ask again now and then while an extraction writes to the dataset, and once when it has ended."""
        ended = self._written_to and not written_to
        self._written_to = written_to
        if ended or (written_to and time.monotonic() - self._asked > RENEW_SECONDS):
            self._load()

    # --- Pages ---

    def _look_at(self, path: str) -> None:
        self._path, self._page, self._place = path, None, {"after": -1}
        self._say_where(line(path, (" …", "$foreground-muted")))
        self._load(row=0)

    def _load(self, row: int | None = None) -> None:
        """Ask for the page; the cursor goes to `row`, or stays."""
        self._asked = time.monotonic()
        self.run_worker(self._fetch(row), exclusive=True, group="page")

    async def _fetch(self, row: int | None) -> None:
        asked: dict[str, Any] = {"path": self._path, "state": self._state, "most": PAGE, **self._place}
        try:
            page = await ask(self.feed, lambda session: session.host.request("samples", **asked))
        except LayertapError as error:
            self._say_where(line((f"! {error}", "$text-error")))
            return
        self._page = page
        self._say_where(line((page["path"], "bold"), (f"   {self._span(page)}", "$foreground-muted")))
        self.query_one("#states", Static).update(states_line(page["counts"], self._state))
        self.query_one(SampleTable).fill(page["samples"], row if row is None or row >= 0 else len(page["samples"]) - 1)
        self._show_one()

    def _total(self, page: dict[str, Any]) -> int:
        return int(page["counts"][self._state] if self._state else sum(page["counts"].values()))

    def _span(self, page: dict[str, Any]) -> str:
        """Which of how many samples the table holds."""
        total, count = self._total(page), len(page["samples"])
        kind = f"{self._state} samples" if self._state else "samples"
        if count >= total:
            return f"{total:,} {kind}"
        return f"{page['before'] + 1:,} to {page['before'] + count:,} of {total:,} {kind}"

    def _say_where(self, text: Content) -> None:
        self.query_one("#where", Static).update(text)

    @on(SampleTable.Beyond)
    def turn(self, event: SampleTable.Beyond) -> None:
        """To another page, where there is one."""
        page = self._page
        if page is None or not page["samples"]:
            return
        numbers = [sample["number"] for sample in page["samples"]]
        if event.which == "first":
            self._go({"after": -1}, 0)
        elif event.which == "last":
            self._go({"before": LAST}, -1)
        elif event.which == "next" and page["before"] + len(numbers) < self._total(page):
            self._go({"after": numbers[-1]}, 0)
        elif event.which == "previous" and page["before"] > 0:
            self._go({"before": numbers[0]}, -1)

    def _go(self, place: dict[str, int], row: int) -> None:
        self._place = place
        self._load(row)

    def action_only(self, state: str) -> None:
        """Only samples in this state, all without one."""
        self._state = state or None
        if self._path is not None:
            self._go({"after": -1}, 0)

    def action_number(self) -> None:
        """Type a number."""
        field = self.query_one(Input)
        field.value = ""
        field.display = True
        field.focus()

    @on(Input.Submitted)
    def numbered(self, event: Input.Submitted) -> None:
        """From this number on."""
        self._end_number()
        if not event.value or self._path is None:
            return
        try:
            self._go({"after": whole(event.value, "sample", "4412") - 1}, 0)
        except UsageError as error:
            self.notify(str(error), severity="warning", markup=False)

    def _end_number(self) -> None:
        self.query_one(Input).display = False
        self.query_one(SampleTable).focus()

    def action_back(self) -> None:
        """Type no number any more, else leave."""
        if self.query_one(Input).display:
            self._end_number()
        else:
            self.run_worker(self.app.run_action("command('view.dashboard')"))

    # --- One sample ---

    @on(DataTable.RowHighlighted)
    def _show_one(self) -> None:
        sample = self.query_one(SampleTable).current
        said = self.query_one("#said", Static)
        if sample is None:
            said.update(line(("none" if self._page else "", "$foreground-muted")))
            return
        sign = of_dataset.SAMPLE_SIGNS[sample["state"]]
        head = joined(
            [
                line((f"{sign} sample {sample['number']:,} {sample['state']}", f"bold {SIGN_STYLES.get(sign, '')}")),
                f"{sample['tokens']:,} tokens",
                f"{sample['file']}:{sample['line']}",
            ]
        )
        said.update(Content("\n").join([head, line(sample["reason"])]) if sample["reason"] else head)

    @on(DataTable.RowSelected)
    def open(self) -> None:
        """Look at the sample."""
        sample = self.query_one(SampleTable).current
        if sample is not None and self._page is not None:
            self.app.push_screen(SampleScreen(self.feed, self._page["path"], sample["number"]))

    def action_log(self) -> None:
        """What the logs say of the sample."""
        sample = self.query_one(SampleTable).current
        if sample is not None and self._page is not None:
            self.run_worker(self._show_log(self._page["path"], sample["number"]), exclusive=True, group="log")

    async def _show_log(self, path: str, number: int) -> None:
        logs = await self.ask_host(lambda session: session.host.request("sample_log", path=path, number=number))
        if logs is not None:
            self.app.push_screen(SampleLog(number, logs))

    # --- The dataset ---

    def action_again(self) -> None:
        """Start the dataset's extraction again: it draws what failed."""
        if self.may_change() and self._page is not None:
            self.run_worker(self._again(self._page["path"]), exclusive=True, group="start")

    async def _again(self, path: str) -> None:
        port = live_port(self.feed.snapshot()["server"])
        started = await self.ask_host(lambda session: start_again(session, path, port))
        if started:
            self.notify(f"started {started['id']}", markup=False)

    def action_browse(self) -> None:
        """Choose another dataset."""

        def chosen(path: str | None) -> None:
            if path:
                self._chosen = True
                self._look_at(path)

        self.app.push_screen(FolderBrowser(self.feed, self._path or "", "folder"), chosen)


def start_again(session: Session, path: str, port: int | None) -> dict[str, Any]:
    """Start the newest extraction into a dataset again. Raises UsageError where no run tells how it was made."""
    run = session.extraction(path)
    if run is None:
        raise UsageError(f"no run here tells how {path} was made; x starts with the same rows and folder")
    return session.start("extract", again(run), port)


def states_line(counts: dict[str, int], only: str | None) -> Content:
    """The keys that filter by state, with the number of samples in each; the one that is on in brackets."""
    parts: list[Content | str] = []
    for key, state in enumerate(("", *STATES)):
        count = counts[state] if state else sum(counts.values())
        text = f"{key} {of_dataset.SAMPLE_SIGNS[state] + ' ' + state if state else 'all'} {count:,}"
        style = "$text-error" if state == "failed" and count else ""
        parts.append(line((f"[{text}]", f"bold {style}")) if (only or "") == state else line((f" {text} ", style)))
    return joined(parts, "")
