"""Moving memory into files: each byte is hashed and copied once, from where it lies."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

# Bytes hashed and copied at a time: they are still in the core's own cache when they are copied.
STRETCH = 1 << 20


def stretches(parts: Iterable[bytes | memoryview], digest: Any) -> Iterator[memoryview]:
    """`parts` (bytes, or memoryviews of single bytes) in short pieces, each put into `digest` just before it comes."""
    for part in parts:
        whole = memoryview(part)
        for at in range(0, len(whole), STRETCH):
            piece = whole[at : at + STRETCH]
            digest.update(piece)
            yield piece


def pour(handle: int, parts: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write `parts` one after another to a file that is open at `handle`.

    Returns the bytes written and their xxh3-64 in hex. Raises OSError.
    """
    import xxhash

    digest, size = xxhash.xxh3_64(), 0
    for piece in stretches(parts, digest):
        size += len(piece)
        rest = piece
        while rest:
            rest = rest[os.write(handle, rest) :]
    return size, digest.hexdigest()
