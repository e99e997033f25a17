"""What an input may be: a file of rows, a folder of such files, or a dataset that Hugging Face `datasets` saved."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from capture.rows import table_rows
from capture.rows.chat import InputError, Refused
from capture.rows.json_rows import open_file, read_json

SUFFIXES = (".parquet", ".jsonl")  # of the files that a folder of rows is made of
HEAD = 1 << 20  # bytes by which a file is told
# What a file of another kind begins with, what it is, and what to do. UTF-32 comes before the UTF-16 in it.
OTHER_KINDS = (
    (b"\x1f\x8b", "is compressed by gzip", "gunzip it"),
    (b"\x28\xb5\x2f\xfd", "is compressed by zstd", "unzstd it"),
    (b"\xfd7zXZ\0", "is compressed by xz", "unxz it"),
    (b"BZh", "is compressed by bzip2", "bunzip2 it"),
    (b"PK\3\4", "is a zip archive", "unzip it"),
    (b"ARROW1", "is an Arrow file", "save its rows as Parquet or JSON lines"),
    (b"\xff\xfe\0\0", "is UTF-32 text", "save it as UTF-8"),
    (b"\0\0\xfe\xff", "is UTF-32 text", "save it as UTF-8"),
    (b"\xff\xfe", "is UTF-16 text", "save it as UTF-8"),
    (b"\xfe\xff", "is UTF-16 text", "save it as UTF-8"),
)
# Never JSON, and a sign that a lone carriage return, which ends no line for us, was meant to.
_LONE_RETURN = re.compile(rb"\}[ \t]*\r\s*\{")

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
    if table_rows.is_parquet(part):
        return table_rows.read_parquet(part, wanted)
    _refuse_other_kinds(part)
    return read_json(part)


def _refuse_other_kinds(path: Path) -> None:
    """Raise `InputError` for what is no JSON by its name and first bytes: else each line of it were a bad row."""
    with open_file(path) as file:
        head = file.readline(HEAD)
    if path.suffix == ".parquet" and head:
        raise InputError(f"{path} is no Parquet file, whatever its name says: copy it again, or call it what it is")
    for begins, what, remedy in OTHER_KINDS:
        if head.startswith(begins):
            raise InputError(f"{path} {what}: {remedy}, and give what comes of it")
    if b"\0" in head[:4]:
        raise InputError(f"{path} is no UTF-8 text but UTF-16 or something else: save it as UTF-8, and give that")
    if _LONE_RETURN.search(head):
        raise InputError(f"{path} has lines that end with a lone carriage return: save it with \\n at their ends")


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
