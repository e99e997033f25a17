"""Reading a log by offset, and telling whether it is still the same log.

`read_part` is the host's side, `LogCursor` the reader's. A log may be renamed and begun anew (rotated), or cut and
written again in its place (truncated); neither may pass unnoticed, and no byte may be lost that is still there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import msgspec

MOST = 16 << 20  # bytes in one answer
COMPRESSED = (".gz", ".xz", ".zst", ".bz2")
TAIL = 64  # bytes before the offset by which a log is known again


class PartHead(msgspec.Struct, omit_defaults=True):
    """The file that a part was read from: `size` in bytes, and `inode`.

    Where that is not the inode that was asked for, `previous` is the size of the asked one, None where it is gone.
    """

    size: int
    inode: int
    previous: int | None = None


class Step(msgspec.Struct, frozen=True):
    """What a part came to.

    `data`: the bytes that follow those before. `lost`: how many bytes between them are gone, None where nobody can
    tell. After `rotated` and `truncated` the cursor stands at the start of what is there now, and there are no data.
    """

    kind: Literal["continue", "rotated", "truncated"]
    data: bytes = b""
    lost: int | None = 0


class LogCursor(msgspec.Struct):
    """How far a log was read: `offset` bytes of the file `inode`. May be kept, and gone on with by another process.

    Read what `asks` says and give the answer to `advance`. It begins with the `tail` of what was read already: a log
    that was cut and has grown past the offset since has other bytes there.
    """

    inode: int | None = None
    offset: int = 0
    tail: bytes = b""

    @property
    def asks(self) -> dict[str, Any]:
        """What `read_part` is to read next."""
        return {"offset": self.offset, "inode": self.inode, "before": len(self.tail)}

    def advance(self, head: PartHead, data: bytes) -> Step:
        """Take in what was read."""
        if self.inode is not None and head.inode != self.inode:
            lost = None if head.previous is None else max(0, head.previous - self.offset)
            return self._begin_anew(head, Step("rotated", lost=lost))
        if head.size < self.offset or not data.startswith(self.tail):
            return self._begin_anew(head, Step("truncated", lost=None))
        fresh = data[len(self.tail) :]
        self.inode = head.inode
        self.offset += len(fresh)
        self.tail = data[-TAIL:]
        return Step("continue", fresh)

    def _begin_anew(self, head: PartHead, step: Step) -> Step:
        self.inode, self.offset, self.tail = head.inode, 0, b""
        return step


def read_part(path: str, offset: int, most: int, inode: int | None = None, before: int = 0) -> tuple[PartHead, bytes]:
    """Up to `most` bytes of a log from `offset` on, behind the `before` bytes that stand in front of them.

    With `inode`, a log that was renamed is read on under its new name in the same folder, until it has no more bytes
    and `path` has some: whoever writes it may never open the new one. Then comes what was written next, which is
    another renamed log where it rotated more than once. Raises OSError.
    """
    place, previous = _place(Path(path), offset, inode)
    with place.open("rb") as file:
        found = os.fstat(file.fileno())
        file.seek(offset - before)
        return PartHead(found.st_size, found.st_ino, previous), file.read(before + min(most, MOST))


def _place(path: Path, offset: int, inode: int | None) -> tuple[Path, int | None]:
    """The file to read from; where that is no longer the one of `inode`, also how large that one became, if known."""
    renamed = None if inode in (None, _inode(path)) else _find(path.parent, inode)
    if renamed is None:
        return path, None
    size = renamed.stat().st_size
    if size > offset or not _size(path):
        return renamed, None
    later = _written_after(renamed, path)
    if any(log.suffix in COMPRESSED for log in later):
        return path, None
    return (later or [path])[0], size


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _find(folder: Path, inode: int | None) -> Path | None:
    """The file of that inode in `folder`. Raises OSError where there is no such folder."""
    return next((entry for entry in folder.iterdir() if _inode(entry) == inode and entry.is_file()), None)


def _written_after(renamed: Path, path: Path) -> list[Path]:
    """Logs of the same name as `path` that were written after `renamed` and before `path`, in that order."""
    siblings = [
        (entry.stat().st_mtime_ns, entry) for entry in path.parent.iterdir() if entry.name.startswith(path.name)
    ]
    since = renamed.stat().st_mtime_ns
    return [entry for written, entry in sorted(siblings) if written > since and entry not in (renamed, path)]
