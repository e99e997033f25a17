"""Room where dumps, runs and datasets go."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from backends.doctor.report import Asked, Check, Place, Question, amount, judge, unknown
from backends.folders import absolute
from backends.launch import EMBEDDED
from backends.runs import Runs
from backends.sample import read_disk
from capture.model_config import known_of
from capture.tap.memory import SLOTS

GB = 10**9
LEAST_SHM = 1 << 30
LEAST_STATE, SCARCE_STATE = GB // 5, 2 * GB
SPARE = 1.1  # of what a plan says
INODES = 2  # times the files of a plan
STATES = 5  # tensors a token where no other number is known: three layers, final and last
NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "wekafs", "9p", "fuse.sshfs", "fuse.juicefs"}
)
MEMORY = frozenset({"tmpfs", "ramfs"})


def dumps(place: Place, asked: Asked) -> Check:
    """Does the tmpfs of the dumps hold what is in flight? The arena takes at most half of what is free."""
    root = asked.dump_root or "/dev/shm"
    disk = read_disk(str(Path(root).expanduser()))
    if disk.free_bytes is None or disk.total_bytes is None:
        return unknown("disks.dumps", f"{root} cannot be looked at")
    slot = _slot_bytes(asked)
    small = disk.total_bytes < LEAST_SHM
    seen = f"{root}: {amount(disk.free_bytes)} free of {amount(disk.total_bytes)}, {disk.filesystem}"
    if slot:
        seen += f"; a slot of the arena takes {amount(slot)}, {SLOTS} are wanted"
    remedy = "free what lies there, give the container more (--shm-size, --ipc=host), or lower max-prefill-tokens"
    if disk.filesystem not in MEMORY:
        seen, remedy = f"{seen}: not in memory", "put dump_dir on a tmpfs, or every state goes through a disk"
    return judge(
        "disks.dumps",
        seen,
        remedy,
        fail=small or (slot is not None and disk.free_bytes < 2 * slot),
        warn=disk.filesystem not in MEMORY or (slot is not None and disk.free_bytes < 2 * SLOTS * slot),
        free_bytes=disk.free_bytes,
        total_bytes=disk.total_bytes,
    )


def _slot_bytes(asked: Asked) -> int | None:
    """What one forward's states take; None where profile or model do not say."""
    tokens = asked.args.get("max-prefill-tokens")
    if not isinstance(tokens, int) or asked.model is None or asked.model.startswith(EMBEDDED):
        return None
    hidden = known_of(Path(asked.model).expanduser()).hidden
    return tokens * 2 * hidden * STATES if hidden else None


def state(place: Place, asked: Asked) -> Check:
    """Is there room for logs, and for what jobs say?"""
    folder = place.runs.state
    disk = read_disk(str(folder))
    if disk.free_bytes is None:
        return unknown("disks.state", f"{folder} cannot be looked at")
    remote = disk.filesystem in NETWORK
    return judge(
        "disks.state",
        f"{folder}: {amount(disk.free_bytes)} free, {disk.filesystem}",
        "keep the state on a local disk (XDG_STATE_HOME): locks and logs over a network are slow and may be lost"
        if remote
        else "make room there; a log that cannot be written stops a server",
        fail=disk.free_bytes < LEAST_STATE,
        warn=remote or disk.free_bytes < SCARCE_STATE,
        free_bytes=disk.free_bytes,
    )


def output(place: Place, asked: Asked) -> list[Check]:
    """Does a dataset fit there? Nothing where no folder is meant."""
    if asked.output is None:
        return []
    return [judge_output(Path(absolute(asked.output)), planned(place.runs, absolute(asked.output)))]


def judge_output(folder: Path, plan: dict[str, Any] | None) -> Check:
    """`plan` is the newest plan's result for this folder."""
    disk, above = read_disk(str(folder)), _nearest(folder)
    if disk.free_bytes is None:
        return unknown("disks.output", f"{folder} cannot be looked at")
    seen = f"{folder}: {amount(disk.free_bytes)} free, {disk.filesystem}"
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        return judge("disks.output", f"{above} is no folder that we may write to", "choose another one", fail=True)
    if disk.filesystem in MEMORY:
        remedy = "choose a folder on a disk: this one is in memory, and gone with the next boot"
        return judge("disks.output", seen, remedy, fail=True, free_bytes=disk.free_bytes)
    if plan is None:
        remedy = f"`layertap plan ROWS --output {folder}` says it"
        return unknown("disks.output", f"{seen}; how much a dataset takes is not known", remedy)
    needed = sum(plan["total_bytes"].values())
    files = plan["samples"] * len(plan["total_bytes"])
    inodes = os.statvfs(above).f_favail
    short = 0 < inodes < INODES * files  # 0: a file system without a fixed number, such as btrfs
    remedy = "keep the dataset on a local disk" if disk.filesystem in NETWORK else "choose a larger disk"
    return judge(
        "disks.output",
        f"{seen}; the plan takes {amount(needed)} in {files:,} files",
        "choose a file system with more inodes" if short else remedy,
        fail=disk.free_bytes < needed * SPARE,
        warn=short or disk.filesystem in NETWORK,
        needed_bytes=needed,
        free_bytes=disk.free_bytes,
    )


def planned(runs: Runs, folder: str) -> dict[str, Any] | None:
    """The result of the newest plan for a dataset there, None where none was made."""
    for run in runs.all("plan"):
        if run.spec.details.get("output") == folder:
            try:
                result = msgspec.json.decode((run.folder / "result.json").read_bytes())
            except (OSError, msgspec.MsgspecError):
                continue
            if isinstance(result, dict) and "total_bytes" in result:
                return result
    return None


def _nearest(folder: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    return folder


QUESTIONS: dict[str, Question] = {"disks.dumps": dumps, "disks.state": state, "disks.output": output}
