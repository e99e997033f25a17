"""What the doctor is asked, where it looks, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from backends.runs import Runs

Status = Literal["pass", "warn", "fail", "unknown"]
GROUPS = ("gpu", "pcie", "driver", "host", "network", "disks", "sglang", "session", "link", "leftovers")
CONTROL = "/dev/nvidiactl"  # there where a driver of GPUs is


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One result. `id` is `<group>.<name>`; `fail` will hurt a run, `warn` may, `unknown` could not be seen.

    `seen` says what was found; `numbers` holds the figures in it, each named with its unit (`free_bytes`). `remedy`
    says what to do, and is empty where it passes.
    """

    id: str
    group: str
    status: Status
    seen: str
    remedy: str = ""
    numbers: dict[str, float] = {}


class Asked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the checks are for. Paths are the host's.

    `args`: the arguments of a profile as merged for this host (`{"tp-size": 8}`), empty where none is meant.
    """

    profile: str | None = None
    embedded: bool = False
    args: dict[str, Any] = {}
    model: str | None = None
    port: int = 30000
    output: str | None = None
    dump_root: str | None = None


@dataclass(frozen=True)
class Place:
    """The host as the checks see it; a test gives another `root` for /proc, /sys and /dev."""

    runs: Runs
    payload: Path
    root: Path = Path("/")

    def path(self, name: str) -> Path:
        """An absolute path of the host."""
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str | None:
        """A small file of the kernel's without white space around it; None where it cannot be read."""
        try:
            return self.path(name).read_text(errors="replace").strip()
        except OSError:
            return None


Question = Callable[[Place, Asked], Check | list[Check]]
"""Looks at one thing; several checks, or none, where it tells of several, or does not matter here."""


def judge(id: str, seen: str, remedy: str, *, fail: bool = False, warn: bool = False, **numbers: float) -> Check:
    """A check that came to an answer."""
    status: Status = "fail" if fail else "warn" if warn else "pass"
    group = id.partition(".")[0]
    return Check(
        id=id, group=group, status=status, seen=seen, remedy="" if status == "pass" else remedy, numbers=numbers
    )


def unknown(id: str, why: str, remedy: str = "") -> Check:
    """A check that came to none."""
    return Check(id=id, group=id.partition(".")[0], status="unknown", seen=why, remedy=remedy)


def amount(count: float) -> str:
    """Bytes in words: `95.6 GB`."""
    power = min(4, max(0, int(math.log10(max(count, 1)) // 3)))
    return f"{count / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def numbered(indexes: list[int]) -> str:
    """GPUs in words: `GPUs 1, 4`."""
    return f"GPU{'s' if len(indexes) != 1 else ''} {', '.join(map(str, indexes))}"
