"""Looking into the folders of this host, for whoever chooses a file there."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from backends.errors import UsageError

MOST = 2000  # entries in one answer


class Entry(msgspec.Struct, frozen=True):
    """A file or a folder; `bytes` is None for a folder, and for what can no longer be asked."""

    name: str
    folder: bool
    bytes: int | None


class Folder(msgspec.Struct, frozen=True):
    """A folder by its absolute path: its entries, folders first, and how many are left out.

    What has a name that is not UTF-8 is among the latter: no JSON holds it, nor does any path that a person types.
    """

    path: str
    entries: list[Entry]
    left_out: int


def absolute(path: str) -> str:
    """An absolute path; one that begins with ~ or is relative starts at the home folder."""
    return str(Path.home() / Path(path).expanduser())


def read_folder(path: str) -> Folder:
    """What is in a folder; a relative path starts at the home folder. Raises UsageError where it cannot be read."""
    place = Path(absolute(path))
    try:
        with os.scandir(place) as found:
            there = list(found)
    except OSError as error:
        raise UsageError(f"{place}: {error.strerror}") from error
    entries = sorted(map(_entry, filter(_is_text, there)), key=lambda entry: (not entry.folder, entry.name))[:MOST]
    return Folder(str(place), entries, len(there) - len(entries))


def _is_text(found: os.DirEntry[str]) -> bool:
    return found.name.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in found.name)


def _entry(found: os.DirEntry[str]) -> Entry:
    try:
        folder = found.is_dir()
        return Entry(found.name, folder, None if folder else found.stat().st_size)
    except OSError:  # gone already, or a link that leads nowhere
        return Entry(found.name, False, None)
