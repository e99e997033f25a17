"""What an extraction would do, told before it costs any GPU time: counts, lengths, the loss mask, disk."""

from __future__ import annotations

import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from capture.rows import files
from capture.rows.alarms import SHOWN, Alarm, Alarms
from capture.rows.chat import InputError, bracketed, mask_parts
from capture.rows.tokenise import BadRow, Encoder, Row, Skipped

PROGRESS_EVERY = 500


class Preview(msgspec.Struct):
    """One row as text, what is in the loss in brackets, and as stretches with whether each is in the loss."""

    line: int
    text: str
    parts: list[tuple[str, bool]]


class Shown(msgspec.Struct):
    """A chosen row: what is in the loss as in `Preview`, nothing shortened; or `reason`, why it gives no sample."""

    file: str
    line: int
    reason: str | None
    tokens: int
    masked_tokens: int
    truncated: bool
    alarms: dict[str, str]
    text: str
    parts: list[tuple[str, bool]]


class Plan(msgspec.Struct):
    """What was found in the rows and what drawing them would write.

    `rows` counts all of them: `samples` (good), `skipped` (good but too long) and `bad`. Lengths are tokens of the
    samples; `median` and `p99` are lengths that occur (nearest rank). `histogram` is (upper bound, samples) in powers
    of two, each bound included. `masked_share` is the part of all tokens that is in the loss, 0 to 1. `alarms` are
    what is odd about samples. `bytes_per_token` and `total_bytes` go by format; `fits` tells whether all formats
    together fit into `free_bytes`. None is "unknown", or "no samples".
    """

    rows: int
    samples: int
    tokens: int
    longest: int | None
    median: int | None
    p99: int | None
    histogram: list[tuple[int, int]]
    masked_tokens: int
    masked_share: float | None
    truncated: int
    skipped: int
    skipped_rows: list[Skipped]
    limit: int | None
    bad: int
    bad_rows: list[BadRow]
    alarms: list[Alarm]
    bytes_per_token: dict[str, float]
    total_bytes: dict[str, int]
    free_bytes: int | None
    fits: bool | None
    output: str | None
    preview: Preview | None
    schema: int = 1


class _Tally:
    """What one pass over the rows keeps: counters, the lengths that occur, and 16 bytes a sample."""

    def __init__(self) -> None:
        self.lengths: Counter[int] = Counter()
        self.masked_tokens = self.truncated = self.skipped = self.bad = 0
        self.alarms = Alarms()
        self.skipped_rows: list[Skipped] = []
        self.bad_rows: list[BadRow] = []
        self.first: Row | None = None
        self.first_masked: Row | None = None

    def add(self, item: Row | BadRow | Skipped) -> None:
        if isinstance(item, Row):
            self._add_sample(item)
        elif isinstance(item, Skipped):
            self.skipped += 1
            _keep(self.skipped_rows, item)
        else:
            self.bad += 1
            _keep(self.bad_rows, item)

    def _add_sample(self, row: Row) -> None:
        masked = sum(row.mask)
        self.lengths[len(row.ids)] += 1
        self.masked_tokens += masked
        self.truncated += row.truncated
        self.first = self.first or row
        if masked:
            self.first_masked = self.first_masked or row
        self.alarms.add(row)


def make_plan(
    rows: Iterable[Row | BadRow | Skipped],
    bytes_per_token: dict[str, float],
    output: Path | None,
    tokenizer: Any,
    limit: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Plan:
    """The plan for `rows`, in one pass and with none of them kept.

    `bytes_per_token`: of each format that will be written. `output`: the dataset's folder, which need not exist yet.
    `tokenizer` renders the preview. `limit` is how many tokens a sample may have, by which the rows were read.
    `progress` is called with the number of rows so far, and with all at the end.
    """
    tally = _Tally()
    count = 0
    for count, item in enumerate(rows, start=1):
        tally.add(item)
        if progress and count % PROGRESS_EVERY == 0:
            progress(count)
    if progress:
        progress(count)
    tokens = sum(length * samples for length, samples in tally.lengths.items())
    total_bytes = {name: math.ceil(size * tokens) for name, size in bytes_per_token.items()}
    free = _free_bytes(output) if output else None
    shown = tally.first_masked or tally.first
    return Plan(
        rows=count,
        samples=tally.lengths.total(),
        tokens=tokens,
        longest=max(tally.lengths, default=None),
        median=_quantile(tally.lengths, 0.5),
        p99=_quantile(tally.lengths, 0.99),
        histogram=_histogram(tally.lengths),
        masked_tokens=tally.masked_tokens,
        masked_share=tally.masked_tokens / tokens if tokens else None,
        truncated=tally.truncated,
        skipped=tally.skipped,
        skipped_rows=tally.skipped_rows,
        limit=limit,
        bad=tally.bad,
        bad_rows=tally.bad_rows,
        alarms=tally.alarms.all(),
        bytes_per_token=bytes_per_token,
        total_bytes=total_bytes,
        free_bytes=free,
        fits=None if free is None else sum(total_bytes.values()) <= free,
        output=None if output is None else str(output),
        preview=_preview(shown, tokenizer) if shown else None,
    )


def refuse_unwritable(output: Path) -> None:
    """Raise `InputError` where a dataset's folder, or the nearest parent that exists, is none that we may write to."""
    folder = output.absolute()
    nearest = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise InputError(f"{output} cannot be written: {nearest} is no folder that we may write to; choose another one")


def show_rows(path: str, encoder: Encoder, wanted: list[str], tokenizer: Any) -> list[Shown]:
    """The rows that `wanted` names, each by its line or index, or by the end of its file's name too: `b.parquet:17`.

    Reads no further than it has to. Raises `InputError` for a name that is none, and for a row that is not there.
    """
    left, shown = [_name_of_row(name) for name in wanted], []
    for read in files.read(path, encoder.columns) if left else ():
        file, line, _ = read
        name = next((name for name in left if name[1] == line and file.endswith(name[0])), None)
        if name is not None:
            left.remove(name)
            shown.append(_shown(encoder(read), tokenizer))
            if not left:
                break
    if left:
        file, line = left[0]
        raise InputError(f"{path} has no row {f'{file}:' if file else ''}{line}, or that line of it is empty")
    return shown


def _name_of_row(name: str) -> tuple[str, int]:
    file, _, line = name.rpartition(":")
    if not line.isdecimal():
        raise InputError(f"{name!r} names no row: give its line, as in 17 or rows.jsonl:17")
    return file, int(line)


def _shown(item: Row | BadRow | Skipped, tokenizer: Any) -> Shown:
    if isinstance(item, Row):
        parts = mask_parts(item.ids, item.mask, tokenizer, limit=1 << 60)
        text = bracketed(parts)
        return Shown(
            item.file, item.line, None, len(item.ids), sum(item.mask), item.truncated, item.alarms, text, parts
        )
    tokens = item.tokens if isinstance(item, Skipped) else 0
    reason = f"it has {tokens:,} tokens, more than --max-length" if isinstance(item, Skipped) else item.reason
    return Shown(item.file, item.line, reason, tokens, 0, False, {}, "", [])


def _preview(row: Row, tokenizer: Any) -> Preview:
    parts = mask_parts(row.ids, row.mask, tokenizer)
    return Preview(row.line, bracketed(parts), parts)


def _keep(shown: list[Any], item: Any) -> None:
    if len(shown) < SHOWN:
        shown.append(item)


def _quantile(lengths: Counter[int], share: float) -> int | None:
    """The shortest length that at least `share` of the samples do not exceed."""
    rank, seen = math.ceil(share * lengths.total()), 0
    for length in sorted(lengths):
        seen += lengths[length]
        if seen >= rank:
            return length
    return None


def _histogram(lengths: Counter[int]) -> list[tuple[int, int]]:
    """(upper bound, samples) from the first power of two that holds any to the last, none left out between them."""
    buckets: Counter[int] = Counter()
    for length, samples in lengths.items():
        buckets[(length - 1).bit_length()] += samples
    if not buckets:
        return []
    return [(1 << exponent, buckets[exponent]) for exponent in range(min(buckets), max(buckets) + 1)]


def _free_bytes(folder: Path) -> int | None:
    """What the file system of `folder`, or of the nearest parent that exists, has left for us."""
    folder = folder.absolute()
    for path in (folder, *folder.parents):
        try:
            return shutil.disk_usage(path).free
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None
