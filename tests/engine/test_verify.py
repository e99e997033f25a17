"""Verification: of a dump's states, of a dump against its prompt, of a dataset at any later time."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
import xxhash
from test_manifest import MANIFEST, SETTINGS

from capture.dataset import formats, manifest
from capture.dataset.ledger import Change, Ledger, LedgerError
from capture.dataset.manifest import ManifestError
from capture.dataset.verify import verify_dataset
from capture.dumps import dump
from capture.dumps.verify import Report, VerificationError, check_states, read_dump
from capture.rows.tokenise import Row

NAMES = ["aux_0", "aux_1", "aux_2", "final", "last"]
TOKENS, HIDDEN = 6, 8


def make_states(seed: int = 0, tokens: int = TOKENS) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(tokens, HIDDEN, generator=generator).to(torch.bfloat16) for name in NAMES}


# --- States ---


def check(states: dict[str, torch.Tensor]) -> None:
    check_states(states, NAMES, TOKENS, HIDDEN, "bfloat16")


def refused(states: dict[str, torch.Tensor]) -> str:
    with pytest.raises(VerificationError) as error:
        check(states)
    return str(error.value)


@pytest.fixture
def states() -> dict[str, torch.Tensor]:
    return make_states()


def test_sound_states_pass(states: dict[str, torch.Tensor]) -> None:
    check(states)
    check(dict(reversed(states.items())))


def test_equal_rows_are_fine(states: dict[str, torch.Tensor]) -> None:
    """A repeated token gives them."""
    for state in states.values():
        state[1:] = state[0]
    check(states)


def test_zeros_among_other_values_are_fine(states: dict[str, torch.Tensor]) -> None:
    states["aux_1"][2] = 0
    states["aux_1"][2, 5] = 2**-126
    check(states)


def test_a_state_that_is_not_there(states: dict[str, torch.Tensor]) -> None:
    del states["aux_2"]
    assert refused(states) == "it holds the states aux_0, aux_1, final, last, expected aux_0, aux_1, aux_2, final, last"


def test_a_state_that_nobody_asked_for(states: dict[str, torch.Tensor]) -> None:
    states["aux_3"] = states["aux_2"].clone()
    assert refused(states).startswith("it holds the states aux_0, aux_1, aux_2, aux_3, final, last, expected aux_0, ")


@pytest.mark.parametrize("shape", [(5, 8), (7, 8), (6, 4), (8, 6), (48,), (1, 6, 8), (0, 8)])
@pytest.mark.parametrize("name", NAMES)
def test_another_shape(states: dict[str, torch.Tensor], name: str, shape: tuple[int, ...]) -> None:
    states[name] = torch.ones(shape, dtype=torch.bfloat16)
    assert refused(states) == f"{name} has shape {list(shape)}, expected [6, 8]"


def test_another_dtype(states: dict[str, torch.Tensor]) -> None:
    states["final"] = states["final"].to(torch.float16)
    assert refused(states) == "final is torch.float16, expected bfloat16"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", NAMES)
def test_one_value_that_is_not_finite(states: dict[str, torch.Tensor], name: str, value: float) -> None:
    states[name][4, 7] = value
    assert refused(states) == f"{name} holds values that are not finite, first in row 4"


@pytest.mark.parametrize("value", [0.0, 1.5, -3.0])
@pytest.mark.parametrize("row", [0, 5])
def test_a_row_that_is_one_value_throughout(states: dict[str, torch.Tensor], row: int, value: float) -> None:
    states["last"][row] = value
    assert refused(states) == f"last row {row} is {value} throughout"


def test_a_row_of_both_zeros(states: dict[str, torch.Tensor]) -> None:
    states["aux_0"][3] = 0.0
    states["aux_0"][3, 1] = -0.0
    assert refused(states).startswith("aux_0 row 3 is ")


# --- A dump ---

RID, IDS = "secret.x1.5.1.6", [11, 12, 13, 14, 15, 16]


def make_dump(folder: Path, states: dict[str, torch.Tensor]) -> Path:
    meta = dump.Meta(
        format=1,
        rid=RID,
        ids=IDS,
        tokens=6,
        hidden=8,
        dtype="bfloat16",
        boundaries=[3, 31, 59],
        files={},
        model="/models/kimi",
        sglang="0.5.23",
        tap="00112233",
    )
    dump.write_done(folder, states, meta)
    return folder


def read(folder: Path, rid: str = RID, ids: list[int] = IDS, boundaries: list[int] | None = None) -> dict[str, object]:
    return read_dump(folder, rid, ids, boundaries or [3, 31, 59], 8, "bfloat16")


def test_a_dump_of_what_was_sent(tmp_path: Path, states: dict[str, torch.Tensor]) -> None:
    found = read(make_dump(tmp_path / "req_5", states))
    assert list(found) == NAMES
    assert all(torch.equal(found[name], states[name]) for name in NAMES)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"rid": "secret.x1.6.1.6"}, "req_5 belongs to request secret.x1.5.1.6, expected secret.x1.6.1.6"),
        (
            {"ids": [11, 12, 13, 99, 15, 16]},
            "its 6 tokens are not the 6 that were sent: token 3 is 14, expected 99",
        ),
        ({"ids": [*IDS, 17]}, "its 6 tokens are not the 7 that were sent"),
        ({"boundaries": [2, 30, 58]}, "it holds boundaries [3, 31, 59], expected [2, 30, 58]"),
    ],
)
def test_a_dump_of_something_else(
    tmp_path: Path, states: dict[str, torch.Tensor], asked: dict[str, object], why: str
) -> None:
    folder = make_dump(tmp_path / "req_5", states)
    with pytest.raises(VerificationError) as error:
        read(folder, **asked)  # type: ignore[arg-type]
    assert str(error.value) == why


def test_a_dump_with_bad_states(tmp_path: Path, states: dict[str, torch.Tensor]) -> None:
    states["aux_1"][0] = 0
    with pytest.raises(VerificationError, match=r"aux_1 row 0 is 0.0 throughout"):
        read(make_dump(tmp_path / "bad", states))
    del states["last"]
    with pytest.raises(VerificationError, match="it holds the states aux_0, aux_1, aux_2, final, expected"):
        read(make_dump(tmp_path / "lacking", states))


# --- A dataset ---

SAMPLES = 6


def rows() -> list[Row]:
    lengths = [4, 9, 4, 1, 30, 7]
    return [
        Row("rows.jsonl", n + 1, [100 * n + i for i in range(length)], [i % 2 for i in range(length)], False)
        for n, length in enumerate(lengths)
    ]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Six samples in both formats, all of them written."""
    settings = msgspec.structs.replace(SETTINGS, hidden=HIDDEN)
    manifest.write_manifest(tmp_path, msgspec.structs.replace(MANIFEST, settings=settings))
    with Ledger(tmp_path) as ledger:
        ledger.add(rows())
        for row, sample in zip(rows(), ledger.samples(), strict=True):
            rewrite(tmp_path, ledger, sample.number, make_states(sample.number, sample.tokens), row.ids, row.mask)
    return tmp_path


def rewrite(
    output: Path, ledger: Ledger, number: int, states: dict[str, torch.Tensor], ids: list[int], mask: list[int]
) -> None:
    files = [
        formats.write(name, output, number, states, torch.tensor(ids), torch.tensor(mask))
        for name in ("native", "specforge")
    ]
    ledger.settle([Change(number, "written", 1, None, files)])


def native(number: int) -> str:
    return f"native/rows_0-2000/{number}.safetensors"


def ckpt(number: int) -> str:
    return f"specforge/rows_0-2000/data_{number}.ckpt"


def failures(output: Path) -> list[tuple[int, str | None, str]]:
    """What a report names; its counts must go with it."""
    report = verify_dataset(output)
    samples = {failure.sample for failure in report.failures}
    assert (report.schema, report.samples, report.failed) == (1, SAMPLES, len(samples))
    assert report.verified == SAMPLES - len(samples)
    return [(failure.sample, failure.format, failure.reason) for failure in report.failures]


def test_a_dataset_as_it_was_written(dataset: Path) -> None:
    told: list[tuple[int, int, int]] = []
    report = verify_dataset(dataset, lambda *now: told.append(now))
    size = sum(path.stat().st_size for name in ("native", "specforge") for path in (dataset / name).rglob("*.*"))
    assert report == Report(1, 6, 6, 0, [], total=6, bytes=size)
    assert [(done, total) for done, total, _ in told] == [(n, 6) for n in range(1, 7)]
    assert told[-1] == (6, 6, size)
    assert msgspec.json.decode(msgspec.json.encode(report)) == {
        "schema": 1,
        "samples": 6,
        "verified": 6,
        "failed": 0,
        "failures": [],
        "total": 6,
        "bytes": size,
        "deviations": {},
    }


def test_how_a_failure_is_reported(dataset: Path) -> None:
    (dataset / native(4)).unlink()
    report = msgspec.json.decode(msgspec.json.encode(verify_dataset(dataset)))
    del report["bytes"], report["total"], report["deviations"]
    assert report == {
        "schema": 1,
        "samples": 6,
        "verified": 5,
        "failed": 1,
        "failures": [{"sample": 4, "format": "native", "reason": f"{native(4)} is missing"}],
    }


@pytest.mark.parametrize("where", [8, 0.3, 0.6, -1], ids=["header", "third", "two thirds", "last byte"])
def test_a_flipped_bit(dataset: Path, where: float) -> None:
    for path in (native(1), ckpt(4)):
        data = bytearray((dataset / path).read_bytes())
        data[where if isinstance(where, int) else int(where * len(data))] ^= 1
        (dataset / path).write_bytes(data)
    changed = "was changed after it was written: its checksum differs"
    assert failures(dataset) == [
        (1, "native", f"{native(1)} {changed}"),
        (4, "specforge", f"{ckpt(4)} {changed}"),
    ]


def test_a_cut_file(dataset: Path) -> None:
    sizes = {path: (dataset / path).stat().st_size for path in (ckpt(0), native(5))}
    os.truncate(dataset / ckpt(0), sizes[ckpt(0)] - 1)
    os.truncate(dataset / native(5), 0)
    assert failures(dataset) == [
        (0, "specforge", f"{ckpt(0)} has {sizes[ckpt(0)] - 1:,} bytes, {sizes[ckpt(0)]:,} were written"),
        (5, "native", f"{native(5)} has 0 bytes, {sizes[native(5)]:,} were written"),
    ]


def test_a_missing_file(dataset: Path) -> None:
    (dataset / ckpt(3)).unlink()
    assert failures(dataset) == [(3, "specforge", f"{ckpt(3)} is missing")]


def test_a_file_that_cannot_be_read(dataset: Path) -> None:
    (dataset / ckpt(3)).unlink()
    (dataset / ckpt(3)).mkdir()
    assert failures(dataset) == [(3, "specforge", f"{ckpt(3)}: Is a directory")]


def test_a_sample_that_fails_in_both_formats_counts_once(dataset: Path) -> None:
    (dataset / native(2)).unlink()
    (dataset / ckpt(2)).unlink()
    assert failures(dataset) == [(2, "native", f"{native(2)} is missing"), (2, "specforge", f"{ckpt(2)} is missing")]


def test_files_of_two_samples_exchanged(dataset: Path) -> None:
    """Samples 0 and 2 are equally long, so are their files."""
    (dataset / native(0)).rename(dataset / "other")
    (dataset / native(2)).rename(dataset / native(0))
    (dataset / "other").rename(dataset / native(2))
    assert failures(dataset) == [
        (0, "native", f"{native(0)} is the file of sample 2, exchanged or copied"),
        (2, "native", f"{native(2)} is the file of sample 0, exchanged or copied"),
    ]


def recorded(dataset: Path, number: int, change: Callable[[Row, dict[str, torch.Tensor]], None]) -> None:
    """Write a sample again otherwise, checksums and all, as a wrong writer would."""
    row, states = rows()[number], make_states(number, len(rows()[number].ids))
    change(row, states)
    with Ledger(dataset) as ledger:
        rewrite(dataset, ledger, number, states, row.ids, row.mask)


def test_files_of_two_samples_exchanged_with_their_checksums(dataset: Path) -> None:
    def as_sample_2(row: Row, states: dict[str, torch.Tensor]) -> None:
        row.ids, row.mask = rows()[2].ids, rows()[2].mask
        states.update(make_states(2, 4))

    recorded(dataset, 0, as_sample_2)
    why = "input_ids are not the sample's: token 0 is 200, expected 0"
    assert failures(dataset) == [(0, "native", f"{native(0)}: {why}"), (0, "specforge", f"{ckpt(0)}: {why}")]


def test_other_ids(dataset: Path) -> None:
    def change(row: Row, _states: dict[str, torch.Tensor]) -> None:
        row.ids[5] = 7

    recorded(dataset, 1, change)
    why = "input_ids are not the sample's: token 5 is 7, expected 105"
    assert failures(dataset) == [(1, "native", f"{native(1)}: {why}"), (1, "specforge", f"{ckpt(1)}: {why}")]


def test_another_mask(dataset: Path) -> None:
    def change(row: Row, _states: dict[str, torch.Tensor]) -> None:
        row.mask[28] = 1

    recorded(dataset, 4, change)
    why = "loss_mask is not the sample's: token 28 is 1, expected 0"
    assert failures(dataset) == [(4, "native", f"{native(4)}: {why}"), (4, "specforge", f"{ckpt(4)}: {why}")]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda states: states.update(aux_1=states["aux_1"][:-1].clone()), "aux_1 has shape [6, 8], expected [7, 8]"),
        (lambda states: states.update(last=states["last"].float()), "last is torch.float32, expected bfloat16"),
        (lambda states: states["aux_0"][3].fill_(0), "aux_0 row 3 is 0.0 throughout"),
        (lambda states: states["final"][6, 2].fill_(float("nan")), "final holds values that are not finite, first in"),
        (lambda states: states.pop("last"), "it holds the states aux_0, aux_1, aux_2, final, expected aux_0, aux_1, "),
    ],
    ids=["rows", "dtype", "zeros", "nan", "missing"],
)
def test_states_that_are_not_sound(
    dataset: Path, change: Callable[[dict[str, torch.Tensor]], object], why: str
) -> None:
    states = make_states(5, 7)
    change(states)
    with Ledger(dataset) as ledger:
        written = formats.write("native", dataset, 5, states, torch.tensor(rows()[5].ids), torch.tensor(rows()[5].mask))
        ledger.settle([Change(5, "written", 1, None, [written])])
    ((sample, name, reason),) = failures(dataset)
    assert (sample, name) == (5, "native")
    assert reason.startswith(why)


def test_a_file_of_no_format_with_its_checksum(dataset: Path) -> None:
    data = b"something else"
    (dataset / ckpt(1)).write_bytes(data)
    with Ledger(dataset) as ledger:
        ledger.db.execute(
            "UPDATE files SET bytes = ?, xxh3 = ? WHERE sample = 1 AND format = 'specforge'",
            (len(data), xxhash.xxh3_64_hexdigest(data)),
        )
    ((sample, name, reason),) = failures(dataset)
    assert (sample, name) == (1, "specforge")
    assert reason.startswith(f"{ckpt(1)}: no sample of this format")


def test_samples_that_are_not_written(dataset: Path) -> None:
    with Ledger(dataset) as ledger:
        ledger.settle([Change(1, "pending", 0), Change(3, "failed", 3, "no dump came"), Change(5, "sent", 1)])
    assert failures(dataset) == [
        (1, None, "it is not extracted, its state is pending"),
        (3, None, "it is not extracted, its state is failed: no dump came"),
        (5, None, "it is not extracted, its state is sent"),
    ]


def test_a_format_that_the_ledger_knows_no_file_of(dataset: Path) -> None:
    with Ledger(dataset) as ledger:
        ledger.db.execute("DELETE FROM files WHERE sample = 2 AND format = 'native'")
    assert failures(dataset) == [(2, "native", "the ledger knows no file of it in this format")]


def test_failures_come_in_the_order_of_the_samples(dataset: Path) -> None:
    for number in (5, 0, 3):
        (dataset / native(number)).unlink()
    assert [sample for sample, _, _ in failures(dataset)] == [0, 3, 5]


def test_a_large_dataset_is_gone_through_in_full(tmp_path: Path) -> None:
    manifest.write_manifest(tmp_path, MANIFEST)
    with Ledger(tmp_path) as ledger:
        ledger.add(Row("rows.jsonl", n, [n], [0], False) for n in range(1500))
    told: list[tuple[int, int]] = []
    report = verify_dataset(tmp_path, lambda done, total, _: told.append((done, total)))
    assert (report.samples, report.verified, report.failed) == (1500, 0, 1500)
    assert [failure.sample for failure in report.failures] == list(range(1500))
    assert told[-1] == (1500, 1500)
    assert [done for done, _ in told] == sorted({done for done, _ in told})


def test_verifying_changes_nothing(dataset: Path) -> None:
    def content() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in dataset.rglob("*") if path.is_file()}

    before = content()
    verify_dataset(dataset)
    assert content() == before


def test_no_dataset(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(ManifestError, match=r"is no dataset: it has no manifest\.json"):
        verify_dataset(tmp_path_factory.mktemp("empty"))
    (dataset / "ledger.sqlite").unlink()
    with pytest.raises(LedgerError, match=r"is no dataset: it has no ledger\.sqlite"):
        verify_dataset(dataset)


def test_tokens_that_are_lost_are_no_samples_fault(dataset: Path) -> None:
    os.truncate(dataset / "tokens" / "ids.bin", 16)
    with pytest.raises(LedgerError, match=r"tokens/ids\.bin is shorter than the ledger says"):
        verify_dataset(dataset)
