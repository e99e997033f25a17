"""The dump folder of a server run: what the tap leaves there, how it is written, read, followed and deleted.

    <root>/<server run>/tap.json        the tap's own state, renewed while it changes
                        dumps.jsonl     a line a request, done or failed
                        req_<N>/        aux_0.pt … aux_<K-1>.pt, final.pt, last.pt, meta.json, then done | failed

Tensors are `[tokens, hidden]` in the server's compute dtype. `aux_<i>` is what enters boundary i, `final` the state
after the final norm, `last` the one before it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from capture.dumps import pt
from capture.dumps.spares import Spares
from capture.layers import Layers

FORMAT = 1
TAIL = 1 << 20  # bytes at the end of dumps.jsonl in which its last line begins
# Of tap.json, what is added up over the replicas of a server, beside `seen`.
COUNTERS = ("slots", "slots_free", "dump_bytes", "writers_lost", "shared_forwards", "failed", "slot_wait_seconds")


class DumpError(Exception):
    """A dump or dump folder that cannot be used; the sentence says why."""


class Meta(msgspec.Struct, frozen=True):
    """meta.json: what was asked and what lies beside it. `files` maps a name to (bytes, xxh3-64 in hex)."""

    format: int
    rid: str
    ids: list[int]
    tokens: int
    hidden: int
    dtype: str
    boundaries: list[int]
    files: dict[str, tuple[int, str]]
    model: str
    sglang: str
    tap: str


class Line(msgspec.Struct, frozen=True):
    """One line of dumps.jsonl: request `n` came to `state` ("done" or "failed").

    `busy` where it failed only since no arena slot came free in time, or no room for its dump; asked again later it may
    well be done.
    """

    n: int
    rid: str
    state: str
    bytes: int
    reason: str | None = None
    busy: bool = False


class TapState(msgspec.Struct, kw_only=True):
    """tap.json: is the tap in, whose code is it, what does it draw, and what has it seen.

    `seen` counts requests by class: ours, warm_up, health, stranger. `reserve` is what the writer leaves free on the
    file system, in bytes; `slot_tokens` the rows that one arena slot holds; `dump_bytes` what dumps in flight may take
    beside the arena. `shared_forwards` counts those that held several requests of ours. `slot_wait_seconds` is the
    back-pressure: how long forwards have waited for a slot, all together. A server of several `replicas` has as many
    taps. `gpu` is the one of the first rank, by name.
    """

    format: int = FORMAT
    inside: bool = True
    error: str | None = None
    code: str
    pid: int
    sglang: str
    model: str
    model_class: str
    layers: Layers | None = None
    hidden: int = 0
    dtype: str = ""
    bytes_per_token: int = 0
    gpu: str | None = None
    ranks: int = 1
    replicas: int = 1
    slots: int = 0
    slots_free: int = 0
    slot_tokens: int = 0
    reserve: int = 0
    slot_wait_seconds: float = 0.0
    dump_bytes: int = 0
    writer_pids: list[int] = []
    writers_lost: int = 0
    seen: dict[str, int] = {}
    shared_forwards: int = 0
    failed: int = 0


def state_names(boundaries: int) -> list[str]:
    """The states of a dump in their order in arena and files: aux_0 …, final, last."""
    return [*(f"aux_{i}" for i in range(boundaries)), "final", "last"]


def make_private(folder: Path) -> Path:
    """Make `folder` (0700) and check that it is ours alone: a real folder, our owner, no access for others.

    Raises DumpError naming the folder where it is not: the states in it are somebody's data.
    """
    try:
        folder.mkdir(mode=0o700, parents=False)
    except FileExistsError:
        pass
    except OSError as error:
        raise DumpError(f"{folder}: {error.strerror}") from error
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise DumpError(f"{folder} is not a folder (or is a symbolic link); remove it or choose another dump root")
    if found.st_uid != os.geteuid():
        raise DumpError(f"{folder} belongs to user {found.st_uid}, not to us; choose another dump root")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise DumpError(f"{folder} is open to other users; chmod 700 it or choose another dump root")
    return folder


def request_folder(dump_dir: Path, number: int) -> Path:
    """Folder of request `number`."""
    return dump_dir / f"req_{number}"


def write_json(path: Path, value: Any, *, durable: bool = False) -> None:
    """Replace `path` atomically by `value` as JSON; `durable` also survives a power cut."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(msgspec.json.encode(value))
        if durable:
            file.flush()
            os.fsync(file.fileno())
    scratch.replace(path)


def tap_folders(dump_dir: Path) -> list[Path]:
    """Where a server's taps are: its dump folder, or the folders in it of those replicas that are there."""
    return sorted(dump_dir.glob("replica_*")) or [dump_dir]


def read_tap(dump_dir: Path) -> TapState | None:
    """The tap's state; None while there is none. Raises DumpError for one that another version wrote.

    Of a server of several replicas the first one's, with the counters of all of them.
    """
    folders = tap_folders(dump_dir)
    if folders == [dump_dir] or (dump_dir / "tap.json").exists():  # the latter says why one of them is not in
        return _read_tap(dump_dir)
    taps = [tap for tap in map(_read_tap, folders) if tap is not None]
    if not taps or len(taps) < taps[0].replicas:
        return None
    first = taps[0]
    for other in taps[1:]:
        for name in COUNTERS:
            setattr(first, name, getattr(first, name) + getattr(other, name))
        first.writer_pids = [*first.writer_pids, *other.writer_pids]
        classes = dict.fromkeys([*first.seen, *other.seen])  # one may have seen what the first has not
        first.seen = {name: first.seen.get(name, 0) + other.seen.get(name, 0) for name in classes}
    return first


def _read_tap(dump_dir: Path) -> TapState | None:
    path = dump_dir / "tap.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=TapState)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise DumpError(f"{path}: {error}; was the server started by another version of Layertap?") from error


def write_done(folder: Path, states: dict[str, Any], meta: Meta, spares: Spares | None = None) -> int:
    """Write a whole dump: tensors, meta.json, then `done`; returns its bytes.

    `states` maps a state's name to a contiguous tensor `[tokens, hidden]`; `meta.files` is filled in here. Large files
    are taken from `spares` if there are any. Raises OSError; what was written until then is the caller's to remove
    (`write_failed`).
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    files = {f"{name}.pt": pt.write(folder / f"{name}.pt", state, spares) for name, state in states.items()}
    (folder / "meta.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(meta, files=files)))
    (folder / "done").touch()
    return sum(size for size, _ in files.values())


def write_failed(folder: Path, reason: str) -> None:
    """Turn whatever is in `folder` into a failed request: only `failed` (JSON: reason) is left. Raises OSError."""
    folder.mkdir(mode=0o700, exist_ok=True)
    for path in folder.iterdir():  # first, since the reason may be a full file system
        path.unlink()
    (folder / "failed").write_bytes(msgspec.json.encode({"reason": reason}))


def read_meta(folder: Path) -> Meta:
    """meta.json of a dump that is done. Raises DumpError where it is failed, unfinished or of another format."""
    if (folder / "failed").exists():
        raise DumpError(f"{folder.name} failed: {_reason(folder / 'failed')}")
    if not (folder / "done").exists():
        raise DumpError(f"{folder.name} has no done mark")
    try:
        meta = msgspec.json.decode((folder / "meta.json").read_bytes(), type=Meta)
    except (OSError, msgspec.MsgspecError) as error:
        raise DumpError(f"{folder.name}/meta.json: {error}") from error
    if meta.format != FORMAT:
        raise DumpError(f"{folder.name} has dump format {meta.format}, this version reads {FORMAT}")
    return meta


def _reason(mark: Path) -> str:
    try:
        return str(msgspec.json.decode(mark.read_bytes(), type=dict[str, str])["reason"])
    except (OSError, msgspec.MsgspecError, KeyError):
        return "the reason is not there; there was no room for it"


class Buffer:
    """Memory that one dump after another is read into, so that its pages need not be found again each time."""

    def __init__(self) -> None:
        self.bytes = memoryview(b"")

    def of(self, size: int) -> memoryview:
        """`size` bytes of it, not cleared; they stay valid until the next call."""
        import torch

        if size > len(self.bytes):
            self.bytes = memoryview(torch.empty(size, dtype=torch.uint8).numpy())
        return self.bytes[:size]


def read_states(folder: Path, meta: Meta, buffer: Buffer | None = None) -> dict[str, Any]:
    """The tensors of a dump, each checked against its size and checksum in `meta` before it is unpickled.

    They lie in `buffer`, if one is given, until it is used again. Raises DumpError naming the file that is missing,
    cut or changed.
    """
    import torch
    import xxhash

    shape, dtype = (meta.tokens, meta.hidden), getattr(torch, meta.dtype)
    # One byte more than was written, to see that a file is too long; each begins where a tensor may.
    rooms = [-(-(size + 1) // 64) * 64 for size, _ in meta.files.values()]
    memory, at, states = (buffer or Buffer()).of(sum(rooms)), 0, {}
    for (name, (size, checksum)), room in zip(meta.files.items(), rooms, strict=True):
        place, at = memory[at : at + size + 1], at + room
        try:
            found = read_into(folder / name, place)
        except OSError as error:
            raise DumpError(f"{folder.name}/{name}: {error.strerror}") from error
        if found != size:
            raise DumpError(f"{folder.name}/{name} has {found} bytes, {size} were written")
        if xxhash.xxh3_64_hexdigest(place[:size]) != checksum:
            raise DumpError(f"{folder.name}/{name} was changed after it was written: its checksum differs")
        states[name.removesuffix(".pt")] = pt.read(place[:size], shape, dtype)
    return states


def read_into(path: Path, place: memoryview) -> int:
    """Read a file into `place`; returns the bytes that the file has, of which no more are read. Raises OSError."""
    at = 0
    with path.open("rb", buffering=0) as file:
        while at < len(place) and (count := file.readinto(place[at:])):
            at += count
        return os.fstat(file.fileno()).st_size


def remove(folder: Path) -> None:
    """Delete a request's folder; the marks go first, so that a half-deleted one is never taken for whole."""
    for mark in ("done", "failed"):
        (folder / mark).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def remove_settled(dump_dir: Path) -> None:
    """Delete the folders of all requests that have come to an end, for one who begins to draw and waits for none yet.

    They are marked, or, where somebody was killed while deleting them, in dumps.jsonl. What is still being written
    stays: its line is to come. Raises DumpError or OSError where dumps.jsonl cannot be read.
    """
    unmarked = {}
    for path in dump_dir.glob("req_*"):
        if not path.name[4:].isdecimal():
            continue
        if (path / "done").exists() or (path / "failed").exists():
            remove(path)
        else:
            unmarked[int(path.name[4:])] = path
    if unmarked:  # a journal of many requests takes a while, and is seldom needed
        for line in Journal(dump_dir).read():
            if line.n in unmarked:
                remove(unmarked[line.n])


class Journal:
    """Follows dumps.jsonl from its start, by offset; a line that is still being written is left for the next read."""

    def __init__(self, dump_dir: Path) -> None:
        self.path = dump_dir / "dumps.jsonl"
        self.offset = 0

    def skip(self) -> None:
        """Pass over the lines that are there. Raises OSError."""
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - TAIL)
            file.seek(start)
            self.offset = start + file.read().rfind(b"\n") + 1

    def read(self) -> Iterator[Line]:
        """The lines that came since the last call. Raises DumpError for one that is no line of ours."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self.offset += len(whole)
        for line in whole.splitlines():
            try:
                yield msgspec.json.decode(line, type=Line)
            except msgspec.MsgspecError as error:
                raise DumpError(f"{self.path}: {error} in {line[:80]!r}") from error
