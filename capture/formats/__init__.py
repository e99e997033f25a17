"""Training formats: one module each, all with the functions of `Format`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

from capture.formats import native, specforge
from capture.ledger import WrittenFile
from capture.pour import pour


class Format(Protocol):
    """What a format's module offers; `states` maps a state's name to a tensor `[tokens, hidden]`."""

    def path(self, number: int) -> str:
        """Path of a sample's file, relative to the dataset."""

    def bytes_per_token(self, hidden: int, layers: int, itemsize: int) -> int:
        """Bytes that one token takes in a file."""

    def refuse(self, dtype: str, layers: int) -> str | None:
        """Why states of that dtype and number of layers do not fit, None where they do."""

    def encode(self, states: dict[str, Any], ids: Any, mask: Any) -> list[bytes | memoryview]:
        """The file of a sample, in the parts that follow one another; `ids` and `mask` are int64 `[tokens]`."""

    def decode(self, data: bytes, layers: int) -> tuple[Any, Any, dict[str, Any]]:
        """Ids, mask and states out of a file. Raises ValueError naming what is not as it should be."""


FORMATS: dict[str, Format] = {"native": native, "specforge": specforge}


class UnknownFormat(Exception):
    """There is no format of that name; the sentence says which there are."""


def find(name: str) -> Format:
    """The format of that name. Raises UnknownFormat."""
    try:
        return FORMATS[name]
    except KeyError:
        raise UnknownFormat(f"no format is called {name!r}; there are {', '.join(FORMATS)}") from None


def write(name: str, output: Path, number: int, states: dict[str, Any], ids: Any, mask: Any) -> WrittenFile:
    """Write a sample in format `name`: whole and on disk under its name, or not there at all. Raises OSError."""
    chosen = find(name)
    parts = chosen.encode(states, ids, mask)
    relative = chosen.path(number)
    path = output / relative
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.part")
    try:
        with scratch.open("wb", buffering=0) as file:
            size, checksum = pour(file.fileno(), parts)
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise
    sync(path.parent)
    return WrittenFile(name, relative, size, checksum)


def sync(path: Path) -> None:
    """Make a file's content, or a rename in a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
