"""The console: screens over one host's feed. It shows, and asks; it waits for nothing and stops nothing by itself."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.filter import LineFilter
from textual.screen import Screen
from textual.theme import BUILTIN_THEMES

from console import bundle, themes
from console.commands import BY_ID, COMMANDS
from console.config import Config, ConsoleConfig
from console.feed import Feed
from console.headless import say
from console.hosts import LOCAL, known, look, open_session
from console.session import Session, going_on
from console.tui.safe_lines import SafeLines
from console.tui.screens.base import HostScreen
from console.tui.screens.dashboard import DashboardScreen
from console.tui.screens.dialogs import Confirm, HostKey, Secret
from console.tui.screens.doctor import DoctorScreen
from console.tui.screens.extract import ExtractScreen
from console.tui.screens.help import HelpScreen, key_name
from console.tui.screens.hosts import HostsScreen
from console.tui.screens.logs import LogScreen
from console.tui.screens.runs import RunsScreen
from console.tui.screens.samples import SamplesScreen
from console.tui.screens.server import ServerScreen
from console.tui.screens.try_prompt import TryScreen
from console.words import of_server
from console.words.printable import printable

T = TypeVar("T")
SHOW_SECONDS = 0.25
THEME_SECONDS = 2.0
TERMINAL_SECONDS = 1.0
DEFAULTS = ConsoleConfig()
SAFE = SafeLines()

VIEWS: dict[str, Callable[[Feed], Screen[None]]] = {
    "view.extract": ExtractScreen,
    "view.samples": SamplesScreen,
    "view.try": TryScreen,
    "view.server": ServerScreen,
    "view.runs": RunsScreen,
    "view.doctor": DoctorScreen,
}


@dataclass(frozen=True)
class Hosts:
    """What the console knows of hosts: names, how to watch one, and how to ask one how it is."""

    names: list[str]
    watch: Callable[[str], Feed]
    look: Callable[[str], dict[str, Any]]


def has_terminal() -> bool:
    """Whether what is typed comes from a terminal that is still there."""
    return sys.__stdin__ is not None and sys.__stdin__.isatty()


def run(host: str, config: Config, python: str | None, accept: str | None, *, read_only: bool, port: int | None) -> int:
    """Open the console on `host`, until it is left; returns the exit code."""
    hosts = known_hosts(config, python, accept, port)
    app = Console(hosts, host, config.console, read_only=read_only)
    try:
        app.run()
    finally:
        app.feed.close()
    for text in app.parting:
        say(text)
    return app.return_code or 0


def known_hosts(config: Config, python: str | None, accept: str | None, port: int | None = None) -> Hosts:
    """The hosts that `--host` takes, with the options of this call."""
    return Hosts(
        known(config),
        lambda name: Feed(name, lambda ask: open_session(name, config, python, accept, ask), port),
        lambda name: look(name, config, python),
    )


class Console(App[None], inherit_bindings=False):
    """`layertap` without a verb."""

    TITLE = "Layertap"
    CSS_PATH = "console.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            Binding(command.key, f"command('{command.id}')", command.label, id=command.id, show=command.footer)
            for command in COMMANDS
        ),
        Binding("ctrl+c", "help_quit", show=False, system=True),
    ]

    def __init__(self, hosts: Hosts, host: str, config: ConsoleConfig = DEFAULTS, *, read_only: bool = False) -> None:
        super().__init__()
        self.hosts = hosts
        self.config = config
        self.read_only = read_only
        self.feed = hosts.watch(host)
        self.parting: list[str] = []
        self._asking: object = None
        self._themes: object = None

    def on_mount(self) -> None:
        """Show the dashboard, and begin to watch."""
        if not self.config.animations:
            self.animation_level = "none"
        self.set_keymap(self.config.keymap)
        self._load_themes()
        self._show_theme(self.config.theme)
        self.push_screen(DashboardScreen(self.feed))
        self.feed.start()
        self.set_interval(SHOW_SECONDS, self.show_now)
        self.set_interval(THEME_SECONDS, self._renew_themes)
        if has_terminal():
            self.set_interval(TERMINAL_SECONDS, self._leave_with_terminal)
        self.call_after_refresh(self._settle)

    def _settle(self) -> None:
        """What is there now stays: a garbage collection that does not look at it holds the screen up for less long."""
        gc.collect()
        gc.freeze()

    def _leave_with_terminal(self) -> None:
        """A terminal may go without a signal; its end would be read for ever, at full speed."""
        if not has_terminal():
            self.exit()

    def _load_themes(self) -> None:
        self._themes = themes.stamp()
        found, faults = themes.load()
        for theme in found:
            self.register_theme(theme)
        for fault in faults:
            self.notify(fault, severity="warning", timeout=12, markup=False)

    def _renew_themes(self) -> None:
        """Take the user's own themes anew where they have changed."""
        if themes.stamp() != self._themes:
            self._load_themes()
            self.refresh_css(animate=False)

    def _show_theme(self, name: str) -> None:
        if name in self.available_themes:
            self.theme = name
        else:
            self.notify(f"there is no theme {name!r}", severity="warning", markup=False)

    def show_now(self) -> None:
        """Hand what is known now to the screen on top, and put the pending question."""
        if not self.screen_stack:  # the console is being left, and this timer ends last
            return
        now = self.feed.snapshot()
        if isinstance(self.screen, HostScreen) and self.screen.laid_out:
            self.screen.show(now)
        question = now["question"]
        if question and question != self._asking:
            self._asking = question
            self._put(question)

    def _put(self, question: dict[str, Any]) -> None:
        def answered(text: str | None) -> None:
            self._asking = None
            self.feed.answer(text)

        if question["kind"] == "host_key":
            self.push_screen(HostKey(question), lambda right: answered("yes" if right else None))
        else:
            self.push_screen(Secret(question), answered)

    def get_line_filters(self) -> Sequence[LineFilter]:
        """See `App`."""
        return [*super().get_line_filters(), SAFE]

    def notify(self, message: str, *, title: str = "", **known: Any) -> None:
        """See `App`."""
        super().notify(printable(message), title=printable(title), **known)

    # --- Commands ---

    async def action_command(self, name: str) -> None:
        """Do a command, or say why it cannot be done now."""
        command = BY_ID[name]
        refusal = command.refusal(self.feed.snapshot())
        if command.changes and self.read_only:
            refusal = "this console was started with --read-only"
        if refusal:
            self.notify(f"{command.label}: {refusal}", severity="warning", markup=False)
        elif name == "view.dashboard":
            if len(self.screen_stack) <= 2:
                self.clear_notifications()
            self._back()
        elif view := self._view(name):
            self._back()
            self.push_screen(view)
        else:
            getattr(self, f"_do_{name.replace('.', '_')}")()

    def _back(self) -> None:
        while len(self.screen_stack) > 2:
            self.pop_screen()

    def _view(self, name: str) -> Screen[None] | str | None:
        """The screen that a command shows, or its name; None for a command that shows none."""
        if name == "view.hosts":
            return HostsScreen(self.feed, self.hosts.names, self.hosts.look)
        if name == "view.logs":
            return self._logs()
        return VIEWS[name](self.feed) if name in VIEWS else None

    def _logs(self) -> str:
        """The name of the log screen, which stays as it was left."""
        name = f"logs of {self.feed.name}"
        if not self.is_screen_installed(name):
            self.install_screen(LogScreen(self.feed), name)
        return name

    def on_hosts_screen_chosen(self, event: HostsScreen.Chosen) -> None:
        """Show another host from now on."""
        self._back()
        if self.is_screen_installed(f"logs of {self.feed.name}"):
            self.uninstall_screen(f"logs of {self.feed.name}")
        before, self.feed = self.feed, self.hosts.watch(event.name)
        before.close()
        self._asking = None
        self.switch_screen(DashboardScreen(self.feed))
        self.feed.start()

    def _do_help(self) -> None:
        self.push_screen(HelpScreen(self._keys_here()))

    def _keys_here(self) -> list[tuple[str, str]]:
        """Keys of the screen and of what has the focus, without those of the app."""
        ours = {command.id for command in COMMANDS}
        found: dict[str, str] = {}
        for active in self.screen.active_bindings.values():
            binding = active.binding
            if binding.id and binding.id not in ours and "." in binding.id and binding.description:
                found.setdefault(binding.description, "")
                keys = [*filter(None, found[binding.description].split("  ")), key_name(binding.key)]
                found[binding.description] = "  ".join(dict.fromkeys(keys))
        return [(keys, text) for text, keys in found.items()]

    def _do_server_stop(self) -> None:
        server = self.feed.snapshot()["server"]
        self._stop(server["id"], f"Stop the server {server['id']} on port {server['port']}, and what draws from it?")

    def _do_server_stacks(self) -> None:
        run_id = self.feed.snapshot()["server"]["id"]

        async def reading() -> None:
            self.notify(f"reading where the processes of {run_id} stand …", markup=False)
            report = await self._ask_host(lambda session: session.host.request("stacks", run_id=run_id))
            if report is not None:
                self.notify("\n".join(of_server.stacks(report)), timeout=60, markup=False)

        self.run_worker(reading())

    def _do_extract_stop(self) -> None:
        run = self.feed.snapshot()["extraction"]
        self._stop(run["id"], f"Stop {run['id']}?\nWhat is written stays; the same rows and folder go on later.")

    def _stop(self, run_id: str, text: str) -> None:
        def confirmed(yes: bool | None) -> None:
            if yes:
                self.run_worker(stopping())

        async def stopping() -> None:
            self.notify(f"stopping {run_id} …", markup=False)
            made = await self._ask_host(lambda session: session.stop(run_id, "asked for in the console"))
            if made is None:
                return
            left = "; ".join(made["left"])
            if left:
                self.notify(f"{run_id} left something behind: {left}", severity="error", timeout=30, markup=False)
            else:
                self.notify(f"{run_id} stopped in {made['seconds']} s ({made['how']}), nothing left", markup=False)

        self.push_screen(Confirm(text, "Stop it"), confirmed)

    async def _ask_host(self, act: Callable[[Session], T]) -> T | None:
        """See `HostScreen.ask_host`; a dialog may lie over the screen."""
        screen = next(one for one in reversed(self.screen_stack) if isinstance(one, HostScreen))
        return await screen.ask_host(act)

    def _do_link_retry(self) -> None:
        self.feed.retry()

    def _do_theme_next(self) -> None:
        names = sorted(name for name in self.available_themes if name not in BUILTIN_THEMES)
        place = names.index(self.theme) + 1 if self.theme in names else 0
        self.theme = names[place % len(names)]
        self.notify(f"theme {self.theme}", markup=False)

    def _do_bundle(self) -> None:
        picture = {"screen.svg": self.export_screenshot(title="Layertap")}
        server = self.feed.snapshot()["server"]
        port = server["port"] if server else None

        async def gathering() -> None:
            self.notify("gathering a support bundle …", markup=False)
            path = await self._ask_host(lambda session: bundle.write(session, picture, port=port))
            if path is not None:
                self.notify(f"written to {path}; masked.json in it lists what was masked", timeout=15, markup=False)

        self.run_worker(gathering())

    def _do_screenshot(self) -> None:
        path = Path.cwd() / f"layertap-{time.strftime('%Y%m%d-%H%M%S')}.svg"
        try:
            path.write_text(self.export_screenshot(title="Layertap"), encoding="utf-8")
        except OSError as error:
            self.notify(f"{path}: {error.strerror}", severity="error", markup=False)
        else:
            self.notify(f"written to {path}", markup=False)

    def _do_quit(self) -> None:
        now = self.feed.snapshot()
        over = {
            run["id"] for run in (now["server"], now["extraction"]) if run and (run["stop_asked"] or not going_on(run))
        }
        going = [run["id"] for run in now["runs"] or [] if run["id"] not in over]
        if going:
            where = "" if self.feed.name == LOCAL else f" --host {self.feed.name}"
            self.parting = [f"{', '.join(going)} goes on; `layertap{where}` comes back to it"]
        self.exit()

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """The palette: our commands, and the choice of a theme."""
        for command in COMMANDS:
            if not (command.changes and self.read_only):
                yield SystemCommand(command.label, command.help, lambda name=command.id: self._from_palette(name))
        yield SystemCommand("Choose a theme", "every theme by name", self.action_change_theme)

    def _from_palette(self, name: str) -> None:
        self.run_worker(self.action_command(name))
