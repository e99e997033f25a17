"""Exporting a dataset from native: every format, killed and gone on with, and what does not fit."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from dataset_helpers import LENGTHS, make_native, states_of
from tmpfs import small_tmpfs

from capture.dataset import formats, manifest
from capture.dataset.export import Exported, ExportJob, Progress, export
from capture.dataset.formats import FORMATS
from capture.dataset.ledger import Change, Ledger, LedgerError
from capture.dataset.manifest import ManifestError, read_manifest, write_manifest
from capture.dataset.verify import verify_dataset
from capture.locks import Busy
from capture.rows.tokenise import Row
from capture.stop import Stop

TRAINERS = [name for name in FORMATS if name != "native"]
SAMPLES = len(LENGTHS)


@pytest.fixture
def native(tmp_path: Path) -> Path:
    """A dataset in native alone."""
    return make_native(tmp_path / "set")


def run(dataset: Path, *names: str, output: Path | None = None, volatile: bool = False) -> Exported:
    told: list[Progress] = []
    job = ExportJob(
        dataset=str(dataset),
        formats=list(names),
        output=str(output) if output else None,
        allow_volatile=volatile,
    )
    made = export(job, lambda now: told.append(msgspec.structs.replace(now)), lambda _: None)
    assert [now.phase for now in told][-2:] == ["finishing", "finished"]
    assert (told[-1].written, told[-1].here, told[-1].failed) == (made.written, made.here, made.failed)
    return made


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- What comes out ---


@pytest.mark.parametrize("name", TRAINERS)
def test_into_the_dataset_itself(native: Path, name: str) -> None:
    made = run(native, name)
    assert (made.samples, made.written, made.here, made.failed, made.missing) == (SAMPLES, SAMPLES, 0, 0, 0)
    assert made.output == str(native)
    with Ledger(native, read_only=True) as ledger:
        for sample in ledger.samples():
            (file,) = [file for file in ledger.files(sample.number) if file.format == name]
            assert file.path == FORMATS[name].path(sample.number)
            ids, _, states = FORMATS[name].decode((native / file.path).read_bytes(), 3)
            assert ids.tolist() == ledger.tokens(sample)[0]
            expected = FORMATS[name].rounded(states_of(sample.number))
            assert set(states) == set(FORMATS[name].holds(3))
            assert all(torch.equal(states[state], expected[state]) for state in states)
    report = verify_dataset(native)
    assert (report.verified, report.failures) == (SAMPLES, [])
    assert read_manifest(native).exported == [name]
    assert read_manifest(native).settings.formats == ["native"]


def test_into_another_dataset(native: Path, tmp_path: Path) -> None:
    """It has the same numbers and tokens, and stands alone."""
    before, other = contents(native), tmp_path / "other"
    made = run(native, *TRAINERS, output=other)
    assert (made.written, made.output) == (SAMPLES, str(other))
    assert contents(native) == before | {".lock": b""} or contents(native) == before
    made_of = read_manifest(other)
    assert (made_of.source, made_of.settings.formats) == (str(native), [])
    assert made_of.formats == sorted(TRAINERS)
    assert made_of.counts["written"] == SAMPLES
    with Ledger(native, read_only=True) as source, Ledger(other, read_only=True) as target:
        for one, copied in zip(source.samples(), target.samples(), strict=True):
            assert (one.number, one.file, one.line) == (copied.number, copied.file, copied.line)
            assert source.tokens(one) == target.tokens(copied)
    report = verify_dataset(other)
    assert (report.samples, report.verified, report.failures) == (SAMPLES, SAMPLES, [])


def test_a_trainer_is_told_which_layers_these_are(native: Path) -> None:
    """Boundaries 3, 31, 59 are outputs of layers 2, 30, 58; here SGLang's ids for them are the boundaries."""
    assert run(native, *TRAINERS).hints == {
        "specforge": "hidden_states_path = this folder; "
        "eagle_aux_hidden_state_layer_ids [3, 31, 59] in the drafter's config",
        "speculators": "--data-path = this folder, --target-layer-ids 3 31 59, --on-missing warn",
        "speculators-fp8": "--data-path = this folder, --target-layer-ids 3 31 59, --on-missing warn, "
        "--hidden-states-backend fp8",
        "speculators-legacy": "--data-path = data/ in this folder (outputs of layers 2 30 58, then the last)",
        "modelopt": "offline data path = this folder; eagle_aux_hidden_state_layer_ids [2, 30, 58] in eagle_config",
    }


def test_how_far_fp8_is_off(native: Path) -> None:
    """A row's error over its norm: for values alike in size some 2.6 %, and never more than 2^-4."""
    seen = run(native, "speculators-fp8", "specforge").deviations
    assert list(seen) == ["speculators-fp8"]
    assert set(seen["speculators-fp8"]) == {"aux_0", "aux_1", "aux_2", "last"}
    for state in seen["speculators-fp8"].values():
        assert state.rows == sum(LENGTHS)
        assert 0.01 < state.mean < 0.04 < state.largest * 2 < 0.125
    again = verify_dataset(native).deviations
    assert again.keys() == seen.keys()
    for name, state in again["speculators-fp8"].items():
        assert (state.rows, state.largest) == (
            seen["speculators-fp8"][name].rows,
            seen["speculators-fp8"][name].largest,
        )


# --- Going on ---


def test_a_second_time_there_is_nothing_to_do(native: Path) -> None:
    first = run(native, "speculators", "specforge")
    before = contents(native)
    again = run(native, "speculators", "specforge")
    assert (first.written, again.written, again.here, again.bytes_written) == (SAMPLES, 0, SAMPLES, 0)
    after = contents(native)
    assert after.keys() == before.keys()
    assert [name for name in after if after[name] != before[name]] == ["manifest.json"]  # it says when


def test_what_is_missing_or_cut_is_written_again(native: Path) -> None:
    run(native, "speculators", "modelopt")
    (native / FORMATS["modelopt"].path(2)).unlink()
    os.truncate(native / FORMATS["speculators"].path(4), 100)
    (native / "speculators" / "state.json").unlink()
    assert verify_dataset(native).failures
    made = run(native, "speculators", "modelopt")
    assert (made.written, made.here) == (2, SAMPLES - 2)
    assert verify_dataset(native).failures == []


def test_a_dataset_that_has_grown(native: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    run(native, "speculators", output=other)
    run(native, "speculators")
    with Ledger(native) as ledger:
        row = Row("rows.jsonl", 99, [7, 8, 9], [0, 1, 1], False)
        known = [Row("rows.jsonl", s.line, *ledger.tokens(s), False) for s in ledger.samples()]
        ledger.add([*known, row])
        states = {name: state[:3].clone() for name, state in states_of(1).items()}
        file = formats.write("native", native, SAMPLES, states, torch.tensor(row.ids), torch.tensor(row.mask))
        ledger.settle([Change(SAMPLES, "written", 1, None, [file])])
    reasons = [(failure.sample, failure.reason) for failure in verify_dataset(native).failures]
    assert reasons == [(SAMPLES, "the ledger knows no file of it in this format")]
    for output in (None, other):
        made = run(native, "speculators", output=output)
        assert (made.written, made.here) == (1, SAMPLES)
        report = verify_dataset(output or native)
        assert (report.samples, report.failures) == (SAMPLES + 1, [])


def test_samples_that_are_not_extracted_are_counted(native: Path) -> None:
    """Numbers stay what they are: the trainer's row 1 is sample 1, there or not."""
    with Ledger(native) as ledger:
        ledger.settle([Change(1, "failed", 3, "no dump came")])
        ledger.db.execute("DELETE FROM files WHERE sample = 1")
    (native / FORMATS["native"].path(1)).unlink()
    made = run(native, "speculators")
    assert (made.samples, made.written, made.missing) == (SAMPLES - 1, SAMPLES - 1, 1)
    assert not (native / FORMATS["speculators"].path(1)).exists()
    assert (native / FORMATS["speculators"].path(2)).exists()


KILLED = """
import sys, time
from capture.dataset import export, formats
from capture.dataset.formats import files
real, written = files.put, []
def put(path, parts):
    made = real(path, parts)
    written.append(path)
    print(len(written), flush=True)
    time.sleep(0.05)
    return made
formats.put = put
job = export.ExportJob(dataset=sys.argv[1], formats=sys.argv[3].split(","), output=sys.argv[2] or None)
export.export(job, lambda now: None, print)
"""


@pytest.mark.parametrize("other", [False, True], ids=["in place", "elsewhere"])
def test_killed_and_gone_on_with(native: Path, tmp_path: Path, other: bool) -> None:
    """Whenever it dies, no name stands for half a file, and the same job finishes."""
    output, names = (tmp_path / "other" if other else native), ["speculators", "specforge"]
    for after in (1, 4, 7):
        killed = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(native), str(output) if other else "", ",".join(names)],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert killed.stdout is not None
        while (line := killed.stdout.readline()) and int(line) < after:
            pass
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        killed.stdout.close()
        for name in names:
            for path in (output / name).rglob("*"):
                if path.is_file() and not path.name.startswith("."):
                    FORMATS[name].decode(path.read_bytes(), 3)  # whole
    made = run(native, *names, output=output if other else None)
    assert made.written + made.here == SAMPLES
    assert verify_dataset(output).failures == []
    assert not list(output.rglob("*.part"))


def test_memory_does_not_grow_with_the_dataset(tmp_path: Path) -> None:
    """However many samples there are, at most twice as many as there are threads are under way."""
    from capture.dataset import export as module

    under_way, most, held = 0, 0, threading.Lock()

    def write(self: Any, task: Any, real: Callable[..., Any] = module.Export._write) -> Any:
        nonlocal under_way, most
        with held:
            under_way += 1
            most = max(most, under_way)
        time.sleep(0.002)
        try:
            return real(self, task)
        finally:
            with held:
                under_way -= 1

    native = make_native(tmp_path / "set", lengths=[3] * 60)
    module.Export._write, kept = write, module.Export._write
    try:
        run(native, "modelopt")
    finally:
        module.Export._write = kept
    assert 0 < most <= module.THREADS


# --- What is damaged, and what does not fit ---


def test_a_damaged_sample_is_not_spread(native: Path) -> None:
    path = native / FORMATS["native"].path(3)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    made = run(native, "specforge", "speculators")
    assert (made.written, made.failed) == (SAMPLES - 1, 1)
    ((sample, name, reason),) = [(one.sample, one.format, one.reason) for one in made.failures]
    assert (sample, name) == (3, "native")
    assert reason == f"{FORMATS['native'].path(3)} was changed after it was written: its checksum differs"
    assert not (native / FORMATS["specforge"].path(3)).exists()


def test_what_fp8_cannot_hold(tmp_path: Path) -> None:
    """A state that is a million times smaller than another one of the same token."""
    native = make_native(tmp_path / "set")
    states = states_of(2)
    states["last"][1] *= 2.0**24
    with Ledger(native) as ledger:
        ids, mask = ledger.tokens(ledger.sample(2))
        file = formats.write("native", native, 2, states, torch.tensor(ids), torch.tensor(mask))
        ledger.settle([Change(2, "written", 1, None, [file])])
    made = run(native, "speculators-fp8")
    ((sample, name, reason),) = [(one.sample, one.format, one.reason) for one in made.failures]
    assert (sample, name) == (2, "speculators-fp8")
    assert reason.startswith("speculators-fp8 cannot hold it: aux_0 row 1 is ")


def change(native: Path, **fields: Any) -> None:
    made = read_manifest(native)
    settings = {name: fields.pop(name) for name in list(fields) if hasattr(made.settings, name)}
    write_manifest(
        native, msgspec.structs.replace(made, settings=msgspec.structs.replace(made.settings, **settings), **fields)
    )


@pytest.mark.parametrize(
    ("fields", "names", "why"),
    [
        ({"dtype": "float32"}, ["speculators"], "speculators takes bfloat16 states, the server computes in float32"),
        ({}, ["native"], "was extracted in native already; name another format, or another --output"),
        (
            {"norms": {"final": "after the final norm"}},
            ["specforge", "speculators"],
            "--format speculators: it takes the last state before the final norm, and the manifest of",
        ),
        (
            {"norms": {"final": "before the final norm", "last": "before the final norm"}},
            ["modelopt"],
            "--format modelopt: it takes the last state after the final norm, and the manifest of",
        ),
        ({"formats": ["specforge"]}, ["modelopt"], "holds no native, from which the others are made, only specforge"),
    ],
)
def test_what_does_not_fit(native: Path, fields: dict[str, Any], names: list[str], why: str) -> None:
    change(native, **fields)
    before = contents(native)
    with pytest.raises(ManifestError) as refused:
        run(native, *names)
    assert why in str(refused.value)
    assert contents(native) == before


def test_an_unknown_format(native: Path) -> None:
    with pytest.raises(formats.UnknownFormat, match="no format is called 'parquet'; there are native, specforge"):
        run(native, "parquet")


def test_four_layers_are_not_for_specforge(tmp_path: Path) -> None:
    from capture.layers import Layers

    native = make_native(tmp_path / "set", layers=Layers([3, 7, 31, 59], [2, 6, 30, 58], [3, 7, 31, 59], [], ""))
    with pytest.raises(ManifestError, match="specforge takes exactly 3 layers, 4 are drawn"):
        run(native, "specforge")
    made = run(native, "speculators", "speculators-legacy", "modelopt")
    assert (made.written, made.failed) == (SAMPLES, 0)
    assert verify_dataset(native).failures == []


def test_folders_that_hold_something_else(native: Path, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.tex").touch()
    with pytest.raises(ManifestError, match="is not empty and holds no dataset"):
        run(native, "modelopt", output=full)
    other = make_native(tmp_path / "other", lengths=[9, 9])
    with pytest.raises(ManifestError, match="holds another dataset: it was not exported from another one"):
        run(native, "modelopt", output=other)
    run(other, "modelopt", output=tmp_path / "export")
    with pytest.raises(LedgerError, match=r"sample 0 of .* is another one in .*; give a new folder"):
        run(native, "modelopt", output=tmp_path / "export")
    change(native, hidden=4096)
    with pytest.raises(ManifestError, match="holds another dataset: the hidden size was 8, now 4096"):
        run(native, "modelopt", output=tmp_path / "export")


def test_a_part_of_a_dataset(native: Path) -> None:
    """speculators finds a sample by its number among the rows, so none may be left out."""
    with Ledger(native) as ledger:
        for table in ("samples", "files"):
            ledger.db.execute(f"DELETE FROM {table} WHERE sample = 1")
    with pytest.raises(LedgerError, match="holds no sample 1, and this format wants them all, from 0 on"):
        run(native, "speculators")
    assert run(native, "specforge").written == SAMPLES - 1


def test_two_at_once(native: Path) -> None:
    from capture.locks import lock

    held = lock(native / ".lock", "a test")
    try:
        with pytest.raises(Busy, match="another job writes to"):
            run(native, "modelopt")
    finally:
        os.close(held)


def test_another_file_system(tmp_path: Path) -> None:
    native = make_native(tmp_path / "set")
    with small_tmpfs(tmp_path / "small", "8m") as small:
        with pytest.raises(ManifestError, match="lies in memory"):
            run(native, "modelopt", output=small / "out")
        run(native, "speculators", "specforge", output=small / "out", volatile=True)
        assert verify_dataset(small / "out").failures == []


def test_no_room(tmp_path: Path) -> None:
    """Too little is said before anything is written; a disk that fills up meanwhile loses nothing."""
    native = make_native(tmp_path / "set", lengths=[400] * 12, hidden=128)
    too_little = r"has [\d,]+ bytes free, about [\d,]+ are still to be written"
    with small_tmpfs(tmp_path / "small", "4m") as small, pytest.raises(ManifestError, match=too_little):
        run(native, "modelopt", "specforge", output=small / "out", volatile=True)
    with small_tmpfs(tmp_path / "full", "8m") as small:
        out = small / "out"
        run_until_full(native, out)
        assert not list(out.rglob("*.part"))
        (small / "filler").unlink()
        assert run(native, "modelopt", output=out, volatile=True).failed == 0
        assert verify_dataset(out).failures == []


def run_until_full(native: Path, out: Path) -> None:
    from tmpfs import fill

    from capture.dataset import export as module

    real = module.Export._require_space

    def then_fill(self: Any, *ledgers: Any) -> None:
        real(self, *ledgers)
        fill(out.parent, leaving=2 << 20)

    module.Export._require_space = then_fill
    try:
        with pytest.raises(Stop, match="is full; nothing is lost: make room and give the same command again") as stop:
            run(native, "modelopt", output=out, volatile=True)
        assert stop.value.exit_code == 1
    finally:
        module.Export._require_space = real


def test_a_ledger_that_somebody_holds_for_too_long(native: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(_ledger: Ledger, _changes: Any) -> None:
        error = sqlite3.OperationalError("database is locked")
        error.sqlite_errorcode = sqlite3.SQLITE_BUSY
        raise error

    monkeypatch.setattr(Ledger, "settle", locked)
    with pytest.raises(Stop, match=f"another program holds the ledger of {native}; nothing is lost") as stop:
        run(native, "modelopt")
    assert stop.value.exit_code == 1


def test_extracting_into_an_export_is_refused(native: Path, tmp_path: Path) -> None:
    run(native, "modelopt", output=tmp_path / "out")
    assert json.loads((tmp_path / "out" / "manifest.json").read_bytes())["source"] == str(native)
    with pytest.raises(ManifestError, match="--format was none, now native"):
        settings = read_manifest(tmp_path / "out").settings
        manifest.require_same(settings, msgspec.structs.replace(settings, formats=["native"]), tmp_path / "out")
