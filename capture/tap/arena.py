"""The arena: one file on tmpfs that the scheduler's process copies states into and the writer reads them from.

A slot holds the rows of one forward: the token ids (int64), then the states one after another, each `[tokens,
hidden]`. The file is allocated in full before it is mapped: an unallocated mapping kills the process (SIGBUS) when
tmpfs fills up.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

ID_BYTES = 8


class ArenaShape(msgspec.Struct, frozen=True):
    """How an arena is cut: `slots` slots of `slot_tokens` rows of `states` states, `hidden` wide."""

    slots: int
    slot_tokens: int
    states: int
    hidden: int
    dtype: str

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one row with its id."""
        import torch

        return ID_BYTES + self.states * self.hidden * int(getattr(torch, self.dtype).itemsize)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return self.slot_tokens * self.bytes_per_token


class Arena:
    """The mapped file; `create` on the tap's side, `attach` on the writer's."""

    def __init__(self, path: Path, shape: ArenaShape) -> None:
        import torch

        self.shape = shape
        size = shape.slots * shape.slot_bytes
        self.bytes = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)

    @classmethod
    def create(cls, path: Path, shape: ArenaShape) -> Arena:
        """Allocate the file (0600) and map it. Raises OSError where tmpfs has no room."""
        path.unlink(missing_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(handle, 0, shape.slots * shape.slot_bytes)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(handle)
        return cls(path, shape)

    @classmethod
    def attach(cls, path: Path, shape: ArenaShape) -> Arena:
        """Map a file that the tap made."""
        return cls(path, shape)

    def ids(self, slot: int) -> Any:
        """Token ids of a slot, int64 `[slot_tokens]`, a view."""
        import torch

        start = slot * self.shape.slot_bytes
        return self.bytes[start : start + self.shape.slot_tokens * ID_BYTES].view(torch.int64)

    def states(self, slot: int) -> Any:
        """States of a slot, `[states, slot_tokens, hidden]`, a view."""
        import torch

        start = slot * self.shape.slot_bytes + self.shape.slot_tokens * ID_BYTES
        end = (slot + 1) * self.shape.slot_bytes
        return (
            self.bytes[start:end]
            .view(getattr(torch, self.shape.dtype))
            .view(self.shape.states, self.shape.slot_tokens, self.shape.hidden)
        )
