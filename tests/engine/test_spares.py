"""Files that a writer fills again once their dump is deleted: whose they are, how many, and what is in them."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
import xxhash
from tmpfs import small_tmpfs

from capture.dumps import pt
from capture.dumps.spares import LEAST_BYTES, Spare, Spares

MB = 1 << 20


@pytest.fixture
def spares(tmp_path: Path) -> Spares:
    return Spares(tmp_path, "spare_0", 10 * MB)


def dumped(spares: Spares, name: str, size: int) -> Spare:
    spare = spares.take(size)
    assert spare is not None
    assert spare.fill([os.urandom(size)])
    os.link(spare.path, spares.folder / name)
    return spare


def test_a_deleted_dumps_file_is_filled_again(spares: Spares) -> None:
    first = dumped(spares, "a.pt", 2 * MB)
    second = dumped(spares, "b.pt", 2 * MB)
    assert first is not second
    inode = (spares.folder / "a.pt").stat().st_ino
    (spares.folder / "a.pt").unlink()
    assert dumped(spares, "c.pt", 2 * MB) is first
    assert (spares.folder / "c.pt").stat().st_ino == inode
    assert len(spares.files) == 2


@pytest.mark.parametrize("seed", range(4))
def test_what_is_in_a_file_is_what_was_written_last(tmp_path: Path, seed: int) -> None:
    """Sizes at random, dumps deleted in any order: every dump that is there is whole, and the limit holds."""
    dice, spares = random.Random(seed), Spares(tmp_path, "spare_0", 12 * MB)
    kept: dict[Path, bytes] = {}
    for turn in range(150):
        if kept and dice.random() < 0.45:
            path = dice.choice(list(kept))
            path.unlink()
            del kept[path]
            continue
        data, path = dice.randbytes(dice.randint(LEAST_BYTES, 4 * MB)), tmp_path / f"dump_{turn}.pt"
        spare = spares.take(len(data))
        if spare is None:
            in_use = sum(file.size for file in spares.files if not file.idle)
            assert in_use + len(data) > spares.most
            continue
        assert spare.fill([data[:5], data[5:]]) == xxhash.xxh3_64_hexdigest(data)
        os.link(spare.path, path)
        kept[path] = data
        assert all(found.read_bytes() == expected for found, expected in kept.items())
        assert sum(file.size for file in spares.files) <= spares.most
        assert (
            sum(path.stat().st_blocks * 512 for path in tmp_path.glob("spare_*")) <= spares.most + 4096 * len(kept) * 2
        )


def test_no_more_than_the_limit(spares: Spares) -> None:
    for name in "abcd":
        dumped(spares, name, 2 * MB)
    assert spares.take(3 * MB) is None
    (spares.folder / "a").unlink()
    assert dumped(spares, "e", 3 * MB).size == 3 * MB
    assert spares.take(11 * MB) is None
    assert spares.take(LEAST_BYTES - 1) is None
    assert len(spares.files) == 4


def test_idle_files_make_way_for_a_longer_one(spares: Spares) -> None:
    for name in "abcde":
        dumped(spares, name, 2 * MB)
    for name in "abcde":
        (spares.folder / name).unlink()
    assert dumped(spares, "long", 9 * MB).size == 9 * MB
    assert [file.size for file in spares.files] == [9 * MB]
    assert sorted(path.name for path in spares.folder.iterdir()) == ["long", spares.files[0].path.name]


def test_a_successor_gives_up_what_its_predecessor_kept(spares: Spares) -> None:
    dumped(spares, "a.pt", 2 * MB)
    dumped(spares, "b.pt", 2 * MB)
    (spares.folder / "b.pt").unlink()
    kept = (spares.folder / "a.pt").read_bytes()
    other = Spares(spares.folder, "spare_10", 10 * MB)
    dumped(other, "c.pt", 2 * MB)
    successor = Spares(spares.folder, "spare_1", 10 * MB)
    assert len(list(spares.folder.glob("spare_*"))) == 3
    successor = Spares(spares.folder, "spare_0", 10 * MB)
    assert [path.name for path in spares.folder.glob("spare_*")] == ["spare_10_1.pt"]
    dumped(successor, "d.pt", 2 * MB)
    assert (spares.folder / "a.pt").read_bytes() == kept


def test_a_full_tmpfs_frees_what_is_idle_first(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "small", "6m") as small:
        spares = Spares(small, "spare_0", 100 * MB)
        dumped(spares, "a", 2 * MB)
        dumped(spares, "b", 2 * MB)
        (small / "a").unlink()
        assert dumped(spares, "c", 3 * MB).size == 3 * MB
        with pytest.raises(OSError, match="No space left on device"):
            spares.take(3 * MB)
        assert len(spares.files) == 2 and len(list(small.iterdir())) == 4
        (small / "b").unlink()
        dumped(spares, "d", 2 * MB)


def test_a_pt_file_in_a_spare_one(tmp_path: Path) -> None:
    """Longer, shorter, in turn: what `torch.load` reads is the tensor, and nothing of an earlier one follows it."""
    spares = Spares(tmp_path, "spare_0", 2 * MB)
    for rows in (700, 900, 600, 601, 700):
        tensor, path = torch.randn(rows, 512), spares.folder / "aux_0.pt"
        size, checksum = pt.write(path, tensor, spares)
        data = path.read_bytes()
        assert (len(data), xxhash.xxh3_64_hexdigest(data)) == (size, checksum)
        assert torch.equal(torch.load(path, weights_only=True), tensor)
        assert path.stat().st_nlink == 2
        path.unlink()
    assert len(spares.files) == 1
