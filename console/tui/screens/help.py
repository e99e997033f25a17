"""The keys, and what the words on the screens mean."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from console.commands import COMMANDS
from console.tui.screens.dialogs import Dialog
from console.tui.widgets.panel import line

SIGNS = {
    "+": "well, or done",
    "~": "going on",
    "!": "wrong",
    "?": "doubtful: look at it; it may be well, or not",
    "-": "nothing to judge: it was stopped, or could not be found out",
    "·": "not yet",
}
WORDS = (
    ("live, stale", "the link's state; stale: nothing was heard for that long. Runs go on without any link."),
    ("boundary 3", "what enters layer 3: the output of layer 2, Hugging Face's hidden_states[3]"),
    ("eagle ids", "what the drafter's config must say for this SGLang version to feed it the same boundaries"),
    ("sent, verified", "sent to the server; verified: its dump was checked and is written to the dataset"),
    ("ours, stranger", "requests of the extraction, and those of anybody else: never dumped"),
    ("arena", "the memory that states are copied into in the forward; a full one slows the run, and never loses any"),
    *SIGNS.items(),
)
SHOWN_KEYS = {"question_mark": "?", "escape": "esc", "slash": "/", "left": "<-", "right": "->"}


class HelpScreen(Dialog[None]):
    """Lists the commands, then the keys of the screen below."""

    BINDINGS = [  # noqa: RUF012
        Binding("escape,question_mark,q", "dismiss", "Close", id="help.close"),
        Binding("j,down", "scroll(2)", show=False, id="help.down"),
        Binding("k,up", "scroll(-2)", show=False, id="help.up"),
    ]

    def __init__(self, here: list[tuple[str, str]]) -> None:
        super().__init__()
        self.here = here

    def compose(self) -> ComposeResult:
        """Three lists."""
        keys = [(key_name(command.key), command.help) for command in COMMANDS]
        keys += [("ctrl+p", "the palette: every command by name")]
        with VerticalScroll(classes="dialog help"):
            for title, entries in (("Here", self.here), ("Everywhere", keys), ("Words", WORDS)):
                if entries:
                    yield Static(line((title, "bold $text-accent")), markup=False)
                    yield Static(self._list(entries), markup=False)
            yield Static(line(("esc closes this", "$foreground-muted")), markup=False)

    def action_scroll(self, lines: int) -> None:
        """Scroll the list."""
        self.query_one(VerticalScroll).scroll_relative(y=lines, animate=False)

    @staticmethod
    def _list(entries: list[tuple[str, str]] | tuple[tuple[str, str], ...]) -> Content:
        wide = max(len(name) for name, _ in entries) + 2
        return Content("\n").join([line((f"  {name:<{wide}}", "bold"), text) for name, text in entries])


def key_name(key: str) -> str:
    """A key as it is on the keyboard."""
    return "  ".join(SHOWN_KEYS.get(one, one) for one in key.split(","))
