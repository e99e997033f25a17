"""Questions in the middle of the screen. Whatever does less is what Enter does first."""

from __future__ import annotations

from typing import Any, TypeVar

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Static

from console.tui.widgets.panel import line

T = TypeVar("T")


class Dialog(ModalScreen[T]):
    """Lies over a screen; what was told in its corner goes, so that nothing lies over the dialog."""

    def on_mount(self) -> None:
        """See the class; a message that comes later stands at the top, see `console.tcss`."""
        self.app.clear_notifications()
        for below in self.app.screen_stack[:-1]:
            below.query("Toast").remove()


class Confirm(Dialog[bool]):
    """Whether to go on; Cancel has the focus."""

    BINDINGS = [  # noqa: RUF012
        Binding("escape", "dismiss(False)", "Cancel", id="dialog.cancel"),
        Binding("left,right", "app.focus_next", show=False, id="dialog.other"),
    ]

    def __init__(self, text: str, yes: str) -> None:
        super().__init__()
        self.text, self.yes = text, yes

    def compose(self) -> ComposeResult:
        """The question and two buttons."""
        with Vertical(classes="dialog"):
            yield Static(line(self.text), markup=False)
            with Horizontal(classes="buttons"):
                yield Button("Cancel", id="cancel")
                yield Button(self.yes, id="yes", variant="warning")

    def on_mount(self) -> None:
        """Cancel first."""
        self.query_one("#cancel").focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Answer."""
        self.dismiss(event.button.id == "yes")


class HostKey(Confirm):
    """Whether a host's new key is the right one."""

    def __init__(self, question: dict[str, Any]) -> None:
        super().__init__(
            f"{question['text']}\n\n{question['fingerprint']}\n\n"
            "Compare it with what the host's administrator says. It is asked once.",
            "It is the right one",
        )


class Secret(Dialog[str | None]):
    """A passphrase or a password; empty or Escape is no answer."""

    BINDINGS = [Binding("escape", "dismiss(None)", "Cancel", id="dialog.cancel")]  # noqa: RUF012

    def __init__(self, question: dict[str, Any]) -> None:
        super().__init__()
        self.question = question

    def compose(self) -> ComposeResult:
        """The question, and where to type."""
        with Vertical(classes="dialog"):
            yield Static(line(self.question["text"]), markup=False)
            if self.question["again"]:
                yield Static("That was not it.", classes="wrong")
            yield Input(password=True, placeholder=self.question["kind"])
            with Horizontal(classes="buttons"):
                yield Button("Cancel", id="cancel")
                yield Button("OK", id="yes")

    def on_mount(self) -> None:
        """Type at once."""
        self.query_one(Input).focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Enter."""
        self.dismiss(event.value or None)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Answer."""
        self.dismiss(self.query_one(Input).value or None if event.button.id == "yes" else None)
