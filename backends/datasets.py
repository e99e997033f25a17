"""What a dataset on this host has: its manifest, its samples a page at a time, and what logs say of one of them.

Reads only, also from a dataset that an extraction is writing to: what is `written` stays as it is. The files
themselves, and the tokens, are read by offset like any other file.
"""

from __future__ import annotations

import re
import sqlite3
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from backends.errors import UsageError
from backends.folders import absolute
from capture.dataset.ledger import Ledger, LedgerError, Sample, State, WrittenFile
from capture.dataset.manifest import Manifest, ManifestError, read_manifest

LAST = (1 << 63) - 1  # the largest number that SQLite has
MOST = 5000  # samples in one page
LOG_LINES = 200  # that are shown of a sample
LOG_AROUND = 2  # lines before and after one that names it

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


class Page(msgspec.Struct):
    """Some of a dataset's samples, by number.

    `counts` are the samples of the whole dataset by state; `before` is how many of the asked kind have lower numbers
    than the first one here.
    """

    path: str
    model: str
    counts: dict[str, int]
    before: int
    samples: list[Sample]


class LogLine(msgspec.Struct):
    """A line of a log, its number from 1; `named` where it names the sample, else it stands near one that does."""

    line: int
    text: str
    named: bool


class SampleLog(msgspec.Struct):
    """What the log of one run says of a sample; `left_out` lines of it are not here."""

    run: str
    log: str
    lines: list[LogLine]
    left_out: int


def describe(path: str) -> Described:
    """A dataset; a relative path starts at the home folder. Raises UsageError where there is none."""
    place = Path(absolute(path))
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
        with Ledger(Path(absolute(path)), read_only=True) as ledger:
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


def samples(path: str, after: int = -1, before: int | None = None, state: State | None = None, most: int = 200) -> Page:
    """Up to `most` samples: the first behind number `after`, or the last below `before` where that is given.

    Only those in `state`, where it is given. A relative path starts at the home folder. Raises UsageError.
    """
    place = Path(absolute(path))
    side, order, edge = (">", "ASC", min(after, LAST)) if before is None else ("<", "DESC", min(before, LAST))
    of_state = "" if state is None else "state = ? AND"
    kind = () if state is None else (state,)
    try:
        manifest = read_manifest(place)
        with Ledger(place, read_only=True) as ledger:
            rows = ledger.db.execute(
                "SELECT sample, file, line, start, tokens, state, attempts, reason FROM samples "
                f"WHERE {of_state} sample {side} ? ORDER BY sample {order} LIMIT ?",
                (*kind, edge, min(most, MOST)),
            ).fetchall()
            found = sorted((Sample(*row) for row in rows), key=lambda sample: sample.number)
            first = found[0].number if found else 0
            (lower,) = ledger.db.execute(
                f"SELECT count(*) FROM samples WHERE {of_state} sample < ?", (*kind, first)
            ).fetchone()
            return Page(str(place), manifest.settings.model, ledger.counts(), lower, found)
    except (ManifestError, LedgerError, sqlite3.DatabaseError) as error:
        raise UsageError(str(error)) from error


def log_of_sample(run: str, log: Path, number: int) -> SampleLog:
    """The lines of an extraction's log that name sample `number`, and those around them. Raises UsageError."""
    try:
        with log.open(encoding="utf-8", errors="replace") as file:
            found = list(_around(file, re.compile(rf"\bsample {number}\b")))
    except OSError as error:
        raise UsageError(f"{log}: {error.strerror}") from error
    return SampleLog(run, str(log), found[-LOG_LINES:], max(0, len(found) - LOG_LINES))


def _around(lines: Iterable[str], naming: re.Pattern[str]) -> Iterator[LogLine]:
    held: deque[LogLine] = deque(maxlen=LOG_AROUND)
    after = 0
    for line, text in enumerate(lines, start=1):
        one = LogLine(line, text.rstrip("\n"), naming.search(text) is not None)
        if one.named:
            yield from held
            held.clear()
            yield one
            after = LOG_AROUND
        elif after:
            yield one
            after -= 1
        else:
            held.append(one)
