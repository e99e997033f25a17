"""What the tap may take of the host's memory, and how it is divided."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from capture.tap import memory
from capture.tap.memory import Room, divide

GB = 10**9


@pytest.mark.parametrize(
    ("asked", "available", "free", "room"),
    [
        (None, 2000 * GB, 1000 * GB, Room(4, 8 * GB, 8 * GB)),  # much memory: as many slots as are of use
        (None, 64 * GB, 30 * GB, Room(3, 6 * GB, 6 * GB)),  # a quarter of 64
        (None, 20 * GB, 30 * GB, Room(1, 2 * GB, 2 * GB)),
        (None, 14 * GB, 30 * GB, Room(1, 2 * GB, GB // 2)),
        (None, 8 * GB, 30 * GB, Room(1, GB, 0)),  # the least that works
        (30 * GB, 40 * GB, 35 * GB, Room(4, 8 * GB, 8 * GB)),
        (11 * GB, 40 * GB, 35 * GB, Room(2, 4 * GB, 4 * GB)),
        (None, 2000 * GB, 5 * GB, Room(1, 2 * GB, 2 * GB)),  # a small tmpfs
        (2 * GB, 8 * GB, 30 * GB, Room(1, GB, 0)),
    ],
)
def test_arena_and_dumps_together_take_what_is_allowed(
    asked: int | None, available: int, free: int, room: Room
) -> None:
    assert divide(asked, GB, available, free) == room
    assert room.slots * GB + room.dump_bytes + room.spare_bytes <= min(asked or available // 4, free)


def test_no_room_at_all_is_said_too() -> None:
    """A file system on which less is free than what is to stay free."""
    with pytest.raises(MemoryError, match=r"; 0 bytes of memory may be taken \(0 are free"):
        divide(None, GB, 40 * GB, -12_000_000)


@pytest.mark.parametrize(
    ("asked", "available", "free"), [(None, 7 * GB, 30 * GB), (GB, 40 * GB, 30 * GB), (None, 99 * GB, GB)]
)
def test_too_little_is_said(asked: int | None, available: int, free: int) -> None:
    with pytest.raises(MemoryError) as refused:
        divide(asked, GB, available, free)
    most = min(available // 4 if asked is None else asked, free)
    assert str(refused.value) == (
        f"a slot of the arena takes 1,000,000,000 bytes and a dump of it as many; {most:,} bytes of memory may be taken "
        f"({free:,} are free on the dump folder's file system, {available:,} in memory); make room there, ask for more "
        "memory, or lower --max-prefill-tokens or --context-length"
    )


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"memory.max": "9000\n", "memory.current": "4000\n"}, 5000),
        ({"memory.max": "9000\n", "memory.current": "8500\n", "memory.stat": "anon 1\ninactive_file 4000\n"}, 4500),
        ({"memory.max": "9000\n", "memory.current": "9500\n"}, 0),
        ({"memory.max": "max\n", "memory.current": "4000\n"}, None),
        ({}, None),
    ],
)
def test_a_containers_limit_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(memory, "CGROUPS", str(tmp_path))
    found, free = memory.available(), psutil.virtual_memory().available
    if expected is None:
        assert abs(found - free) < free / 5
    else:
        assert found == expected
