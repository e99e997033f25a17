"""One sample, token by token: what is shown of it, odd rows, and what verification says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from test_manifest import MANIFEST, SETTINGS
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from capture.dataset import formats, inspect_sample, manifest
from capture.dataset.inspect_sample import Seen, describe
from capture.dataset.ledger import Change, Ledger, LedgerError
from capture.job import main
from capture.rows.tokenise import Row

HIDDEN = 8
IDS, MASK = [1, 2, 3, 1, 2], [0, 0, 1, 1, 0]
NAMES = ["aux_0", "aux_1", "aux_2", "final", "last"]


def states(seed: int = 0, tokens: int = len(IDS)) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(tokens, HIDDEN, generator=generator).to(torch.bfloat16) for name in NAMES}


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Sample 0 is written, 1 has failed, 2 is pending; the model is there with a tokenizer."""
    model = tmp_path / "model"
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "What": 1, "is": 2, "this": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(model)
    (model / "config.json").write_text('{"model_type": "llama"}')
    output = tmp_path / "data"
    output.mkdir()
    settings = msgspec.structs.replace(SETTINGS, hidden=HIDDEN, model=str(model))
    manifest.write_manifest(output, msgspec.structs.replace(MANIFEST, settings=settings))
    with Ledger(output) as ledger:
        ledger.add([Row("rows.jsonl", line, [*IDS, line % 3], [*MASK, 0], False) for line in (1, 2, 3)])
        write(output, ledger, 0, states(tokens=len(IDS) + 1))
        ledger.settle([Change(1, "failed", 3, "the server answered 500")])
    return output


def write(output: Path, ledger: Ledger, number: int, found: dict[str, torch.Tensor]) -> None:
    ids, mask = ledger.tokens(ledger.sample(number))
    files = [
        formats.write(name, output, number, found, torch.tensor(ids), torch.tensor(mask))
        for name in ("native", "specforge")
    ]
    ledger.settle([Change(number, "written", 1, None, files)])


def look(output: Path, number: int = 0) -> Seen:
    return inspect_sample.inspect_sample(output, number)


def test_a_written_sample(dataset: Path) -> None:
    seen = look(dataset)
    assert [(token.id, token.text, token.in_loss) for token in seen.tokens] == [
        (1, "What", False),
        (2, "is", False),
        (3, "this", True),
        (1, "What", True),
        (2, "is", False),
        (1, "What", False),
    ]
    assert (seen.dataset, seen.left_out, seen.no_text, seen.read) == (str(dataset), 0, None, "native")
    assert seen.layers_words == "outputs of layers 2, 30, 58 (boundaries 3, 31, 59)"
    assert (seen.sample.number, seen.sample.state, seen.sample.line) == (0, "written", 1)
    assert [file.format for file in seen.files] == ["native", "specforge"]
    assert seen.failures == []
    assert list(seen.states) == NAMES
    aux_0, wrote = seen.states["aux_0"], states(tokens=6)["aux_0"].float()
    assert (aux_0.shape, aux_0.dtype, aux_0.norm) == ([6, 8], "bfloat16", "before the final norm")
    assert aux_0.mean == pytest.approx(wrote.mean().item())
    assert aux_0.std == pytest.approx(wrote.std(correction=0).item())
    assert aux_0.norms == pytest.approx(wrote.norm(dim=1).tolist())
    assert (aux_0.odd, aux_0.odd_rows) == ([], 0)
    assert seen.states["final"].norm == "after the final norm"


def test_a_sample_that_is_not_written_shows_its_tokens_and_why(dataset: Path) -> None:
    seen = look(dataset, 1)
    assert len(seen.tokens) == 6
    assert (seen.states, seen.read, seen.files) == ({}, None, [])
    (failure,) = seen.failures
    assert failure.reason == "it is not extracted, its state is failed: the server answered 500"


def test_no_such_sample(dataset: Path) -> None:
    with pytest.raises(LedgerError, match="no sample 3 in"):
        look(dataset, 3)


def test_where_native_is_gone_another_format_is_read(dataset: Path) -> None:
    (dataset / "native/rows_0-2000/0.safetensors").unlink()
    seen = look(dataset)
    assert (seen.read, list(seen.states)) == ("specforge", ["aux_0", "aux_1", "aux_2", "final"])
    assert [(failure.format, failure.reason) for failure in seen.failures] == [
        ("native", "native/rows_0-2000/0.safetensors is missing")
    ]


def test_files_that_cannot_be_read_leave_the_tokens(dataset: Path) -> None:
    for path in ("native/rows_0-2000/0.safetensors", "specforge/rows_0-2000/data_0.ckpt"):
        (dataset / path).write_bytes(b"nonsense")
    seen = look(dataset)
    assert (seen.read, seen.states, len(seen.tokens), len(seen.failures)) == (None, {}, 6, 2)


def test_without_the_models_tokenizer_there_is_no_text(dataset: Path) -> None:
    (dataset.parent / "model").rename(dataset.parent / "moved")
    seen = look(dataset)
    assert {token.text for token in seen.tokens} == {None}
    assert seen.no_text == (
        f"{dataset.parent}/model: no such model folder, nor a model of that name in the local Hugging Face cache"
    )


def test_a_tokenizer_that_is_code_runs_only_for_a_model_that_is_trusted(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted = []
    monkeypatch.setattr(
        inspect_sample,
        "load_tokenizer",
        lambda model, trust_remote_code: trusted.append(trust_remote_code) or PreTrainedTokenizerFast,
    )
    monkeypatch.setattr(PreTrainedTokenizerFast, "decode", lambda ids: "x", raising=False)
    for model in (None, "/another", f"{dataset.parent}/model"):
        inspect_sample.inspect_sample(dataset, 0, model)
    assert trusted == [False, False, True]


def test_of_a_long_sample_the_first_tokens_are_told(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect_sample, "MOST_TOKENS", 4)
    seen = look(dataset)
    assert (len(seen.tokens), seen.left_out) == (4, 2)
    assert (len(seen.states["last"].norms), seen.states["last"].shape) == (4, [6, 8])


# --- Odd rows ---


def odd(state: torch.Tensor) -> list[tuple[int, str]]:
    return [(one.row, one.why) for one in describe(state).odd]


def test_rows_that_are_odd_the_worst_first() -> None:
    state = states(tokens=10)["aux_0"]
    state[1] *= 1000
    state[3] = 0
    state[5] = 2.5
    state[7, 2] = float("nan")
    state[8] /= 1000
    assert odd(state) == [(7, "not finite"), (3, "all zero"), (5, "one value"), (1, "far off"), (8, "far off")]
    assert describe(state).odd_rows == 5


def test_one_token_or_all_zero_have_no_norm_to_be_far_from() -> None:
    assert odd(states(tokens=1)["aux_0"]) == []
    assert odd(torch.zeros(2, HIDDEN)) == [(0, "all zero"), (1, "all zero")]
    assert odd(torch.full((2, HIDDEN), float("inf"))) == [(0, "not finite"), (1, "not finite")]
    assert describe(torch.full((2, HIDDEN), float("inf"))).median_norm is None


# --- As a job ---


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, **job: Any) -> tuple[int, Any]:
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "job.json").write_text(json.dumps(job))
    return main("sample"), json.loads((folder / "result.json").read_text())


def test_the_job(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, result = run(tmp_path / "run", monkeypatch, output=str(dataset), number=0)
    assert (code, result["schema"], result["sample"]["number"], result["states"]["aux_0"]["shape"]) == (0, 1, 0, [6, 8])
    code, result = run(tmp_path / "failed", monkeypatch, output=str(dataset), number=1)
    assert (code, result["failures"][0]["sample"]) == (1, 1)
    code, result = run(tmp_path / "none", monkeypatch, output=str(dataset), number=99)
    assert (code, result) == (2, {"error": f"no sample 99 in {dataset}/ledger.sqlite"})


def test_a_value_that_is_not_finite_is_null_in_json(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = states(tokens=6)
    broken["aux_1"][2, 3] = float("inf")
    with Ledger(dataset) as ledger:
        write(dataset, ledger, 0, broken)
    code, result = run(tmp_path / "run", monkeypatch, output=str(dataset), number=0)
    aux_1 = result["states"]["aux_1"]
    assert (code, aux_1["norms"][2], aux_1["mean"]) == (1, None, None)
    assert aux_1["odd"] == [{"row": 2, "why": "not finite"}]
    assert result["failures"][0]["reason"].startswith("aux_1 holds values that are not finite, first in row 2")
