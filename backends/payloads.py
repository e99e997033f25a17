"""Payloads on a host: old ones go, those in use stay."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

from backends.runs import Runs

UNUSED_SECONDS = 30 * 86400.0


def prune(mine: Path, runs: Runs) -> None:
    """Remove the payloads beside `mine` that no run lives on and that no agent has begun with for 30 days.

    A run of another machine that shares this home counts as living: nobody here can tell.
    """
    with contextlib.suppress(OSError):  # another agent may be at it too
        os.utime(mine)
        in_use = {mine.name} | {run.spec.code for run in runs.all() if run.state() not in ("exited", "died")}
        for folder in mine.parent.iterdir():
            if folder.name not in in_use and time.time() - folder.stat().st_mtime > UNUSED_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
