"""What a probe sends and how near is near enough, without a server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from capture import probe
from capture.layers import Layers
from capture.probe import DENSE, FLOAT32, ROUTED, Probe

LAYERS = Layers([2, 4], [1, 3], [1, 3], [], "")


@pytest.mark.parametrize(
    ("most", "room", "lengths"),
    [
        (8192, 10**6, [3, 64, 1500, 2500, 8192]),
        (2500, 10**6, [3, 64, 1500, 2500]),
        (2049, 10**6, [3, 64, 1500, 2049]),
        (3, 10**6, [3]),
        (1, 10**6, [1]),
        (8192, 10_000, [3, 64, 1500, 2500, 5933]),  # the longest beside the others
        (8192, 3500, [3, 64, 1500, 1933]),
        (8192, 100, [3, 97]),
        (8192, 1, [1]),
    ],
)
def test_the_lengths_that_fit(most: int, room: int, lengths: list[int]) -> None:
    assert probe.lengths(most, room) == lengths
    assert sum(lengths) <= room


def test_the_longest_prompt_that_server_and_arena_take() -> None:
    tap: Any = SimpleNamespace(dump_bytes=30_000, bytes_per_token=10)
    assert probe.longest(tap, {"max_req_input_len": 2050, "max_total_num_tokens": 5000}) == 2049
    assert probe.longest(tap, {"max_req_input_len": 2050, "max_total_num_tokens": 1000}) == 1000
    assert probe.longest(tap, {"max_req_input_len": 9000}) == 3000


def test_prompts_are_of_ordinary_tokens() -> None:
    tokenizer = SimpleNamespace(
        all_special_ids=[0, 1],
        added_tokens_decoder={7: "<|media_pad|>"},
        get_vocab=lambda: {str(i): i for i in range(9)},
    )
    made = probe.prompts(tokenizer, [64, 1500])
    assert [len(prompt) for prompt in made] == [64, 1500]
    assert set(made[0]) | set(made[1]) == {2, 3, 4, 5, 6, 8}
    assert made == probe.prompts(tokenizer, [64, 1500])
    assert made[1][:64] != made[0]  # else rows of the one could stand for the other's


@pytest.mark.parametrize(
    ("config", "routed"), [('{"hidden_size": 8}', False), ('{"llm_config": {"num_experts": 128}}', True), ("{", False)]
)
def test_whether_tokens_are_routed(tmp_path: Path, config: str, routed: bool) -> None:
    assert probe.experts(tmp_path) is False
    (tmp_path / "config.json").write_text(config)
    assert probe.experts(tmp_path) is routed


def test_the_tolerance_by_dtype() -> None:
    assert probe.tolerance("float32", True) is FLOAT32
    assert probe.tolerance("bfloat16", True) is ROUTED
    assert probe.tolerance("float16", False) is DENSE


def turned(rows: int, *cosines: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Two states `[rows, 2]`; the first rows of the second are turned to these cosines."""
    one = torch.tensor([[1.0, 0.0]]).repeat(rows, 1)
    other = one.clone()
    for row, cosine in enumerate(cosines):
        other[row] = torch.tensor([cosine, (1 - cosine**2) ** 0.5])
    return one, other


@pytest.mark.parametrize(
    ("tolerance", "rows", "cosines", "passes"),
    [
        (DENSE, 100, [0.9995], True),
        (DENSE, 100, [0.9985], False),
        (ROUTED, 100, [0.95] * 6, True),  # the share of a hundred, and one for short prompts
        (ROUTED, 100, [0.95] * 7, False),
        (ROUTED, 3, [0.95], True),
        (ROUTED, 3, [0.95] * 2, False),
        (ROUTED, 100, [0.89], False),
        (FLOAT32, 100, [0.999995], True),
        (FLOAT32, 100, [0.99998], False),
    ],
)
def test_how_near_is_near_enough(tolerance: Any, rows: int, cosines: list[float], passes: bool) -> None:
    made: Any = SimpleNamespace(tolerance=tolerance, compared=[], failures=[])
    one, other = turned(rows, *cosines)
    asking: Any = object.__new__(Probe)
    asking.made, asking.layers, asking.names = made, LAYERS, ["aux_1"]
    asking._compare(rows, {"aux_1": one}, {"aux_1": other})
    assert (made.failures == []) is passes
    assert made.compared[0].least == pytest.approx(min(cosines), abs=1e-6)
    if not passes:
        assert f"{rows:,} tokens: aux_1 (output of layer 3) differs between alone and together" in made.failures[0]


def test_a_rank_that_left_nothing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "RANK_SECONDS", 0.0)
    asking: Any = object.__new__(Probe)
    asking.made, asking.dump_dir, asking.layers = SimpleNamespace(failures=[]), tmp_path, LAYERS
    asking.tap = SimpleNamespace(ranks=2, model_class="LlamaForCausalLM")
    asyncio.run(asking._check_ranks("64 tokens alone", "s.probe1.0.0.64", {}))
    assert asking.made.failures == [f"64 tokens alone: rank {rank} left no checksums within 0 s" for rank in (0, 1)]


def test_a_setter_that_makes_other_boundaries_of_serve_ids(tmp_path: Path) -> None:
    from capture.dumps.dump import write_json
    from capture.tap.rank_sums import RankSum

    write_json(tmp_path / "rank_0.probe1.0.0.json", RankSum(0, 64, {}, [1, 3]))
    asking: Any = object.__new__(Probe)
    asking.made, asking.dump_dir, asking.layers = SimpleNamespace(failures=[]), tmp_path, LAYERS
    asking.tap = SimpleNamespace(ranks=1, model_class="LlamaForCausalLM")
    asyncio.run(asking._check_ranks("64 tokens alone", "s.probe1.0.0.64", {}))
    assert asking.made.failures == [
        "64 tokens alone: rank 0's LlamaForCausalLM makes boundaries [1, 3] of serve_ids [1, 3], drawn were [2, 4]"
    ]
