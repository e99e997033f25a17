"""speculators 0.9.0: ArrowDataset with the file or the fp8 backend, check_hidden_states, shift_batch, CollateFn."""

import sys
from collections import Counter
from pathlib import Path

import numpy
import torch
from hs_connectors.fp8_utils import dequantize_fp8_tensor, quantize_tensor_to_fp8
from hs_connectors.transfer import FileTransfer, FP8Transfer
from native import aux, read_native, require_same, tell
from speculators.data_generation.offline import check_hidden_states
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import ArrowDataset, CollateFn
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

native, folder = read_native(sys.argv[1]), Path(sys.argv[2])
fp8 = folder.name.endswith("fp8")
transfer = (FP8Transfer if fp8 else FileTransfer)(folder / "hidden_states")
dataset = ArrowDataset(max_len=4096, datapath=folder, transfer=transfer, on_missing="raise")
assert len(dataset) == len(native)
assert dataset.approx_lengths == [len(sample["input_ids"]) for sample in native]
values = 0
for number, sample in enumerate(native):
    check_hidden_states(transfer.get_cached(number), sample["input_ids"].tolist())
    stacked = torch.stack([sample[name] for name in ("aux_0", "aux_1", "aux_2", "last")], dim=1)
    if fp8:  # what its own connector would have kept
        stacked = dequantize_fp8_tensor(*quantize_tensor_to_fp8(stacked))
    found = dataset[number]
    values += require_same(found["input_ids"], sample["input_ids"], "input_ids")
    values += require_same(found["loss_mask"], sample["loss_mask"], "loss_mask")
    values += require_same(found["hidden_states"], stacked[:, :3].flatten(1), "hidden_states")
    values += require_same(found["verifier_last_hidden_states"], stacked[:, 3], "verifier_last_hidden_states")
    if not fp8:
        require_same(found["hidden_states"], aux(sample), "hidden_states")
# The validation split keeps the numbers of the whole set.
val = ArrowDataset(max_len=4096, datapath=folder, transfer=transfer, on_missing="raise", train_ratio=0.5, split="val")
require_same(val[0]["input_ids"], native[len(native) // 2]["input_ids"], "input_ids of the validation split")
hidden = native[0]["last"].shape[1]
batch = CollateFn(256, hidden, 3, preprocess=shift_batch)([dataset[i] for i in range(4)])
assert batch["hidden_states"].shape == (1, 256, 3 * hidden) and batch["error_records"] == 0
frequencies = torch.load(folder / "token_freq.pt", weights_only=True)
in_loss = Counter(torch.cat([sample["input_ids"][sample["loss_mask"].bool()] for sample in native]).tolist())
assert frequencies == dict(in_loss)
if not fp8:
    (d2t_path,), (t2d_path,) = folder.glob("d2t-*.npy"), folder.glob("t2d-*.npy")
    ours = [torch.from_numpy(numpy.load(path)) for path in (d2t_path, t2d_path)]
    theirs = build_vocab_mappings_from_distribution(frequencies, len(ours[0]), len(ours[1]))
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(ours, theirs, strict=True))
tell(samples=len(native), values=values)
