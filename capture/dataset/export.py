"""Writing a dataset in further formats, from native: into the dataset itself, or into another one.

It may be killed at any moment: a sample's file is whole under its name or not there, the ledger knows only what is on
disk, and the same job goes on with what is missing.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from capture.dataset import formats
from capture.dataset.finish import finish
from capture.dataset.ledger import Change, Ledger, Sample, WrittenFile
from capture.dataset.manifest import (
    NORMS,
    Manifest,
    ManifestError,
    differences,
    read_manifest,
    take_folder,
    write_manifest,
)
from capture.dataset.verify import Reader
from capture.dumps.verify import FAILURES_SHOWN, Deviation, Failure, VerificationError, check_states
from capture.in_order import in_order
from capture.locks import lock
from capture.model_config import read_model_config
from capture.stop import cannot_write, is_busy, is_full

THREADS = min(4, os.cpu_count() or 1)
COMMIT_SECONDS = 0.5


class ExportJob(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be written; paths are the host's. `output` is the dataset itself where it is None.

    `draft_vocab`: tokens of a drafter's vocabulary, whose maps are then written too.
    """

    dataset: str
    formats: list[str]
    output: str | None = None
    allow_volatile: bool = False
    draft_vocab: int | None = None


class Progress(msgspec.Struct, kw_only=True):
    """progress.json of an export. `here` counts samples that an earlier one had written; rates are over the whole run.

    `phase`: exporting, finishing, finished.
    """

    schema: int = 1
    phase: str
    output: str
    samples: int
    here: int = 0
    written: int = 0
    failed: int = 0
    bytes_written: int = 0
    bytes_per_second: float | None = None
    eta_seconds: float | None = None
    seconds: float = 0.0
    failures: list[Failure] = []


class Exported(msgspec.Struct, kw_only=True):
    """What an export came to.

    `missing` counts samples that the dataset itself has not got; `files` what lies beside the samples' files; `hints`
    tells each trainer about its files. `deviations` goes by format and state, of formats that are not bit for bit.
    """

    schema: int = 1
    dataset: str
    output: str
    formats: list[str]
    samples: int
    here: int
    written: int
    failed: int
    missing: int
    failures: list[Failure]
    bytes_written: int
    seconds: float
    files: list[str]
    hints: dict[str, str]
    deviations: dict[str, dict[str, Deviation]]


class _Task(msgspec.Struct):
    """A sample to write: its native file, and the formats that it lacks."""

    sample: Sample
    native: WrittenFile
    formats: list[str]
    ids: list[int]
    mask: list[int]


class _Made(msgspec.Struct):
    """What was written of a sample, or why it was not."""

    files: list[WrittenFile] = []
    failure: Failure | None = None
    deviations: dict[str, dict[str, Deviation]] = {}


def export(job: ExportJob, report: Callable[[Progress], None], say: Callable[[str], None]) -> Exported:
    """Export a dataset. Raises UnknownFormat, ManifestError, LedgerError, Busy, Stop."""
    dataset = Path(job.dataset)
    output = Path(job.output) if job.output else dataset
    manifest = read_manifest(dataset)
    require_fit(dataset, manifest, job.formats, in_place=output.resolve() == dataset.resolve())
    vocabulary = draft_vocabulary(manifest, job)
    take_folder(output, job.allow_volatile, say)
    held = lock(output / ".lock", f"another job writes to {output}")
    try:
        return Export(job, dataset, output, manifest, vocabulary, report, say).run()
    except (OSError, sqlite3.OperationalError) as error:
        if isinstance(error, OSError) or is_full(error) or is_busy(error):
            raise cannot_write(output, error) from error
        raise
    finally:
        os.close(held)


def require_fit(dataset: Path, manifest: Manifest, names: list[str], *, in_place: bool) -> None:
    """Raise ManifestError where a format cannot be made of this dataset, UnknownFormat."""
    settings = manifest.settings
    if "native" not in manifest.formats:
        has = ", ".join(manifest.formats)
        raise ManifestError(f"{dataset} holds no native, from which the others are made, only {has}")
    for name in names:
        chosen = formats.find(name)
        if in_place and name in settings.formats:
            raise ManifestError(f"{dataset} was extracted in {name} already; name another format, or another --output")
        if reason := chosen.refuse(settings.dtype, len(settings.layers.boundaries)):
            raise ManifestError(f"--format {name}: {reason}")
        if manifest.norms.get(chosen.final) != NORMS[chosen.final]:
            raise ManifestError(
                f"--format {name}: it takes the last state {NORMS[chosen.final]}, "
                f"and the manifest of {dataset} names none"
            )


def draft_vocabulary(manifest: Manifest, job: ExportJob) -> formats.DraftVocabulary | None:
    """The drafter's vocabulary that is asked for. Raises ManifestError where it does not fit model or formats."""
    if job.draft_vocab is None:
        return None
    for name in job.formats:
        if not formats.find(name).takes_vocabulary:
            raise ManifestError(f"--format {name}: it takes no maps of a drafter's vocabulary; export it without")
    path = Path(manifest.settings.model) / "config.json"
    try:
        size = read_model_config(path.parent).vocabulary
    except (OSError, msgspec.MsgspecError) as error:
        raise ManifestError(
            f"--draft-vocab: the size of the model's vocabulary is not known; {path}: {error}"
        ) from error
    if size is None or not 1 <= job.draft_vocab <= size:
        raise ManifestError(f"--draft-vocab {job.draft_vocab:,}: {path} has a vocab_size of {size}")
    return formats.DraftVocabulary(job.draft_vocab, size)


class Export:
    """One run of an export."""

    def __init__(
        self,
        job: ExportJob,
        dataset: Path,
        output: Path,
        manifest: Manifest,
        vocabulary: formats.DraftVocabulary | None,
        report: Callable[[Progress], None],
        say: Callable[[str], None],
    ) -> None:
        self.vocabulary = vocabulary
        self.job, self.dataset, self.output, self.report, self.say = job, dataset, output, report, say
        self.manifest = manifest
        self.in_place = output.resolve() == dataset.resolve()
        self.reader = Reader(dataset, manifest)
        self.begun = time.monotonic()
        self.deviations: dict[str, dict[str, Deviation]] = {}
        self.failures: list[Failure] = []

    def run(self) -> Exported:
        """Write what is missing, and then what lies beside the samples' files."""
        with Ledger(self.dataset, read_only=True) as source:
            made = self._target_manifest()
            with Ledger(self.output) as target:
                if not self.in_place:
                    target.adopt(source)
                written = source.counts()["written"]
                missing = sum(source.counts().values()) - written
                self.progress = Progress(phase="exporting", output=str(self.output), samples=written)
                self._require_space(source, target)
                self._write_all(source, target)
                self._show("finishing")
                finish(self.output, made, target, self.job.formats, self.vocabulary)
                made.counts, made.updated = made.counts | target.counts(), time.time()
                write_manifest(self.output, made)
        self._show("finished")
        now = self.progress
        return Exported(
            dataset=str(self.dataset),
            output=str(self.output),
            formats=self.job.formats,
            samples=now.samples,
            here=now.here,
            written=now.written,
            failed=now.failed,
            missing=missing,
            failures=self.failures,
            bytes_written=now.bytes_written,
            seconds=now.seconds,
            files=[
                file.path for name in self.job.formats if name in made.finished for file in made.finished[name].files
            ],
            hints={
                name: hint
                for name in self.job.formats
                if (hint := formats.find(name).hint(self.manifest.settings.layers)) is not None
            },
            deviations=self.deviations,
        )

    def _target_manifest(self) -> Manifest:
        """The manifest that the output has from the first file on. Raises ManifestError where it has another one."""
        asked = set(self.job.formats)
        if self.in_place:
            made = self.manifest
        elif (self.output / "manifest.json").exists():
            made = read_manifest(self.output)
            theirs = msgspec.structs.replace(self.manifest.settings, formats=made.settings.formats)
            differ = differences(made.settings, theirs)
            if made.source is None or differ:
                why = "; ".join(differ) or "it was not exported from another one"
                raise ManifestError(f"{self.output} holds another dataset: {why}. Give a new folder")
        else:
            made = msgspec.structs.replace(
                self.manifest,
                settings=msgspec.structs.replace(self.manifest.settings, formats=[]),
                exported=[],
                finished={},
                counts={},
                source=str(self.dataset),
            )
        made.exported = sorted({*made.exported, *asked} - set(made.settings.formats))
        write_manifest(self.output, made)
        return made

    def _require_space(self, source: Ledger, target: Ledger) -> None:
        settings, layers = self.manifest.settings, len(self.manifest.settings.layers.boundaries)
        itemsize = 4 if settings.dtype == "float32" else 2
        sizes = {
            name: formats.find(name).bytes_per_token(settings.hidden, layers, itemsize) for name in self.job.formats
        }
        needed = sum(
            sizes[name] * sample.tokens for sample, lacking in self._lacking(source, target) for name in lacking
        )
        free = shutil.disk_usage(self.output).free
        if needed > free:
            raise ManifestError(
                f"{self.output} has {free:,} bytes free, about {needed:,} are still to be written; "
                "make room, or choose another --output"
            )

    def _lacking(self, source: Ledger, target: Ledger) -> Iterator[tuple[Sample, list[str]]]:
        """The samples that are written in the dataset, each with the formats that are not there whole yet."""
        for sample in source.samples("written"):
            here = {
                file.format
                for file in target.files(sample.number)
                if file.format in self.job.formats and self._is_whole(file)
            }
            yield sample, [name for name in self.job.formats if name not in here]

    def _is_whole(self, file: WrittenFile) -> bool:
        try:
            return (self.output / file.path).stat().st_size == file.bytes
        except OSError:
            return False

    def _write_all(self, source: Ledger, target: Ledger) -> None:
        changes: list[Change] = []
        committed = time.monotonic()
        try:
            for task, made in in_order(THREADS, self._write, self._tasks(source, target)):
                self._take_in(task, made, changes)
                if time.monotonic() - committed > COMMIT_SECONDS:
                    committed = time.monotonic()
                    target.settle(changes)
                    changes.clear()
                    self._show("exporting")
        finally:
            target.settle(changes)

    def _tasks(self, source: Ledger, target: Ledger) -> Iterator[_Task]:
        for sample, lacking in self._lacking(source, target):
            if not lacking:
                self.progress.here += 1
                continue
            native = next((file for file in source.files(sample.number) if file.format == "native"), None)
            if native is None:
                self._fail(Failure(sample.number, "native", "the ledger knows no file of it in this format"))
                continue
            yield _Task(sample, native, lacking, *source.tokens(sample))

    def _write(self, task: _Task) -> _Made:
        """Read a sample's native file, check it, and write what lacks. Raises OSError where there is no room."""
        import torch

        made, number, name = _Made(), task.sample.number, "native"
        try:
            states = self.reader.states(task.native, task.ids, task.mask)
            ids, mask = torch.tensor(task.ids), torch.tensor(task.mask)
            for name in task.formats:
                chosen = formats.find(name)
                if chosen.lossy:
                    made.deviations[name] = _deviations(chosen, states)
                made.files.append(formats.write(name, self.output, number, states, ids, mask))
        except VerificationError as error:
            made.failure = Failure(number, name, str(error))
        return made

    def _take_in(self, task: _Task, made: _Made, changes: list[Change]) -> None:
        for name, states in made.deviations.items():
            for state, seen in states.items():
                self.deviations.setdefault(name, {}).setdefault(state, Deviation()).include(seen)
        if made.files:
            changes.append(Change(task.sample.number, "written", task.sample.attempts, None, made.files))
            self.progress.bytes_written += sum(file.bytes for file in made.files)
        if made.failure:
            self._fail(made.failure)
        else:
            self.progress.written += 1

    def _fail(self, failure: Failure) -> None:
        self.failures.append(failure)
        self.progress.failed += 1
        self.progress.failures = [failure, *self.progress.failures][:FAILURES_SHOWN]
        self.say(f"sample {failure.sample} failed: {failure.reason}")

    def _show(self, phase: str) -> None:
        now = self.progress
        now.phase, now.seconds = phase, round(time.monotonic() - self.begun, 1)
        now.bytes_per_second = round(now.bytes_written / now.seconds) if now.seconds else None
        left = now.samples - now.here - now.written - now.failed
        now.eta_seconds = round(now.seconds / now.written * left, 1) if now.written and phase == "exporting" else None
        self.report(now)


def _deviations(chosen: formats.Format, states: dict[str, Any]) -> dict[str, Deviation]:
    """How far each state will be off. Raises VerificationError where nothing is left of a row."""
    rounded = chosen.rounded(states)
    some = next(iter(rounded.values()))
    try:
        check_states(rounded, rounded, some.shape[0], some.shape[1], str(some.dtype).removeprefix("torch."))
    except VerificationError as error:
        raise VerificationError(f"{chosen.name} cannot hold it: {error}") from error
    found = {name: Deviation() for name in rounded}
    for name, deviation in found.items():
        deviation.add(states[name], rounded[name])
    return found
