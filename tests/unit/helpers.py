"""Waiting and processes, for the tests of what runs on a host."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from backends import runs

ROOT = Path(__file__).parents[2]
FAKE_SGLANG = Path(__file__).parent / "fake"
SLEEP = ["/bin/sleep", "600"]


class Clock:
    """A time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def until(true: Callable[[], Any], what: str = "", seconds: float = 30.0) -> Any:
    """Wait for a condition; returns what it came to. The time-out is for a machine that is stuck."""
    deadline = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < deadline, f"never came true: {what or true}"
        time.sleep(0.02)
    return found


def suspend(pid: int) -> None:
    """Stop a process by SIGSTOP; it is stopped when this returns."""
    psutil.Process(pid).suspend()
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)


def gone(pid: int) -> bool:
    """Whether there is no such process, or only its zombie."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def end_all(state: Path) -> None:
    """Kill every process of every run below a state folder."""
    for run in runs.Runs(state).all():
        until(lambda run=run: not _killed(run), f"{run.id} is gone")


def _killed(run: runs.Run) -> list[psutil.Process]:
    found = run.processes()
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return found
