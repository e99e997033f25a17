"""`.pt` files that `torch.save` has not written: everything that reads its files reads them."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
import torch
import xxhash

from capture.dumps import pt

TENSORS = {
    "bf16": torch.randn(33, 48).to(torch.bfloat16),
    "fp16": torch.randn(5, 16).to(torch.float16),
    "fp32": torch.randn(1, 7),
    "one value": torch.ones(1, 1, dtype=torch.bfloat16),
    "larger than a stretch": torch.randn(300, 2048),
}


@pytest.fixture(params=TENSORS)
def tensor(request: pytest.FixtureRequest) -> torch.Tensor:
    return TENSORS[request.param]


def test_torch_reads_it(tmp_path: Path, tensor: torch.Tensor) -> None:
    path = tmp_path / "state.pt"
    size, checksum = pt.write(path, tensor)
    assert (size, checksum) == (path.stat().st_size, xxhash.xxh3_64_hexdigest(path.read_bytes()))
    for mapped in (False, True):
        found = torch.load(path, weights_only=True, mmap=mapped)
        assert torch.equal(found, tensor) and found.dtype == tensor.dtype
        assert found.untyped_storage().nbytes() == tensor.nbytes
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_container_is_that_of_torch_save(tmp_path: Path, tensor: torch.Tensor) -> None:
    """The same records of the same lengths at the same places; only checksums differ."""
    pt.write(tmp_path / "ours.pt", tensor)
    torch.save(tensor, tmp_path / "theirs.pt")
    ours, theirs = (zipfile.ZipFile(tmp_path / name).infolist() for name in ("ours.pt", "theirs.pt"))
    names = [[info.filename.partition("/")[2] for info in infos] for infos in (ours, theirs)]
    assert names[0] == names[1]
    assert [info.file_size for info in ours] == [info.file_size for info in theirs]


def test_a_part_of_a_larger_memory(tmp_path: Path) -> None:
    arena = torch.randn(3, 50, 16)
    pt.write(tmp_path / "part.pt", arena[1, 10:30])
    found = torch.load(tmp_path / "part.pt", weights_only=True)
    assert torch.equal(found, arena[1, 10:30])
    assert found.untyped_storage().nbytes() == 20 * 16 * 4


def test_read_takes_its_own_files_as_views_and_others_through_torch(tmp_path: Path, tensor: torch.Tensor) -> None:
    pt.write(tmp_path / "ours.pt", tensor)
    data = bytearray((tmp_path / "ours.pt").read_bytes())
    view = pt.read(data, tuple(tensor.shape), tensor.dtype)
    assert torch.equal(view, tensor)
    view.zero_()
    assert not torch.load(io.BytesIO(data), weights_only=True).any()
    stream = io.BytesIO()
    torch.save({"not": "a tensor"}, stream)
    assert pt.read(stream.getvalue(), tuple(tensor.shape), tensor.dtype) == {"not": "a tensor"}
    stream = io.BytesIO()
    torch.save(tensor, stream)
    assert torch.equal(pt.read(bytearray(stream.getvalue()), tuple(tensor.shape), tensor.dtype), tensor)
    other = (tensor.shape[0] + 1, tensor.shape[1])
    stream = io.BytesIO()
    torch.save(tensor, stream)
    assert pt.read(stream.getvalue(), other, tensor.dtype).shape == tensor.shape
