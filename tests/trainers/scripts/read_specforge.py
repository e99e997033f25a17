"""SpecForge 0.2.0: OfflineManifestReader, load_feature_file, normalize_offline_sample, OfflineEagle3Dataset."""

import sys

import torch
from native import aux, read_native, require_same, tell
from specforge.algorithms.eagle3.data import normalize_offline_sample
from specforge.core.compact_teacher import validate_vocab_mapping_consistency
from specforge.data.preprocessing import OfflineEagle3Dataset, process_token_dict_to_mappings
from specforge.runtime.data_plane.feature_store import load_feature_file
from specforge.runtime.data_plane.offline_reader import OfflineManifestReader, list_feature_files
from specforge.training.vocab_mapping import count_effective_feature_tokens

native, folder = read_native(sys.argv[1]), sys.argv[2]
refs = OfflineManifestReader(folder, validate_files=True).read()
by_number = {int(ref.feature_store_uri.rpartition("data_")[2].removesuffix(".ckpt")): ref for ref in refs}
assert sorted(by_number) == list(range(len(native)))
older = OfflineEagle3Dataset(list_feature_files(folder), max_len=4096)
older_by_number = {int(path.rpartition("data_")[2].removesuffix(".ckpt")): i for i, path in enumerate(list_feature_files(folder))}  # fmt: skip
values = 0
for number, sample in enumerate(native):
    ref = by_number[number]
    assert ref.num_tokens == len(sample["input_ids"])
    mask = sample["loss_mask"].clone()
    mask[-1] = 0  # its loader's doing
    found = normalize_offline_sample(load_feature_file(ref.feature_store_uri.removeprefix("file://")), 4096)
    for loaded in (found, older[older_by_number[number]]):
        values += require_same(loaded["input_ids"][0], sample["input_ids"], "input_ids")
        values += require_same(loaded["loss_mask"][0], mask, "loss_mask")
        values += require_same(loaded["target"][0], sample["final"], "target")
        values += require_same(loaded["hidden_state"][0], aux(sample), "hidden_state")
        assert loaded["attention_mask"].all()
counts = count_effective_feature_tokens(folder)
in_loss = torch.cat([sample["input_ids"][sample["loss_mask"].bool()] for sample in native])
assert counts.total() == len(in_loss)
ours = torch.load(f"{folder}/vocab_mapping/vocab_mapping.pt")  # as its draft model loads it
validate_vocab_mapping_consistency(ours["t2d"], ours["d2t"])
d2t, t2d = process_token_dict_to_mappings(counts.copy(), len(ours["d2t"]), len(ours["t2d"]))
assert d2t.shape == ours["d2t"].shape and t2d.shape == ours["t2d"].shape
# Which of the tokens that are as often there it takes is up to the order of its files.
assert sum(counts[int(i)] for i in ours["t2d"].nonzero()) == sum(counts[int(i)] for i in t2d.nonzero())
tell(samples=len(native), values=values)
