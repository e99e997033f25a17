"""The demo: the main job on the embedded engine, from launch to proof, the same behind both doors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from backends import sglang
from backends.errors import ExitCode, LayertapError, LeftBehind, NotReady
from console import words
from console.extraction import job
from console.launching import layer_choice
from console.session import Session

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

    def run(self) -> None:
        """Up to the verified dataset. Raises a LayertapError of the step that failed."""
        session = self.session
        merged = session.plan_launch(self.profile, None, session.host.request("free_port"), sglang.Overrides())
        session.host.request("remove_demo", path=self.output)
        server = self.server = session.launch(merged, layer_choice({}, merged.layers))
        self.say(f"launched {server['id']} ({self.profile}, SGLang {server['sglang']}) on port {server['port']}")
        status: dict[str, Any] = {}
        for status in session.follow_launch(server["id"], READY_SECONDS):
            self.follow(status)
        if status["verdict"]["verdict"] != "healthy":
            raise NotReady("\n".join(words.server(status)))
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
        """Stop its server, once; whoever asks again waits for that."""
        with self._stopping:
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
