"""The claim that all rests on: what the tap draws is what SGLang feeds a drafter that asks for `serve_ids`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engines import Engines
from serving import Serving, make_drafter
from shapes import BACKENDS, LIMITS, make, start

PROMPTS = [[(17 * i * i + n) % 1000 + 9 for i in range(n)] for n in (1, 3, 64, 1500, 2500)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make(tmp_path_factory)


@pytest.mark.parametrize("name", ["llama", "deepseek-v3"])
def test_the_drafter_is_given_what_the_tap_draws(
    engines: Engines, made: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    tap = start(engines, made[name])
    layers = tap.tap.layers
    assert layers is not None
    drafter = make_drafter(made[name], tmp_path_factory.mktemp("drafter") / "drafter", layers.serve_ids)
    serving = Serving(
        engines,
        tmp_path_factory.mktemp("recorder"),
        "base",
        "layertap",
        drafter,
        model=made[name],
        **BACKENDS,
        **LIMITS,
    )
    for row, (ids, states) in enumerate(zip(PROMPTS, tap.draw(PROMPTS, together=False), strict=True)):
        drawn = torch.cat([states[f"aux_{i}"] for i in range(3)], dim=-1)
        given = serving.given(f"prompt-{row}", ids, new_tokens=8)
        cosine = torch.nn.functional.cosine_similarity(given.float(), drawn.float(), dim=-1).min()
        same = torch.equal(given, drawn)
        print(f"{name} {len(ids)} tokens, ids {layers.serve_ids}: equal {same}, least cosine {cosine:.7f}")
        assert same
