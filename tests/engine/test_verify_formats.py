"""Verification of every format: whatever is done to its files is found, and named by sample."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from dataset_helpers import LENGTHS, make_native, row_of, states_of

from capture.dataset import formats
from capture.dataset.export import ExportJob, export
from capture.dataset.formats import FORMATS
from capture.dataset.ledger import Change, Ledger
from capture.dataset.manifest import ManifestError, read_manifest, write_manifest
from capture.dataset.verify import verify_dataset
from capture.job import VerifyJob, run_verify

SAMPLES = len(LENGTHS)
TRAINERS = [name for name in FORMATS if name != "native"]
FINISHED = [name for name in FORMATS if FORMATS[name].finishes]


@pytest.fixture(scope="module")
def every_format(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset in every format."""
    made = make_native(tmp_path_factory.mktemp("made") / "set")
    export(ExportJob(dataset=str(made), formats=TRAINERS), lambda _: None, lambda _: None)
    return made


@pytest.fixture
def dataset(every_format: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(every_format, tmp_path / "set"))


def failures(dataset: Path, **how: Any) -> list[tuple[int | None, str | None, str]]:
    report = verify_dataset(dataset, **how)
    samples = {failure.sample for failure in report.failures if failure.sample is not None}
    assert report.failed <= len(samples)
    return [(failure.sample, failure.format, failure.reason) for failure in report.failures]


def test_all_is_well(dataset: Path) -> None:
    report = verify_dataset(dataset)
    assert (report.samples, report.verified, report.failed, report.failures) == (SAMPLES, SAMPLES, 0, [])
    with Ledger(dataset, read_only=True) as ledger:
        assert report.bytes == sum(file.bytes for _, file in ledger.all_files())


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


def exchange(path: Path, other: Path) -> None:
    path.rename(path.with_name("x"))
    other.rename(path)
    path.with_name("x").rename(other)


# What is done to the file of sample 2, with that of sample 0 (as long) at hand, and what verification says of it.
DAMAGE: dict[str, tuple[Callable[[Path, Path], Any], list[tuple[int, str]]]] = {
    "missing": (lambda path, _: path.unlink(), [(2, "{2} is missing")]),
    "truncated": (lambda path, _: os.truncate(path, 77), [(2, "{2} has 77 bytes, {size} were written")]),
    "emptied": (lambda path, _: os.truncate(path, 0), [(2, "{2} has 0 bytes, {size} were written")]),
    "longer": (
        lambda path, _: path.write_bytes(path.read_bytes() + b"x"),
        [(2, "{2} has {size+1} bytes, {size} were written")],
    ),
    "bit-flipped": (
        lambda path, _: flip(path),
        [(2, "{2} was changed after it was written: its checksum differs")],
    ),
    "exchanged": (
        exchange,
        [
            (0, "{0} is the file of sample 2, exchanged or copied"),
            (2, "{2} is the file of sample 0, exchanged or copied"),
        ],
    ),
    "overwritten by another": (
        lambda path, other: shutil.copy(other, path),
        [(2, "{2} is the file of sample 0, exchanged or copied")],
    ),
    "duplicated": (
        lambda path, _: shutil.copy(path, path.with_name(f"copy{path.suffix}")),
        [(2, "{folder}/copy{suffix} is a copy of the file of sample 2; remove it")],
    ),
    "a stranger beside it": (
        lambda path, _: path.with_name(f"data_99{path.suffix}").write_bytes(b"x"),
        [(None, "{folder}/data_99{suffix} belongs to no sample; remove it")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("name", FORMATS)
def test_damage_is_named(dataset: Path, name: str, kind: str) -> None:
    damage, expected = DAMAGE[kind]
    path, other = FORMATS[name].path(2), FORMATS[name].path(0)
    size = (dataset / path).stat().st_size
    damage(dataset / path, dataset / other)
    words = {
        "{2}": path,
        "{0}": other,
        "{size}": f"{size:,}",
        "{size+1}": f"{size + 1:,}",
        "{folder}": str(Path(path).parent),
        "{suffix}": Path(path).suffix,
    }

    def filled(text: str) -> str:
        for key, value in words.items():
            text = text.replace(key, value)
        return text

    found = failures(dataset)
    assert [(sample, reason) for sample, _, reason in found] == [(sample, filled(text)) for sample, text in expected]
    assert {by for _, by, _ in found} == {name}


@pytest.mark.parametrize("name", TRAINERS)
def test_states_of_another_sample_with_the_right_checksum(dataset: Path, name: str) -> None:
    """What a wrong writer would leave: native tells."""
    rewrite(dataset, name, states_of(0), row_of(2, 4).ids, row_of(2, 4).mask)
    assert failures(dataset) == [(2, name, "aux_0 is not that of native, first in row 0")]


@pytest.mark.parametrize("name", TRAINERS)
def test_one_bit_of_one_state_with_the_right_checksum(dataset: Path, name: str) -> None:
    states = states_of(2)
    state = FORMATS[name].holds(3)[-1]
    states[state][3, 5] = -states[state][3, 5]
    rewrite(dataset, name, states, row_of(2, 4).ids, row_of(2, 4).mask)
    assert failures(dataset) == [(2, name, f"{state} is not that of native, first in row 3")]


@pytest.mark.parametrize("name", FORMATS)
def test_ids_of_another_sample_with_the_right_checksum(dataset: Path, name: str) -> None:
    rewrite(dataset, name, states_of(2), [*row_of(2, 4).ids[:3], 7], row_of(2, 4).mask)
    why = f"{FORMATS[name].path(2)}: input_ids are not the sample's: token 3 is 7, expected 203"
    assert failures(dataset)[0] == (2, name, why)


def test_the_two_final_states_mistaken_for_each_other(dataset: Path) -> None:
    """The norm is not applied where the trainer thinks it is: nothing but native can tell."""
    states = states_of(2)
    states["last"], states["final"] = states["final"], states["last"]
    for name in ("specforge", "speculators"):
        rewrite(dataset, name, states, row_of(2, 4).ids, row_of(2, 4).mask)
    assert failures(dataset) == [
        (2, "specforge", "final is not that of native, first in row 0"),
        (2, "speculators", "last is not that of native, first in row 0"),
    ]


def rewrite(dataset: Path, name: str, states: dict[str, torch.Tensor], ids: list[int], mask: list[int]) -> None:
    with Ledger(dataset) as ledger:
        file = formats.write(name, dataset, 2, states, torch.tensor(ids), torch.tensor(mask))
        ledger.settle([Change(2, "written", 1, None, [file])])


# --- What lies beside the samples ---


@pytest.mark.parametrize("name", FINISHED)
def test_every_file_beside_the_samples_is_looked_at(dataset: Path, name: str) -> None:
    again = "; `layertap export` it again"
    for file in read_manifest(dataset).finished[name].files:
        path, whole = dataset / file.path, (dataset / file.path).read_bytes()
        flip(path)
        changed = f"{file.path} was changed after it was written: its checksum differs{again}"
        assert failures(dataset) == [(None, name, changed)]
        os.truncate(path, 1)
        assert failures(dataset) == [(None, name, f"{file.path} has 1 bytes, {file.bytes:,} were written{again}")]
        path.unlink()
        assert failures(dataset) == [(None, name, f"{file.path} is missing{again}")]
        path.write_bytes(whole)
    assert failures(dataset) == []


@pytest.mark.parametrize("name", FINISHED)
def test_what_was_never_finished(dataset: Path, name: str) -> None:
    made = read_manifest(dataset)
    del made.finished[name]
    write_manifest(dataset, made)
    why = "what its trainer reads beside the samples is not here; `layertap export` it again"
    assert failures(dataset) == [(None, name, why)]


@pytest.mark.parametrize("name", FINISHED)
def test_what_was_made_of_other_samples(dataset: Path, name: str) -> None:
    made = read_manifest(dataset)
    made.finished[name] = msgspec.structs.replace(made.finished[name], samples=5)
    write_manifest(dataset, made)
    ((sample, by, reason),) = failures(dataset)
    assert (sample, by) == (None, name)
    assert "was made of 5 samples, 6 are here; `layertap export` it again" in reason


# --- Which formats, which samples ---


def test_a_folder_that_the_manifest_does_not_know(dataset: Path) -> None:
    made = read_manifest(dataset)
    made.exported.remove("modelopt")
    write_manifest(dataset, made)
    why = "the folder modelopt is here, the manifest knows no such format; remove it"
    assert failures(dataset) == [(None, "modelopt", why)]


def test_one_format_alone(dataset: Path) -> None:
    for name in ("specforge", "modelopt"):
        (dataset / FORMATS[name].path(1)).unlink()
    assert [name for _, name, _ in failures(dataset)] == ["modelopt", "specforge"]
    assert [name for _, name, _ in failures(dataset, only="specforge")] == ["specforge"]
    assert failures(dataset, only="speculators") == []


def test_some_samples_chosen_at_random(dataset: Path) -> None:
    for number in range(SAMPLES):
        (dataset / FORMATS["native"].path(number)).unlink()
    chosen = set()
    for _ in range(20):
        report = verify_dataset(dataset, most=2)
        assert (report.samples, report.failed, report.total) == (2, 2, SAMPLES)
        chosen |= {failure.sample for failure in report.failures}
    assert len(chosen) > 3
    assert verify_dataset(dataset, most=99).samples == SAMPLES


@pytest.mark.parametrize("name", FORMATS)
def test_a_link_to_nothing(dataset: Path, name: str) -> None:
    path = FORMATS[name].path(99)
    (dataset / path).symlink_to("nothing")
    why = f"{path} belongs to no sample: No such file or directory; remove it"
    assert failures(dataset) == [(None, name, why)]


@pytest.mark.parametrize("name", FORMATS)
def test_a_stranger_of_another_kind(dataset: Path, name: str) -> None:
    folder = Path(FORMATS[name].path(0)).parent
    for place in (folder, folder.parent) if folder.name.startswith("rows_") else (folder,):
        for file in (".hidden", "7.part"):
            (dataset / place / file).touch()
        assert failures(dataset) == []
        (dataset / place / "stray.txt").write_text("x")
        assert failures(dataset) == [(None, name, f"{place}/stray.txt belongs to no sample; remove it")]
        (dataset / place / "stray.txt").unlink()


@pytest.mark.parametrize("is_there", [True, False])
def test_the_folder_of_a_format_that_the_dataset_does_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    """No file of it would be read, so no sample may count as verified."""
    monkeypatch.chdir(tmp_path)
    made = make_native(tmp_path / "set")
    if is_there:
        (made / "specforge").mkdir()
    with pytest.raises(ManifestError) as refused:
        run_verify(VerifyJob(output=str(made / "specforge")))
    assert str(refused.value) == f"{made} holds no specforge, only native"


def test_the_job_finds_out_what_a_folder_is(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a job writes its progress where it stands
    (dataset / FORMATS["specforge"].path(1)).unlink()
    assert run_verify(VerifyJob(output=str(dataset)))[0] == 1
    assert run_verify(VerifyJob(output=str(dataset / "specforge")))[0] == 1
    assert run_verify(VerifyJob(output=str(dataset / "speculators")))[0] == 0
    dumps = tmp_path / "dumps" / "req_7"
    dumps.mkdir(parents=True)
    for name, state in states_of(1).items():
        torch.save(state, dumps / f"{name}.pt")
    code, report = run_verify(VerifyJob(output=str(dumps.parent)))
    assert (code, report.samples, report.verified) == (0, 1, 1)
    (dumps / "final.pt").unlink()
    code, report = run_verify(VerifyJob(output=str(dumps.parent), sample=1))
    assert (code, report.failures[0].sample, report.failures[0].reason) == (1, 7, "final.pt is missing")
