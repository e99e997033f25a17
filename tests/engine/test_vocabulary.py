"""A drafter's vocabulary beside an export: which tokens, in each trainer's files, kept true as the dataset grows."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import msgspec
import numpy
import pytest
import torch
from dataset_helpers import make_native

from capture.dataset.export import Exported, ExportJob, export
from capture.dataset.formats import DraftVocabulary
from capture.dataset.formats.vocabulary import maps
from capture.dataset.ledger import Ledger, LedgerError, Tokens
from capture.dataset.manifest import ManifestError, read_manifest, write_manifest
from capture.dataset.verify import verify_dataset

ROWS = [Tokens(0, [5, 5, 7, 9, 1], [1, 1, 1, 0, 1]), Tokens(1, [7, 2, 9], [1, 1, 0])]
TARGET = 1024


@pytest.fixture
def native(tmp_path: Path) -> Path:
    """A dataset in native alone, of a model whose config is there."""
    folder = make_native(tmp_path / "set")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"text_config": {"vocab_size": TARGET}}))
    made = read_manifest(folder)
    made.settings = msgspec.structs.replace(made.settings, model=str(model))
    write_manifest(folder, made)
    return folder


def run(dataset: Path, name: str, draft: int | None) -> Exported:
    return export(ExportJob(dataset=str(dataset), formats=[name], draft_vocab=draft), lambda _: None, lambda _: None)


def test_the_most_frequent_tokens_of_the_loss_then_the_lowest() -> None:
    d2t, t2d = maps(ROWS, DraftVocabulary(5, 12))  # 5 and 7 twice, 1 and 2 once, 0 never; 9 is in no loss
    assert (d2t.dtype, t2d.dtype, t2d.shape) == (torch.int64, torch.bool, (12,))
    assert (torch.arange(5) + d2t).tolist() == [0, 1, 2, 5, 7] == t2d.nonzero().flatten().tolist()


def test_a_token_that_the_model_has_not() -> None:
    with pytest.raises(LedgerError, match="sample 0 has the token id 9, and the model's vocabulary 8"):
        maps(ROWS, DraftVocabulary(5, 8))


@pytest.mark.parametrize("name", ["specforge", "speculators", "speculators-fp8", "speculators-legacy"])
def test_each_trainers_files(native: Path, name: str) -> None:
    made = run(native, name, 100)
    if name == "specforge":
        assert made.files == ["specforge/vocab_mapping/vocab_mapping.pt"]
        found = torch.load(native / made.files[0], weights_only=True)
        d2t, t2d = found["d2t"], found["t2d"]
    else:
        assert {f"{name}/d2t-100.npy", f"{name}/t2d-100.npy"} < set(made.files)
        d2t, t2d = (torch.from_numpy(numpy.load(native / name / f"{part}-100.npy")) for part in ("d2t", "t2d"))
    with Ledger(native, read_only=True) as ledger:
        seen = Counter(
            token for row in ledger.all_tokens() for token, counts in zip(row.ids, row.mask, strict=True) if counts
        )
    kept = (torch.arange(100) + d2t).tolist()
    assert kept == t2d.nonzero().flatten().tolist() and len(t2d) == TARGET
    left_out = max((count for token, count in seen.items() if token not in kept), default=0)
    assert min(seen[token] for token in kept) >= left_out
    assert verify_dataset(native).failures == []


def test_what_is_asked_for_once_stays_and_is_verified(native: Path) -> None:
    run(native, "specforge", 100)
    path = native / "specforge/vocab_mapping/vocab_mapping.pt"
    path.unlink()
    (failure,) = verify_dataset(native).failures
    assert "vocab_mapping.pt is missing" in failure.reason
    run(native, "specforge", None)
    assert path.exists() and verify_dataset(native).failures == []
    run(native, "specforge", 50)
    assert len(torch.load(path, weights_only=True)["d2t"]) == 50


@pytest.mark.parametrize(
    ("name", "draft", "said"),
    [
        ("modelopt", 100, "--format modelopt: it takes no maps of a drafter's vocabulary; export it without"),
        ("specforge", 5000, "--draft-vocab 5,000: .*config.json has a vocab_size of 1024"),
        ("specforge", 0, "--draft-vocab 0: .*config.json has a vocab_size of 1024"),
    ],
)
def test_what_does_not_fit(native: Path, name: str, draft: int, said: str) -> None:
    with pytest.raises(ManifestError, match=said):
        run(native, name, draft)


def test_a_model_that_is_gone(native: Path, tmp_path: Path) -> None:
    (tmp_path / "model" / "config.json").unlink()
    with pytest.raises(ManifestError, match=r"the size of the model's vocabulary is not known; .*config\.json"):
        run(native, "specforge", 100)
