"""Small models for a GPU, and how a server of them starts with no kernel package beyond triton."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import Engine, Engines
from transformers import DeepseekV3ForCausalLM

from backends.embedded import models
from capture.layers import LayerChoice

BACKENDS = {"attention_backend": "triton", "sampling_backend": "pytorch", "mem_fraction_static": 0.3}
LIMITS = {"context_length": 4104, "max_prefill_tokens": 8192, "max_total_tokens": 65536}
BOUNDARIES = [2, 4, 5]


def make(factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Llama and a DeepSeek-V3 shape."""
    folder = factory.mktemp("models")
    models.build("llama", folder / "llama")
    return {"llama": folder / "llama", "deepseek-v3": deepseek(folder / "deepseek-v3", hidden=256)}


def deepseek(folder: Path, hidden: int, **other: int) -> Path:
    """A DeepSeek-V3 shape, whose heads are as wide as kernels want them."""
    heads = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    config = models._deepseek_shape(layers=8, hidden=hidden, **heads, **other)
    models._save(folder, DeepseekV3ForCausalLM, config, extra=models.DEEPSEEK_FOR_SGLANG)
    return folder


def start(engines: Engines, model: Path, **args: Any) -> Engine:
    return engines.get("base", model=model, layers=LayerChoice(boundaries=BOUNDARIES), **BACKENDS, **LIMITS, **args)
