"""What the watch of a run sees: the looks at its server, its host and its progress, put together for the rules."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import Any

import msgspec

from backends.processes import read_stat
from backends.runs import Run, write_json
from backends.verdict.alarms import Alarm, Drawing, Sight, Space
from backends.verdict.observation import OF_A_KILL
from backends.verdict.watch import ServerWatch

ALARMS = "alarms.json"  # in an extraction's folder, as long as its supervisor watches it
OLD_SECONDS = 60.0  # after which what a supervisor said last, every two seconds, is no longer true
SAID = 3  # sentences of a verdict's evidence
XID = re.compile(r"NVRM: Xid \([^)]*\): (\d+)")


def sight(server: ServerWatch, seen: dict[str, Any], sample: dict[str, Any], extraction: Run | None) -> Sight:
    """What is seen now. `seen` is the server's last look, `sample` one of the host, with the disk of the output."""
    verdict, evidence, tap = seen["verdict"], server.evidence, seen["tap"]
    kernel = evidence.kernel if evidence else []
    ended = server.run.exit
    return Sight(
        at=time.monotonic(),
        verdict=verdict["verdict"],
        cause=verdict["cause"],
        remedy=verdict["remedy"],
        said="; ".join(verdict["evidence"][:SAID]),
        ended=ended.at if ended else None,
        health_failing_s=evidence.health_failing_s if evidence else None,
        batch_at=evidence.batch.at if evidence and evidence.batch else None,
        throttled=evidence.throttled if evidence else {},
        xids=evidence.xids if evidence else {},
        kernel=[line for line in kernel if (found := XID.search(line)) and int(found[1]) not in OF_A_KILL],
        drawing=drawing(extraction) if extraction else None,
        bytes_per_token=tap["bytes_per_token"] if tap else 0,
        memory=_memory(server.run, sample),
        disk=_disk(extraction, sample) if extraction else None,
    )


def drawing(run: Run) -> Drawing | None:
    """How far an extraction is; None before it said so."""
    try:
        found = msgspec.json.decode((run.folder / "progress.json").read_bytes(), type=Drawing)
    except (OSError, msgspec.MsgspecError):
        return None
    running = run.running
    with contextlib.suppress(OSError):
        found.paused = running is not None and read_stat(running.child.pid).state == "stopped"
    return found


def write_alarms(run: Run, alarms: list[Alarm]) -> None:
    """Say what is wrong with a run now, to whoever looks at it."""
    write_json(run.folder / ALARMS, {"schema": 1, "at": time.time(), "alarms": alarms})


def read_alarms(run: Run) -> list[dict[str, Any]] | None:
    """What the supervisor of an extraction says that is wrong now; None where nobody watches it, or can say it."""
    running = run.running
    if running is None or not run.alive() or not running.supervisor.alive():
        return None
    try:
        found = msgspec.json.decode((run.folder / ALARMS).read_bytes())
        return None if time.time() - found["at"] > OLD_SECONDS else list(found["alarms"])
    except (OSError, msgspec.MsgspecError, KeyError, TypeError):
        return None


def _memory(server: Run, sample: dict[str, Any]) -> Space | None:
    dumps, folder = sample["dumps"], server.spec.dump_dir
    if dumps is None or folder is None:
        return None
    path = Path(folder)
    return Space(str(path.parent), dumps["free_bytes"] - (dumps["reserve"] or 0), folder_bytes(path))


def _disk(run: Run, sample: dict[str, Any]) -> Space | None:
    output = run.spec.details["output"]
    free = next((disk["free_bytes"] for disk in sample["host"]["disks"] if disk["path"] == output), None)
    now = drawing(run)
    return None if free is None or now is None else Space(output, free, now.bytes_written)


def folder_bytes(folder: Path, depth: int = 3) -> int:
    """What a folder takes on its file system, down to the dumps of replicas; what goes meanwhile is left out."""
    total = 0
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    total += folder_bytes(Path(entry.path), depth - 1) if depth > 1 else 0
                else:
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total
