"""speculators 0.9.0: a few steps of its EAGLE-3 model on an export, with its loader, collator and loss."""

import sys

import torch
from native import tell
from speculators.losses.utils import resolve_loss_config
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import ArrowDataset, CollateFn
from transformers import AutoConfig

folder, model = sys.argv[1:3]
torch.manual_seed(0)
config = AutoConfig.from_pretrained(model)
draft_config = AutoConfig.from_pretrained(model)
draft_config.num_hidden_layers = 1
drafter = Eagle3DraftModel.from_training_args(
    draft_config,
    verifier_name_or_path=model,
    target_layer_ids=[2, 4, 5],  # the boundaries that were drawn
    draft_vocab_size=config.vocab_size,
    norm_before_residual=False,
    ttt_steps=2,
    draft_attn_impl="eager",
).float()
dataset = ArrowDataset(max_len=512, datapath=folder, on_missing="raise")
collate = CollateFn(512, config.hidden_size, 3, dtype=torch.float32, preprocess=shift_batch)
batches = [collate([dataset[i] for i in range(at, at + 4)]) for at in range(0, 8, 4)]
optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=1e-3)
loss_config = resolve_loss_config("kl_div", "eager")  # the fused one is a Triton kernel
losses = []
for step in range(8):
    batch = dict(batches[step % len(batches)])
    assert batch.pop("error_records") == 0
    _, loss, _ = drafter(**batch, ttt_steps=2, loss_config=loss_config)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(float(loss.detach()))
tell(losses=[sum(losses[at : at + 2]) / 2 for at in range(0, len(losses), 2)])
