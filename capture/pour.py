"""Writing memory to a file: each byte is hashed and written once, from where it lies."""

from __future__ import annotations

import os
from collections.abc import Iterable

# Bytes hashed and written at a time: they are still in the core's own cache when they are written.
STRETCH = 1 << 20


def pour(handle: int, parts: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write `parts` (bytes, or memoryviews of single bytes) one after another to a file that is open at `handle`.

    Returns the bytes written and their xxh3-64 in hex. Raises OSError.
    """
    import xxhash

    digest, size = xxhash.xxh3_64(), 0
    for part in parts:
        whole = memoryview(part)
        for at in range(0, len(whole), STRETCH):
            rest = whole[at : at + STRETCH]
            digest.update(rest)
            size += len(rest)
            while rest:
                rest = rest[os.write(handle, rest) :]
    return size, digest.hexdigest()
