"""How much of the host's memory the tap may take: the pinned arena, and dumps on tmpfs until the driver has them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import msgspec

SLOTS = 4  # forwards under way to the writers; more only lengthen the queue in front of them
DUMPS_AHEAD = 2  # arenas' worth of prompts between the driver and its disk keep the server's queue full
SHARE = 4  # a quarter of what is available, where nothing was asked for
CGROUPS = "/sys/fs/cgroup"
UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


class Room(msgspec.Struct, frozen=True):
    """`slots` of the arena; bytes that dumps in flight may take beside it, and files kept to be written again."""

    slots: int
    dump_bytes: int
    spare_bytes: int


def divide(asked: int | None, slot_bytes: int, available: int, tmpfs_free: int) -> Room:
    """Divide what may be taken (`asked` bytes, else a quarter of `available`) into arena, dumps and spare files.

    Never more than `tmpfs_free`, which holds all three. Raises MemoryError, naming what is lacking, where not even one
    slot and one dump that fills it find room.
    """
    tmpfs_free = max(0, tmpfs_free)  # less than is to stay free
    most = min(available // SHARE if asked is None else asked, tmpfs_free)
    slots = min(SLOTS, most // ((1 + 2 * DUMPS_AHEAD) * slot_bytes)) or int(most >= 2 * slot_bytes)
    if slots == 0:
        raise MemoryError(
            f"a slot of the arena takes {slot_bytes:,} bytes and a dump of it as many; {most:,} bytes of memory may be "
            f"taken ({tmpfs_free:,} are free on the dump folder's file system, {available:,} in memory); make room "
            "there, ask for more memory, or lower --max-prefill-tokens or --context-length"
        )
    arena = slots * slot_bytes
    dumps = min(DUMPS_AHEAD * arena, most - arena)
    return Room(slots, dumps, min(dumps, most - arena - dumps))


def parse_bytes(said: int | str) -> int:
    """Bytes, given as a number or in words such as "48 GiB". Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z]*)", str(said).strip().lower())
    if match is None or match[2] not in UNITS:
        raise ValueError("expected bytes, or a size such as 48 GiB")
    return int(float(match[1]) * UNITS[match[2]])


def available() -> int:
    """Bytes that processes can still take here: the host's, or the container's where that has a limit."""
    import psutil

    return min([int(psutil.virtual_memory().available), *rooms(_text)])


def rooms(text: Callable[[str], str | None]) -> Iterator[int]:
    """Bytes that each memory limit above this process leaves; version 2 of cgroups, and the whole container's in 1.

    `text` reads a small file under /proc or /sys, None where it cannot. Files that were read lie in memory only until
    somebody wants it, so they count as free, as they do in the host's MemAvailable: a checkpoint fills any container.
    """
    own = re.search(r"^0::(/.*)$", text("/proc/self/cgroup") or "", re.MULTILINE)
    above = PurePosixPath(own[1] if own else "/")
    found = [(f"{CGROUPS}{one}", "memory.max", "memory.current", "inactive_file") for one in (above, *above.parents)]
    found += [(f"{CGROUPS}/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")]
    for folder, most, used, cache in found:
        limit, usage = text(f"{folder}/{most}") or "", text(f"{folder}/{used}") or ""
        if limit.isdecimal() and usage.isdecimal():
            idle = re.search(rf"^{cache} (\d+)$", text(f"{folder}/memory.stat") or "", re.MULTILINE)
            yield max(0, int(limit) - int(usage) + (int(idle[1]) if idle else 0))


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
