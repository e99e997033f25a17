"""The Logs screen: the server's log and the job's, live, with filter, search and jumps."""

from __future__ import annotations

from datetime import datetime
from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.message import Message
from textual.reactive import var
from textual.widgets import ContentSwitcher, Input, Label, Static

from console.feed import Feed
from console.tui.screens.base import HostScreen
from console.tui.widgets.log_row import lines_in_words
from console.tui.widgets.log_view import LogView

REFRESH = 1 / 5  # seconds between looks at what the head says


KEYS: list[BindingType] = [
    Binding("slash", "search", "Search", id="logs.search", key_display="/"),
    Binding("f", "filter", "Filter", id="logs.filter"),
    Binding("t", "time", "Go to a time", id="logs.time", show=False),
    Binding("tab", "other", "Other log", id="logs.other", show=False),
]


class Prompt(Horizontal):
    """One line that asks for something, and says when that is over."""

    DEFAULT_CSS = """
    Prompt { height: 1; background: $panel; }
    Prompt > Label { padding: 0 1; color: $accent; text-style: bold; }
    Prompt > Input { width: 1fr; background: $panel; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "close", "Cancel", id="logs.cancel")]

    class Closed(Message):
        """It asks no more; `typed` is what was entered, None where it was cancelled."""

        def __init__(self, what: str, typed: str | None) -> None:
            super().__init__()
            self.what = what
            self.typed = typed

    what = ""

    def compose(self) -> ComposeResult:
        """A label and a field."""
        yield Label()
        yield Input(compact=True, select_on_focus=True)

    def ask(self, what: str, typed: str, hint: str) -> None:
        """Ask for `what`, with `typed` in the field at first."""
        self.what = what
        self.query_one(Label).update(what)
        field = self.query_one(Input)
        field.value, field.placeholder = typed, hint
        field.focus()

    def action_close(self) -> None:
        """Ask no more."""
        self.post_message(self.Closed(self.what, None))

    @on(Input.Submitted)
    def _entered(self, event: Input.Submitted) -> None:
        event.stop()
        self.post_message(self.Closed(self.what, event.value))


class LogScreen(HostScreen):
    """Shows `feed.logs`, one at a time; logs that come later are taken up by themselves."""

    DEFAULT_CSS = """
    LogScreen .log-head { height: 1; padding: 0 1; background: $panel; text-wrap: nowrap; text-overflow: ellipsis; }
    LogScreen #log-views, LogScreen LogView { height: 1fr; }
    LogScreen #log-foot { height: 1; }
    LogScreen #log-line { color: $text-muted; }
    """
    BINDINGS: ClassVar[list[BindingType]] = KEYS

    shown: var[str] = var("")
    """The title of the log that is shown."""

    def __init__(self, feed: Feed) -> None:
        super().__init__(feed)
        self._views: dict[str, LogView] = {}
        self._asking = False
        self._typed = {"filter": "", "search": "", "time": ""}

    def compose_body(self) -> ComposeResult:
        """The head, the log, one line about the current line, and what may be asked for."""
        yield Static(id="log-names", classes="log-head")
        yield Static(id="log-state", classes="log-head")
        yield ContentSwitcher(id="log-views")
        with ContentSwitcher(id="log-foot", initial="log-line"):
            yield Static(id="log-line", classes="log-head")
            yield Prompt(id="log-prompt")

    def on_mount(self) -> None:
        """Take up the logs that are there."""
        self.set_interval(REFRESH, self._take_up)
        self.call_later(self._take_up)

    @property
    def view(self) -> LogView | None:
        """The log that is shown; None before there is any."""
        return self._views.get(self.shown)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Ask for one thing at a time."""
        del parameters
        return action not in ("search", "filter", "time", "other") or not self._asking

    def action_filter(self) -> None:
        """Ask for a filter."""
        self._ask("filter", r"Prefill !health /token: \d{4}/    empty shows all lines")

    def action_search(self) -> None:
        """Ask for what to search."""
        self._ask("search", "text or /regex/, then n and N")

    def action_time(self) -> None:
        """Ask for a time to go to."""
        self._ask("time", "14:02, 14:02:11 or -5m")

    def action_other(self) -> None:
        """Show the next log."""
        titles = list(self._views)
        if titles:
            self._switch(titles[(titles.index(self.shown) + 1) % len(titles)])

    def _ask(self, what: str, hint: str) -> None:
        if self.view is not None:
            self._asking = True
            self.query_one("#log-foot", ContentSwitcher).current = "log-prompt"
            self.query_one(Prompt).ask(what, self._typed[what], hint)

    @on(Prompt.Closed)
    def _answered(self, event: Prompt.Closed) -> None:
        view = self.view
        assert view is not None
        self._asking = False
        self.query_one("#log-foot", ContentSwitcher).current = "log-line"
        view.focus()
        typed = None if event.what == "time" and not event.typed else event.typed  # "" is no filter, but no time
        if typed is not None:
            self._typed[event.what] = typed
            view.say("")  # what was wrong before may be right now
            do = {"filter": view.set_filter, "search": view.search, "time": view.jump}[event.what]
            try:
                do(typed)
            except ValueError as error:
                view.say(str(error))
        self._look()

    def _switch(self, title: str) -> None:
        self.shown = title
        view = self._views[title]
        self.query_one("#log-views", ContentSwitcher).current = view.id
        self.call_after_refresh(view.focus)  # it cannot take the focus before it is displayed
        self._look()

    async def _take_up(self) -> None:
        """Add a view for each log that came since."""
        for title, buffer in self.feed.logs.items():
            if title not in self._views:
                view = LogView(buffer, id=f"log-{len(self._views)}")
                self._views[title] = view
                await self.query_one("#log-views", ContentSwitcher).add_content(view)
                if not self.shown:
                    self._switch(title)
        self._look()

    def _look(self) -> None:
        """Say anew what stands above and below the log."""
        view = self.view
        width = self.size.width - 2
        self._put("#log-names", self._names(width))
        if view is not None:
            self._put("#log-state", state_words(view, self.feed.log_state(self.shown), width))
            self._put("#log-line", Text(view.note or line_words(view)))

    def _put(self, place: str, words: Text) -> None:
        static = self.query_one(place, Static)
        if static.content != words:
            static.update(words, layout=False)

    def _names(self, width: int) -> Text:
        names = Text(no_wrap=True, overflow="ellipsis")
        for title in self._views:
            run = self.feed.log_run(title)
            name = f" {title}{f' {run}' if run else ''} "
            names.append(name, "reverse bold" if title == self.shown else "")
        hint = "  Tab: the other log"
        if len(self._views) > 1 and names.cell_len + len(hint) <= width:
            names.append(hint, "dim")
        elif not self._views:
            names.append("no log yet")
        return names


def state_words(view: LogView, stream: str, width: int) -> Text:
    """How a log is, in a line `width` wide: following or paused, how long, its stream, what is missing, the filter."""
    buffer = view.buffer
    dropped = f"{buffer.dropped:,} dropped from memory" if buffer.dropped else "nothing missing"
    parts = [
        "following" if view.following else f"paused (+{view.behind:,})",
        lines_in_words(buffer.next),
        stream,
        dropped,
    ]
    filtered = filter_words(view)
    whole = " (the file on the host is whole)" if buffer.dropped else ""
    left = " · ".join(parts)
    if len(left) + len(whole) + 2 + len(filtered) <= width:
        left += whole
    return Text(f"{left}  {filtered:>{max(0, width - len(left) - 2)}}", no_wrap=True, overflow="ellipsis")


def filter_words(view: LogView) -> str:
    """The filter, and how far it has come; "" where there is none."""
    if not view.filter:
        return ""
    around = f" ±{view.context}" if view.context else ""
    progress = "" if view.progress is None else f" {view.progress:.0%} done"
    return f"filter: {view.filter}{around}{progress}"


def line_words(view: LogView) -> str:
    """Where the current line stands in the log."""
    line = view.current
    if line is None:
        return ""
    parts = [f"line {line.number + 1:,}"]
    if line.time is not None:
        parts.append(f"{datetime.fromtimestamp(line.time):%Y-%m-%d %H:%M:%S}")
    if view.left:
        parts.append(f"from column {view.left + 1}")
    if view.searched:
        parts.append(f"search: {view.searched}")
    return " · ".join(parts)
