"""Tiny models for the embedded engine, built on the spot from a seed and byte-identical every time.

`kimi-k2_5` is Kimi-K2.5's own SGLang class with its vision tower and all 61 layers, 128 wide; `deepseek-v3` and
`llama` have 8 layers. `kimi-k2_5` also gets `text/`, the same text model as Hugging Face loads it, the reference for
parity. Weights come from integer arithmetic on a counter-based generator, not from torch's initialisers, whose bits
depend on the CPU.

usage: python -m backends.embedded.models NAME FOLDER
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

SEED = 20_250
VOCABULARY = 1024
LAYERS = {"kimi-k2_5": 61, "deepseek-v3": 8, "llama": 8}
SPECIAL_TOKENS = [
    "<s>",
    "</s>",
    "<pad>",
    "<|im_system|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_middle|>",
    "<|im_end|>",
    "<|media_pad|>",
]
# The shape of Kimi's own template: role, separator, content, end of turn.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "<|im_{{ message['role'] }}|>{{ message['role'] }}<|im_middle|>"
    "{{ message['content'] }}<|im_end|>"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"
)
MAX_POSITIONS = 8192
YARN = {
    "rope_type": "yarn",
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 2048,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
# What SGLang reads in a DeepSeek config and transformers does not write.
DEEPSEEK_FOR_SGLANG = {
    "rope_scaling": YARN,
    "rope_theta": 10000.0,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "ep_size": 1,
    "num_nextn_predict_layers": 0,
}


def code_hash() -> str:
    """Hash of what the models are made from, for the name of their folder."""
    digest = hashlib.blake2b(digest_size=6)
    for file in ("models.py", "conversations.jsonl"):
        digest.update(resources.files("backends.embedded").joinpath(file).read_bytes())
    return digest.hexdigest()


def build(name: str, folder: Path) -> Path:
    """Make the tiny model `name` in `folder` unless it is there; returns `folder`.

    The folder appears whole or not at all, so two builders and a kill do no harm. Raises KeyError for a name that is
    not in `MODELS`.
    """
    make = MODELS[name]
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        make(scratch)
        os.rename(scratch, folder)
    except OSError:
        if not folder.is_dir():  # else another builder was first, with the same bytes
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _deepseek_shape(layers: int, hidden: int, **other: Any) -> Any:
    from transformers import DeepseekV3Config

    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "moe_intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "routed_scaling_factor": 2.827,
        "kv_lora_rank": 64,
        "q_lora_rank": 64,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "max_position_embeddings": MAX_POSITIONS,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "rope_parameters": {**YARN, "rope_theta": 10000.0},
        "dtype": "bfloat16",
    }
    return DeepseekV3Config(**{**shape, **other})


def make_deepseek(folder: Path) -> None:
    """A DeepSeek-V3 shape: MLA and MoE, 8 layers, 128 wide."""
    from transformers import DeepseekV3ForCausalLM

    config = _deepseek_shape(layers=LAYERS["deepseek-v3"], hidden=128)
    _save(folder, DeepseekV3ForCausalLM, config, extra=DEEPSEEK_FOR_SGLANG)


def make_llama(folder: Path) -> None:
    """A Llama shape: 8 layers, 128 wide, grouped-query attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=LAYERS["llama"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        bos_token_id=0,
        eos_token_id=1,
        dtype="bfloat16",
    )
    _save(folder, LlamaForCausalLM, config)


def make_kimi(folder: Path) -> None:
    """Kimi-K2.5 with all of its 61 layers, so that the outputs of layers 2, 30 and 58 exist."""
    from safetensors.torch import load_file, save_file
    from transformers import DeepseekV3ForCausalLM
    from transformers.models.kimi_k25.image_processing_kimi_k25 import Kimi_K25ImageProcessor

    text = folder / "text"
    _save(
        text, DeepseekV3ForCausalLM, _deepseek_shape(layers=LAYERS["kimi-k2_5"], hidden=128), extra=DEEPSEEK_FOR_SGLANG
    )
    _save_tokenizer(folder)
    weights = load_file(text / "model.safetensors")
    save_file({f"language_model.{key}": value for key, value in weights.items()}, folder / "model.safetensors")
    Kimi_K25ImageProcessor().save_pretrained(folder)
    tower = {"num_attention_heads": 4, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
    vision = {
        "patch_size": 14,
        "init_pos_emb_height": 8,
        "init_pos_emb_width": 8,
        "init_pos_emb_time": 4,
        "merge_kernel_size": [2, 2],
        "mm_hidden_size": 64,
        "text_hidden_size": 128,
        "_attn_implementation": "sdpa",
        **tower,
        **{f"vt_{key}": value for key, value in tower.items()},
    }
    _write_json(
        folder / "config.json",
        {
            "architectures": ["KimiK25ForConditionalGeneration"],
            "model_type": "kimi_k25",
            "text_config": {**json.loads((text / "config.json").read_text()), "model_type": "deepseek_v3"},
            "vision_config": vision,
            "media_placeholder_token_id": SPECIAL_TOKENS.index("<|media_pad|>"),
            "dtype": "bfloat16",
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
        },
    )


MODELS: dict[str, Callable[[Path], None]] = {
    "kimi-k2_5": make_kimi,
    "deepseek-v3": make_deepseek,
    "llama": make_llama,
}


def _save(folder: Path, model_class: Any, config: Any, extra: dict[str, Any] | None = None) -> None:
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):  # names and shapes only
        shapes = dict(_checkpoint_shapes(model_class(config).state_dict()))
    save_file(
        {key: _weight(key, shape) for key, shape in shapes.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    config.architectures = [model_class.__name__]
    config.save_pretrained(folder)
    if extra:
        _write_json(folder / "config.json", json.loads((folder / "config.json").read_text()) | extra)
    _save_tokenizer(folder)


def _checkpoint_shapes(state: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes as checkpoints have them: an expert's weights each by themselves, not stacked as in memory."""
    for name, value in state.items():
        above, _, last = name.rpartition(".")
        if not above.endswith("mlp.experts"):
            yield name, tuple(value.shape)
            continue
        experts, rows, columns = value.shape
        for expert in range(experts):
            if last == "gate_up_proj":
                yield f"{above}.{expert}.gate_proj.weight", (rows // 2, columns)
                yield f"{above}.{expert}.up_proj.weight", (rows // 2, columns)
            else:
                yield f"{above}.{expert}.{last}.weight", (rows, columns)


def _weight(name: str, shape: tuple[int, ...]) -> Any:
    """Weight `name` in bf16: ones for norms, zeros for the router's bias, else uniform with std 0.02."""
    import numpy as np
    import torch

    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=torch.bfloat16)
    if name.endswith("bias"):
        return torch.zeros(shape, dtype=torch.float32 if "e_score_correction" in name else torch.bfloat16)
    generator = np.random.Generator(np.random.Philox(key=[SEED, zlib.crc32(name.encode())]))
    levels = generator.integers(-(2**15), 2**15, size=shape, dtype=np.int32).astype(np.float32)
    return torch.from_numpy(levels * np.float32(0.02 * 3**0.5 / 2**15)).to(torch.bfloat16)


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    text = resources.files("backends.embedded").joinpath("conversations.jsonl").read_text(encoding="utf-8")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="<pad>",
        additional_special_tokens=[token for token in SPECIAL_TOKENS if token.startswith("<|")],
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def main(argv: list[str]) -> None:
    """Build one model; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="backends.embedded.models", description="Build a tiny model.")
    parser.add_argument("name", choices=sorted(MODELS))
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args(argv)
    build(arguments.name, arguments.folder)


if __name__ == "__main__":
    main(sys.argv[1:])
