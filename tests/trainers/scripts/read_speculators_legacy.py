"""speculators 0.4.0.1: Eagle3SampleFileDataset, which shifts what it loads by one."""

import sys
from pathlib import Path

import torch
from native import aux, read_native, require_same, tell
from speculators.train.data import Eagle3SampleFileDataset, create_collate_fn

native, folder = read_native(sys.argv[1]), sys.argv[2]
dataset = Eagle3SampleFileDataset(max_len=4096, datapath=folder, hidden_states_dtype=torch.bfloat16)
numbers = [int(Path(path).stem.removeprefix("data_")) for path in dataset.data]
assert sorted(numbers) == list(range(len(native)))
values = 0
for place, number in enumerate(numbers):
    sample, found = native[number], dataset[place]
    assert dataset.approx_lengths[place] == len(sample["input_ids"])
    values += require_same(found["input_ids"], sample["input_ids"][1:], "input_ids")
    values += require_same(found["loss_mask"], sample["loss_mask"][1:], "loss_mask")
    values += require_same(found["hidden_states"], aux(sample)[:-1], "hidden_states")
    values += require_same(found["verifier_last_hidden_states"], sample["last"][1:], "verifier_last_hidden_states")
batch = create_collate_fn(256)([dataset[i] for i in range(4)])
assert batch["hidden_states"].shape[:2] == (1, 256)
tell(samples=len(native), values=values)
