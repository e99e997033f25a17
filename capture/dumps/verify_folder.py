"""Is a folder of dumps whole? Those of the tap, and any `req_<N>/{aux_<i>,final}.pt` with or without a meta.json.

Where a dump's meta.json is the tap's own, its checksums and shapes hold. Else the files must agree with each other,
with the CRC-32 that `torch.save` leaves in them, and with whatever a meta.json says of their sizes.
"""

from __future__ import annotations

import os
import random
import re
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from capture.dumps import dump
from capture.dumps.verify import (
    SCHEMA,
    THREADS,
    Failure,
    Progress,
    Report,
    VerificationError,
    check_kind,
    check_states,
)
from capture.in_order import in_order

FOLDER = re.compile(r"req_(\d+)")
AUX = re.compile(r"aux_(\d+)\.pt")
BESIDE = ("meta.json", "done", "failed")
# What a meta.json of others may call the same things.
IDS = ("ids", "input_ids", "token_ids", "tokens")
TOKENS = ("tokens", "num_tokens", "n_tokens", "seq_len", "length")
HIDDEN = ("hidden", "hidden_size")
LAYERS = ("boundaries", "layers", "layer_ids", "aux_layers", "capture_layers")


class _Seen(msgspec.Struct):
    """A request's dump in short; `ids` and `content` are hashes, None for ids that are not told."""

    name: str
    layers: int
    hidden: int
    dtype: str
    content: str
    ids: str | None
    bytes: int


def is_dumps(folder: Path) -> bool:
    """Whether a folder holds dumps."""
    return folder.is_dir() and any(True for _ in _requests(folder))


def verify_dumps(folder: Path, progress: Progress | None = None, most: int | None = None) -> Report:
    """Verify every dump of a folder, or `most` of them, chosen at random, if given."""
    requests, failures = dict[int, Path](), list[Failure]()
    for number, path in sorted(_requests(folder)):
        if path != requests.setdefault(number, path):
            failures += [Failure(number, None, f"{path.name} has the number of {requests[number].name}; rename one")]
    numbers = list(requests)
    chosen = numbers if most is None or most >= len(numbers) else sorted(random.sample(numbers, most))
    failures = [failure for failure in failures if failure.sample in chosen]
    seen: dict[int, _Seen] = {}
    read = 0
    looks = in_order(THREADS, lambda number: _look_at(requests[number]), chosen)
    for done, (number, found) in enumerate(looks, start=1):
        if isinstance(found, _Seen):
            seen[number], read = found, read + found.bytes
        else:
            failures += [Failure(number, None, found)]
        if progress:
            progress(done, len(chosen), read)
    failures += _unlike_the_others(seen)
    failures += _same_as_others(seen)
    failed = len({failure.sample for failure in failures})
    if not (folder / "tap.json").exists():  # the tap's dumps are deleted once they are in a dataset
        first, last = numbers[0], numbers[-1]
        failures += [
            Failure(number, None, f"req_{number} is missing between {requests[first].name} and {requests[last].name}")
            for number in sorted(set(range(first, last)) - set(numbers))
        ]
    failures.sort(key=lambda failure: failure.sample or 0)
    return Report(SCHEMA, len(chosen), len(chosen) - failed, failed, failures, len(numbers), read)


def _requests(folder: Path) -> Iterator[tuple[int, Path]]:
    """Numbers and folders; others than the tap may have filled the numbers up with zeros."""
    for entry in os.scandir(folder):
        if (match := FOLDER.fullmatch(entry.name)) and entry.is_dir():
            yield int(match[1]), folder / entry.name


def _look_at(folder: Path) -> _Seen | str:
    """A dump in short, or what is wrong with it."""
    try:
        if (folder / "failed").exists():
            dump.read_meta(folder)  # says why
        meta = _own_meta(folder)
        return _look_at_own(folder, meta) if meta else _look_at_other(folder)
    except (VerificationError, dump.DumpError) as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or folder.name}: {error.strerror}"


def _own_meta(folder: Path) -> dump.Meta | None:
    """The tap's meta.json, None where it is another's or not there."""
    try:
        meta = msgspec.json.decode((folder / "meta.json").read_bytes(), type=dump.Meta)
    except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return dump.read_meta(folder) if meta.files else None


def _look_at_own(folder: Path, meta: dump.Meta) -> _Seen:
    check_kind(meta.tokens, meta.hidden, meta.dtype)  # before anything is made of such a shape
    states = dump.read_states(folder, meta)
    _require_no_more(folder, set(meta.files))
    if len(meta.ids) != meta.tokens:
        raise VerificationError(f"meta.json says {meta.tokens} tokens and holds {len(meta.ids)}")
    check_states(states, dump.state_names(len(meta.boundaries)), meta.tokens, meta.hidden, meta.dtype)
    size = sum(size for size, _ in meta.files.values())
    content = " ".join(xxh3 for _, xxh3 in meta.files.values())
    return _Seen(folder.name, len(meta.boundaries), meta.hidden, meta.dtype, content, _hash(meta.ids), size)


def _look_at_other(folder: Path) -> _Seen:
    import torch

    files = {path.name: path for path in folder.iterdir()}
    aux = sorted(int(match[1]) for name in files if (match := AUX.fullmatch(name)))
    names = [*(f"aux_{i}" for i in range(max(aux, default=-1) + 1)), "final", *(["last"] if "last.pt" in files else [])]
    if not aux:
        raise VerificationError("it holds no aux_<i>.pt")
    for name in names:
        if f"{name}.pt" not in files:
            raise VerificationError(f"{name}.pt is missing")
    _require_no_more(folder, {f"{name}.pt" for name in names})
    states = {name: _load(files[f"{name}.pt"]) for name in names}
    final = states["final"]
    if final.ndim != 2:
        raise VerificationError(f"final.pt has shape {list(final.shape)}, expected [tokens, hidden]")
    tokens, hidden = final.shape
    dtype = str(final.dtype).removeprefix("torch.")
    check_states(states, names, tokens, hidden, dtype)
    ids = _told(folder, tokens, hidden, dtype, len(aux))
    size = sum(files[f"{name}.pt"].stat().st_size for name in names)
    content = " ".join(_content(state.contiguous().view(torch.uint8)) for state in states.values())
    return _Seen(folder.name, len(aux), hidden, dtype, content, None if ids is None else _hash(ids), size)


def _load(path: Path) -> Any:
    import torch

    is_zip = zipfile.is_zipfile(path)  # else it is cut, or in torch's older format; torch knows
    if is_zip:
        _check_crc(path)
    try:
        state = torch.load(path, weights_only=True, mmap=is_zip, map_location="cpu")
    except Exception as error:  # whatever damaged bytes lead torch's unpickler to
        raise VerificationError(f"{path.name} is cut or damaged ({type(error).__name__})") from error
    if not isinstance(state, torch.Tensor):
        raise VerificationError(f"{path.name} holds a {type(state).__name__}, not a tensor")
    if state.layout != torch.strided:
        raise VerificationError(f"{path.name} holds a sparse tensor, not a dense one")
    return state


def _check_crc(path: Path) -> None:
    """Read what a zip holds and compare it with the CRC-32 that is kept there, but for 0: the tap keeps none."""
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if entry.CRC:
                    with archive.open(entry) as file:
                        while file.read(1 << 20):
                            pass
    except (zipfile.BadZipFile, EOFError) as error:
        raise VerificationError(f"{path.name} was changed after it was written: {error}") from error


def _told(folder: Path, tokens: int, hidden: int, dtype: str, layers: int) -> list[int] | None:
    """Check what a meta.json of others says, as far as it is understood; the token ids, where it has them."""
    try:
        meta = msgspec.json.decode((folder / "meta.json").read_bytes())
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise VerificationError(f"meta.json: {error}") from error
    if not isinstance(meta, dict):
        raise VerificationError("meta.json holds no object")
    for keys, found in ((TOKENS, tokens), (HIDDEN, hidden)):
        for key in keys:
            if type(meta.get(key)) is int and meta[key] != found:
                raise VerificationError(f"meta.json says {key} = {meta[key]}, the states have {found}")
    for key in LAYERS:
        if isinstance(meta.get(key), list) and len(meta[key]) != layers:
            raise VerificationError(f"meta.json says {key} = {meta[key]}, there are {layers} aux states")
    if isinstance(meta.get("dtype"), str) and meta["dtype"].removeprefix("torch.") != dtype:
        raise VerificationError(f"meta.json says dtype = {meta['dtype']}, the states are {dtype}")
    ids = next((meta[key] for key in IDS if isinstance(meta.get(key), list)), None)
    if ids is not None and len(ids) != tokens:
        raise VerificationError(f"meta.json holds {len(ids)} token ids, the states have {tokens} rows")
    return ids


def _require_no_more(folder: Path, files: set[str]) -> None:
    for path in sorted(folder.iterdir()):
        if path.name not in files and path.name not in BESIDE:
            raise VerificationError(f"{path.name} does not belong to it")


def _unlike_the_others(seen: dict[int, _Seen]) -> Iterator[Failure]:
    kinds = Counter((one.layers, one.hidden, one.dtype) for one in seen.values())
    if len(kinds) < 2:
        return
    (layers, hidden, dtype), _ = kinds.most_common(1)[0]
    for number, one in seen.items():
        if (one.layers, one.hidden, one.dtype) != (layers, hidden, dtype):
            yield Failure(
                number,
                None,
                f"it holds {one.layers} aux states [tokens, {one.hidden}] of {one.dtype}, "
                f"most others {layers} [tokens, {hidden}] of {dtype}",
            )


def _same_as_others(seen: dict[int, _Seen]) -> Iterator[Failure]:
    """Dumps whose states are another one's; where both tell the same tokens, that is as it should be."""
    first: dict[str, int] = {}
    for number, one in seen.items():
        other = first.setdefault(one.content, number)
        if other == number or (one.ids is not None and one.ids == seen[other].ids):
            continue
        why = "though their tokens differ" if one.ids is not None else "a copy, or the same prompt again"
        yield Failure(number, None, f"its states are those of {seen[other].name}, {why}")


def _hash(ids: list[int]) -> str:
    import xxhash

    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(ids))


def _content(data: Any) -> str:
    import xxhash

    return xxhash.xxh3_64_hexdigest(memoryview(data.reshape(-1).numpy()))
