"""Further architectures on the CPU engine for real: whatever way a model looks up which layers it collects."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import Engines
from other_models import MAKE

from capture.layers import LayerChoice


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe", "glm4-moe"])
def test_states_are_those_of_a_hugging_face_forward(engines: Engines, tmp_path: Path, name: str) -> None:
    (tmp_path / "model").mkdir()
    MAKE[name](tmp_path / "model")
    engine = engines.get(
        "embedded-llama", model=tmp_path / "model", layers=LayerChoice(outputs=[0, 2, 5]), dtype="float32"
    )
    layers = engine.tap.layers
    assert layers is not None
    assert (layers.boundaries, layers.serve_ids) == ([1, 3, 6], [0, 2, 5])
    code, found = engine.probe(tmp_path, against_hf=True)
    assert (code, found.failures) == (0, [])
    assert found.against_hf is not None
    assert min(one.least for one in found.against_hf) > 0.99999
    assert {one.state for one in found.against_hf} == {"aux_0", "aux_1", "aux_2", "final", "last"}
