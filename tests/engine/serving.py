"""What reaches an EAGLE-3 drafter when SGLang serves with one: a tiny drafter, and a plugin that writes it down."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import torch
from engines import Engine, Engines, plugin
from safetensors.torch import save_file

from capture.layers import LayerChoice

RECORDER = """
import itertools
import os

import torch


def register():
    if os.environ.get("SGLANG_PLATFORM") == "layertap_cpu":
        from layertap_cpu import PlainCpu
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
        from sglang.srt.speculative.draft_utils import DraftBackendFactory

        # As far as the first draft, which sees the prefill: what comes after it needs kernels.
        PlainCpu.supports_speculative_algorithm = lambda self, algorithm: True
        MHATokenToKVPool._init_kv_copy_and_warmup = lambda self: None
        DraftBackendFactory.create_draft_extend_backend = lambda self: None  # the draft runner has one
    from sglang.srt.models.llama_eagle3 import LlamaModel

    forward, numbers = LlamaModel.forward, itertools.count()

    def write_down_and_forward(self, input_ids, positions, forward_batch, *args, **kwargs):
        given, lengths = forward_batch.spec_info.hidden_states, forward_batch.extend_seq_lens_cpu
        if forward_batch.forward_mode.name == "EXTEND" and lengths is not None and forward_batch.rids:
            place = f"{os.environ['RECORDER_FOLDER']}/{next(numbers)}"
            record = {
                "rids": list(forward_batch.rids),
                "prefixes": list(forward_batch.extend_prefix_lens_cpu),
                "lengths": list(lengths),
                "given": given.detach().cpu().clone(),
            }
            torch.save(record, place + ".part")
            os.rename(place + ".part", place + ".pt")
        return forward(self, input_ids, positions, forward_batch, *args, **kwargs)

    LlamaModel.forward = write_down_and_forward
"""


def make_drafter(target: Path, folder: Path, serve_ids: list[int]) -> Path:
    """A random EAGLE-3 drafter for the model in `target`, whose config asks for these ids."""
    shape = json.loads((target / "config.json").read_text())
    shape = shape.get("text_config") or shape
    hidden, vocabulary, heads, width = shape["hidden_size"], shape["vocab_size"], 4, shape["hidden_size"] // 4
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": width,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "vocab_size": vocabulary,
        "draft_vocab_size": vocabulary,
        "max_position_embeddings": shape["max_position_embeddings"],
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": serve_ids},
    }
    rows = {
        "midlayer.self_attn.q_proj": (heads * width, 2 * hidden),
        "midlayer.self_attn.k_proj": (heads * width, 2 * hidden),
        "midlayer.self_attn.v_proj": (heads * width, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads * width),
        "midlayer.mlp.gate_proj": (2 * hidden, hidden),
        "midlayer.mlp.up_proj": (2 * hidden, hidden),
        "midlayer.mlp.down_proj": (hidden, 2 * hidden),
        "fc": (hidden, 3 * hidden),
        "lm_head": (vocabulary, hidden),
    }
    seed = torch.Generator().manual_seed(1)
    weights = {f"{name}.weight": torch.randn(size, generator=seed) * 0.02 for name, size in rows.items()}
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
    weights |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: weight.bfloat16() for name, weight in weights.items()}, folder / "model.safetensors")
    return folder


class Serving:
    """A server that speculates with a drafter, and what its drafter was given."""

    def __init__(
        self, engines: Engines, folder: Path, profile: str, plugins: str, drafter: Path, model: Path | None, **args: Any
    ) -> None:
        self.folder = folder
        self.engine: Engine = engines.get(
            profile,
            model=model,
            layers=LayerChoice(outputs=[1]),  # the tap is in, and must not be in the way
            speculative_algorithm="EAGLE3",
            speculative_draft_model_path=str(drafter),
            speculative_num_steps=1,
            speculative_eagle_topk=1,
            speculative_num_draft_tokens=2,
            ENV_PYTHONPATH=plugin(folder, "recorder", RECORDER),
            ENV_SGLANG_PLUGINS=f"{plugins},recorder",
            ENV_RECORDER_FOLDER=str(folder),
            **args,
        )

    def given(self, name: str, ids: list[int], new_tokens: int) -> torch.Tensor:
        """What reached the drafter of a prompt's prefill, `[tokens, 3 * hidden]`; `new_tokens` are then answered."""
        sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        answer = self.engine.post("/generate", {"input_ids": ids, "rid": name, "sampling_params": sampling})
        assert answer["meta_info"]["completion_tokens"] == new_tokens
        deadline = time.monotonic() + 60
        while True:
            parts = sorted(self._parts(name), key=lambda part: part[0])
            if sum(len(rows) for _, rows in parts) == len(ids):
                return torch.cat([rows for _, rows in parts])
            assert time.monotonic() < deadline, f"the drafter was given {[rows.shape for _, rows in parts]}"
            time.sleep(0.05)

    def _parts(self, name: str) -> list[tuple[int, torch.Tensor]]:
        found = []
        for path in sorted(self.folder.glob("*.pt"), key=lambda path: int(re.sub(r"\D", "", path.name))):
            record = torch.load(path, weights_only=True)
            row = 0
            for rid, prefix, length in zip(record["rids"], record["prefixes"], record["lengths"], strict=True):
                if rid == name:
                    found.append((prefix, record["given"][row : row + length]))
                row += length
        return found
