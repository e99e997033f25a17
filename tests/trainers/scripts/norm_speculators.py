"""speculators 0.9.0: what its verifier_norm makes of an export's last state, beside what SGLang's norm made."""

import sys
from pathlib import Path

import torch
from native import read_native, tell
from speculators.train.data import ArrowDataset
from speculators.utils.loading import load_model_layers
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

native, folder, model = read_native(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
config = AutoConfig.from_pretrained(model)
norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps).to(torch.bfloat16)
norm.load_state_dict(
    {"weight": load_model_layers(["model.norm.weight"], model)["model.norm.weight"].to(torch.bfloat16)}
)
dataset = ArrowDataset(max_len=4096, datapath=folder, on_missing="raise")
largest = 0.0
with torch.no_grad():
    for number, sample in enumerate(native):
        made = norm(dataset[number]["verifier_last_hidden_states"]).float()
        off = (made - sample["final"].float()).norm(dim=1) / sample["final"].float().norm(dim=1)
        largest = max(largest, float(off.max()))
tell(samples=len(native), largest=largest)
