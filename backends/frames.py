"""Frames between console and agent: two lengths, a JSON head, an optional binary body.

4 bytes  length of the head, big-endian
4 bytes  length of the body, big-endian
head     JSON object
body     bytes
"""

from __future__ import annotations

import struct
from typing import Any, BinaryIO

import msgspec

LENGTHS = struct.Struct(">II")
MOST = 256 << 20  # bytes of head and body; text that is no frame reads as a larger size


class FrameError(Exception):
    """The other side sent no frame, or half of one: usually it died, or it is a program that is not the agent."""


def pack(head: Any, body: bytes = b"") -> bytes:
    """One frame. Raises TypeError or ValueError for a head that is no JSON."""
    data = msgspec.json.encode(head)
    return LENGTHS.pack(len(data), len(body)) + data + body


def read_frame(stream: BinaryIO) -> tuple[dict[str, Any], bytes] | None:
    """Read one frame; None at the end of the stream. Raises FrameError for anything else."""
    lengths = _exactly(stream, LENGTHS.size)
    if not lengths:
        return None
    if len(lengths) < LENGTHS.size:
        raise FrameError(f"expected a frame, got {lengths!r} and the end")
    head_size, body_size = LENGTHS.unpack(lengths)
    if head_size + body_size > MOST:
        raise FrameError(f"expected a frame, got {lengths!r}")
    data = _exactly(stream, head_size + body_size)
    if len(data) < head_size + body_size:
        raise FrameError(f"a frame of {head_size + body_size} bytes ended after {len(data)}")
    try:
        head = msgspec.json.decode(data[:head_size], type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise FrameError(f"expected a frame's JSON head, got {data[:80]!r}") from error
    return head, data[head_size:]


def _exactly(stream: BinaryIO, size: int) -> bytes:
    """`size` bytes, fewer only at the end of the stream."""
    parts = []
    while size:
        part = stream.read(size)
        if not part:
            break
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
