"""Is it what was asked for? A dump before it is written, and a dataset at any later time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from capture import dump
from capture.formats import FORMATS
from capture.ledger import Ledger, Sample, WrittenFile
from capture.manifest import Manifest, read_manifest

SCHEMA = 1
THREADS = 4
FEW = 16  # leading values of a row by which nearly every row shows that it is not one value throughout


class VerificationError(Exception):
    """A sample that is not what was asked for; the sentence says in what."""


class Failure(msgspec.Struct, frozen=True):
    """A sample that failed, and in which format; None where it is in none."""

    sample: int
    format: str | None
    reason: str


class Report(msgspec.Struct, frozen=True):
    """Outcome of verifying a dataset; each sample counts once, `samples = verified + failed`."""

    schema: int
    samples: int
    verified: int
    failed: int
    failures: list[Failure]


def check_states(states: dict[str, Any], names: Iterable[str], tokens: int, hidden: int, dtype: str) -> None:
    """Check that exactly the states `names` are there, each `[tokens, hidden]` of `dtype` and sound.

    Sound: every value finite, no row that is one value throughout. Raises VerificationError.
    """
    names = list(names)
    if sorted(states) != sorted(names):
        raise VerificationError(f"it holds the states {', '.join(sorted(states))}, expected {', '.join(names)}")
    for name in names:
        state = states[name]
        if tuple(state.shape) != (tokens, hidden):
            raise VerificationError(f"{name} has shape {list(state.shape)}, expected [{tokens}, {hidden}]")
        if str(state.dtype) != f"torch.{dtype}":
            raise VerificationError(f"{name} is {state.dtype}, expected {dtype}")
        if (row := _first_row_not_finite(state)) is not None:
            raise VerificationError(f"{name} holds values that are not finite, first in row {row}")
        if (row := _first_flat_row(state)) is not None:
            raise VerificationError(f"{name} row {row} is {state[row, 0].item()} throughout")


def _first_row_not_finite(state: Any) -> int | None:
    """The first row of a state `[tokens, hidden]` that holds a NaN or an infinity, None where all are finite.

    A row with one of them has no finite sum, and summing is forty times faster than asking each value; only rows whose
    sum is not finite, be it by overflow, are looked at one by one.
    """
    for row in (~state.sum(dim=1).isfinite()).nonzero():
        if not state[row].isfinite().all():
            return int(row)
    return None


def _first_flat_row(state: Any) -> int | None:
    """The first row that is one value throughout, None where there is none; most rows show by their beginning."""
    for row in (state[:, :FEW] == state[:, :1]).all(dim=1).nonzero():
        if (state[row] == state[row, :1]).all():
            return int(row)
    return None


def read_dump(
    folder: Path,
    rid: str,
    ids: list[int],
    boundaries: list[int],
    hidden: int,
    dtype: str,
    buffer: dump.Buffer | None = None,
) -> dict[str, Any]:
    """The states of a dump, verified against the prompt that was sent; they lie in `buffer` until it is used again.

    Raises VerificationError or DumpError.
    """
    meta = dump.read_meta(folder)
    if meta.rid != rid:
        raise VerificationError(f"{folder.name} belongs to request {meta.rid}, expected {rid}")
    if meta.tokens != len(ids) or meta.ids != ids:
        raise VerificationError(
            f"its {meta.tokens} tokens are not the {len(ids)} that were sent{_parting(meta.ids, ids)}"
        )
    if meta.boundaries != boundaries:
        raise VerificationError(f"it holds boundaries {meta.boundaries}, expected {boundaries}")
    states = dump.read_states(folder, meta, buffer)
    check_states(states, dump.state_names(len(boundaries)), len(ids), hidden, dtype)
    return states


def verify_dataset(output: Path, progress: Callable[[int, int], None] | None = None) -> Report:
    """Verify every sample of a dataset in every format it was written in, reading each file whole.

    `progress` gets the samples done and all. Raises ManifestError or LedgerError where `output` is no dataset.
    """
    manifest = read_manifest(output)
    with Ledger(output, read_only=True) as ledger:
        total, done = sum(ledger.counts().values()), 0
        failures: list[Failure] = []
        failed: set[int] = set()
        with ThreadPoolExecutor(THREADS) as pool:
            for batch in _batches(ledger.samples(), 64):
                checks = [(sample, ledger.files(sample.number), *ledger.tokens(sample)) for sample in batch]
                for found in pool.map(lambda check: list(check_sample(output, manifest, *check)), checks):
                    failures += found
                    failed.update(failure.sample for failure in found)
                done += len(batch)
                if progress:
                    progress(done, total)
    return Report(SCHEMA, total, total - len(failed), len(failed), failures)


def check_sample(
    output: Path, manifest: Manifest, sample: Sample, files: list[WrittenFile], ids: list[int], mask: list[int]
) -> Iterable[Failure]:
    """What is wrong with one sample, in each format of the dataset; nothing where all is well."""
    if sample.state != "written":
        why = f": {sample.reason}" if sample.reason else ""
        yield Failure(sample.number, None, f"it is not extracted, its state is {sample.state}{why}")
        return
    by_format = {file.format: file for file in files}
    for name in manifest.settings.formats:
        try:
            if name not in by_format:
                raise VerificationError("the ledger knows no file of it in this format")
            _check_file(output, manifest, by_format[name], ids, mask)
        except VerificationError as error:
            yield Failure(sample.number, name, str(error))


def _check_file(output: Path, manifest: Manifest, file: WrittenFile, ids: list[int], mask: list[int]) -> None:
    import xxhash

    try:
        data = (output / file.path).read_bytes()
    except FileNotFoundError:
        raise VerificationError(f"{file.path} is missing") from None
    except OSError as error:
        raise VerificationError(f"{file.path}: {error.strerror}") from error
    if len(data) != file.bytes:
        raise VerificationError(f"{file.path} has {len(data):,} bytes, {file.bytes:,} were written")
    if xxhash.xxh3_64_hexdigest(data) != file.xxh3:
        raise VerificationError(f"{file.path} was changed after it was written: its checksum differs")
    layers = manifest.settings.layers
    try:
        found_ids, found_mask, states = FORMATS[file.format].decode(data, len(layers.boundaries))
    except ValueError as error:
        raise VerificationError(f"{file.path}: {error}") from error
    if found_ids.tolist() != ids:
        raise VerificationError(f"{file.path}: input_ids are not the sample's{_parting(found_ids.tolist(), ids)}")
    if found_mask.tolist() != mask:
        raise VerificationError(f"{file.path}: loss_mask is not the sample's{_parting(found_mask.tolist(), mask)}")
    expected = [name for name in dump.state_names(len(layers.boundaries)) if file.format == "native" or name != "last"]
    check_states(states, expected, len(ids), manifest.settings.hidden, manifest.settings.dtype)


def _parting(found: list[int], expected: list[int]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), None)
    return "" if at is None else f": token {at} is {found[at]}, expected {expected[at]}"


def _batches(samples: Iterable[Sample], size: int) -> Iterable[list[Sample]]:
    batch: list[Sample] = []
    for sample in samples:
        batch.append(sample)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
