"""The demo: the main job on the embedded engine, from launch to proof, the same behind both doors."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from backends import sglang
from backends.errors import ConnectionFailed, ExitCode, LayertapError, LeftBehind, NotReady, RunDied
from console.extraction import job
from console.feed import aside
from console.launching import layer_choice
from console.session import Session
from console.words import of_server

READY_SECONDS = 600.0
FORMATS = ["native", "specforge"]

Say = Callable[[str], None]
Follow = Callable[[dict[str, Any]], None]


class Demo:
    """Launches, extracts, verifies (`run`), and stops (`stop`), whatever happened before.

    `say` takes a sentence a step, `follow` what is known of the step under way: a server's status or a job's run.
    """

    def __init__(self, session: Session, output: str, profile: str, say: Say, follow: Follow) -> None:
        self.session = session
        self.output = output
        self.profile = profile
        self.say = say
        self.follow = follow
        self.server: dict[str, Any] | None = None
        self.made: dict[str, Any] | None = None
        self._stopped: dict[str, Any] | None = None
        self._stopping = threading.Lock()
        self._over = threading.Event()
        self._launching = threading.Lock()  # held until a launch is answered
        self._unanswered: int | None = None  # port of a launch of which nobody knows whether it happened

    def run(self) -> None:
        """Up to the verified dataset. Raises a LayertapError of the step that failed."""
        session = self.session
        merged = session.plan_launch(self.profile, None, session.host.request("free_port"), sglang.Overrides())
        session.host.request("remove_demo", path=self.output)
        server = aside(lambda: self._launch(merged)).result()  # its answer comes also where Ctrl+C ends this thread
        self.say(f"launched {server['id']} ({self.profile}, SGLang {server['sglang']}) on port {server['port']}")
        status: dict[str, Any] = {}
        for status in session.follow_launch(server["id"], READY_SECONDS):
            self.follow(status)
        if status["verdict"]["verdict"] != "healthy":
            raise NotReady("\n".join(of_server.server(status)))
        self.say(f"ready; drawing {status['layers']}")
        rows = f"{session.hello['payload_folder']}/host/backends/embedded/conversations.jsonl"
        drawn = self._job("extract", job(rows, self.output, FORMATS, {}, allow_volatile=True), server["port"])
        report = self._job("verify", {"output": self.output})
        self.made = {
            "schema": 1,
            "output": self.output,
            "written": drawn["written"],
            "verified": report["verified"],
            "failed": drawn["failed"] + report["failed"],
            "whole": report["verified"] == drawn["samples"],
        }

    def _launch(self, merged: sglang.Launch) -> dict[str, Any]:
        with self._launching:
            if self._over.is_set():
                raise LayertapError("the demo was left before its server was launched")
            try:
                self.server = self.session.launch(merged, layer_choice({}, merged.layers))
            except ConnectionFailed:
                self._unanswered = merged.port
                raise
            return self.server

    def _job(self, kind: str, asked: dict[str, Any], port: int | None = None) -> dict[str, Any]:
        started = self.session.start(kind, asked, port)
        if kind == "extract":
            self.say(f"extracting: {started['id']}")
        run = started
        for run in self.session.follow(started["id"]):
            self.follow(run)
        _, result = self.session.finish(run)
        assert isinstance(result, dict)
        return result

    def stop(self) -> None:
        """Stop its server, once, also one that is just being launched; whoever asks again waits for that."""
        self._over.set()
        with self._stopping, self._launching:
            if self.server is None and self._unanswered is not None:
                with contextlib.suppress(RunDied):  # it was not launched
                    self.server = self.session.host.request("server", port=self._unanswered)
            if self.server and self._stopped is None:
                self._stopped = self.session.stop(self.server["id"], "the demo is over")

    def outcome(self) -> dict[str, Any]:
        """What it came to. Raises LeftBehind where its server left something, LayertapError where it was not done."""
        stopped = self._stopped
        if stopped and stopped["left"]:
            raise LeftBehind("; ".join(stopped["left"]))
        if self.made is None or stopped is None:
            raise LayertapError("the demo was left before it was done; its server is stopped")
        return self.made | {"server_stopped": True, "seconds_to_stop": stopped["seconds"]}


def lines(outcome: dict[str, Any]) -> list[str]:
    """The outcome in one line."""
    return [
        f"demo: {outcome['written']} samples written, {outcome['verified']} verified, {outcome['failed']} failed; "
        f"native and specforge in {outcome['output']}; server stopped in {outcome['seconds_to_stop']} s"
    ]


def code(outcome: dict[str, Any]) -> int:
    """The exit code of an outcome."""
    return ExitCode.NOT_VERIFIED if outcome["failed"] or not outcome["whole"] else ExitCode.OK
