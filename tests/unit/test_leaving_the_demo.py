"""The demo leaves no server behind, whenever it is left. The session is made up."""

from __future__ import annotations

import os
import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import until

from backends.errors import ConnectionFailed, LayertapError, RunDied
from console.demo import Demo
from console.feed import aside
from console.headless import show_demo

PORT = 31000
SERVER = {"id": "server-1", "sglang": "0.5.23", "port": PORT}


class MadeSession:
    """Launches as `launching` does; a server that nobody stopped is in `alive`."""

    def __init__(self, launching: Any = lambda: None) -> None:
        self.launching = launching
        self.alive: list[str] = []
        self.host = self
        self.removing = threading.Event()
        self.removing.set()

    def request(self, method: str, **known: Any) -> Any:
        if method == "remove_demo":
            self.removing.wait()
        if method == "server" and (known != {"port": PORT} or not self.alive):
            raise RunDied("no server of ours runs here")
        return {"free_port": PORT, "remove_demo": None, "server": SERVER}[method]

    def plan_launch(self, profile: str, model: None, port: int, overrides: Any) -> Any:
        return SimpleNamespace(layers={"outputs": [2]}, port=port)

    def launch(self, merged: Any, layers: Any) -> dict[str, Any]:
        self.alive.append(SERVER["id"])
        self.launching()
        return SERVER

    def stop(self, run_id: str, why: str) -> dict[str, Any]:
        self.alive.remove(run_id)
        return {"left": [], "seconds": 0.1}


def made(session: Any, say: Any = lambda text: None) -> Demo:
    return Demo(session, "/out", "embedded-llama", say, lambda run: None)


def test_ctrl_c_while_its_server_is_being_launched() -> None:
    demos: list[Demo] = []

    def interrupted() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        until(demos[0]._over.is_set, "somebody stops it")

    session = MadeSession(interrupted)

    def make(say: Any, follow: Any) -> Demo:
        demos.append(made(session))
        return demos[0]

    with pytest.raises(KeyboardInterrupt):
        show_demo(make)
    assert session.alive == []


def test_leaving_the_console_while_its_server_is_being_launched() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def launching() -> None:
        begun.set()
        go_on.wait()

    session = MadeSession(launching)
    demo = made(session)
    aside(demo.run)
    assert begun.wait(30)
    stopping = aside(demo.stop)
    until(demo._over.is_set, "it is being stopped")
    go_on.set()
    stopping.result(30)
    assert session.alive == []


def test_after_it_was_left_nothing_is_launched() -> None:
    session = MadeSession()
    session.removing.clear()
    demo = made(session)
    running = aside(demo.run)
    demo.stop()
    session.removing.set()
    with pytest.raises(LayertapError, match="left before its server was launched"):
        running.result(30)
    assert session.alive == []


@pytest.mark.parametrize("launched", [True, False])
def test_a_link_that_breaks_over_the_launch(launched: bool) -> None:
    def cut() -> None:
        if not launched:
            session.alive.clear()
        raise ConnectionFailed("it is not known whether 'launch' still happened")

    session = MadeSession(cut)
    with pytest.raises(ConnectionFailed):
        show_demo(lambda say, follow: made(session))
    assert session.alive == []
