"""Files that are there whole under their names, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from capture.dumps.pour import pour


def put(path: Path, parts: list[bytes | memoryview]) -> tuple[int, str]:
    """Write a file, on disk before it has its name; returns its bytes and their xxh3-64 in hex. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.part")
    try:
        with scratch.open("wb", buffering=0) as file:
            made = pour(file.fileno(), parts)
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise
    sync(path.parent)
    return made


def sync(path: Path) -> None:
    """Make a file's content, or a rename in a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def checksum(path: Path) -> tuple[int, str]:
    """Bytes of a file and their xxh3-64 in hex. Raises OSError."""
    import xxhash

    digest, size = xxhash.xxh3_64(), 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(1 << 20):
            digest.update(block)
            size += len(block)
    return size, digest.hexdigest()
