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
        for folder in unused(mine, runs):
            shutil.rmtree(folder, ignore_errors=True)


def unused(mine: Path, runs: Runs) -> list[Path]:
    """What `prune` would remove. Raises OSError where it cannot be looked at."""
    in_use = {mine.name} | {run.spec.code for run in runs.all() if run.state() not in ("exited", "died")}
    old = time.time() - UNUSED_SECONDS
    return [path for path in sorted(mine.parent.iterdir()) if path.name not in in_use and path.stat().st_mtime < old]
