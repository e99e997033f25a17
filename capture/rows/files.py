"""What an input may be: a file of rows, a folder of such files, or a dataset that Hugging Face `datasets` saved."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from capture.rows import table_rows
from capture.rows.chat import InputError, Refused
from capture.rows.json_rows import open_file, read_json

SUFFIXES = (".parquet", ".jsonl")  # of the files that a folder of rows is made of

Raw: TypeAlias = "bytes | dict[str, Any] | Refused"
"""A row as it was read: a line of JSON, an object, or why there is none."""


def read(path: str | Path, wanted: Collection[str] | None = None) -> Iterator[tuple[str, int, Raw]]:
    """(file, line or index, row) for every row, in order; files of a folder go by their names.

    Lines of text count from 1; rows of tables, as in `dataset[i]`, from 0. What a table holds beside the columns
    `wanted` (all of them without) need not be readable. Nothing is opened before the first row is asked for. Raises
    `InputError` for what is missing, empty, or cannot be read on.
    """
    for part in _parts(Path(path)):
        for line, row in _read_part(part, wanted):
            yield str(part), line, row


def read_hash(path: str | Path) -> str:
    """SHA-256 of an input's bytes, in hex; of several files, that of their names and hashes. Raises `InputError`."""
    path = Path(path)
    parts = [file for part in _parts(path) for file in (table_rows.saved_files(part) if part.is_dir() else [part])]
    if parts == [path]:
        return _hash_file(path)
    whole = hashlib.sha256()
    for part in parts:
        whole.update(f"{part.relative_to(path)}\0{_hash_file(part)}\n".encode())
    return whole.hexdigest()


def _hash_file(path: Path) -> str:
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_part(part: Path, wanted: Collection[str] | None) -> Iterator[tuple[int, Raw]]:
    if part.is_dir():
        return table_rows.read_saved(part, wanted)
    return table_rows.read_parquet(part, wanted) if table_rows.is_parquet(part) else read_json(part)


def _parts(path: Path) -> list[Path]:
    """The files of rows, or the saved dataset, that an input is made of."""
    if not path.is_dir() or (path / table_rows.STATE).exists():
        return [path]
    if (path / table_rows.SPLITS).exists():
        splits = ", ".join(sorted(split.name for split in path.iterdir() if split.is_dir()))
        raise InputError(f"{path} holds several datasets ({splits}): give the folder of one of them")
    found = {suffix: sorted(path.rglob(f"*{suffix}")) for suffix in SUFFIXES}
    kinds = [suffix for suffix in SUFFIXES if found[suffix]]
    if not kinds:
        raise InputError(f"{path} holds no rows: give a folder of Parquet or JSONL files, or one that datasets saved")
    if len(kinds) > 1:
        raise InputError(f"{path} holds {' and '.join(kinds)} files: put what belongs together in a folder of its own")
    return found[kinds[0]]
