"""Figures, moments and names as every screen and every line shows them."""

from __future__ import annotations

import math
import time

BLOCKS = "▁▂▃▄▅▆▇█"


def size(count: float | None) -> str:
    """Bytes in words: `1.42 GB`."""
    if count is None:
        return "?"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.0f} TB" if count >= 99.95 else f"{count:.3g} TB"


def counted(count: int, noun: str) -> str:
    """How many of something: `1 row`, `1,200 rows`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def duration(seconds: float | None) -> str:
    """Seconds in words: `2 h 14 m`, `95 s`."""
    if seconds is None:
        return "?"
    whole = math.ceil(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} m {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} m"


def when(at: float) -> str:
    """A moment in epoch seconds as date and time here."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def clock(at: float) -> str:
    """A moment in epoch seconds as the time of day here."""
    return time.strftime("%H:%M", time.localtime(at))


def dashed(name: str) -> str:
    """A name out of JSON as it is shown: `warm-up`."""
    return name.replace("_", "-")


def number(value: float | None) -> str:
    """A whole number, `?` where it is not known."""
    return "?" if value is None else f"{value:.0f}"


def norm(value: float | None) -> str:
    """A figure of a state; `?` for one that is not finite."""
    return "?" if value is None else f"{value:.4g}"


def sign(fatal: bool) -> str:
    """`!` for what is wrong, `?` for what is doubtful."""
    return "!" if fatal else "?"


def bar(done: int, total: int, width: int = 20) -> str:
    """How much is done, as a bar; nothing where there is nothing to do."""
    filled = done * width // total if total else 0
    return f"[{'#' * filled}{'-' * (width - filled)}]" if total else ""


def histogram(buckets: list[list[int]]) -> str:
    """Counts as blocks, with the bounds of the first and the last bucket."""
    if not buckets:
        return ""
    most = max(count for _, count in buckets)
    blocks = "".join(BLOCKS[math.ceil(count / most * (len(BLOCKS) - 1))] if count else " " for _, count in buckets)
    return f"<= {buckets[0][0]:,} {blocks} {buckets[-1][0]:,}"
