"""The headless door: data on stdout, narration on stderr, an exit code that scripts can rely on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from backends.errors import ExitCode
from backends.logs import LogCursor
from backends.sglang import mask_text
from backends.verdict.watch import settled
from console.demo import Demo
from console.log_lines import clean, redrawn
from console.session import Session
from console.words import figures, of_host, of_run, of_server
from console.words.printable import printable


def out(data: Any, as_json: bool, text: Callable[[Any], Iterable[str]]) -> None:
    """Print data: one JSON object on one line, as it is, or lines of text, safe to show."""
    if as_json:
        sys.stdout.write(msgspec.json.encode(data).decode() + "\n")
    else:
        sys.stdout.write("".join(f"{printable(line)}\n" for line in text(data)))
    sys.stdout.flush()


def say(text: str) -> None:
    """Narrate."""
    ProgressLine.clear()
    sys.stderr.write(f"{printable(text)}\n")
    sys.stderr.flush()


class ProgressLine:
    """One line on a terminal's stderr that is written over; nothing where stderr is no terminal."""

    shown = 0

    @classmethod
    def show(cls, text: str) -> None:
        """Replace the line."""
        if sys.stderr.isatty():
            text = printable(text)
            sys.stderr.write(f"\r{text[:110]}{' ' * max(0, cls.shown - len(text))}")
            sys.stderr.flush()
            cls.shown = len(text[:110])

    @classmethod
    def clear(cls) -> None:
        """Remove the line."""
        if cls.shown:
            sys.stderr.write(f"\r{' ' * cls.shown}\r")
            cls.shown = 0


class StartNarration:
    """Tells a launch: a line a phase, how long it has been in it, and why it takes long."""

    def __init__(self) -> None:
        self.last = ""
        self.told: str | None = None

    def show(self, status: dict[str, Any]) -> None:
        """Take in the server's status."""
        phase = status["phase"] or "starting"
        if phase != self.last:
            say(f"  {figures.dashed(phase)} …")
            self.last = phase
        verdict, cause = status["verdict"]["verdict"], status["verdict"]["cause"]
        if verdict in of_server.GOING_ON and cause != self.told:
            self.told = cause
            if cause:
                say(f"  {of_server.SIGNS[verdict]} {verdict.replace('_', ' ')}: {cause}")
        silent = next((line for line in status["verdict"]["evidence"] if line.startswith("log silent")), "")
        ProgressLine.show(f"  {figures.dashed(phase)} for {figures.duration(status['phase_seconds'])}  {silent}")


class EventNarration:
    """Tells what happens to a run beside its own work: a server that is launched again, what the watch saw."""

    def __init__(self) -> None:
        self.told = 0.0

    def show(self, run: dict[str, Any]) -> None:
        """Take in a run with its newest events."""
        new = [one for one in run["events"] if one["at"] > self.told]
        for one in new:
            if one["event"] in of_run.NARRATED:
                say(f"  {of_run.event(one)}")
            self.told = one["at"]


def wait_ready(session: Session, run_id: str, seconds: float) -> dict[str, Any]:
    """Follow a launch with its phases; returns the last status, healthy or not."""
    narration = StartNarration()
    status: dict[str, Any] = {}
    for status in session.follow_launch(run_id, seconds):
        narration.show(status)
    ProgressLine.clear()
    return status


def ready_code(status: dict[str, Any], seconds: float) -> ExitCode:
    """The exit code of a launch that was followed for `seconds` at most; where it goes on, that is said."""
    if not settled(status):  # also one whose log says ready while /health fails: nothing can be drawn from it yet
        say(f"not ready after {seconds:g} s; it goes on, `layertap status --watch` follows it")
        return ExitCode.TIMEOUT
    return ExitCode.OK if status["verdict"]["verdict"] in ("healthy", "degraded") else ExitCode.NOT_READY


def follow_job(session: Session, run_id: str, line: Callable[[dict[str, Any]], str]) -> dict[str, Any]:
    """Follow a job to its end with a progress line; returns the ended run. Ctrl+C stops the job."""
    run: dict[str, Any] = {}
    narration = EventNarration()
    try:
        for run in session.follow(run_id):
            narration.show(run)
            if run["progress"]:
                ProgressLine.show(line(run["progress"]))
    except KeyboardInterrupt:
        say(f"stopping {run_id} …")
        session.stop(run_id, "Ctrl+C")
        raise
    ProgressLine.clear()
    return run


def end_job(
    session: Session,
    run: dict[str, Any],
    line: Callable[[dict[str, Any]], str],
    show: Callable[[Any], Iterable[str]],
    as_json: bool,
) -> int:
    """Follow a job that was just started, print its result, and return its exit code."""
    code, result = session.finish(follow_job(session, run["id"], line))
    out(result, as_json, show)
    return code


def show_demo(make: Callable[[Callable[[str], None], Callable[[dict[str, Any]], None]], Demo]) -> dict[str, Any]:
    """Run a demo to its end, and stop it whatever happens; returns its outcome."""
    narration = StartNarration()

    def follow(run: dict[str, Any]) -> None:
        if "phases" in run:
            narration.show(run)
        elif run["progress"]:
            line = of_run.progress if run["kind"] == "extract" else of_run.verifying
            ProgressLine.show(line(run["progress"]))

    demo = make(say, follow)
    try:
        demo.run()
    finally:
        ProgressLine.clear()
        demo.stop()
    return demo.outcome()


def log_text(data: bytes) -> str:
    """Lines of a log as they are printed, secrets masked; on a terminal bars as last drawn, no escape sequences."""
    text = data.decode(errors="replace")
    if not sys.stdout.isatty():  # a file or a program is given all of it
        return mask_text(text)
    drawn = (part for line in text.split("\n") for part in (redrawn(line) if "\r" in line else (line,)))
    return mask_text("\n".join(map(clean, drawn)))


def follow_log(session: Session, path: str, follow: bool) -> Iterator[bytes]:
    """A log's bytes from its start; with `follow` for as long as one reads. Bytes that are gone are said."""
    cursor = LogCursor()
    while True:
        step = session.log(path, cursor)
        if step.kind != "continue":
            say(of_host.log_gap(step.kind, step.lost))
        elif step.data:
            yield step.data
        elif not follow:
            return
        else:
            time.sleep(0.3)
