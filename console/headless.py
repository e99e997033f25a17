"""The headless door: data on stdout, narration on stderr, an exit code that scripts can rely on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from backends.errors import OurBug, RunDied, by_code
from backends.logs import LogCursor
from backends.sglang import mask_text
from console import words
from console.session import Session

LOG_SHOWN = 4000  # bytes of a failed job's log


def out(data: Any, as_json: bool, text: Callable[[Any], Iterable[str]]) -> None:
    """Print data: one JSON object on one line, or lines of text."""
    if as_json:
        sys.stdout.write(msgspec.json.encode(data).decode() + "\n")
    else:
        sys.stdout.write("".join(f"{line}\n" for line in text(data)))
    sys.stdout.flush()


def say(text: str) -> None:
    """Narrate."""
    ProgressLine.clear()
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


class ProgressLine:
    """One line on a terminal's stderr that is written over; nothing where stderr is no terminal."""

    shown = 0

    @classmethod
    def show(cls, text: str) -> None:
        """Replace the line."""
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{text[:110]}{' ' * max(0, cls.shown - len(text))}")
            sys.stderr.flush()
            cls.shown = len(text[:110])

    @classmethod
    def clear(cls) -> None:
        """Remove the line."""
        if cls.shown:
            sys.stderr.write(f"\r{' ' * cls.shown}\r")
            cls.shown = 0


def wait_ready(session: Session, run_id: str, seconds: float) -> dict[str, Any]:
    """Follow a launch with its phases; returns the last status, healthy or not."""
    last = ""
    status: dict[str, Any] = {}
    for status in session.follow_launch(run_id, seconds):
        phase = status["phase"] or "starting"
        if phase != last:
            say(f"  {phase.replace('_', '-')} …")
            last = phase
        silent = next((line for line in status["verdict"]["evidence"] if line.startswith("log silent")), "")
        ProgressLine.show(f"  {phase.replace('_', '-')} for {words.duration(status['phase_seconds'])}  {silent}")
    ProgressLine.clear()
    return status


def follow_job(session: Session, run_id: str, line: Callable[[dict[str, Any]], str]) -> dict[str, Any]:
    """Follow a job to its end with a progress line; returns the ended run. Ctrl+C stops the job."""
    run: dict[str, Any] = {}
    try:
        for run in session.follow(run_id):
            if run["progress"]:
                ProgressLine.show(line(run["progress"]))
    except KeyboardInterrupt:
        say(f"stopping {run_id} …")
        session.stop(run_id, "Ctrl+C")
        raise
    ProgressLine.clear()
    return run


def finish_job(session: Session, run: dict[str, Any]) -> tuple[int, Any]:
    """An ended job's exit code and result.

    Raises the LayertapError that it met, RunDied where it was killed before it could say anything.
    """
    ended, result = run["exit"], run["result"]
    code = ended["code"] if ended else None
    if isinstance(result, dict) and "error" in result and code:
        raise by_code(code, result["error"])
    if code is None:
        how = f"by signal {ended['signal']}" if ended else "and could not write down how"
        raise RunDied(f"the run {run['id']} was ended {how}; give the same command again, nothing is lost")
    if result is None:
        raise OurBug(f"the run {run['id']} failed:\n{mask_text(session.log_end(run['log'], LOG_SHOWN).strip())}")
    return code, result


def follow_log(session: Session, path: str, follow: bool) -> Iterator[bytes]:
    """A log's bytes from its start; with `follow` for as long as one reads. Bytes that are gone are said."""
    cursor = LogCursor()
    while True:
        step = session.log(path, cursor)
        if step.kind != "continue":
            lost = "an unknown number of" if step.lost is None else f"{step.lost:,}"
            say(f"the log was {step.kind}, {lost} bytes of it are gone")
        elif step.data:
            yield step.data
        elif not follow:
            return
        else:
            time.sleep(0.3)
