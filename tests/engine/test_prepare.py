"""What comes before the first prompt: how long a sample may be, which rows are taken, and whether a server is safe."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from capture import prepare
from capture.dataset.ledger import Ledger
from capture.extraction import Progress
from capture.gate import NotSafe
from capture.layers import Layers
from capture.prepare import Preparation
from capture.probe import DENSE, Probed
from capture.rows.tokenise import RowOptions

# --- How long a sample may be ---


def limits(asked: int | None, kept: int | None, resumed: bool, overlong: int = 0) -> Any:
    preparation: Any = object.__new__(Preparation)
    preparation.job = SimpleNamespace(options=SimpleNamespace(max_length=asked))
    preparation.manifest = SimpleNamespace(limit=kept, input_hash="ab" if resumed else "")
    preparation.ledger = SimpleNamespace(unused=lambda why: ["a row"] * overlong if why == "overlong" else [])
    preparation.said = []
    preparation.say = preparation.said.append
    return preparation


@pytest.mark.parametrize(
    ("asked", "kept", "resumed", "server", "limit"),
    [
        (None, None, False, 100, 100),
        (64, None, False, 100, 64),
        (None, None, False, None, None),
        (None, 100, True, 8000, 100),  # the rows were read by it
        (None, 8000, True, 100, 8000),  # the gate says which of them this server does not take
        (None, None, True, 100, 100),  # of a dataset that kept none
    ],
)
def test_rows_are_read_by_one_limit(
    asked: int | None, kept: int | None, resumed: bool, server: int | None, limit: int | None
) -> None:
    preparation = limits(asked, kept, resumed)
    assert preparation._limit(server) == limit
    assert preparation.manifest.limit == (server if not resumed and asked is None else kept)
    assert preparation.said == []


def test_rows_that_another_server_would_take_are_said_to_stay_out() -> None:
    preparation = limits(None, 100, resumed=True, overlong=2)
    assert preparation._limit(8000) == 100
    (said,) = preparation.said
    assert said.startswith("warning: rows of more than 100 tokens stay out, ")
    assert preparation._limit(100) == 100
    assert len(preparation.said) == 1


# --- The rows ---


def test_the_models_vocabulary_counts_and_not_its_tokenizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"input_ids": [5, 2999], "loss_mask": [0, 1]}\n{"input_ids": [5, 3000], "loss_mask": [0, 1]}\n')
    (tmp_path / "config.json").write_text('{"vocab_size": 3000}')
    (tmp_path / "set").mkdir()
    preparation: Any = object.__new__(Preparation)
    server = SimpleNamespace(model=str(tmp_path))
    preparation.job = SimpleNamespace(rows=str(rows), options=RowOptions(), server=server)
    preparation.output, preparation.progress = tmp_path, Progress(phase="", output="")
    preparation.manifest = SimpleNamespace(input_hash="")
    preparation.report = preparation.say = lambda _what: None
    monkeypatch.setattr(prepare.manifest, "write_manifest", lambda _output, _manifest: None)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, "a")))
    with Ledger(tmp_path / "set") as preparation.ledger:
        preparation._tokenise(tokenizer, None)
        assert [preparation.ledger.tokens(sample)[0] for sample in preparation.ledger.samples()] == [[5, 2999]]


# --- The probe before the first sample ---


def probing(monkeypatch: pytest.MonkeyPatch, found: Any, kept: Any = None) -> tuple[Any, list[Any]]:
    """A preparation of rows up to 300 tokens whose server comes to `found`, and what it asked of the probe."""
    asked: list[Any] = []
    monkeypatch.setattr(prepare.probe, "kept", lambda _server, _tap, longest: asked.append(("kept", longest)) or kept)
    monkeypatch.setattr(prepare.probe, "probe", lambda *_, most: asked.append(("probe", most)) or found)
    preparation: Any = object.__new__(Preparation)
    preparation.ledger, preparation.progress = SimpleNamespace(longest=lambda: 300), SimpleNamespace(phase="")
    preparation.told, preparation.said = [], []
    preparation.report = lambda _progress: None
    preparation.say = preparation.said.append
    preparation.tell = lambda event, **facts: preparation.told.append({"event": event, **facts})
    return preparation, asked


def probed(*failures: str) -> Probed:
    return Probed(
        passed=not failures,
        at=0.0,
        run="server-1",
        code="00",
        pid=1,
        sglang="0.5.23",
        model="/m",
        model_class="LlamaForCausalLM",
        dtype="bfloat16",
        ranks=2,
        layers=Layers([2], [1], [1], [], ""),
        lengths=[3, 300],
        tolerance=DENSE,
        failures=list(failures),
    )


def test_a_server_is_probed_before_the_first_sample_with_prompts_as_long_as_the_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sound = probed()
    preparation, asked = probing(monkeypatch, sound)
    assert preparation._pass_probe(None, None, {}, None) is sound
    assert asked == [("kept", 300), ("probe", 300)]
    assert preparation.told == [{"event": "probed", "passed": True, "earlier": False, "lengths": [3, 300], "ranks": 2}]


def test_a_server_that_passed_before_is_not_probed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = probed()
    preparation, asked = probing(monkeypatch, None, kept=sound)
    assert preparation._pass_probe(None, None, {}, None) is sound
    assert asked == [("kept", 300)]
    assert preparation.told[0]["earlier"] is True


def test_a_server_that_fails_the_probe_gives_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    preparation, _ = probing(monkeypatch, probed("a", "b", "c", "d", "e"))
    with pytest.raises(NotSafe) as refused:
        preparation._pass_probe(None, None, {}, None)
    assert str(refused.value) == "the probe failed: a; b; c; and 2 more, which the log and `layertap probe` name"
    assert preparation.said == [f"probe: {failure}" for failure in "abcde"]
    assert preparation.told[0]["passed"] is False
