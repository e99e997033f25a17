"""A tmpfs of a few hundred kilobytes, to see what happens when it is full."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_tmpfs(folder: Path, size: str, *options: str) -> Iterator[Path]:
    """Mount a tmpfs of `size` on `folder`; the test is skipped, and says so, where mounting is not permitted."""
    folder.mkdir(exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", ",".join([f"size={size}", "mode=0700", *options]), "tmpfs", folder],
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)  # lazy: an arena may still be mapped


def fill(folder: Path, *, leaving: int = 0) -> Path:
    """Take all free memory of a tmpfs but `leaving` bytes; returns the file that holds it."""
    filler = folder / "filler"
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    filler.write_bytes(bytes(free - leaving))
    return filler
