"""How far a pull is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

from capture.dataset.ledger import WrittenFile
from console.pull.source import Source


class Progress(msgspec.Struct):
    """How far a pull is. `phase`: listing, checking, tokens, files. `link` says what the link is, unless it is live.

    `bytes_done` counts what is here of the samples' files, also of those that are not whole yet. It never falls: of a
    file that is fetched once more, each byte counts when it has come for the first time.
    """

    phase: str
    files_done: int = 0
    files: int = 0
    bytes_done: int = 0
    bytes: int = 0
    bytes_per_second: float | None = None
    link: str | None = None


class Meter:
    """Counts what comes, from any thread, and shows it when it is told to."""

    def __init__(self, source: Source, show: Callable[[Progress], None]) -> None:
        self._source, self._show = source, show
        self._progress = Progress("listing")
        self._under_way: dict[str, int] = {}  # bytes that count already, of files that are not whole
        self._lock = threading.Lock()
        self._began, self._before = time.monotonic(), 0  # when the files were begun, and the bytes fetched by then

    def expect(self, files: int, size: int) -> None:
        """So many files of so many bytes are wanted in all."""
        self._progress.files, self._progress.bytes = files, size

    def begin(self) -> None:
        """The rate is that of the files from now on."""
        self._began, self._before = time.monotonic(), self._source.fetched

    def came(self, file: WrittenFile, size: int) -> None:
        """The first `size` bytes of a file are here."""
        with self._lock:
            before = self._under_way.get(file.path, 0)
            if before < size:
                self._under_way[file.path] = size
                self._progress.bytes_done += size - before

    def whole(self, file: WrittenFile) -> None:
        """A file is here, and right."""
        with self._lock:
            self._progress.files_done += 1
            self._progress.bytes_done += file.bytes - self._under_way.pop(file.path, 0)

    def show(self, phase: str) -> None:
        """Show how far it is."""
        now, link = self._progress, self._source.host.state
        now.phase, now.link = phase, None if link.state == "live" else link.state
        if phase == "files":
            seconds = time.monotonic() - self._began
            now.bytes_per_second = (self._source.fetched - self._before) / seconds if seconds > 0 else None
        self._show(now)
