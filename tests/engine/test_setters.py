"""Every EAGLE-3 setter of the installed SGLang: how it reads ids, and that Layertap says the same of it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from setters import DELEGATES, Source, boundaries, rule

from capture.layers import serve_ids_by_version

OUTPUTS = "outputs"
FIRST = "boundaries, outputs if the first is 1"
LAST = "outputs, boundaries if the last is the number of layers"
# SGLang 0.5.23: file -> class, how its setter reads ids, whether what it is made of is seen to collect states.
KNOWN = {
    "apertus.py": ("ApertusForCausalLM", OUTPUTS, True),
    "bailing_moe.py": ("BailingMoEForCausalLM", OUTPUTS, True),
    "deepseek_v2.py": ("DeepseekV2ForCausalLM", FIRST, True),
    "exaone_moe.py": ("ExaoneMoEForCausalLM", OUTPUTS, True),
    "gemma3_causal.py": ("Gemma3ForCausalLM", OUTPUTS, True),
    "gemma3_mm.py": ("Gemma3ForConditionalGeneration", DELEGATES, True),
    "gemma4_causal.py": ("Gemma4ForCausalLM", OUTPUTS, True),
    "gemma4_mm.py": ("Gemma4ForConditionalGeneration", OUTPUTS, True),
    "glm4_moe.py": ("Glm4MoeForCausalLM", OUTPUTS, True),
    "glm4_moe_lite.py": ("Glm4MoeLiteForCausalLM", FIRST, True),
    "glm5_next.py": ("Glm5NextForConditionalGeneration", OUTPUTS, True),
    "gpt_oss.py": ("GptOssForCausalLM", LAST, True),
    "kimi_k25.py": ("KimiK25ForConditionalGeneration", DELEGATES, True),
    "llama.py": ("LlamaForCausalLM", OUTPUTS, True),
    "longcat_flash.py": ("LongcatFlashForCausalLM", OUTPUTS, True),
    # Runs outside torch, in MindSpore: there are no modules to draw from, and the tap says so.
    "mindspore.py": ("MindSporeForCausalLM", "unknown: [[2, 30, 58], [1, 29, 57], [24, 30, 61]]", False),
    "minimax_m2.py": ("MiniMaxM2ForCausalLM", OUTPUTS, True),
    "minimax_m3.py": ("MiniMaxM3SparseForCausalLM", OUTPUTS, True),
    "minimax_m3_vl.py": ("MiniMaxM3SparseForConditionalGeneration", OUTPUTS, True),
    "mllama4.py": ("Llama4ForConditionalGeneration", DELEGATES, True),
    "qwen2.py": ("Qwen2ForCausalLM", OUTPUTS, True),
    "qwen2_5_vl.py": ("Qwen2_5_VLForConditionalGeneration", OUTPUTS, True),
    "qwen2_moe.py": ("Qwen2MoeForCausalLM", OUTPUTS, True),
    "qwen3.py": ("Qwen3ForCausalLM", OUTPUTS, True),
    "qwen3_5_text.py": ("Qwen3_5ForCausalLM", OUTPUTS, False),  # its inner class is named by its subclasses
    "qwen3_moe.py": ("Qwen3MoeForCausalLM", OUTPUTS, True),
    "qwen3_next.py": ("Qwen3NextForCausalLM", OUTPUTS, True),
    "qwen3_vl.py": ("Qwen3VLForConditionalGeneration", OUTPUTS, True),
}


@pytest.fixture(scope="module")
def source() -> Source:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.origin is not None
    return Source(Path(spec.origin).parent / "srt" / "models")


def test_every_setter_is_known(source: Source) -> None:
    found = {
        file: (name, rule(function), source.finds_inner(name)) for (file, name), function in source.setters().items()
    }
    assert found == KNOWN


def ancestors(source: Source, name: str) -> type:
    """A class of that name whose ancestors have the names that SGLang's have."""
    bases = [
        base for node in source.named.get(name, []) for base in (one.id for one in node.bases if hasattr(one, "id"))
    ]
    made = [ancestors(source, base) for base in dict.fromkeys(bases) if base in source.named and base != name]
    return type(name, tuple(made[:1]), {})


@pytest.mark.parametrize("drawn", [[2, 31, 59], [3, 31, 59]])
def test_the_ids_that_are_told_for_this_version_make_what_was_drawn(source: Source, drawn: list[int]) -> None:
    setters = source.setters()
    deepseek = setters["deepseek_v2.py", "DeepseekV2ForCausalLM"]
    for (file, name), function in setters.items():
        if file == "mindspore.py":
            continue
        told = serve_ids_by_version(ancestors(source, name), drawn)[-1]
        assert "<" not in told.sglang  # holds for the newest
        if rule(function) == DELEGATES:
            if file == "kimi_k25.py":
                assert boundaries(deepseek, told.ids) == drawn
        else:
            assert boundaries(function, told.ids) == drawn, name


def test_what_inherits_from_deepseek_is_told_deepseeks_ids(source: Source) -> None:
    assert [one.ids for one in serve_ids_by_version(ancestors(source, "GlmMoeDsaForCausalLM"), [3, 31])] == [
        [2, 30],
        [3, 31],
    ]
