"""One prompt: its tokens, and what comes out of every layer."""

from __future__ import annotations

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import Input, Static

from backends.errors import LayertapError
from console.extraction import live_port
from console.tui.jobs import finish_job
from console.tui.screens.base import HostScreen
from console.tui.widgets.check import Check
from console.tui.widgets.panel import line
from console.words import of_dataset


class TryScreen(HostScreen):
    """Type a prompt, press Enter."""

    BINDINGS = [Binding("ctrl+t", "toggle_chat", "As a chat message", id="try.chat")]  # noqa: RUF012

    def compose_body(self) -> ComposeResult:
        """See `HostScreen`."""
        with Horizontal(id="prompt"):
            yield Input(placeholder="a prompt, taken as it is; Enter sends it", id="text")
            yield Check("as a chat message", id="chat")
        with VerticalScroll(id="outcome"):
            yield Static(markup=False, id="said")

    def on_mount(self) -> None:
        """Type at once."""
        self.query_one("#text").focus()

    def action_toggle_chat(self) -> None:
        """Through the chat template, or not."""
        self.query_one(Check).toggle()

    @on(Input.Submitted)
    def send(self, event: Input.Submitted) -> None:
        """Send it, unless one is under way."""
        if event.value and self.may_change():
            chat = self.query_one(Check).value
            self.run_worker(self._try(event.value, chat), exclusive=True, group="try")

    async def _try(self, text: str, chat: bool) -> None:
        said = self.query_one("#said", Static)
        said.update(line(("drawing …", "$foreground-muted")))
        try:
            port = live_port(self.feed.snapshot()["server"])
            _, result = await finish_job(self.feed, "try", {"text": text, "chat": chat}, port)
        except LayertapError as error:
            said.update(line((f"! {error}", "$text-error")))
        else:
            said.update(line("\n".join(of_dataset.tried(result))))
