"""The claim that all rests on: what the tap draws is what SGLang feeds a drafter that asks for `serve_ids`."""

from __future__ import annotations

import pytest
import torch
from engines import Engines
from serving import Serving, make_drafter

PROMPTS = [[(17 * i * i + n) % 1000 + 9 for i in range(n)] for n in (1, 3, 64, 300)]


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["embedded-llama", "embedded-kimi-k2_5"])
def test_the_drafter_is_given_what_the_tap_draws(
    engines: Engines, tmp_path_factory: pytest.TempPathFactory, profile: str
) -> None:
    tap = engines.get(profile)
    assert tap.tap.layers is not None
    drafter = make_drafter(tap.model, tmp_path_factory.mktemp("drafter") / "drafter", tap.tap.layers.serve_ids)
    serving = Serving(
        engines,
        tmp_path_factory.mktemp("recorder"),
        profile,
        "layertap,layertap_cpu",
        drafter,
        model=None,
        speculative_draft_attention_backend="torch_native",
        skip_server_warmup=True,
    )
    for row, (ids, states) in enumerate(zip(PROMPTS, tap.draw(PROMPTS, together=False), strict=True)):
        drawn = torch.cat([states[f"aux_{i}"] for i in range(3)], dim=-1)
        given = serving.given(f"prompt-{row}", ids, new_tokens=1)
        assert torch.equal(given, drawn)
        assert len({state.float().sum().item() for state in given.chunk(3, dim=-1)}) == 3
