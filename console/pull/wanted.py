"""Which samples are pulled: the ledger that the copy will have, in the making."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath

import msgspec

from backends.datasets import Described, Range, WrittenSample
from backends.errors import UsageError
from capture.dataset.ledger import TABLES, WrittenFile
from console.pull.progress import Meter
from console.pull.source import Source
from console.pull.target import PART, put


class Failure(msgspec.Struct, frozen=True):
    """A file that was not copied; its sample is then not in the local ledger. None for a file that is no sample's."""

    sample: int | None
    path: str
    reason: str


class Wanted:
    """The samples to copy with their files; `failures` are those that could not be had."""

    def __init__(self, source: Source, described: Described, target: Path) -> None:
        self._source, self._described, self._target = source, described, target
        self.failures: list[Failure] = []
        self._part = target / f"ledger.sqlite{PART}"
        for leftover in (self._part, target / f"ledger.sqlite{PART}-journal"):
            leftover.unlink(missing_ok=True)
        self.db = sqlite3.connect(self._part, isolation_level=None)
        self.db.executescript(f"{TABLES} CREATE TEMP TABLE here (sample, format, PRIMARY KEY (sample, format));")

    def choose(self, chosen: Sequence[Range] | None, meter: Meter) -> None:
        """Write down the samples to copy with their files. Raises UsageError where one that is chosen is missing."""
        ranges = None if chosen is None else merged([*chosen, *self._copied()])
        after = -1
        self.db.execute("BEGIN")
        while page := self._page(after, ranges):
            for sample in page:
                self._write_down(sample)
            after = page[-1].number
            meter.show("listing")
        self.db.execute("COMMIT")
        if chosen is not None:
            self._require_all(chosen)
        if after < 0:
            raise UsageError(f"{self._described.path} has no written sample yet")

    def files(self, *, missing: bool = False) -> Iterator[tuple[int, WrittenFile]]:
        """The files by sample; only those that are not here, if asked."""
        where = "WHERE (sample, format) NOT IN (SELECT sample, format FROM here)" if missing else ""
        for sample, *row in self.db.execute(f"SELECT * FROM files {where} ORDER BY sample, format"):
            yield sample, WrittenFile(*row)

    def tokens(self) -> Iterator[tuple[int, str, int, int]]:
        """Number, key, start and length in tokens of each sample, in the order of the tokens."""
        yield from self.db.execute("SELECT sample, key, start, tokens FROM samples ORDER BY start").fetchall()

    def size(self) -> tuple[int, int]:
        """How many files, and how many bytes."""
        files, size = self.db.execute("SELECT count(*), coalesce(sum(bytes), 0) FROM files").fetchone()
        return files, size

    def mark_here(self, sample: int, file: WrittenFile) -> None:
        """A file was here before anything was fetched."""
        self.db.execute("INSERT INTO here VALUES (?,?)", (sample, file.format))

    def here(self) -> int:
        """How many files were here before anything was fetched."""
        (count,) = self.db.execute("SELECT count(*) FROM here").fetchone()
        return int(count)

    def keep_what_came(self) -> tuple[int, int, int]:
        """Put the ledger in its place, without what failed; returns its samples, files and bytes."""
        for failure in self.failures:
            for table in ("samples", "files"):
                self.db.execute(f"DELETE FROM {table} WHERE sample = ?", (failure.sample,))
        (samples,) = self.db.execute("SELECT count(*) FROM samples").fetchone()
        files, size = self.size()
        self.db.close()
        put(self._part, self._target / "ledger.sqlite")
        return samples, files, size

    def _copied(self) -> list[Range]:
        """The samples that an earlier pull brought here."""
        path = self._target / "ledger.sqlite"
        if not path.exists():
            return []
        earlier = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
        try:
            return [(number, number) for (number,) in earlier.execute("SELECT sample FROM samples")]
        finally:
            earlier.close()

    def _page(self, after: int, ranges: list[Range] | None) -> list[WrittenSample]:
        found = self._source.request("dataset_samples", path=self._described.path, after=after, ranges=ranges)
        return msgspec.convert(found, list[WrittenSample])

    def _write_down(self, sample: WrittenSample) -> None:
        self.db.execute(
            "INSERT INTO samples VALUES (?,?,?,?,?,?,?,'written',?,NULL)",
            (
                sample.number,
                sample.key,
                sample.occurrence,
                sample.file,
                sample.line,
                sample.start,
                sample.tokens,
                sample.attempts,
            ),
        )
        for file in sample.files:
            self.require_inside(file)
            row = sample.number, file.format, file.path, file.bytes, file.xxh3
            self.db.execute("INSERT INTO files VALUES (?,?,?,?,?)", row)

    def require_inside(self, file: WrittenFile) -> None:
        """Raise UsageError for a file that a ledger or a manifest says to be outside the dataset."""
        parts = PurePosixPath(file.path).parts
        if len(parts) < 2 or parts[0] in ("/", "tokens") or ".." in parts:
            raise UsageError(f"the ledger of {self._described.path} names a file outside the dataset: {file.path!r}")

    def _require_all(self, chosen: Sequence[Range]) -> None:
        for first, last in chosen:
            found = self.db.execute("SELECT sample FROM samples WHERE sample BETWEEN ? AND ? ORDER BY 1", (first, last))
            next_one = first
            for (number,) in found:
                if number != next_one:
                    break
                next_one += 1
            if next_one <= last:
                raise UsageError(
                    f"sample {next_one} is not written in {self._described.path}, which has "
                    f"{self._described.written:,} that are; choose others"
                )


def merged(ranges: Iterable[Range]) -> list[Range]:
    """The same numbers as ranges that ascend and are apart from each other."""
    found: list[Range] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return found
