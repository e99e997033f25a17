"""Training formats: exactly the files that their readers take, whole or not at all."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file
from tmpfs import fill, small_tmpfs

from capture import formats
from capture.formats import FORMATS, native, specforge
from capture.ledger import WrittenFile

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
    assert (ids.tolist(), mask.tolist()) == ([11], [0])
    assert found["aux_2"].shape == (1, HIDDEN)


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_sample_gives_the_same_bytes(name: str) -> None:
    first = encoded_by(name, STATES)
    assert first == encoded_by(name, make_states(), IDS.clone(), MASK.clone())


# --- Round trip ---


@pytest.mark.parametrize(("name", "lacking"), [("native", set()), ("specforge", {"last"})])
def test_states_come_back_bit_for_bit(name: str, lacking: set[str]) -> None:
    generator = torch.Generator().manual_seed(0)
    states = {
        key: torch.randint(-(2**15), 2**15, (50, 32), dtype=torch.int16, generator=generator).view(torch.bfloat16)
        for key in STATES
    }  # every bit pattern, NaN and infinity among them
    ids, mask = torch.randint(0, 2**31 - 1, (50,), generator=generator), torch.ones(50, dtype=torch.int64)
    found_ids, found_mask, found = FORMATS[name].decode(encoded_by(name, states, ids, mask), 3)
    assert torch.equal(found_ids, ids) and torch.equal(found_mask, mask)
    assert set(found) == set(states) - lacking
    for key, state in found.items():
        assert torch.equal(state.contiguous().view(torch.int16), states[key].view(torch.int16)), key


@pytest.mark.parametrize("layers", [1, 4])
def test_native_takes_any_layers_and_float32(layers: int) -> None:
    states = make_states(layers, torch.float32)
    _, _, found = native.decode(encoded_by("native", states), layers)
    assert set(found) == set(states)
    assert all(torch.equal(found[name], state) and state.dtype == torch.float32 for name, state in states.items())


# --- What does not fit, and what it takes ---


def test_refusals() -> None:
    assert native.refuse("bfloat16", 3) is None
    assert native.refuse("float32", 7) is None
    assert specforge.refuse("bfloat16", 3) is None
    assert specforge.refuse("float32", 3) == "specforge takes bfloat16 states, the server computes in float32"
    assert specforge.refuse("bfloat16", 4) == "specforge takes exactly 3 layers, 4 are drawn"


def test_bytes_a_token() -> None:
    assert native.bytes_per_token(7168, 3, 2) == 71_696  # 2 * 7168 * (3 + 2) + 16
    assert specforge.bytes_per_token(7168, 3, 2) == 57_360  # 2 * 7168 * (3 + 1) + 16
    assert native.bytes_per_token(128, 3, 4) == 2576


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_a_token_are_those_of_a_file(name: str) -> None:
    """What a file has beyond its tokens does not grow with them."""
    sizes = {}
    for tokens in (100, 1100):
        states = {key: torch.zeros(tokens, 128, dtype=torch.bfloat16) for key in STATES}
        sizes[tokens] = len(encoded_by(name, states, torch.zeros(tokens).long(), torch.zeros(tokens).long()))
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
    with pytest.raises(ValueError, match=f"no sample of this format: '{key}'"):
        native.decode(save(tensors), 3)


RECORD = {"input_ids": IDS, "loss_mask": MASK, "hidden_state": torch.ones(1, 3, 4)}


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (RECORD, "no sample of this format ("),
        (RECORD | {"aux_hidden_state": 7}, "no sample of this format ("),
        ([1, 2], "no sample of this format ("),
        (
            RECORD | {"aux_hidden_state": torch.ones(3, 12)},
            "states have shapes [1, 3, 4] and [3, 12], expected [1, tokens, width]",
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


def test_a_bit_flipped_anywhere_never_breaks_the_reader() -> None:
    """Torch's unpickler fails in many ways; verification of a dataset goes on with the next file."""
    whole = encoded_by("specforge", STATES)
    broken = 0
    for at in range(0, len(whole), 2):
        data = bytearray(whole)
        data[at] ^= 1 << at // 2 % 8
        try:
            specforge.decode(bytes(data), 3)
        except ValueError:
            broken += 1
    assert broken > 300
