"""In bf16, bit for bit: the tap's states against those that SGLang's own capture returns for the same batch."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
from engines import Engine, Engines

from capture.dumps import dump
from capture.tap.settings import Rid

# Boundaries, and the ids that say them to SGLang 0.5.23's setter for that model.
SHAPES = {
    "embedded-llama": ([2, 4, 5], [1, 3, 4]),
    "embedded-deepseek-v3": ([2, 4, 5], [1, 3, 4]),
    "embedded-kimi-k2_5": ([3, 31, 59], [3, 31, 59]),
}
PROMPTS = [[(17 * i * i + n) % 1000 + 9 for i in range(n)] for n in (1, 9, 120, 300)]


def batches(engine: Engine, before: int) -> list[str]:
    """The prefill batches that the log shows after `before` characters: requests and tokens of each."""
    return re.findall(r"Prefill batch, (#new-seq: \d+, #new-token: \d+)", engine.log()[before:])


def own_capture(engine: Engine, prompts: list[list[int]]) -> list[torch.Tensor]:
    """SGLang's own aux states, `[tokens, K * hidden]` a prompt."""
    sampling = {"max_new_tokens": 1, "temperature": 0}
    answers = engine.post(
        "/generate", {"input_ids": prompts, "sampling_params": sampling, "return_hidden_states": True}
    )
    return [torch.tensor(answer["meta_info"]["hidden_states"][0]).to(torch.bfloat16) for answer in answers]


def tapped(engine: Engine, prompts: list[list[int]], name: str) -> list[torch.Tensor]:
    """The tap's aux states of the same request, `[tokens, K * hidden]` a prompt."""
    rids = [str(Rid(engine.server.secret, name, row, 0, len(ids))) for row, ids in enumerate(prompts)]
    body = {"input_ids": prompts, "rid": rids, "sampling_params": {"max_new_tokens": 0}}
    journal = dump.Journal(engine.dump_dir)
    engine.post("/generate", body)
    lines: dict[str, dump.Line] = {}
    while not set(rids) <= lines.keys():
        lines |= {line.rid: line for line in journal.read()}
        time.sleep(0.02)
    made = []
    for rid in rids:
        folder = dump.request_folder(engine.dump_dir, lines[rid].n)
        states = dump.read_states(folder, dump.read_meta(folder))
        made.append(torch.cat([states[f"aux_{i}"] for i in range(3)], dim=-1))
        dump.remove(folder)
    return made


def in_one_batch(engine: Engine, ask: Any) -> list[torch.Tensor]:
    """Ask until SGLang happens to take all prompts into one forward, so that both servers compute the same."""
    whole = f"#new-seq: {len(PROMPTS)}, #new-token: {sum(map(len, PROMPTS))}"
    for attempt in range(60):
        before = len(engine.log())
        states: list[torch.Tensor] = ask(attempt)
        if batches(engine, before)[:1] == [whole]:
            return states
    raise AssertionError("SGLang never took the prompts into one batch")


@pytest.mark.parametrize(
    "profile",
    # Of Kimi's 61 layers, every change is held against a Hugging Face forward (test_float32.py), which takes less.
    [pytest.param(name, marks=[] if name == "embedded-llama" else [pytest.mark.slow]) for name in SHAPES],
)
def test_aux_states_are_those_of_sglangs_own_capture(engines: Engines, profile: str) -> None:
    boundaries, ids = SHAPES[profile]
    own = engines.get(
        profile,
        enable_return_aux_hidden_states=True,
        enable_return_hidden_states=True,
        speculative_algorithm="EAGLE3",
        return_aux_hidden_state_layer_ids=ids,
    )
    tap = engines.get(profile)
    assert tap.tap.layers is not None
    assert tap.tap.layers.boundaries == boundaries
    assert tap.tap.layers.outputs == [boundary - 1 for boundary in boundaries]
    assert tap.tap.layers.serve_ids == ids
    for row, prompt in enumerate(PROMPTS):  # each alone
        (expected,), (found,) = own_capture(own, [prompt]), tapped(tap, [prompt], f"alone{row}")
        assert expected.shape == (len(prompt), 3 * 128)
        assert torch.equal(found, expected)
    expected_all = in_one_batch(own, lambda _: own_capture(own, PROMPTS))
    found_all = in_one_batch(tap, lambda attempt: tapped(tap, PROMPTS, f"batch{attempt}"))
    for found, expected in zip(found_all, expected_all, strict=True):
        assert torch.equal(found, expected)
