"""The ledger of a dataset: one row a sample, and the tokens that belong to it.

    ledger.sqlite     samples, the files written for them, rows that could not be used
    tokens/ids.bin    int32, the token ids of all samples one after another
    tokens/mask.bin   uint8, their loss masks

The driver is the only writer. SQLite in rollback-journal mode; what a sample's row says is committed in batches, and
a sample is `written` only after its files are on disk.
"""

from __future__ import annotations

import array
import os
import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import msgspec

from capture.rows.tokenise import BadRow, Row, Skipped, token_digest

State = Literal["pending", "sent", "written", "failed"]
TABLES = """
CREATE TABLE IF NOT EXISTS samples (
    sample INTEGER PRIMARY KEY,
    key TEXT NOT NULL,
    occurrence INTEGER NOT NULL,
    file TEXT NOT NULL,
    line INTEGER NOT NULL,
    start INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    state TEXT NOT NULL DEFAULT 'pending',
    attempts INTEGER NOT NULL DEFAULT 0,
    reason TEXT,
    UNIQUE (key, occurrence)
);
CREATE INDEX IF NOT EXISTS by_state ON samples (state);
CREATE TABLE IF NOT EXISTS files (
    sample INTEGER NOT NULL,
    format TEXT NOT NULL,
    path TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    xxh3 TEXT NOT NULL,
    PRIMARY KEY (sample, format)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS unused (
    file TEXT NOT NULL,
    line INTEGER NOT NULL,
    kind TEXT NOT NULL,
    reason TEXT NOT NULL
);
"""
COLUMNS = "sample, file, line, start, tokens, state, attempts, reason"  # of a Sample
FIND = "SELECT sample FROM samples WHERE key = ? AND occurrence = ?"
CACHE_KIB = 64 << 10  # of pages; keys come in no order, and those of a million samples fit
PAGE = 1000  # rows that are read at once: no commit gets in while a statement is open, and SQLite waits 5 s for it


class LedgerError(Exception):
    """A ledger that cannot be used, or an input that does not belong to it; the sentence says what to do."""


class Sample(msgspec.Struct, frozen=True):
    """A sample as the ledger knows it; its tokens are in `Ledger.tokens`."""

    number: int
    file: str
    line: int
    start: int
    tokens: int
    state: State
    attempts: int
    reason: str | None


class Tokens(msgspec.Struct, frozen=True):
    """A sample's number, token ids and loss mask."""

    number: int
    ids: list[int]
    mask: list[int]

    @property
    def in_loss(self) -> Iterator[int]:
        """The token ids that the mask lets into the loss."""
        return (token for token, counts in zip(self.ids, self.mask, strict=True) if counts)


class WrittenFile(msgspec.Struct, frozen=True):
    """A file of a sample in one format; `path` is relative to the dataset, `xxh3` is xxh3-64 in hex."""

    format: str
    path: str
    bytes: int
    xxh3: str


class Ledger:
    """One dataset's ledger. `read_only` for everybody but the driver.

    Raises LedgerError for one that cannot be used, and where a dataset that has been `begun` has none any more: its
    files would belong to nothing.
    """

    def __init__(self, output: Path, *, read_only: bool = False, begun: bool = False) -> None:
        self.path = output / "ledger.sqlite"
        self.folder = output / "tokens"
        if read_only and not self.path.exists():
            raise LedgerError(f"{output} is no dataset: it has no ledger.sqlite")
        if not read_only and not _size(self.path) and (begun or any(map(_size, self._token_files()))):
            raise LedgerError(
                f"{output} has lost its ledger, which says what its files belong to; restore ledger.sqlite from a "
                "copy, or give a new folder"
            )
        if not read_only:
            self.folder.mkdir(exist_ok=True)
        try:
            # A reader too may have to roll back what a killed driver began, so it opens the file for writing.
            mode = "rw" if read_only else "rwc"
            self.db = sqlite3.connect(f"{self.path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None)
            if read_only:
                self.db.execute("PRAGMA query_only = ON")
            else:
                self.db.executescript(TABLES)
                self.db.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
            self._match_tokens(cut=not read_only)
        except sqlite3.DatabaseError as error:
            raise LedgerError(f"{self.path}: {error}; {_remedy(error)}") from error

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.db.close()

    def _match_tokens(self, *, cut: bool = True) -> None:
        """Check that the token files hold what is committed, and `cut` what a run that was killed left beyond it."""
        end = self._end()
        for path, size in self._token_files().items():
            if _size(path) < end * size:
                raise LedgerError(f"{path} is shorter than the ledger says; restore it, or start in a new folder")
            if cut:
                path.touch()
                os.truncate(path, end * size)

    def _token_files(self) -> dict[Path, int]:
        """The files of the tokens, and how many bytes each has for one."""
        return {self.folder / "ids.bin": 4, self.folder / "mask.bin": 1}

    def _end(self) -> int:
        return int(self.db.execute("SELECT coalesce(max(start + tokens), 0) FROM samples").fetchone()[0])

    def add(self, rows: Iterable[Row | BadRow | Skipped]) -> int:
        """Take the whole input, in its order: known rows stay as they are, new ones are appended; returns how many.

        All or nothing. Raises LedgerError where a row of the earlier input is not there any more.
        """
        (known,) = self.db.execute("SELECT count(*) FROM samples").fetchone()
        missing, seen, added = bytearray(b"\1") * known, _Occurrences(), 0
        number, start = known, self._end()
        self.db.execute("BEGIN IMMEDIATE")
        try:
            self.db.execute("DELETE FROM unused")
            with (self.folder / "ids.bin").open("ab") as ids_file, (self.folder / "mask.bin").open("ab") as mask_file:
                for row in rows:
                    if not isinstance(row, Row):
                        self._put_aside(row)
                        continue
                    ids, mask = array.array("i", row.ids).tobytes(), bytes(row.mask)
                    digest = token_digest(ids, mask)
                    place = digest.hex(), seen.add(digest)
                    if known and (found := self.db.execute(FIND, place).fetchone()):
                        missing[found[0]] = 0
                        continue
                    ids_file.write(ids)
                    mask_file.write(mask)
                    self.db.execute(
                        "INSERT INTO samples (sample, key, occurrence, file, line, start, tokens) "
                        "VALUES (?,?,?,?,?,?,?)",
                        (number, *place, row.file, row.line, start, len(row.ids)),
                    )
                    number, start, added = number + 1, start + len(row.ids), added + 1
                if any(missing):
                    raise LedgerError(self._gone(missing.index(1), missing.count(1)))
                for file in (ids_file, mask_file):
                    file.flush()
                    os.fsync(file.fileno())
            self.db.execute("COMMIT")
        except BaseException:
            self._roll_back()
            self._match_tokens()
            raise
        return added

    def adopt(self, source: Ledger) -> int:
        """Take over the samples of another ledger, with their numbers and tokens, as pending; returns how many are new.

        All or nothing. Raises LedgerError where this one holds others under the same numbers, OSError.
        """
        columns = "sample, key, occurrence, file, line, start, tokens"
        known = dict(self.db.execute("SELECT sample, key FROM samples"))
        rows = source.db.execute(f"SELECT {columns} FROM samples ORDER BY sample").fetchall()
        if other := [row[0] for row in rows if known.get(row[0], row[1]) != row[1]]:
            raise LedgerError(f"sample {other[0]} of {source.path} is another one in {self.path}; give a new folder")
        new = [row for row in rows if row[0] not in known]
        if not new:
            return 0
        for name in ("ids.bin", "mask.bin"):
            scratch = self.folder / f".{name}.part"
            shutil.copyfile(source.folder / name, scratch)
            with scratch.open("rb") as file:
                os.fsync(file.fileno())
            scratch.replace(self.folder / name)
        self.db.execute("BEGIN IMMEDIATE")
        try:
            self.db.executemany(f"INSERT INTO samples ({columns}) VALUES (?,?,?,?,?,?,?)", new)
            self.db.execute("COMMIT")
        except BaseException:
            self._roll_back()
            raise
        return len(new)

    def _put_aside(self, row: BadRow | Skipped) -> None:
        kind, reason = ("bad", row.reason) if isinstance(row, BadRow) else ("overlong", f"{row.tokens} tokens")
        self.db.execute("INSERT INTO unused VALUES (?,?,?,?)", (row.file, row.line, kind, reason))

    def _gone(self, number: int, count: int) -> str:
        sample = self.sample(number)
        return (
            f"{count} rows of the earlier input are not there any more or read differently now, the first was "
            f"{sample.file}:{sample.line}; an input may only grow: restore it, or extract into a new folder"
        )

    def sample(self, number: int) -> Sample:
        """One sample. Raises LedgerError where there is none."""
        try:
            found = self.db.execute(f"SELECT {COLUMNS} FROM samples WHERE sample = ?", (number,)).fetchone()
        except OverflowError:  # no integer of SQLite's, so no sample's either
            found = None
        if found is None:
            raise LedgerError(f"no sample {number} in {self.path}")
        return Sample(*found)

    def samples(self, *states: State) -> Iterator[Sample]:
        """Samples in these states (all of them without any), by number; safe to change states meanwhile."""
        where = f"state IN ({','.join('?' * len(states))}) AND" if states else ""
        query = f"SELECT {COLUMNS} FROM samples WHERE {where} sample > ? ORDER BY sample"
        for row in self._pages(query, *states, last=(-1,)):
            yield Sample(*row)

    def _pages(self, query: str, *values: Any, last: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        """The rows of a query, a page at a time; it asks for those after `last`, which are a row's first columns."""
        while batch := self.db.execute(f"{query} LIMIT {PAGE}", (*values, *last)).fetchall():
            yield from batch
            last = batch[-1][: len(last)]

    def tokens(self, sample: Sample) -> tuple[list[int], list[int]]:
        """Token ids and loss mask of a sample."""
        ids = array.array("i")
        with (self.folder / "ids.bin").open("rb") as file:
            file.seek(sample.start * 4)
            ids.frombytes(file.read(sample.tokens * 4))
        with (self.folder / "mask.bin").open("rb") as file:
            file.seek(sample.start)
            mask = list(file.read(sample.tokens))
        return ids.tolist(), mask

    def counts(self) -> dict[str, int]:
        """Samples by state."""
        found = dict(self.db.execute("SELECT state, count(*) FROM samples GROUP BY state"))
        return {state: found.get(state, 0) for state in ("pending", "sent", "written", "failed")}

    def unused(self, kind: str) -> list[tuple[str, int, str]]:
        """Rows that gave no sample: file, line, reason. `kind` is "bad" or "overlong"."""
        return list(
            self.db.execute("SELECT file, line, reason FROM unused WHERE kind = ? ORDER BY file, line", (kind,))
        )

    def longest(self) -> int:
        """Tokens of the longest sample."""
        return int(self.db.execute("SELECT coalesce(max(tokens), 0) FROM samples").fetchone()[0])

    def total(self, *states: State) -> int:
        """Tokens of the samples in these states, of all without any."""
        where = f"WHERE state IN ({','.join('?' * len(states))})" if states else ""
        return int(self.db.execute(f"SELECT coalesce(sum(tokens), 0) FROM samples {where}", states).fetchone()[0])

    def reopen(self) -> None:
        """Make what an earlier run left unfinished or failed pending again."""
        self.db.execute("UPDATE samples SET state = 'pending', reason = NULL WHERE state IN ('sent', 'failed')")

    def settle(self, changes: Iterable[Change]) -> None:
        """Commit a batch of changes."""
        self.db.execute("BEGIN IMMEDIATE")
        try:
            for change in changes:
                self.db.execute(
                    "UPDATE samples SET state = ?, attempts = ?, reason = ? WHERE sample = ?",
                    (change.state, change.attempts, change.reason, change.sample),
                )
                self.db.executemany(
                    "INSERT OR REPLACE INTO files VALUES (?,?,?,?,?)",
                    [(change.sample, file.format, file.path, file.bytes, file.xxh3) for file in change.files],
                )
            self.db.execute("COMMIT")
        except BaseException:
            self._roll_back()
            raise

    def _roll_back(self) -> None:
        if self.db.in_transaction:  # SQLite has done it itself where the disk is full
            self.db.execute("ROLLBACK")

    def files(self, number: int) -> list[WrittenFile]:
        """The files of a sample."""
        return [
            WrittenFile(*row)
            for row in self.db.execute("SELECT format, path, bytes, xxh3 FROM files WHERE sample = ?", (number,))
        ]

    def some(self, most: int) -> list[int]:
        """The numbers of at most `most` samples, chosen at random, in order."""
        return sorted(
            number for (number,) in self.db.execute("SELECT sample FROM samples ORDER BY random() LIMIT ?", (most,))
        )

    def all_files(self) -> Iterator[tuple[int, WrittenFile]]:
        """The files of all samples, by number; the driver may write meanwhile."""
        after = "WHERE (sample, format) > (?, ?) ORDER BY sample, format"
        query = f"SELECT sample, format, path, bytes, xxh3 FROM files {after}"
        for number, *row in self._pages(query, last=(-1, "")):
            yield number, WrittenFile(*row)

    def written_keys(self) -> Iterator[tuple[int, str, int]]:
        """Number, key and occurrence of the written samples, by number; the driver may write meanwhile."""
        after = "WHERE state = 'written' AND sample > ? ORDER BY sample"
        yield from self._pages(f"SELECT sample, key, occurrence FROM samples {after}", last=(-1,))

    def written_in(self, name: str) -> int:
        """How many samples have a file in a format."""
        return int(self.db.execute("SELECT count(*) FROM files WHERE format = ?", (name,)).fetchone()[0])

    def all_tokens(self) -> Iterator[Tokens]:
        """The tokens of every sample, by number. Raises LedgerError where numbers are left out."""
        for expected, sample in enumerate(self.samples()):
            if sample.number != expected:
                raise LedgerError(
                    f"{self.path} holds no sample {expected}, and this format wants them all, from 0 on; "
                    "use the whole dataset"
                )
            yield Tokens(sample.number, *self.tokens(sample))

    def bytes_written(self) -> int:
        """Bytes of all files."""
        return int(self.db.execute("SELECT coalesce(sum(bytes), 0) FROM files").fetchone()[0])


def token_key(ids: bytes, mask: bytes) -> str:
    """The key of a sample: `token_digest` in hex."""
    return token_digest(ids, mask).hex()


class _Occurrences:
    """How often each digest came by before; about 100 bytes for each of them."""

    def __init__(self) -> None:
        self._once: set[bytes] = set()
        self._again = Counter[bytes]()

    def add(self, digest: bytes) -> int:
        """Note one more; returns how many there were."""
        if digest not in self._once:
            self._once.add(digest)
            return 0
        self._again[digest] += 1
        return self._again[digest]


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _remedy(error: sqlite3.DatabaseError) -> str:
    if getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return "an extraction is writing to it; try again in a moment"
    return "restore it from a copy, or start in a new folder"


class Change(msgspec.Struct, frozen=True):
    """A new state of a sample."""

    sample: int
    state: State
    attempts: int
    reason: str | None = None
    files: list[WrittenFile] = []
