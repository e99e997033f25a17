"""Training formats: exactly the files that their readers take, whole or not at all."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import xxhash
from safetensors.torch import load_file
from tmpfs import fill, small_tmpfs

from capture.dataset import formats
from capture.dataset.formats import FORMATS
from capture.dataset.ledger import Tokens, WrittenFile

native, specforge = FORMATS["native"], FORMATS["specforge"]
TRAINERS = [name for name in FORMATS if name != "native"]
HIDDEN = 4
IDS = torch.tensor([11, 12, 13])
MASK = torch.tensor([0, 1, 1])


def make_states(layers: int = 3, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    names = [*(f"aux_{i}" for i in range(layers)), "final", "last"]
    return {name: (torch.arange(12).view(3, HIDDEN) + 100 * i).to(dtype) for i, name in enumerate(names)}


STATES = make_states()


def encoded(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def encoded_by(name: str, states: dict[str, torch.Tensor], ids: Any = IDS, mask: Any = MASK) -> bytes:
    return b"".join(FORMATS[name].encode(states, ids, mask))


# --- Where a sample lies ---


@pytest.mark.parametrize(
    ("number", "group"),
    [(0, "rows_0-2000"), (1999, "rows_0-2000"), (2000, "rows_2000-4000"), (300_001, "rows_300000-302000")],
)
def test_samples_lie_in_groups_of_2000(number: int, group: str) -> None:
    assert native.path(number) == f"native/{group}/{number}.safetensors"
    assert specforge.path(number) == f"specforge/{group}/data_{number}.ckpt"


# --- What is in a file ---


def test_the_native_file(tmp_path: Path) -> None:
    written = formats.write("native", tmp_path, 7, STATES, IDS, MASK)
    tensors = load_file(tmp_path / "native" / "rows_0-2000" / "7.safetensors")
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()} == {
        "input_ids": ((3,), torch.int64),
        "loss_mask": ((3,), torch.int64),
        "aux_0": ((3, 4), torch.bfloat16),
        "aux_1": ((3, 4), torch.bfloat16),
        "aux_2": ((3, 4), torch.bfloat16),
        "final": ((3, 4), torch.bfloat16),
        "last": ((3, 4), torch.bfloat16),
    }
    assert tensors["input_ids"].tolist() == [11, 12, 13]
    assert tensors["loss_mask"].tolist() == [0, 1, 1]
    assert all(torch.equal(tensors[name], state) for name, state in STATES.items())
    data = (tmp_path / "native" / "rows_0-2000" / "7.safetensors").read_bytes()
    assert written == WrittenFile(
        "native", "native/rows_0-2000/7.safetensors", len(data), xxhash.xxh3_64_hexdigest(data)
    )


def test_the_specforge_file(tmp_path: Path) -> None:
    """What SpecForge's own loader takes: these four keys, ids and mask one-dimensional, states with a batch of one."""
    written = formats.write("specforge", tmp_path, 2001, STATES, IDS, MASK)
    path = tmp_path / "specforge" / "rows_2000-4000" / "data_2001.ckpt"
    record = torch.load(path, weights_only=True, mmap=True)  # as SpecForge opens it: the zip format
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in record.items()} == {
        "input_ids": ((3,), torch.int64),
        "loss_mask": ((3,), torch.int64),
        "hidden_state": ((1, 3, 4), torch.bfloat16),
        "aux_hidden_state": ((1, 3, 12), torch.bfloat16),
    }
    assert record["input_ids"].tolist() == [11, 12, 13]
    assert record["loss_mask"].tolist() == [0, 1, 1]
    assert torch.equal(record["hidden_state"][0], STATES["final"])
    assert record["aux_hidden_state"][0, 1].tolist() == [4, 5, 6, 7, 104, 105, 106, 107, 204, 205, 206, 207]
    data = path.read_bytes()
    assert written == WrittenFile(
        "specforge", "specforge/rows_2000-4000/data_2001.ckpt", len(data), xxhash.xxh3_64_hexdigest(data)
    )


def test_each_specforge_tensor_stands_alone() -> None:
    """A view would be saved with all that it is a view of."""
    record = torch.load(io.BytesIO(encoded_by("specforge", STATES)), weights_only=True)
    for name, tensor in record.items():
        assert tensor.is_contiguous(), name
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize, name
        assert tensor.device.type == "cpu", name


@pytest.mark.parametrize("name", FORMATS)
def test_one_token(tmp_path: Path, name: str) -> None:
    states = {key: state[:1].clone() for key, state in STATES.items()}
    written = formats.write(name, tmp_path, 0, states, IDS[:1], MASK[:1])
    ids, mask, found = FORMATS[name].decode((tmp_path / written.path).read_bytes(), 3)
    assert ids.tolist() == [11]
    assert mask is None or mask.tolist() == [0]
    assert found["aux_2"].shape == (1, HIDDEN)


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_sample_gives_the_same_bytes(name: str) -> None:
    first = encoded_by(name, STATES)
    assert first == encoded_by(name, make_states(), IDS.clone(), MASK.clone())


# --- Round trip ---


LACKING = {
    "native": set(),
    "specforge": {"last"},
    "speculators": {"final"},
    "speculators-legacy": {"final"},
    "modelopt": {"last"},
}


@pytest.mark.parametrize(("name", "lacking"), LACKING.items())
def test_states_come_back_bit_for_bit(name: str, lacking: set[str]) -> None:
    generator = torch.Generator().manual_seed(0)
    states = {
        key: torch.randint(-(2**15), 2**15, (50, 32), dtype=torch.int16, generator=generator).view(torch.bfloat16)
        for key in STATES
    }  # every bit pattern, NaN and infinity among them
    ids, mask = torch.randint(0, 2**31 - 1, (50,), generator=generator), torch.ones(50, dtype=torch.int64)
    found_ids, found_mask, found = FORMATS[name].decode(encoded_by(name, states, ids, mask), 3)
    assert torch.equal(found_ids, ids)
    assert torch.equal(found_mask, mask) if found_mask is not None else name == "speculators"
    assert set(found) == set(states) - lacking == set(FORMATS[name].holds(3))
    for key, state in found.items():
        assert torch.equal(state.contiguous().view(torch.int16), states[key].view(torch.int16)), key


@pytest.mark.parametrize("layers", [1, 4])
def test_native_takes_any_layers_and_float32(layers: int) -> None:
    states = make_states(layers, torch.float32)
    _, _, found = native.decode(encoded_by("native", states), layers)
    assert set(found) == set(states)
    assert all(torch.equal(found[name], state) and state.dtype == torch.float32 for name, state in states.items())


# --- The trainers' own layouts ---


def test_the_speculators_file(tmp_path: Path) -> None:
    """What ArrowDataset takes: boundaries ascending, then the state before the final norm."""
    written = formats.write("speculators", tmp_path, 2001, STATES, IDS, MASK)
    assert written.path == "speculators/hidden_states/hs_2001.safetensors"
    tensors = load_file(tmp_path / written.path)
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()} == {
        "token_ids": ((3,), torch.int64),
        "hidden_states": ((3, 4, 4), torch.bfloat16),
    }
    assert tensors["token_ids"].tolist() == [11, 12, 13]
    for i, name in enumerate(["aux_0", "aux_1", "aux_2", "last"]):
        assert torch.equal(tensors["hidden_states"][:, i], STATES[name]), name


def test_the_fp8_file_of_speculators(tmp_path: Path) -> None:
    """One scale a token, such that its largest value of all states becomes 448."""
    generator = torch.Generator().manual_seed(0)
    states = {
        name: torch.randn(3000, 16, generator=generator).mul(10.0**i).to(torch.bfloat16)
        for i, name in enumerate(STATES)
    }
    ids = torch.arange(3000)
    written = formats.write("speculators-fp8", tmp_path, 0, states, ids, ids)
    tensors = load_file(tmp_path / written.path)
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()} == {
        "token_ids": ((3000,), torch.int64),
        "hidden_states": ((3000, 4, 16), torch.float8_e4m3fn),
        "hidden_states_scales": ((3000, 1, 1), torch.float32),
    }
    kept = torch.stack([states[name] for name in ("aux_0", "aux_1", "aux_2", "last")], dim=1).float()
    assert torch.equal(tensors["hidden_states_scales"][:, 0, 0], kept.abs().amax(dim=(1, 2)) / 448)
    assert tensors["hidden_states"].float().abs().amax(dim=(1, 2)).eq(448).all()
    _, _, found = FORMATS["speculators-fp8"].decode((tmp_path / written.path).read_bytes(), 3)
    assert found["last"].dtype == torch.bfloat16
    assert ((found["last"].float() - states["last"].float()).norm() / states["last"].float().norm()).item() < 0.04
    assert all(torch.equal(found[name], state) for name, state in FORMATS["speculators-fp8"].rounded(states).items())


def test_an_fp8_row_of_zeros(tmp_path: Path) -> None:
    states = {name: torch.zeros(1, 4, dtype=torch.bfloat16) for name in STATES}
    _, _, found = FORMATS["speculators-fp8"].decode(encoded_by("speculators-fp8", states, IDS[:1], MASK[:1]), 3)
    assert all(state.eq(0).all() for state in found.values())


def test_the_file_of_older_speculators(tmp_path: Path) -> None:
    written = formats.write("speculators-legacy", tmp_path, 2001, STATES, IDS, MASK)
    assert written.path == "speculators-legacy/data/data_2001.pt"
    record = torch.load(tmp_path / written.path, weights_only=True, mmap=True)
    assert list(record) == ["input_ids", "loss_mask", "hidden_states"]
    assert (record["input_ids"].tolist(), record["loss_mask"].tolist()) == ([11, 12, 13], [0, 1, 1])
    for name, state in zip(["aux_0", "aux_1", "aux_2", "last"], record["hidden_states"], strict=True):
        assert torch.equal(state, STATES[name]), name


def test_the_modelopt_file(tmp_path: Path) -> None:
    written = formats.write("modelopt", tmp_path, 2001, STATES, IDS, MASK)
    assert written.path == "modelopt/rows_2000-4000/2001.pt"
    record = torch.load(tmp_path / written.path, weights_only=True)
    assert record.pop("hidden_states_prenorm") is False
    assert {name: tuple(tensor.shape) for name, tensor in record.items()} == {
        "input_ids": (3,), "loss_mask": (3,), "hidden_states": (3, 4), "aux_hidden_states": (3, 12),
    }  # fmt: skip
    assert torch.equal(record["hidden_states"], STATES["final"])
    assert torch.equal(record["aux_hidden_states"][:, 4:8], STATES["aux_1"])


@pytest.mark.parametrize("name", ["specforge", "speculators-legacy", "modelopt"])
def test_a_view_is_saved_without_the_rest(name: str) -> None:
    """States read from a file share its memory."""
    whole = torch.arange(5 * 3 * HIDDEN).view(5, 3, HIDDEN).to(torch.bfloat16)
    views = dict(zip(STATES, whole, strict=True))
    assert encoded_by(name, views, IDS, MASK) == encoded_by(name, {k: v.clone() for k, v in views.items()}, IDS, MASK)


# --- What belongs beside the samples' files ---

ROWS = [Tokens(0, [5, 6, 7, 5], [0, 1, 1, 1]), Tokens(1, [6], [0]), Tokens(2, [9, 6], [1, 1])]
FREQUENCIES = {5: 1, 6: 2, 7: 1, 9: 1}


@pytest.mark.parametrize("name", ["speculators", "speculators-fp8"])
def test_the_hugging_face_dataset_of_speculators(tmp_path: Path, name: str) -> None:
    files = formats.finish(name, tmp_path, lambda: iter(ROWS))
    assert sorted(path.name for path in (tmp_path / name).iterdir()) == sorted(Path(file.path).name for file in files)
    for file in files:
        data = (tmp_path / file.path).read_bytes()
        assert (file.format, file.bytes, file.xxh3) == (name, len(data), xxhash.xxh3_64_hexdigest(data))
    rows = datasets.load_from_disk(str(tmp_path / name))
    assert len(rows) == 3 and rows.format["type"] == "torch"
    for row, expected in zip(rows, ROWS, strict=True):
        assert (row["input_ids"].dtype, row["loss_mask"].dtype) == (torch.int64, torch.int64)
        assert (row["input_ids"].tolist(), row["loss_mask"].tolist()) == (expected.ids, expected.mask)
        assert row["seq_len"] == len(expected.ids)
    assert torch.load(tmp_path / name / "token_freq.pt", weights_only=True) == FREQUENCIES


def test_the_hugging_face_dataset_is_replaced(tmp_path: Path) -> None:
    formats.finish("speculators", tmp_path, lambda: iter(ROWS))
    again = formats.finish("speculators", tmp_path, lambda: iter([*ROWS, Tokens(3, [1, 2], [1, 0])]))
    assert len(datasets.load_from_disk(str(tmp_path / "speculators"))) == 4
    assert files(tmp_path) == sorted(file.path for file in again)


def test_what_older_speculators_wants_beside(tmp_path: Path) -> None:
    formats.finish("speculators-legacy", tmp_path, lambda: iter(ROWS))
    lengths = json.loads((tmp_path / "speculators-legacy" / "data" / "sample_lengths.json").read_bytes())
    assert lengths == {"0": 4, "1": 1, "2": 2}
    assert torch.load(tmp_path / "speculators-legacy" / "token_freq.pt", weights_only=True) == FREQUENCIES


@pytest.mark.parametrize("name", FORMATS)
def test_formats_that_want_something_beside_say_so(tmp_path: Path, name: str) -> None:
    assert bool(formats.finish(name, tmp_path, lambda: iter(ROWS))) == FORMATS[name].finishes


# --- What does not fit, and what it takes ---


def test_refusals() -> None:
    assert native.refuse("bfloat16", 3) is None
    assert native.refuse("float32", 7) is None
    assert specforge.refuse("bfloat16", 3) is None
    assert specforge.refuse("float32", 3) == "specforge takes bfloat16 states, the server computes in float32"
    assert specforge.refuse("bfloat16", 4) == "specforge takes exactly 3 layers, 4 are drawn"
    for name in ("speculators", "speculators-fp8", "speculators-legacy", "modelopt"):
        assert FORMATS[name].refuse("bfloat16", 4) is None
        assert FORMATS[name].refuse("float32", 3) == f"{name} takes bfloat16 states, the server computes in float32"


def test_bytes_a_token() -> None:
    assert native.bytes_per_token(7168, 3, 2) == 71_696  # 2 * 7168 * (3 + 2) + 16
    assert specforge.bytes_per_token(7168, 3, 2) == 57_360  # 2 * 7168 * (3 + 1) + 16
    assert native.bytes_per_token(128, 3, 4) == 2576
    assert FORMATS["speculators"].bytes_per_token(7168, 3, 2) == 57_368  # ids are in its files and in its dataset
    assert FORMATS["speculators-fp8"].bytes_per_token(7168, 3, 2) == 28_700
    assert FORMATS["speculators-legacy"].bytes_per_token(7168, 3, 2) == 57_360
    assert FORMATS["modelopt"].bytes_per_token(7168, 3, 2) == 57_360


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_a_token_are_those_on_disk(tmp_path: Path, name: str) -> None:
    """What files have beyond their tokens does not grow with them."""
    sizes = {}
    for tokens in (100, 1100):
        states = {key: torch.zeros(tokens, 128, dtype=torch.bfloat16) for key in STATES}
        ids = torch.zeros(tokens).long()
        sample = formats.write(name, tmp_path / str(tokens), 0, states, ids, ids.clone())
        beside = formats.finish(
            name, tmp_path / str(tokens), lambda ids=ids: iter([Tokens(0, ids.tolist(), ids.tolist())])
        )
        sizes[tokens] = sample.bytes + sum(file.bytes for file in beside)
    a_token = (sizes[1100] - sizes[100]) / 1000
    assert abs(a_token - FORMATS[name].bytes_per_token(128, 3, 2)) < 1


# --- Whole or not at all ---


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", FORMATS)
def test_a_full_disk_leaves_no_part_of_a_file(tmp_path: Path, name: str) -> None:
    states = {key: torch.ones(200, 64, dtype=torch.bfloat16) for key in STATES}
    ids, mask = torch.arange(200), torch.ones(200, dtype=torch.int64)
    with small_tmpfs(tmp_path / "small", "256k") as small:
        written = formats.write(name, small, 0, states, ids, mask)
        fill(small, leaving=written.bytes // 2)
        with pytest.raises(OSError, match="No space left on device"):
            formats.write(name, small, 1, states, ids, mask)
        assert files(small) == ["filler", written.path]
        with pytest.raises(OSError, match="No space left on device"):
            formats.write(name, small, 0, states, ids, mask)  # drawn again
        data = (small / written.path).read_bytes()
        assert (len(data), xxhash.xxh3_64_hexdigest(data)) == (written.bytes, written.xxh3)


@pytest.mark.parametrize("name", FORMATS)
def test_a_sample_is_written_again_in_its_place(tmp_path: Path, name: str) -> None:
    formats.write(name, tmp_path, 5, make_states(), IDS + 1, MASK)
    again = formats.write(name, tmp_path, 5, STATES, IDS, MASK)
    assert files(tmp_path) == [again.path]
    assert FORMATS[name].decode((tmp_path / again.path).read_bytes(), 3)[0].tolist() == [11, 12, 13]


# --- Damage ---


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_cut_anywhere_is_no_sample(name: str) -> None:
    whole = encoded_by(name, STATES)
    for size in range(0, len(whole), 7):
        with pytest.raises(ValueError, match="no sample of this format"):
            FORMATS[name].decode(whole[:size], 3)


@pytest.mark.parametrize("key", ["input_ids", "loss_mask"])
def test_a_native_file_that_lacks_a_tensor(key: str) -> None:
    from safetensors.torch import save

    tensors = {"input_ids": IDS, "loss_mask": MASK, **STATES}
    del tensors[key]
    with pytest.raises(ValueError, match=f"no sample of this format: it has no tensor '{key}'"):
        native.decode(save(tensors), 3)


RECORD = {"input_ids": IDS, "loss_mask": MASK, "hidden_state": torch.ones(1, 3, 4)}


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (RECORD, "no sample of this format: it has no tensor 'aux_hidden_state'"),
        (RECORD | {"aux_hidden_state": 7}, "no sample of this format: it has no tensor 'aux_hidden_state'"),
        ([1, 2], "no sample of this format (list)"),
        (RECORD | {"aux_hidden_state": torch.ones(3, 12)}, "aux_hidden_state has shape [3, 12], expected 3 dimensions"),
        (
            RECORD | {"aux_hidden_state": torch.ones(1, 3, 13)},
            "aux states have width 13, which is no multiple of 3 layers",
        ),
        (
            RECORD | {"aux_hidden_state": torch.ones(2, 3, 12)},
            "states have shapes [1, 3, 4] and [2, 3, 12], expected [1, tokens, width]",
        ),
    ],
)
def test_a_specforge_file_that_holds_something_else(value: Any, why: str) -> None:
    with pytest.raises(ValueError) as refused:
        specforge.decode(encoded(value), 3)
    assert str(refused.value).startswith(why)


@pytest.mark.parametrize("name", FORMATS)
def test_a_bit_flipped_anywhere_never_breaks_the_reader(name: str) -> None:
    """Torch's unpickler fails in many ways; verification of a dataset goes on with the next file."""
    whole = encoded_by(name, STATES)
    broken = 0
    for at in range(0, len(whole), 2):
        data = bytearray(whole)
        data[at] ^= 1 << at // 2 % 8
        try:
            FORMATS[name].decode(bytes(data), 3)
        except ValueError:
            broken += 1
    assert broken > 50
