"""Choosing a file or a folder of the host."""

from __future__ import annotations

import posixpath
from typing import Any, ClassVar, Literal

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from backends.errors import LayertapError
from console.feed import Feed
from console.tui.jobs import ask
from console.tui.screens.dialogs import Dialog
from console.tui.widgets.panel import line
from console.words import figures

THIS = "."
UP = ".."


class FolderBrowser(Dialog[str | None]):
    """The folders of the host, from `start` on; answers with the absolute path that was chosen, None for none."""

    DEFAULT_CSS = """
    FolderBrowser .dialog { height: 92%; width: 96; padding: 0 1; }
    FolderBrowser .folder { text-style: bold; }
    FolderBrowser OptionList { height: 1fr; border: none; padding: 0; background: $surface; }
    FolderBrowser Input { margin: 0; }
    FolderBrowser .hint { color: $text-muted; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "Cancel", id="browser.cancel"),
        Binding("j", "move('cursor_down')", show=False, id="browser.down"),
        Binding("k", "move('cursor_up')", show=False, id="browser.up"),
        Binding("g", "move('first')", show=False, id="browser.first"),
        Binding("G", "move('last')", show=False, id="browser.last"),
        Binding("backspace,h,left", "leave", "Folder above", id="browser.leave"),
        Binding("slash", "filter", "Filter", id="browser.filter"),
    ]

    def __init__(self, feed: Feed, start: str, want: Literal["file", "folder"] = "file") -> None:
        super().__init__()
        self.feed = feed
        self.start = start
        self.want = want
        self.path = start
        self._entries: list[dict[str, Any]] = []
        self._left_out = 0

    def compose(self) -> ComposeResult:
        """The folder, what is in it, what is filtered for, and the keys."""
        with Vertical(classes="dialog") as dialog:
            dialog.border_title = f"Choose a {self.want} on {self.feed.name}"
            yield Static(markup=False, classes="folder")
            yield OptionList(markup=False, compact=True)
            yield Input(placeholder="only names with this in them", compact=True)
            yield Static("enter opens   backspace folder above   / filter   esc cancels", classes="hint")

    def on_mount(self) -> None:
        """Look into the first folder."""
        self.query_one(Input).display = False
        self.query_one(OptionList).focus()
        self._go(self.start)

    def _go(self, path: str) -> None:
        self.run_worker(self._look(path), exclusive=True, group="look")

    async def _look(self, path: str) -> None:
        said, before = self.query_one(".folder", Static), self.path
        said.update(line(f"{path or 'home'} ", ("…", "$foreground-muted")))
        try:
            found = await ask(self.feed, lambda session: session.host.request("folder", path=path))
        except LayertapError as error:
            said.update(line((f"! {error}", "$text-error")))
            return
        self.path, self._left_out = found["path"], found["left_out"]
        self._entries = sorted(found["entries"], key=_order)
        self.query_one(Input).value = ""
        said.update(line(self.path))
        self._fill(posixpath.basename(before) if posixpath.dirname(before) == self.path else None)

    def _fill(self, come_from: str | None = None) -> None:
        """List what the filter lets through."""
        wanted = self.query_one(Input).value.lower()
        shown = [entry for entry in self._entries if wanted in entry["name"].lower()]
        options = [Option(line(("            ../  ", ""), ("the folder above", "$foreground-muted")), id=UP)]
        if self.want == "folder":
            options.insert(0, Option(line("           ./  ", ("this folder: choose it", "$foreground-muted")), id=THIS))
        options += [Option(_entry(entry), id=f"/{index}") for index, entry in enumerate(shown)]
        self._shown = shown
        listed = self.query_one(OptionList)
        listed.set_options(options)
        fixed = len(options) - len(shown)
        names = [entry["name"] for entry in shown]
        listed.highlighted = fixed + names.index(come_from) if come_from in names else min(fixed, len(options) - 1)
        if self.want == "folder" and come_from not in names:
            listed.highlighted = 0
        left_out = f"and {self._left_out:,} more that are not listed" if self._left_out else ""
        self.query_one(".dialog").border_subtitle = left_out

    @on(OptionList.OptionSelected)
    def open(self, event: OptionList.OptionSelected) -> None:
        """Open a folder, choose a file."""
        name = event.option.id or ""
        if name == UP:
            self.action_leave()
        elif name == THIS:
            self.dismiss(self.path)
        else:
            entry = self._shown[int(name[1:])]
            path = posixpath.join(self.path, entry["name"])
            if entry["folder"]:
                self._go(path)
            elif self.want == "file":
                self.dismiss(path)

    def action_leave(self) -> None:
        """To the folder above."""
        self._go(posixpath.dirname(self.path.rstrip("/")) or "/")

    def action_move(self, where: str) -> None:
        """Move in the list."""
        getattr(self.query_one(OptionList), f"action_{where}")()

    def action_filter(self) -> None:
        """Type what names must have in them."""
        field = self.query_one(Input)
        field.display = True
        field.focus()

    def action_back(self) -> None:
        """End the filter, else choose nothing."""
        field = self.query_one(Input)
        if not field.display:
            self.dismiss(None)
            return
        field.value = ""
        field.display = False
        self.query_one(OptionList).focus()

    @on(Input.Changed)
    def filtered(self) -> None:
        """List what is left."""
        self._fill()

    @on(Input.Submitted)
    def chosen(self) -> None:
        """Back to the list, with the filter on."""
        self.query_one(OptionList).focus()


def _order(entry: dict[str, Any]) -> tuple[bool, bool, str]:
    return not entry["folder"], entry["name"].startswith("."), entry["name"].lower()


def _entry(entry: dict[str, Any]) -> Any:
    if entry["folder"]:
        return line(f"{'':>10}  ", (f"{entry['name']}/", "bold"))
    return line((f"{figures.size(entry['bytes']):>10}  ", "$foreground-muted"), entry["name"])
