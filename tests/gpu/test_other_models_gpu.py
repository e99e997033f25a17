"""Further architectures on a GPU: the probe, with a Hugging Face forward, on each."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from engines import Engines
from other_models import MAKE
from shapes import BACKENDS, LIMITS

from capture.layers import LayerChoice
from console.words import of_server

# Its own kernel package has a router's; SGLang can compile one with Triton too.
ROUTER = {"ENV_SGLANG_OPT_USE_JIT_KERNEL_FUSED_TOPK": "1"}


@pytest.mark.parametrize("name", list(MAKE))
def test_states_are_those_of_a_hugging_face_forward(engines: Engines, tmp_path: Path, name: str) -> None:
    (tmp_path / "model").mkdir()
    MAKE[name](tmp_path / "model")
    layers = LayerChoice(outputs=[0, 2, 5])
    engine = engines.get("base", model=tmp_path / "model", layers=layers, **BACKENDS, **LIMITS, **ROUTER)
    code, found = engine.probe(tmp_path, against_hf=True)
    print(*of_server.probed(msgspec.to_builtins(found)), sep="\n")
    assert (code, found.failures) == (0, [])
    assert found.layers.boundaries == [1, 3, 6]
    assert found.against_hf is not None
    assert min(one.median for one in found.against_hf) > 0.999
