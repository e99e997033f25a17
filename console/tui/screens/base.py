"""What every screen has: the line at its top that tells host, link and server, what is wrong, and the keys below."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import Footer, Static

from backends.errors import LayertapError
from console.commands import COMMANDS
from console.feed import Feed
from console.session import Session, going_on
from console.tui.jobs import ask
from console.tui.widgets.banner import Banner
from console.tui.widgets.panel import Panel, joined, line
from console.words import of_host
from console.words.printable import printable

T = TypeVar("T")
ALWAYS = ("view.dashboard", "help")


class HostLine(Static):
    """Host and link on the left, profile, SGLang and tap on the right."""

    DEFAULT_CSS = "HostLine { height: 1; background: $panel; padding: 0 1; }"

    def __init__(self, feed: Feed) -> None:
        super().__init__(markup=False)
        self.feed = feed

    def show(self, now: dict[str, Any]) -> None:
        """Draw this snapshot."""
        host = now["host"]
        name = (
            self.feed.name if host is None or self.feed.name == host["host"] else f"{self.feed.name} ({host['host']})"
        )
        left = joined([line(("Layertap", "bold"), f"  {name}"), link_words(now)])
        space = self.content_size.width - left.cell_length
        right = next((text for text in map(printable, server_words(now)) if len(text) < space), "")
        self.update(line(left, " " * (space - len(right)), (right, "$foreground-muted")))


def server_words(now: dict[str, Any]) -> list[str]:
    """What runs there, the most telling that fits first."""
    host, server = now["host"], now["server"]
    if server is None:
        if host is None:
            return []
        return [f"SGLang {host['sglang']}" if host["sglang"] else "no SGLang found there; say --python"]
    tap, version = server["tap"], f"SGLang {server['sglang']}"
    layers = tap["layers"] if tap and tap["inside"] else None
    state = f"tap in, {len(layers['boundaries'])} layers" if layers else "tap not in"
    if not going_on(server):
        state = server["state"]
    return [f"{server['details']['profile']} · {version} · {state}", f"{version} · {state}", state]


def link_words(now: dict[str, Any]) -> Any:
    """How the link is, with a sign and a colour where it is not simply live."""
    link = now["link"]
    if link["state"] == "live":
        samples = next((stream for stream in now["streams"] if stream["name"] == "samples"), None)
        if samples and samples["state"] == "stale":
            return line((f"! {of_host.stream(samples)}", "bold $text-warning"))
        age = "" if not samples or samples["heard_age"] is None else f" {samples['heard_age']:.1f} s"
        return line(("+ live", "$text-success"), (age, "$foreground-muted"))
    said = " ".join(of_host.link(link, now["at"])).removeprefix("! link ")
    style = "$text-error" if link["state"] == "failed" else "$text-warning"
    return line((f"{'!' if link['state'] == 'failed' else '~'} {said}", f"bold {style}"))


class HostScreen(Screen[None]):
    """A screen of one host; `show` gets every new snapshot while the screen is on top."""

    # The dashboard's keys work everywhere, but elsewhere the line at the bottom is for the screen's own.
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(command.key, f"app.command('{command.id}')", command.label, id=command.id, show=command.id in ALWAYS)
        for command in COMMANDS
    ]
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide"), (160, "-huge")]  # noqa: RUF012

    def __init__(self, feed: Feed) -> None:
        super().__init__()
        self.feed = feed
        self._begun = False

    @property
    def laid_out(self) -> bool:
        """Whether there is a place to show anything: not before the first layout, nor while it is being closed."""
        return self._begun and bool(self.query(HostLine))

    def compose(self) -> ComposeResult:
        """Top line, what is wrong, body, keys."""
        yield HostLine(self.feed)
        yield Banner()
        yield from self.compose_body()
        yield Footer(show_command_palette=False)

    def compose_body(self) -> ComposeResult:
        """What stands between top line and keys."""
        raise NotImplementedError

    def show(self, now: dict[str, Any]) -> None:
        """Draw a snapshot."""
        self.query_one(HostLine).show(now)
        self.query_one(Banner).show(now)
        for panel in self.query(Panel):
            panel.show(now)

    def on_mount(self) -> None:
        """Draw what is known already, once there is a place for it."""
        self.call_after_refresh(self._begin)

    def _begin(self) -> None:
        self._begun = True
        if self.laid_out:
            self.show(self.feed.snapshot())

    def may_change(self) -> bool:
        """Whether something on the host may be changed; where not, that is said."""
        read_only = getattr(self.app, "read_only", False)
        if read_only:
            self.notify("this console was started with --read-only", severity="warning")
        return not read_only

    async def ask_host(self, act: Callable[[Session], T]) -> T | None:
        """Do something on the host without blocking a key; an error is shown, and gives None."""
        try:
            return await ask(self.feed, act)
        except LayertapError as error:
            self.notify(str(error), severity="error", timeout=12, markup=False)
            return None
