"""What a dataset on this host has to be copied: its manifest, and the samples that are written, a page at a time.

Reads only, also from a dataset that an extraction is writing to: what is `written` stays as it is. The files
themselves, and the tokens, are read by offset like any other file.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from backends.errors import UsageError
from capture.ledger import Ledger, LedgerError, WrittenFile
from capture.manifest import Manifest, ManifestError, read_manifest

LAST = (1 << 63) - 1  # the largest number that SQLite has
MOST = 5000  # samples in one page

Range = tuple[int, int]


class Described(msgspec.Struct):
    """A dataset: its absolute folder, its manifest, and how many samples are written."""

    path: str
    manifest: Manifest
    written: int


class WrittenSample(msgspec.Struct):
    """A sample as its row in the ledger has it; `start` and `tokens` count tokens."""

    number: int
    key: str
    occurrence: int
    file: str
    line: int
    start: int
    tokens: int
    attempts: int
    files: list[WrittenFile]


def describe(path: str) -> Described:
    """A dataset; a relative path starts at the home folder. Raises UsageError where there is none."""
    place = Path.home() / Path(path).expanduser()
    try:
        manifest = read_manifest(place)
        with Ledger(place, read_only=True) as ledger:
            return Described(str(place), manifest, ledger.counts()["written"])
    except (ManifestError, LedgerError, sqlite3.DatabaseError) as error:
        raise UsageError(str(error)) from error


def written(path: str, after: int, ranges: Sequence[Range] | None = None) -> list[WrittenSample]:
    """The next written samples behind number `after`, at most MOST; none at the end.

    Only those in `ranges` (first and last number, ascending), where they are given. Raises UsageError.
    """
    try:
        with Ledger(Path(path), read_only=True) as ledger:
            return list(_page(ledger, after, ranges))
    except (LedgerError, sqlite3.DatabaseError) as error:
        raise UsageError(str(error)) from error


def _page(ledger: Ledger, after: int, ranges: Sequence[Range] | None) -> Iterator[WrittenSample]:
    left = MOST
    for first, last in ranges or [(0, LAST)]:
        if last <= after:
            continue
        rows: list[tuple[Any, ...]] = ledger.db.execute(
            "SELECT sample, key, occurrence, file, line, start, tokens, attempts FROM samples "
            "WHERE state = 'written' AND sample BETWEEN ? AND ? ORDER BY sample LIMIT ?",
            (max(first, after + 1), last, left),
        ).fetchall()
        for row in rows:
            values = (*row, ledger.files(row[0]))
            yield WrittenSample(*values)
        left -= len(rows)
        if not left:
            return
