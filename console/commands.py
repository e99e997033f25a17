"""Everything that one can do in the console, once: key, footer, palette, help and keymap all come from here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from console.session import going_on

Now = dict[str, Any]  # a snapshot


def anytime(now: Now) -> str | None:
    """Never refused."""
    return None


def connected(now: Now) -> str | None:
    """Refused without a live link."""
    link = now["link"]
    return None if link["state"] == "live" else f"the link is {link['state']}; wait until it is live"


def server_running(now: Now) -> str | None:
    """Refused without a server that runs."""
    server = now["server"]
    if not going_on(server):
        return connected(now) or "no server runs; launch one first"
    return connected(now)


def extraction_running(now: Now) -> str | None:
    """Refused where nothing is being extracted."""
    run = now["extraction"]
    if not going_on(run):
        return connected(now) or "no extraction runs"
    return connected(now)


def link_failed(now: Now) -> str | None:
    """Refused while the link needs no help."""
    return None if now["link"]["state"] == "failed" else f"the link is {now['link']['state']}"


@dataclass(frozen=True)
class Command:
    """One thing to do.

    `id` names it in a keymap; `verb` is the headless way to do the same; `changes` says that it changes something on
    the host, so that --read-only refuses it; `refusal` says why it cannot be done now, None where it can.
    """

    id: str
    key: str
    label: str
    help: str
    verb: str | None = None
    footer: bool = False
    changes: bool = False
    refusal: Callable[[Now], str | None] = anytime


COMMANDS = (
    Command("view.dashboard", "escape", "Back", "back to the dashboard; on it, messages are cleared", "status"),
    Command("view.logs", "l", "Logs", "live log of the server and of the extraction", "logs", footer=True),
    Command("view.extract", "x", "Extract", "start an extraction, or watch it", "extract", footer=True),
    Command("view.samples", "a", "Samples", "samples of the dataset, token by token", "sample"),
    Command("view.try", "t", "Try", "one prompt: its tokens, and what comes out of every layer", "try", footer=True),
    Command("view.server", "s", "Server", "arguments, the tap, the gate; launch and stop", "launch", footer=True),
    Command("view.runs", "r", "Runs", "everything that ran on this host, and how it went", "runs", footer=True),
    Command("view.doctor", "d", "Doctor", "what would make a run fail on this host, and what to do", "doctor"),
    Command("view.hosts", "o", "Hosts", "the hosts that can be reached; change to another", "hosts"),
    Command("help", "question_mark", "Help", "keys of this screen, and what the words mean", footer=True),
    Command("server.stop", "K", "Stop server", "stop the server, and prove that nothing is left", "stop",
            changes=True, refusal=server_running),
    Command("server.stacks", "b", "Stacks", "where every rank stands, and which one differs; for a server that hangs",
            "stacks", changes=True, refusal=server_running),
    Command("extract.stop", "X", "Stop extraction", "stop the extraction; the same rows go on later", "stop",
            changes=True, refusal=extraction_running),
    Command("link.retry", "R", "Connect again", "try a link that failed once more", refusal=link_failed),
    Command("theme.next", "T", "Theme", "the next theme"),
    Command("bundle", "ctrl+b", "Support bundle",
            "logs, state and this screen in one file in the current folder, secrets masked", "bundle",
            refusal=connected),
    Command("screenshot", "ctrl+s", "Picture", "write this screen to an SVG file in the current folder"),
    Command("quit", "ctrl+q", "Quit", "leave the console; whatever runs on the host goes on", footer=True),
)  # fmt: skip

BY_ID = {command.id: command for command in COMMANDS}
