"""`.pt` files straight from memory: each byte of a tensor is moved once.

`torch.save` into a stream and the stream into a file would move it three times more. Here `torch.save` lays out the
container with its storage left out (`torch.serialization.skip_data`, torch 2.6 or newer), and the bytes are written
into the place that it left. The files are `torch.save`'s but for its CRC-32, which xxh3-64 in meta.json stands in for.
"""

from __future__ import annotations

import functools
import io
import math
import os
from pathlib import Path
from typing import Any

from capture.dumps.pour import pour
from capture.dumps.spares import Spares


class _Layout:
    """A file for `torch.save` that keeps what is written and where; where it seeks over a storage, nothing is kept."""

    def __init__(self) -> None:
        self.position = 0
        self.written: list[tuple[int, bytes]] = []

    def write(self, data: Any) -> int:
        self.written.append((self.position, bytes(data)))
        self.position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.position = offset + (self.position if whence == os.SEEK_CUR else 0)
        return self.position

    def tell(self) -> int:
        return self.position

    def flush(self) -> None:
        pass


@functools.lru_cache(maxsize=256)
def container(shape: tuple[int, ...], dtype: Any) -> tuple[bytes, bytes]:
    """What stands before and behind the storage in the `.pt` file of a contiguous tensor of `shape` and `dtype`."""
    import torch

    layout = _Layout()
    tensor = torch.empty(shape, dtype=dtype)
    with torch.serialization.skip_data():
        torch.save(tensor, layout)
    head, expected = b"", 0
    for at, (position, data) in enumerate(layout.written):
        if position != expected:
            tail = b"".join(data for _, data in layout.written[at:])
            if position - expected != tensor.nbytes:
                break
            return head, tail
        head, expected = head + data, position + len(data)
    raise RuntimeError(f"torch {torch.__version__} lays out a .pt file in a way that is not known here")


def write(path: Path, tensor: Any, spares: Spares | None = None) -> tuple[int, str]:
    """Write a contiguous tensor as a `.pt` file (0600), a new one or one of `spares`.

    Returns its bytes and their xxh3-64 in hex. Raises OSError.
    """
    import torch

    head, tail = container(tuple(tensor.shape), tensor.dtype)
    parts = (head, memoryview(tensor.reshape(-1).view(torch.uint8).numpy()), tail)
    size = sum(map(len, parts))
    spare = spares.take(size) if spares else None
    if spare is not None:
        checksum = spare.fill(parts)
        os.link(spare.path, path)
        return size, checksum
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        return pour(handle, parts)
    finally:
        os.close(handle)


def read(data: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """The tensor of a `.pt` file whose bytes are `data`: a view of them where they are laid out as `write` does it.

    Whatever else `torch.load` takes with `weights_only=True` is read by it. Raises what it raises.
    """
    import torch

    head, tail = container(shape, dtype)
    count = math.prod(shape)
    if len(data) == len(head) + count * dtype.itemsize + len(tail) and bytes(data[: len(head)]) == head:
        return torch.frombuffer(data, dtype=dtype, count=count, offset=len(head)).view(shape)
    return torch.load(io.BytesIO(data), weights_only=True)
