"""A Hugging Face forward to compare with: what it loads, and what it refuses before it takes memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3ForCausalLM

from backends.embedded import models
from capture import against_hf
from capture.rows.chat import InputError

IDS = [20, 30, 40, 50]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.build("llama", tmp_path_factory.mktemp("models") / "llama")


def hidden_of(loaded: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        return loaded(torch.tensor([IDS]), output_hidden_states=True).hidden_states  # type: ignore[no-any-return]


def test_a_multimodal_models_language_model_is_the_one_compared_with(tmp_path: Path) -> None:
    kimi = models.build("kimi-k2_5", tmp_path / "kimi")
    hidden = hidden_of(DeepseekV3ForCausalLM.from_pretrained(kimi / "text", dtype=torch.float32).eval())
    states = {"aux_0": hidden[3][0], "aux_1": hidden[30][0], "final": hidden[-1][0], "last": hidden[-1][0]}
    found = {one.state: one for one in against_hf.compare(kimi, [(IDS, states)], [3, 31], False)}
    assert {name: (one.boundary, one.nearest) for name, one in found.items()} == {
        "aux_0": (3, 3),
        "aux_1": (31, 30),  # what was handed in is off by one, and that is seen
        "final": (61, 61),
        "last": (61, 61),
    }
    assert found["aux_0"].least > 0.999999 and found["final"].least > 0.999999
    assert found["final"].scale == pytest.approx(1, abs=1e-5)
    assert abs(found["last"].scale - 1) > 0.1  # it was handed in after the norm, where it should be before


def copy_with(llama: Path, folder: Path, **config: object) -> Path:
    folder.mkdir()
    for path in llama.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    old = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(old | config))
    return folder


def test_weights_that_are_not_there_are_not_made_up(llama: Path, tmp_path: Path) -> None:
    model = copy_with(llama, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    lacking = {name: weight for name, weight in weights.items() if ".layers.3.mlp." not in name}
    save_file(lacking, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        InputError, match=r"finds no weights for model\.layers\.3\.mlp\.\w+\.weight and 2 more in .*/model"
    ):
        against_hf.compare(model, [], [2], False)


def test_what_transformers_does_not_know(llama: Path, tmp_path: Path) -> None:
    model = copy_with(llama, tmp_path / "model", model_type="of_tomorrow")
    with pytest.raises(InputError, match=f"does not load {model}: .*of_tomorrow"):
        against_hf.compare(model, [], [2], False)


def test_memory_is_asked_for_before_anything_is_loaded(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = sum(weight.numel() for weight in load_file(llama / "model.safetensors").values())
    monkeypatch.setattr(against_hf.memory, "available", lambda: int(4 * values * against_hf.SPARE) + 1)
    against_hf.require_room(llama)
    monkeypatch.setattr(against_hf.memory, "available", lambda: 4 * values)
    with pytest.raises(InputError, match="probe without --against-hf"):
        against_hf.require_room(llama)


def test_a_quantised_model_and_one_without_weights(llama: Path, tmp_path: Path) -> None:
    quantised = copy_with(llama, tmp_path / "quantised", quantization_config={"quant_method": "fp8"})
    with pytest.raises(InputError, match=f"{quantised} is quantised"):
        against_hf.require_room(quantised)
    bare = copy_with(llama, tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    with pytest.raises(InputError, match=f"{bare} has no safetensors"):
        against_hf.require_room(bare)
    with pytest.raises(InputError, match=f"{tmp_path}/none"):
        against_hf.require_room(tmp_path / "none")
