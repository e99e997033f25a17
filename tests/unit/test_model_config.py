"""What is read out of a model's config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from capture.model_config import ModelConfig, known_of, read_model_config

KIMI = {
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "vocab_size": 163840,
    "kv_lora_rank": 512,
    "n_routed_experts": 384,
    "quantization_config": {"quant_method": "compressed-tensors"},
}
OF_KIMI = ModelConfig(
    layers=61, hidden=7168, vocabulary=163840, experts=384, mla=True, quantization="compressed-tensors"
)


def read(folder: Path, config: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return read_model_config(folder)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda text: text,
        lambda text: {"text_config": text, "vision_config": {"hidden_size": 1152}},
        lambda text: {"language_config": text},
        lambda text: {"llm_config": text, "hidden_size": 1},
        lambda text: {"thinker_config": {"text_config": text, "audio_config": {}}},
    ],
    ids=["at the top", "text", "language", "llm", "thinker"],
)
def test_the_language_model_is_found_wherever_it_stands(tmp_path: Path, wrap: Any) -> None:
    assert read(tmp_path, wrap(KIMI)) == known_of(tmp_path) == OF_KIMI


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_what_the_language_models_part_leaves_out_holds_for_the_whole(tmp_path: Path, name: str) -> None:
    whole = {name: "float32", "vocab_size": 9, "quantization_config": {"quant_method": "fp8"}, "text_config": {}}
    found = read(tmp_path, whole)
    assert (found.dtype, found.vocabulary, found.quantization) == ("float32", 9, "fp8")
    found = read(tmp_path, whole | {"text_config": {name: "bfloat16", "vocab_size": 8}})
    assert (found.dtype, found.vocabulary) == ("bfloat16", 8)


def test_the_class_is_that_of_the_whole_model(tmp_path: Path) -> None:
    text = {"architectures": ["DeepseekV3ForCausalLM"]}
    whole = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}
    assert read(tmp_path, whole).architecture == "KimiK25ForConditionalGeneration"
    assert read(tmp_path, {"text_config": text}).architecture == "DeepseekV3ForCausalLM"


@pytest.mark.parametrize(
    ("config", "experts"),
    [
        ({"hidden_size": 8}, 0),
        ({"n_routed_experts": 256}, 256),
        ({"num_experts": 0}, 0),
        ({"num_experts": 1}, 0),
        ({"num_experts": 128, "n_routed_experts": None}, 128),
        ({"num_local_experts": 32}, 32),
        ({"moe_num_experts": 64}, 64),
        ({"text_config": {"n_routed_experts": 384}, "num_experts": None}, 384),
    ],
)
def test_experts_by_any_of_their_names(tmp_path: Path, config: dict[str, Any], experts: int) -> None:
    assert read(tmp_path, config).experts == experts


def test_what_is_no_number_or_no_name_is_not_known(tmp_path: Path) -> None:
    odd = {
        "num_hidden_layers": "61",
        "hidden_size": -1,
        "vocab_size": True,
        "architectures": [],
        "dtype": 16,
        "n_routed_experts": "many",
        "text_config": None,
        "quantization_config": {},
    }
    assert read(tmp_path, odd) == ModelConfig()
    assert read(tmp_path, {"quantization_config": ["int4"]}).quantization == "unknown"


@pytest.mark.parametrize("text", ["[]", "7", "{", "\udcff"])
def test_a_file_that_is_no_object_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(msgspec.MsgspecError):
        read_model_config(tmp_path)
    assert known_of(tmp_path) == ModelConfig()


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_model_config(tmp_path)
    assert known_of(tmp_path) == ModelConfig()
