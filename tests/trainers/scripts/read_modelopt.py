"""Model Optimizer 0.47.0: OfflineSupervisedDataset and EagleOfflineDataCollator."""

import sys
from pathlib import Path

from modelopt.torch.speculative.eagle.utils import EagleOfflineDataCollator, OfflineSupervisedDataset
from native import aux, read_native, require_same, tell

native, folder = read_native(sys.argv[1]), Path(sys.argv[2])
files = sorted(folder.rglob("*.pt"), key=lambda path: int(path.stem))
assert [int(path.stem) for path in files] == list(range(len(native)))
dataset = OfflineSupervisedDataset([str(path) for path in files], answer_only_loss=True)
values = 0
for sample, found in zip(native, dataset, strict=True):
    values += require_same(found["input_ids"], sample["input_ids"], "input_ids")
    values += require_same(found["loss_mask"], sample["loss_mask"], "loss_mask")
    values += require_same(found["base_model_hidden_states"], sample["final"], "base_model_hidden_states")
    values += require_same(found["aux_hidden_states"], aux(sample), "aux_hidden_states")
    assert found["base_hidden_prenorm"] is False
batch = EagleOfflineDataCollator(256)([dataset[i] for i in range(4)])
assert batch["input_ids"].shape == (4, 256)
assert batch["base_model_outputs"]["aux_hidden_states"].shape[:2] == (4, 256)
tell(samples=len(native), values=values)
