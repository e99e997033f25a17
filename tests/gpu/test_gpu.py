"""The tap on a GPU: through pinned memory and a copy stream, the same states as a Hugging Face forward's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from engines import Engines
from shapes import BOUNDARIES, make, start
from transformers import DeepseekV3ForCausalLM, LlamaForCausalLM

from capture.dumps import dump

PROMPTS = [[(17 * i * i + n) % 1000 + 9 for i in range(n)] for n in (1, 3, 64, 1500, 2500)]
# Routing may flip between two implementations in bf16, and changes a row where it does.
LEAST_COSINE = {"llama": 0.999, "deepseek-v3": 0.99}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make(tmp_path_factory)


def reference(model: Path, ids: list[int]) -> dict[str, torch.Tensor]:
    """A Hugging Face forward in float32, `[tokens, hidden]` a state."""
    kind = LlamaForCausalLM if "llama" in model.name else DeepseekV3ForCausalLM
    loaded = kind.from_pretrained(model, dtype=torch.float32).eval()
    seen: dict[str, torch.Tensor] = {}
    loaded.model.norm.register_forward_pre_hook(lambda _module, args: seen.update(last=args[0][0]))
    with torch.no_grad():
        hidden = loaded.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    states = {f"aux_{i}": hidden[boundary][0] for i, boundary in enumerate(BOUNDARIES)}
    return states | {"final": hidden[-1][0], "last": seen["last"]}


def least_cosine(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    cosine = torch.nn.functional.cosine_similarity
    return min(float(cosine(found[name].float(), expected[name].float(), dim=-1).min()) for name in expected)


@pytest.mark.parametrize("name", ["llama", "deepseek-v3"])
def test_states_are_those_of_a_hugging_face_forward(engines: Engines, made: dict[str, Path], name: str) -> None:
    engine = start(engines, made[name])
    alone, together = engine.draw(PROMPTS, together=False), engine.draw(PROMPTS)
    for ids, one, batched in zip(PROMPTS, alone, together, strict=True):
        worst = least_cosine(one, reference(made[name], ids))
        print(f"{name} {len(ids)} tokens: least cosine {worst:.5f}, batched {least_cosine(batched, one):.5f}")
        assert worst > LEAST_COSINE[name]
        assert least_cosine(batched, one) > LEAST_COSINE[name]
    assert engine.tap.failed == 0


def test_states_hold_while_forward_follows_forward(engines: Engines, made: dict[str, Path]) -> None:
    """Copies of one forward run beside the next ones, into whose buffers nothing of it may have been left."""
    prompts = [[(31 * n + 17 * i * i + i * n) % 1000 + 9 for i in range(1500)] for n in range(96)]
    engine = start(engines, made["llama"])
    alone, together = engine.draw(prompts[::12], together=False), engine.draw(prompts)
    for one, batched in zip(alone, together[::12], strict=True):
        assert least_cosine(batched, one) > LEAST_COSINE["llama"]
    assert engine.tap.failed == 0


def test_chunks_are_put_together(engines: Engines, made: dict[str, Path]) -> None:
    whole = start(engines, made["llama"]).draw(PROMPTS, together=False)
    chunked = start(engines, made["llama"], chunked_prefill_size=256)
    for states, expected in zip(chunked.draw(PROMPTS), whole, strict=True):
        assert least_cosine(states, expected) > LEAST_COSINE["llama"]


def test_ten_thousand_short_requests_lose_nothing(engines: Engines, made: dict[str, Path]) -> None:
    engine = start(engines, made["llama"])
    before = engine.tap.seen["ours"]
    prompts = [[(7 * i + j) % 1000 + 9 for j in range(1 + i % 40)] for i in range(10_000)]
    for at in range(0, len(prompts), 2000):
        for ids, states in zip(prompts[at : at + 2000], engine.draw(prompts[at : at + 2000]), strict=True):
            assert states["aux_0"].shape == (len(ids), 128)
    assert engine.tap.seen["ours"] - before == 10_000
    assert engine.tap.failed == 0
    assert [line.state for line in dump.Journal(engine.dump_dir).read()][-10_000:] == ["done"] * 10_000
    assert not any(name.startswith("req_") for name in os.listdir(engine.dump_dir))
