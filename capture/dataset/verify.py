"""Is a dataset what was asked for? Its files against its ledger, its formats against each other, at any later time."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from capture.dataset import formats
from capture.dataset.finish import is_finished
from capture.dataset.formats.files import checksum
from capture.dataset.ledger import Ledger, Sample, WrittenFile
from capture.dataset.manifest import Manifest, ManifestError, read_manifest
from capture.dumps.dump import Buffer, read_into
from capture.dumps.verify import (
    SCHEMA,
    THREADS,
    Deviation,
    Failure,
    Progress,
    Report,
    VerificationError,
    check_states,
    parting,
)
from capture.in_order import in_order


class _WrongBytes(VerificationError):
    """A file whose bytes are not those that were written; `xxh3` says which they are."""

    def __init__(self, why: str, xxh3: str) -> None:
        super().__init__(why)
        self.xxh3 = xxh3


class _Task(msgspec.Struct):
    """A sample to look at, with all that the ledger knows of it."""

    sample: Sample
    files: dict[str, WrittenFile]
    ids: list[int]
    mask: list[int]


class _Found(msgspec.Struct):
    """What a look at a sample came to; `wrong` maps a format to the checksum of bytes that are not its own."""

    failures: list[Failure] = []
    wrong: dict[str, str] = {}
    bytes: int = 0
    deviations: dict[str, dict[str, Deviation]] = {}


class Reader:
    """Reads and checks files of a dataset, into memory of its own for each thread: a state lies there until the next
    file in the same place is read."""

    def __init__(self, output: Path, manifest: Manifest) -> None:
        self.output, self.settings = output, manifest.settings
        self.of_thread = threading.local()

    def states(self, file: WrittenFile, ids: list[int], mask: list[int], place: str = "") -> dict[str, Any]:
        """The states of a sample's file, all of it checked. Raises VerificationError."""
        data, settings = self._bytes(file, place), self.settings
        chosen, layers = formats.find(file.format), len(settings.layers.boundaries)
        try:
            found_ids, found_mask, states = chosen.decode(data, layers)
        except ValueError as error:
            raise VerificationError(f"{file.path}: {error}") from error
        if found_ids.tolist() != ids:
            raise VerificationError(f"{file.path}: input_ids are not the sample's{parting(found_ids.tolist(), ids)}")
        if found_mask is not None and found_mask.tolist() != mask:
            raise VerificationError(f"{file.path}: loss_mask is not the sample's{parting(found_mask.tolist(), mask)}")
        check_states(states, chosen.holds(layers), len(ids), settings.hidden, settings.dtype)
        return states

    def _bytes(self, file: WrittenFile, place: str) -> memoryview:
        import xxhash

        path = self.output / file.path
        buffers: dict[str, Buffer] = self.of_thread.__dict__
        try:
            size = path.stat().st_size
            data = buffers.setdefault(place, Buffer()).of(size)
            read_into(path, data)
        except FileNotFoundError:
            raise VerificationError(f"{file.path} is missing") from None
        except OSError as error:
            raise VerificationError(f"{file.path}: {error.strerror}") from error
        xxh3 = xxhash.xxh3_64_hexdigest(data)
        if size != file.bytes:
            raise _WrongBytes(f"{file.path} has {size:,} bytes, {file.bytes:,} were written", xxh3)
        if xxh3 != file.xxh3:
            raise _WrongBytes(f"{file.path} was changed after it was written: its checksum differs", xxh3)
        return data


def verify_dataset(
    output: Path, progress: Progress | None = None, only: str | None = None, most: int | None = None
) -> Report:
    """Verify every sample of a dataset in every format it holds, reading each file whole.

    In format `only` alone, if given; `most` samples, chosen at random, if given. What lies beside the samples' files
    is verified too, and files that belong to no sample are named. Raises ManifestError or LedgerError where `output`
    is no dataset, ManifestError where it does not hold `only`.
    """
    manifest = read_manifest(output)
    if only is not None and only not in manifest.formats:  # no file of it would be read, and every sample be verified
        raise ManifestError(f"{output} holds no {only}, only {', '.join(manifest.formats)}")
    names = [name for name in manifest.formats if only in (None, name)]
    reader = Reader(output, manifest)
    with Ledger(output, read_only=True) as ledger:
        total = sum(ledger.counts().values())
        samples = ledger.samples() if most is None else map(ledger.sample, ledger.some(most))
        wanted = total if most is None else min(most, total)
        failures: list[Failure] = []
        done, read, deviations = 0, 0, dict[str, dict[str, Deviation]]()
        owners = _Owners(ledger)
        for _, found in in_order(THREADS, lambda task: _look_at(reader, names, task), _tasks(ledger, samples)):
            failures += [owners.explain(failure, found.wrong) for failure in found.failures]
            done, read = done + 1, read + found.bytes
            for name, states in found.deviations.items():
                for state, seen in states.items():
                    deviations.setdefault(name, {}).setdefault(state, Deviation()).include(seen)
            if progress:
                progress(done, wanted, read)
        failed = len({failure.sample for failure in failures})
        failures += _beside_samples(output, manifest, ledger, names)
        failures += _belonging_to_none(output, manifest, ledger, names, owners)
    return Report(SCHEMA, done, done - failed, failed, failures, total, read, deviations)


def check_sample(
    output: Path, manifest: Manifest, sample: Sample, files: list[WrittenFile], ids: list[int], mask: list[int]
) -> list[Failure]:
    """What is wrong with one sample, in each format of the dataset; nothing where all is well."""
    task = _Task(sample, {file.format: file for file in files}, ids, mask)
    return _look_at(Reader(output, manifest), manifest.formats, task).failures


def _tasks(ledger: Ledger, samples: Iterable[Sample]) -> Iterator[_Task]:
    for sample in samples:
        files = {file.format: file for file in ledger.files(sample.number)}
        yield _Task(sample, files, *ledger.tokens(sample))


def _look_at(reader: Reader, names: list[str], task: _Task) -> _Found:
    sample, found = task.sample, _Found()
    if sample.state != "written":
        why = f": {sample.reason}" if sample.reason else ""
        found.failures.append(Failure(sample.number, None, f"it is not extracted, its state is {sample.state}{why}"))
        return found
    native: dict[str, Any] | None = None
    for name in sorted(names, key=lambda name: name != "native"):
        try:
            if name not in task.files:
                raise VerificationError("the ledger knows no file of it in this format")
            states = reader.states(task.files[name], task.ids, task.mask, "native" if name == "native" else "")
            if name == "native":
                native = states
            elif native is not None:
                _compare(name, states, native, found)
        except VerificationError as error:
            found.failures.append(Failure(sample.number, name, str(error)))
            if isinstance(error, _WrongBytes):
                found.wrong[name] = error.xxh3
        else:
            found.bytes += task.files[name].bytes
    found.failures.sort(key=lambda failure: str(failure.format))
    return found


def _compare(name: str, states: dict[str, Any], native: dict[str, Any], found: _Found) -> None:
    """Check states that another format gave against those of native, bit for bit after what that format rounds."""
    chosen = formats.find(name)
    expected = chosen.rounded(native)
    for state, values in states.items():
        if (row := first_other_row(values, expected[state])) is not None:
            raise VerificationError(f"{state} is not that of native, first in row {row}")
        if chosen.lossy:
            deviation = Deviation()
            deviation.add(native[state], values)
            found.deviations.setdefault(name, {})[state] = deviation


def first_other_row(a: Any, b: Any) -> int | None:
    """The first row in which two finite states of one shape and dtype differ, None where they are equal."""
    import torch

    if torch.equal(a, b):
        return None
    return int((a != b).any(dim=1).nonzero()[0])


class _Owners:
    """Whose file it is that has a checksum; asked only where something is wrong."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.known: dict[tuple[str, str], int] | None = None

    def of(self, name: str, xxh3: str) -> int | None:
        if self.known is None:
            self.known = {(file.format, file.xxh3): number for number, file in self.ledger.all_files()}
        return self.known.get((name, xxh3))

    def explain(self, failure: Failure, wrong: dict[str, str]) -> Failure:
        """Say so where the bytes are those of another sample."""
        name = failure.format
        if name is None or name not in wrong or (owner := self.of(name, wrong[name])) is None:
            return failure
        path = next(file.path for file in self.ledger.files(failure.sample or 0) if file.format == name)
        return msgspec.structs.replace(failure, reason=f"{path} is the file of sample {owner}, exchanged or copied")


def _beside_samples(output: Path, manifest: Manifest, ledger: Ledger, names: list[str]) -> Iterator[Failure]:
    """What is wrong with the files that a format has beside those of samples."""
    for name in names:
        expected = formats.find(name).finishes or name in manifest.finished
        if not expected or not ledger.written_in(name):
            continue
        again = "; `layertap export` it again"
        if (output / "pull.json").exists():  # here nothing is exported
            again = "; pull the whole dataset"
        if name not in manifest.finished:
            yield Failure(None, name, f"what its trainer reads beside the samples is not here{again}")
            continue
        made = manifest.finished[name]
        sound = True
        for file in made.files:
            try:
                size, xxh3 = checksum(output / file.path)
            except OSError as error:
                missing = isinstance(error, FileNotFoundError)
                yield Failure(None, name, f"{file.path}{' is missing' if missing else f': {error.strerror}'}{again}")
                sound = False
                continue
            if size != file.bytes:
                yield Failure(None, name, f"{file.path} has {size:,} bytes, {file.bytes:,} were written{again}")
                sound = False
            elif xxh3 != file.xxh3:
                yield Failure(None, name, f"{file.path} was changed after it was written: its checksum differs{again}")
        if sound and not is_finished(output, manifest, ledger, name):
            now = ledger.written_in(name)
            yield Failure(None, name, f"{made.files[0].path} was made of {made.samples} samples, {now} are here{again}")


def _belonging_to_none(
    output: Path, manifest: Manifest, ledger: Ledger, names: list[str], owners: _Owners
) -> Iterator[Failure]:
    """Files among the samples', of whatever kind, that are none; and formats that the manifest does not know."""
    for name in formats.FORMATS:
        if name not in manifest.formats and (output / name).is_dir():
            yield Failure(None, name, f"the folder {name} is here, the manifest knows no such format; remove it")
    written = {file.path for _, file in ledger.all_files()}
    for name in names:
        chosen = formats.find(name)
        made = manifest.finished.get(name)
        beside = {file.path for file in made.files} if made else set()
        # Where nothing is known of what its trainer reads beside the samples, only what looks like one is a stranger.
        kind = Path(chosen.path(0)).suffix if chosen.finishes and not made else ""
        # A killed run leaves files that the ledger does not know yet; their samples are reported as not written.
        known = written | beside | {chosen.path(sample.number) for sample in ledger.samples()}
        samples_lie_in = os.path.commonpath([chosen.path(0), chosen.path(1 << 40)])
        for folder, _, files in os.walk(output / samples_lie_in):
            for file in sorted(files):
                path = str(Path(folder, file).relative_to(output))
                # What a killed run or a pull has not finished is taken up again.
                if file.startswith(".") or file.endswith(".part") or not file.endswith(kind) or path in known:
                    continue
                try:
                    owner = owners.of(name, checksum(output / path)[1])
                except OSError as error:  # as of a link to what is gone
                    yield Failure(None, name, f"{path} belongs to no sample: {error.strerror}; remove it")
                    continue
                of_whom = "belongs to no sample" if owner is None else f"is a copy of the file of sample {owner}"
                yield Failure(owner, name, f"{path} {of_whom}; remove it")
