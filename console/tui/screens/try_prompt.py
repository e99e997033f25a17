"""One prompt: its tokens, and what comes out of every layer."""

from __future__ import annotations

import asyncio
from typing import Any

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import Checkbox, Input, Static

from console import words
from console.session import Session
from console.tui.screens.base import HostScreen
from console.tui.widgets.panel import line

POLL_SECONDS = 0.3


class TryScreen(HostScreen):
    """Type a prompt, press Enter."""

    BINDINGS = [Binding("ctrl+t", "toggle_chat", "As a chat message", id="try.chat")]  # noqa: RUF012

    def compose_body(self) -> ComposeResult:
        """See `HostScreen`."""
        with Horizontal(id="prompt"):
            yield Input(placeholder="a prompt, taken as it is; Enter sends it", id="text")
            yield Checkbox("as a chat message", id="chat", compact=True)
        with VerticalScroll(id="outcome"):
            yield Static(markup=False, id="said")

    def on_mount(self) -> None:
        """Type at once."""
        self.query_one("#text").focus()

    def action_toggle_chat(self) -> None:
        """Through the chat template, or not."""
        self.query_one(Checkbox).toggle()

    @on(Input.Submitted)
    def send(self, event: Input.Submitted) -> None:
        """Send it, unless one is under way."""
        if event.value:
            chat = self.query_one(Checkbox).value
            self.run_worker(self._try(event.value, chat), exclusive=True, group="try")

    async def _try(self, text: str, chat: bool) -> None:
        said = self.query_one("#said", Static)
        said.update(line(("drawing …", "$text-muted")))
        started = await self.ask_host(lambda session: session.start("try", {"text": text, "chat": chat}))
        if started is None:
            said.update("")
            return
        run = started
        while run["state"] in ("running", "starting"):
            await asyncio.sleep(POLL_SECONDS)
            asked = await self.ask_host(lambda session: _look(session, started["id"]))
            if asked is None:
                return
            run = asked
        result = run["result"] or {"error": f"{run['id']} ended without a word; its log is {run['log']}"}
        if "error" in result:
            said.update(line((f"! {result['error']}", "$text-error")))
        else:
            said.update("\n".join(words.tried(result)))


def _look(session: Session, run_id: str) -> dict[str, Any]:
    found: dict[str, Any] = session.host.request("run", run_id=run_id)
    return found
