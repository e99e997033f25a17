"""Large files on tmpfs that a writer fills again and again.

Finding and clearing the pages of a new file costs three times what copying into pages does that are there and mapped.
So a writer keeps a name of its own, a hard link, and a mapping of each large file that it has made. Whoever deletes a
dump deletes the dump's names only; a file that then has one name left is filled again. A dump that was deleted must
therefore not be read through a mapping that is still open.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from capture.dumps.pour import stretches

LEAST_BYTES = 1 << 20  # of a file that is worth it
CLOSE = 0.05  # of its length by which a file may be too long or too short and is taken all the same
HEADROOM = 1.5  # a mapping's length by its file's, so that a file that grows a little need not be mapped again


class Spare:
    """A file whose pages are all there, and mapped."""

    def __init__(self, path: Path, size: int) -> None:
        """Raises OSError where tmpfs has no room."""
        self.path, self.size, self.length = path, 0, 0
        self.handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            self.resize(size)
        except OSError:
            self.drop()
            raise

    @property
    def idle(self) -> bool:
        """Whether no dump has it."""
        return os.fstat(self.handle).st_nlink == 1

    def resize(self, size: int) -> None:
        """Make the file `size` bytes long, all of them allocated: a page that is lacking would kill the writer."""
        if size == self.size:
            return
        if size > self.length:
            self.length = int(size * HEADROOM)
            os.ftruncate(self.handle, self.length)  # a mapping must not be longer than its file when it is made
            self.mapping = mmap.mmap(self.handle, self.length)
        os.ftruncate(self.handle, size)
        os.posix_fallocate(self.handle, 0, size)
        self.size = size

    def fill(self, parts: Sequence[bytes | memoryview]) -> str:
        """Copy `parts`, `size` bytes together, into the file; returns their xxh3-64 in hex."""
        import xxhash

        digest, at = xxhash.xxh3_64(), 0
        for piece in stretches(parts, digest):
            self.mapping[at : at + len(piece)] = piece
            at += len(piece)
        return str(digest.hexdigest())

    def drop(self) -> None:
        """Give it up; a dump that has it keeps it."""
        self.path.unlink(missing_ok=True)
        if self.length:
            self.mapping.close()  # it would keep the pages
        os.close(self.handle)


class Spares:
    """What one writer keeps: at most `most` bytes, dumps that have not been deleted yet included."""

    def __init__(self, folder: Path, name: str, most: int) -> None:
        """Files are called `<name>_<number>.pt`; those that an earlier writer of that name kept are given up."""
        self.folder, self.name, self.most = folder, name, most
        self.files: list[Spare] = []
        self.made = 0
        for path in folder.glob(f"{name}_*.pt"):
            path.unlink()

    def take(self, size: int) -> Spare | None:
        """An idle file of `size` bytes, made if need be; None where it would be too small or too much.

        Raises OSError where tmpfs has no room.
        """
        if not LEAST_BYTES <= size <= self.most:
            return None
        try:
            return self._take(size)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            self.drop_idle()
            return self._take(size)

    def _take(self, size: int) -> Spare | None:
        idle = sorted((file for file in self.files if file.idle), key=lambda file: abs(file.size - size))
        room = self.most - sum(file.size for file in self.files)
        if idle and (abs(idle[0].size - size) <= CLOSE * size or room < size):
            fit = idle.pop(0)
            while room + fit.size < size and idle:
                room += self._drop(idle.pop())
            if room + fit.size >= size:
                fit.resize(size)
                return fit
        if room < size:
            return None
        self.made += 1
        self.files.append(Spare(self.folder / f"{self.name}_{self.made}.pt", size))
        return self.files[-1]

    def drop_idle(self) -> None:
        """Free the memory of every file that no dump has."""
        for file in [file for file in self.files if file.idle]:
            self._drop(file)

    def _drop(self, file: Spare) -> int:
        self.files.remove(file)
        file.drop()
        return file.size
