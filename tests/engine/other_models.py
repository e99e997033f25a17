"""Tiny models of further architectures, with random weights, as SGLang and transformers both load them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

from backends.embedded import models

SHAPE = {
    "vocab_size": models.VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,  # SGLang's rotary kernels take no narrower one
    "max_position_embeddings": models.MAX_POSITIONS,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "bfloat16",
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}


def make_qwen3(folder: Path) -> None:
    models._save(folder, transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**SHAPE))


def make_qwen3_moe(folder: Path) -> None:
    config = transformers.Qwen3MoeConfig(**SHAPE, **EXPERTS, num_experts=8, norm_topk_prob=True)
    models._save(folder, transformers.Qwen3MoeForCausalLM, config)


def make_glm4_moe(folder: Path) -> None:
    config = transformers.Glm4MoeConfig(
        **SHAPE, **EXPERTS, n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1
    )
    models._save(folder, transformers.Glm4MoeForCausalLM, config)


def make_gpt_oss(folder: Path) -> None:
    """Its checkpoints hold all experts of a layer in one tensor."""
    shape = {name: value for name, value in SHAPE.items() if name != "intermediate_size"}
    config = transformers.GptOssConfig(
        **shape,
        intermediate_size=64,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=128,
        swiglu_limit=7.0,  # SGLang reads it; transformers has it in its code
    )
    config.architectures = ["GptOssForCausalLM"]
    torch.manual_seed(models.SEED)
    made = transformers.GptOssForCausalLM(config).bfloat16()
    for name, weight in made.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.ones_(weight)
        else:
            torch.nn.init.uniform_(weight, -0.035, 0.035)
    folder.mkdir(exist_ok=True)
    weights = {name: weight.contiguous() for name, weight in made.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    models._save_tokenizer(folder)


MAKE: dict[str, Callable[[Path], None]] = {
    "qwen3": make_qwen3,
    "qwen3-moe": make_qwen3_moe,
    "glm4-moe": make_glm4_moe,
    "gpt-oss": make_gpt_oss,
}
