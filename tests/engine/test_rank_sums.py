"""One rank's checksums: of a probe's requests and nobody else's, over chunks, and never at the server's cost."""

from __future__ import annotations

import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash

from capture.tap import rank_sums
from capture.tap.rank_sums import RankSum, RankSums
from capture.tap.settings import Rid

STATES = [torch.arange(40, dtype=torch.float32).view(10, 4).to(torch.bfloat16) * (i + 1) for i in range(3)]


def rid(tokens: int, extract: str = "probe1a", row: int = 0) -> str:
    return str(Rid("secret", extract, row, 0, tokens))


def batch(*requests: tuple[str, int, int]) -> Any:
    """(rid, rows before, rows) each."""
    rids, prefixes, lengths = (list(column) for column in zip(*requests, strict=True))
    return SimpleNamespace(rids=rids, extend_prefix_lens_cpu=prefixes, extend_seq_lens_cpu=lengths)


def digest(state: torch.Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(state.contiguous().view(torch.uint8).numpy())


def expected(start: int, end: int) -> dict[str, str]:
    return {name: digest(state[start:end]) for name, state in zip(("aux_0", "final", "last"), STATES, strict=True)}


@pytest.fixture
def sums(tmp_path: Path) -> RankSums:
    return RankSums(tmp_path, "secret", 1, lambda: [2, 4])


def test_a_probes_rows_among_others(sums: RankSums, tmp_path: Path) -> None:
    others = (rid(2, "0a1b"), 0, 2), (rid(4), 0, 4), ("HEALTH_CHECK", 0, 1), (rid(3, row=1), 0, 3)
    sums.take(batch(*others), STATES)
    assert rank_sums.read(tmp_path, rid(4), 1) == RankSum(1, 4, expected(2, 6), [2, 4])
    assert rank_sums.read(tmp_path, rid(3, row=1), 1) == RankSum(1, 3, expected(7, 10), [2, 4])
    assert rank_sums.read(tmp_path, rid(4), 0) is None
    assert len(list(tmp_path.iterdir())) == 2  # nobody else's
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in tmp_path.iterdir())
    assert all("secret" not in path.name for path in tmp_path.iterdir())
    rank_sums.remove_all(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_chunks_come_to_the_sum_of_the_whole(sums: RankSums, tmp_path: Path) -> None:
    for start, end in ((0, 4), (4, 9), (9, 10)):
        assert rank_sums.read(tmp_path, rid(10), 1) is None
        sums.take(batch((rid(10), start, end - start)), [state[start:end] for state in STATES])
    assert rank_sums.read(tmp_path, rid(10), 1) == RankSum(1, 10, expected(0, 10), [2, 4])


def test_a_prompt_that_starts_again_and_one_of_a_killed_probe(sums: RankSums, tmp_path: Path) -> None:
    sums.take(batch((rid(10, "probe00"), 0, 3)), [state[:3] for state in STATES])
    sums.take(batch((rid(10), 0, 5)), [state[5:] for state in STATES])
    sums.take(batch((rid(10), 0, 10)), STATES)
    assert rank_sums.read(tmp_path, rid(10), 1) == RankSum(1, 10, expected(0, 10), [2, 4])
    assert sums.under_way == {}


def test_rows_that_never_came_are_said(sums: RankSums, tmp_path: Path) -> None:
    sums.take(batch((rid(10), 0, 2)), [state[:2] for state in STATES])
    sums.take(batch((rid(10), 5, 5)), [state[5:] for state in STATES])
    found = rank_sums.read(tmp_path, rid(10), 1)
    assert found is not None
    assert found.error == "rank 1 saw rows 5 to 10, expected them from 2"


def test_a_setter_that_raises_costs_the_probe_and_not_the_server(tmp_path: Path) -> None:
    def refuse() -> list[int]:
        raise RuntimeError("no such layers")

    RankSums(tmp_path, "secret", 0, refuse).take(batch((rid(10), 0, 10)), STATES)
    found = rank_sums.read(tmp_path, rid(10), 0)
    assert found is not None
    assert found.error == "no such layers"


def test_a_dump_folder_that_is_gone_costs_the_server_nothing(tmp_path: Path) -> None:
    """Then not even the reason can be written."""
    sums = RankSums(tmp_path / "gone", "secret", 1, lambda: [2, 4])
    sums.take(batch((rid(4), 0, 4)), STATES)
    (tmp_path / "gone").mkdir()
    sums.take(batch((rid(4), 0, 4)), STATES)
    assert rank_sums.read(tmp_path / "gone", rid(4), 1) == RankSum(1, 4, expected(0, 4), [2, 4])
