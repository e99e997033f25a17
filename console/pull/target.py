"""The folder that a dataset is pulled into: whose copy it is, who writes to it, and how a file gets its name."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from backends.datasets import Described
from backends.errors import Locked, UsageError
from capture.dataset.formats import sync
from capture.dataset.manifest import Manifest, differences
from capture.dumps.dump import write_json

SCHEMA = 1
PART = ".part"

T = TypeVar("T")


class Claim(msgspec.Struct):
    """pull.json: whose copy a folder is."""

    schema: int
    dataset: str
    manifest: Manifest


def make(target: Path) -> bool:
    """Make a folder unless it is there; returns whether it was made. Raises OSError."""
    try:
        target.mkdir(parents=True)
    except FileExistsError:
        return False
    return True


def claim(target: Path, described: Described) -> None:
    """Write down whose copy the folder is."""
    write_json(target / "pull.json", Claim(SCHEMA, described.path, described.manifest), durable=True)


def require_ours(target: Path, described: Described) -> None:
    """Raise UsageError unless `target` is empty, or an earlier pull of the same dataset."""
    there = {entry.name for entry in target.iterdir()} if target.exists() else set()
    if there <= {".lock"}:
        return
    claimed = _read(target / "pull.json", Claim)
    earlier = claimed.manifest if claimed else _read(target / "manifest.json", Manifest)
    if earlier is None:
        raise UsageError(f"{target} is not empty and holds no dataset; pull into a new folder")
    differ = differences(earlier.settings, described.manifest.settings)
    if earlier.created != described.manifest.created and not differ:
        differ = [f"it was begun at another time, from {earlier.input}"]
    if differ:
        raise UsageError(f"{target} holds another dataset: {'; '.join(differ)}. Pull into a new folder")
    if claimed is None:
        raise UsageError(f"{target} is this dataset itself, or a copy that `pull` did not make; pull into a new folder")


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Be the only one that writes to `target`. Raises Locked."""
    with (target / ".lock").open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Locked(f"something else writes to {target}; wait for it, or pull into another folder") from None
        yield


def put(part: Path, final: Path) -> None:
    """Give a whole file its name, so that it outlives a power cut."""
    sync(part)
    part.replace(final)
    sync(final.parent)


def size(path: Path) -> int:
    """Bytes of a file, 0 where there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def xxh3(path: Path) -> str:
    """Checksum of a file, xxh3-64 in hex."""
    import xxhash

    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path}: {error}; pull into a new folder") from error
