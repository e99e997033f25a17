"""The dataset of an earlier demo, which the next one replaces: what is one, and nothing else, is deleted."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from backends.errors import UsageError

ROWS = "/backends/embedded/conversations.jsonl"  # in whichever payload
WRITTEN = frozenset({"manifest.json", ".lock", "ledger.sqlite", "ledger.sqlite-journal", "tokens"})
SCRATCH = ".manifest.json."  # of a driver that was killed


class DemoSettings(msgspec.Struct):
    """The settings in a manifest, as far as they matter here."""

    formats: list[str]


class DemoManifest(msgspec.Struct):
    """A manifest, as far as it tells a demo from other datasets, whichever version wrote it."""

    profile: str
    input: str
    settings: DemoSettings


def remove(place: Path) -> None:
    """Delete the dataset of an earlier demo, if there is one. Raises UsageError for a folder that holds anything else.

    Also for a demo's that somebody put something into, such as notes or an export.
    """
    try:
        there = {entry.name for entry in place.iterdir()} if place.is_dir() else set()
        if not there <= {".lock"} and (extra := there - _written(place)):
            named = ", ".join(sorted(extra)[:3])
            raise UsageError(f"{place} holds more than a demo: {named}; move that away, or give another folder")
        if there:
            shutil.rmtree(place)
    except OSError as error:
        raise UsageError(f"{place}: {error}") from error


def _written(place: Path) -> set[str]:
    """The names that an earlier demo can have written into this folder. Raises UsageError where it is no demo's."""
    try:
        manifest = msgspec.json.decode((place / "manifest.json").read_bytes(), type=DemoManifest)
    except (OSError, msgspec.MsgspecError):
        manifest = None
    if manifest is None or not manifest.profile.startswith("embedded-") or not manifest.input.endswith(ROWS):
        raise UsageError(f"{place} is not empty and holds no demo; give another folder")
    return {*WRITTEN, *manifest.settings.formats, *(path.name for path in place.glob(f"{SCRATCH}*"))}
