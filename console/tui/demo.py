"""The demo in the console: it runs beside the screens, and leaving the console stops its server."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from backends.errors import LayertapError
from console.config import ConsoleConfig
from console.demo import Demo, Follow, Say
from console.feed import aside
from console.session import Session, going_on
from console.tui.app import Console, Hosts
from console.tui.screens.dialogs import Confirm

POLL_SECONDS = 0.1

Make = Callable[[Session, Say, Follow], Demo]


def show(hosts: Hosts, host: str, config: ConsoleConfig, make: Make) -> dict[str, Any]:
    """Show the demo until the console is left, and stop its server; returns its outcome.

    Raises what the demo raised.
    """
    app = DemoConsole(hosts, host, config, make)
    try:
        app.run()
    finally:
        app.stop_demo()
        app.feed.close()
    return app.outcome()


class DemoConsole(Console):
    """A console whose main job starts by itself."""

    def __init__(self, hosts: Hosts, host: str, config: ConsoleConfig, make: Make) -> None:
        super().__init__(hosts, host, config)
        self._make = make
        self._demo: Demo | None = None
        self._error: BaseException | None = None
        self._said: deque[str] = deque()
        self._leaving = threading.Event()

    def on_mount(self) -> None:
        """Begin."""
        threading.Thread(target=self._run, name="layertap-demo", daemon=True).start()
        self.set_interval(0.25, self._tell)

    def _run(self) -> None:
        while (session := self.feed.session) is None:
            if self._leaving.wait(POLL_SECONDS):
                return
        demo = self._demo = self._make(session, self._said.append, lambda run: None)
        if self._leaving.is_set():  # whoever leaves may not have seen it yet
            return
        try:
            demo.run()
        except BaseException as error:
            if not self._leaving.is_set():
                self._error = error
                self._said.append(f"the demo failed: {error}")
        else:
            self._said.append("the demo is done: look around; ^q leaves, and stops its server")

    def _tell(self) -> None:
        while self._said:
            self.notify(self._said.popleft(), title=time.strftime("%H:%M:%S"), timeout=15, markup=False)

    def _do_quit(self) -> None:
        if self._is_stopped():
            self.exit()
            return

        def confirmed(yes: bool | None) -> None:
            if yes:
                self.run_worker(leaving())

        async def leaving() -> None:
            self.notify("stopping the demo's server …")
            await asyncio.wrap_future(aside(self.stop_demo))
            self.exit()

        self.push_screen(Confirm("Leave, and stop the demo's server?", "Stop it and leave"), confirmed)

    def _is_stopped(self) -> bool:
        """Whether its server was stopped, or died, so that there is nothing to ask."""
        ours = self._demo.server if self._demo else None
        shown = self.feed.snapshot()["server"]
        return bool(ours and shown and shown["id"] == ours["id"] and not going_on(shown))

    def stop_demo(self) -> None:
        """Stop its server, unless it is stopped already."""
        self._leaving.set()
        if self._demo:
            try:
                self._demo.stop()
            except LayertapError as error:
                self._error = self._error or error

    def outcome(self) -> dict[str, Any]:
        """What it came to. Raises what it raised."""
        if self._error:
            raise self._error
        if self._demo is None:
            raise LayertapError("the demo was left before it began")
        return self._demo.outcome()
