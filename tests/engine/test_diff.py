"""Comparing two datasets by content."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from dataset_helpers import LENGTHS, make_native, row_of, states_of

from capture.dataset import formats
from capture.dataset.diff import Diff, Difference, diff
from capture.dataset.export import ExportJob, export
from capture.dataset.ledger import Change, Ledger
from capture.dataset.manifest import ManifestError, read_manifest, write_manifest
from capture.layers import Layers
from capture.rows.tokenise import Row

SAMPLES = len(LENGTHS)
STATES = ["boundary 3", "boundary 31", "boundary 59", "final", "last"]


@pytest.fixture
def a(tmp_path: Path) -> Path:
    return make_native(tmp_path / "a")


@pytest.fixture
def b(tmp_path: Path) -> Path:
    return make_native(tmp_path / "b")


def exported(dataset: Path, output: Path, *names: str) -> Path:
    job = ExportJob(dataset=str(dataset), formats=list(names), output=str(output))
    assert export(job, lambda _: None, lambda _: None).failures == []
    return output


def rewrite(dataset: Path, number: int, states: dict[str, torch.Tensor], row: Row) -> None:
    """Write a sample's native file again, checksum and all."""
    with Ledger(dataset) as ledger:
        file = formats.write("native", dataset, number, states, torch.tensor(row.ids), torch.tensor(row.mask))
        ledger.settle([Change(number, "written", 1, None, [file])])


def add(dataset: Path, rows: Iterable[Row], first: int) -> None:
    """Add samples whose states are those of sample 0."""
    with Ledger(dataset) as ledger:
        known = [Row("rows.jsonl", sample.line, *ledger.tokens(sample), False) for sample in ledger.samples()]
        new = list(rows)
        ledger.add([*known, *new])
    for number, row in enumerate(new, start=first):
        rewrite(dataset, number, {name: state[: len(row.ids)] for name, state in states_of(0).items()}, row)


def test_the_same_twice(a: Path, b: Path) -> None:
    told: list[tuple[int, int]] = []
    made = diff(a, b, lambda *now: told.append(now))
    assert (made.same, made.equal, made.different, made.only_a, made.only_b) == (True, SAMPLES, 0, 0, 0)
    assert (made.samples, made.read, made.settings, made.differences) == ([6, 6], ["native", "native"], [], [])
    assert sorted(made.states) == STATES and made.not_compared == []
    for state in made.states.values():
        assert (state.samples, state.different, state.deviation.rows) == (SAMPLES, 0, sum(LENGTHS))
        assert (state.deviation.largest, state.deviation.mean) == (0, 0)
    assert told == [(done, SAMPLES) for done in range(1, SAMPLES + 1)]
    assert msgspec.json.decode(msgspec.json.encode(made), type=Diff) == made


@pytest.mark.parametrize("name", ["specforge", "speculators", "speculators-legacy", "modelopt"])
def test_another_format_holds_the_same(a: Path, tmp_path: Path, name: str) -> None:
    made = diff(a, exported(a, tmp_path / "out", name))
    assert (made.same, made.equal, made.read, made.settings) == (True, SAMPLES, ["native", name], [])
    assert made.not_compared == ["final" if formats.FORMATS[name].final == "last" else "last"]
    assert sorted(made.states) == [state for state in STATES if state not in made.not_compared]


def test_two_formats_without_native(a: Path, tmp_path: Path) -> None:
    one = exported(a, tmp_path / "one", "specforge", "modelopt")
    other = exported(a, tmp_path / "other", "speculators", "modelopt")
    assert diff(one, other).read == ["modelopt", "modelopt"]
    made = diff(exported(a, tmp_path / "x", "specforge"), exported(a, tmp_path / "y", "speculators"))
    assert (made.same, made.not_compared, sorted(made.states)) == (True, ["final", "last"], STATES[:3])


def test_fp8_is_told_from_bf16(a: Path, tmp_path: Path) -> None:
    made = diff(a, exported(a, tmp_path / "out", "speculators-fp8"))
    assert (made.same, made.different) == (False, SAMPLES)
    assert 0.01 < made.states["boundary 31"].deviation.mean < 0.04
    assert made.differences[0].what.startswith("boundary 3 differs, first in row 0, a row by at most ")


def test_one_value_of_one_state(a: Path, b: Path) -> None:
    states = states_of(4)
    before = states["aux_1"][17].float()
    states["aux_1"][17, 3] += 1
    off = float((states["aux_1"][17].float() - before).norm() / before.norm())
    rewrite(b, 4, states, row_of(4, LENGTHS[4]))
    made = diff(a, b)
    assert (made.same, made.equal, made.different) == (False, SAMPLES - 1, 1)
    why = f"boundary 31 differs, first in row 17, a row by at most {off:.2%} of its norm"
    assert made.differences == [Difference(4, 4, why)]
    assert made.states["boundary 31"].different == 1
    assert made.states["boundary 31"].deviation.largest == pytest.approx(off)
    assert made.states["final"].different == 0


def test_samples_that_one_of_them_has(a: Path, b: Path) -> None:
    add(a, [Row("rows.jsonl", 50, [1, 2], [0, 1], False)], SAMPLES)
    add(b, [Row("rows.jsonl", 60, [3, 4], [0, 1], False), Row("rows.jsonl", 61, [5], [1], False)], SAMPLES)
    made = diff(a, b)
    assert (made.same, made.equal, made.only_a, made.only_b, made.samples) == (False, SAMPLES, 1, 2, [7, 8])
    assert made.differences == [
        Difference(6, None, "only in the first"),
        Difference(None, 6, "only in the second"),
        Difference(None, 7, "only in the second"),
    ]


def test_a_sample_that_is_not_written_is_not_there(a: Path, b: Path) -> None:
    with Ledger(b) as ledger:
        ledger.settle([Change(2, "failed", 3, "no dump came")])
    assert diff(a, b).differences == [Difference(2, None, "only in the first")]


def test_the_same_samples_in_another_order(tmp_path: Path) -> None:
    """Found by content: their numbers do not matter, and one that is there twice is two."""
    rows = [Row("r", i, [10 + i, 20, 30 + i], [0, 1, 1], False) for i in range(3)]
    one, other = (make_native(tmp_path / name, lengths=[4]) for name in ("one", "other"))
    for dataset, order in ((one, [0, 1, 1, 2]), (other, [1, 2, 1, 0])):
        add(dataset, [rows[i] for i in order], 1)
    made = diff(one, other)
    assert (made.same, made.equal) == (True, 5)
    rewrite(other, 3, {name: state[:3] for name, state in states_of(4).items()}, rows[1])
    made = diff(one, other)
    assert (made.same, made.equal) == (False, 4)
    assert (made.differences[0].a, made.differences[0].b) == (3, 3)


def test_another_mask(a: Path, b: Path) -> None:
    """As with --last-turn-only: the same tokens under another key."""
    add(a, [Row("rows.jsonl", 50, [1, 2, 3, 4], [0, 1, 1, 1], False)], SAMPLES)
    add(b, [Row("rows.jsonl", 50, [1, 2, 3, 4], [0, 1, 0, 1], False)], SAMPLES)
    made = diff(a, b)
    assert (made.same, made.different, made.only_a, made.only_b) == (False, 1, 0, 0)
    assert made.differences == [Difference(6, 6, "loss_mask differs: token 2 is 1, in the second 0")]


def test_a_damaged_file(a: Path, b: Path) -> None:
    path = b / formats.FORMATS["native"].path(3)
    path.write_bytes(path.read_bytes()[:-1])
    (a / formats.FORMATS["native"].path(1)).unlink()
    made = diff(a, b)
    assert [(one.a, one.b) for one in made.differences] == [(1, 1), (3, 3)]
    assert made.differences[0].what.endswith("1.safetensors is missing")
    assert made.differences[0].what.startswith("in the first it cannot be read: ")
    assert made.differences[1].what.startswith("in the second it cannot be read: ")


def settings(dataset: Path, **changed: Any) -> None:
    made = read_manifest(dataset)
    write_manifest(dataset, msgspec.structs.replace(made, settings=msgspec.structs.replace(made.settings, **changed)))


def test_other_settings_are_told(a: Path, b: Path) -> None:
    settings(b, max_length=2048, weights="12" * 32)
    made = diff(a, b)
    assert made.same
    assert made.settings == ["the model (its weights) was 898989898989…, now 121212121212…", "--max-length was 4096, now 2048"]  # fmt: skip


def test_states_are_compared_by_their_boundaries(tmp_path: Path, a: Path) -> None:
    """aux_1 of one is aux_0 of the other."""
    other = make_native(tmp_path / "c", layers=Layers([31, 40, 59], [30, 39, 58], [31, 40, 59], [], ""))
    for number, length in enumerate(LENGTHS):
        states = states_of(number)
        moved = {
            "aux_0": states["aux_1"],
            "aux_1": states["aux_0"],
            **{n: states[n] for n in ("aux_2", "final", "last")},
        }
        rewrite(other, number, moved, row_of(number, length))
    made = diff(a, other)
    assert sorted(made.states) == ["boundary 31", "boundary 59", "final", "last"]
    assert made.not_compared == ["boundary 3", "boundary 40"]
    assert (made.equal, made.different, made.same) == (SAMPLES, 0, False)
    assert made.settings == [
        "the layers were outputs of layers 2, 30, 58 (boundaries 3, 31, 59), "
        "now outputs of layers 30, 39, 58 (boundaries 31, 40, 59)"
    ]


def test_differences_are_all_counted_and_some_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capture.dataset.diff.SHOWN", 5)
    one, other = make_native(tmp_path / "one", lengths=[1] * 12), make_native(tmp_path / "other", lengths=[2])
    made = diff(one, other)
    assert (made.only_a, made.only_b, len(made.differences)) == (12, 1, 5)


def test_no_dataset(a: Path, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="is no dataset"):
        diff(a, tmp_path)
