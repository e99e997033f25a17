"""In float32, where routing does not flip: the tap's states against Hugging Face, chunks, batch mates and ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Engine, Engines
from transformers import DeepseekV3ForCausalLM

BOUNDARIES = [3, 31, 59]
PROMPTS = [[(11 + 7 * i * i + 3 * n) % 1000 + 9 for i in range(n)] for n in (7, 100, 500)]
NEAR = 1e-5


@pytest.fixture(scope="module")
def alone(engines: Engines) -> list[dict[str, torch.Tensor]]:
    """Each prompt in a forward of its own, in one piece."""
    engine = engines.get("embedded-kimi-k2_5", dtype="float32")
    return engine.draw(PROMPTS, together=False)


@pytest.fixture(scope="module")
def reference(engines: Engines) -> Any:
    model = engines.get("embedded-kimi-k2_5", dtype="float32").model / "text"
    return DeepseekV3ForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def farthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def test_states_are_those_of_a_hugging_face_forward(alone: list[dict[str, torch.Tensor]], reference: Any) -> None:
    seen: dict[str, torch.Tensor] = {}
    reference.model.norm.register_forward_pre_hook(lambda _module, args: seen.update(last=args[0][0]))
    for ids, states in zip(PROMPTS, alone, strict=True):
        with torch.no_grad():
            hidden = reference.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        expected = {f"aux_{i}": hidden[boundary][0] for i, boundary in enumerate(BOUNDARIES)}
        expected |= {"final": hidden[-1][0], "last": seen["last"]}
        assert farthest(states, expected) < NEAR
        # the states are of a size that such a difference is small against, and no two of them are the same
        assert min(float(state.abs().max()) for state in expected.values()) > 100 * NEAR
        assert not torch.allclose(states["aux_0"], states["aux_1"], atol=100 * NEAR)


def test_final_is_the_norm_of_last(alone: list[dict[str, torch.Tensor]], reference: Any) -> None:
    for states in alone:
        with torch.no_grad():
            assert (reference.model.norm(states["last"]) - states["final"]).abs().max() < NEAR


def test_the_states_depend_on_the_prefix(engines: Engines, alone: list[dict[str, torch.Tensor]]) -> None:
    # Else the comparisons below could not see rows of another prompt.
    tail = engines.get("embedded-kimi-k2_5", dtype="float32").draw([PROMPTS[1][50:]])[0]
    assert (tail["aux_2"] - alone[1]["aux_2"][50:]).abs().max() > 100 * NEAR


def test_a_mixed_batch_gives_what_each_prompt_gives_alone(
    engines: Engines, alone: list[dict[str, torch.Tensor]]
) -> None:
    together = engines.get("embedded-kimi-k2_5", dtype="float32").draw(PROMPTS)
    for states, expected in zip(together, alone, strict=True):
        assert farthest(states, expected) < NEAR


@pytest.mark.slow
def test_chunks_of_32_are_put_together(engines: Engines, alone: list[dict[str, torch.Tensor]]) -> None:
    engine = engines.get("embedded-kimi-k2_5", dtype="float32", chunked_prefill_size=32)
    assert engine.tap.slot_tokens == 32
    for states, expected in zip(engine.draw(PROMPTS), alone, strict=True):
        assert farthest(states, expected) < NEAR
    assert engine.tap.failed == 0
    # 607 tokens at 32 a forward: the prompts really came in pieces
    assert sum("Prefill batch" in line for line in engine.log().splitlines()) > 607 // 32


def test_two_ranks_give_what_one_gives(engines: Engines, alone: list[dict[str, torch.Tensor]]) -> None:
    engine = engines.get("embedded-kimi-k2_5", dtype="float32", tp_size=2, ENV_SGLANG_CPU_OMP_THREADS_BIND="0|1")
    assert engine.tap.ranks == 2
    for states, expected in zip(engine.draw(PROMPTS, together=False), alone, strict=True):
        assert farthest(states, expected) < NEAR
    assert [path.name for path in Path(engine.dump_dir).iterdir() if path.name.startswith("req_")] == []
    assert isinstance(engine, Engine)
