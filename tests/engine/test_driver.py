"""The driver's patience: with writers that are too slow, which counts no attempt, and with a ledger that is held."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from capture import driver
from capture.dataset.ledger import Change, Ledger
from capture.draw import DrawError
from capture.driver import Extraction
from capture.dumps import dump
from capture.layers import Layers
from capture.probe import DENSE, Probed
from capture.rows.tokenise import Row, RowOptions
from capture.server import ServerGone
from capture.stop import Stop


class Lane:
    """Answers as told, one word a call; a busy one has no slot free until it was looked at twice."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.drawer = SimpleNamespace(dump_dir=folder)
        self.words, self.asked, self.gone = list(words), 0, None

    async def draw(self, _number: int, _attempt: int, _ids: list[int]) -> tuple[str, Path]:
        self.asked += 1
        word = self.words.pop(0)
        if word != "done":
            raise DrawError(word, busy=word == "busy")
        return "rid", self.drawer.dump_dir / "req_0"


def drawing(monkeypatch: pytest.MonkeyPatch, free: list[int]) -> Any:
    monkeypatch.setattr(driver, "BUSY_PAUSE", 0.0)
    monkeypatch.setattr(dump, "read_tap", lambda _folder: SimpleNamespace(slots_free=free.pop(0)))
    extraction: Any = object.__new__(Extraction)
    extraction.stopping, extraction.said = None, []
    extraction.say = extraction.said.append
    return extraction


def test_a_busy_tap_is_asked_again_once_it_has_a_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lane, free = Lane(tmp_path, "busy", "busy", "done"), [0, 0, 1, 2]
    extraction = drawing(monkeypatch, free)
    assert asyncio.run(extraction._draw(lane, 7, 1, [1])) == ("rid", tmp_path / "req_0")
    assert (lane.asked, free) == (3, [])
    assert extraction.said == ["sample 7 waits for a slot and is asked for again: busy"] * 2


def test_other_failures_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = Lane(tmp_path, "its states are not finite")
    with pytest.raises(DrawError, match="not finite"):
        asyncio.run(drawing(monkeypatch, [])._draw(lane, 0, 1, [1]))


@pytest.mark.parametrize("slots", [0, 1])  # one that is free is taken before this prompt comes to it
@pytest.mark.parametrize("why", ["patience", "stop", "gone"])
def test_patience_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str, slots: int) -> None:
    lane, extraction = Lane(tmp_path, "busy"), drawing(monkeypatch, [slots])
    if why == "gone":
        lane.gone = ServerGone("it is dead")
    elif why == "stop":
        extraction.stopping = RuntimeError("asked to stop")
    else:
        monkeypatch.setattr(driver, "BUSY_SECONDS", -1.0)
    with pytest.raises(DrawError, match="busy"):
        asyncio.run(extraction._draw(lane, 0, 1, [1]))


# --- How long a sample may be ---


def limits(asked: int | None, kept: int | None, resumed: bool, overlong: int = 0) -> Any:
    extraction: Any = object.__new__(Extraction)
    extraction.job = SimpleNamespace(options=SimpleNamespace(max_length=asked))
    extraction.manifest = SimpleNamespace(limit=kept, input_hash="ab" if resumed else "")
    extraction.ledger = SimpleNamespace(unused=lambda why: ["a row"] * overlong if why == "overlong" else [])
    extraction.said = []
    extraction.say = extraction.said.append
    return extraction


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
    extraction = limits(asked, kept, resumed)
    assert extraction._limit(server) == limit
    assert extraction.manifest.limit == (server if not resumed and asked is None else kept)
    assert extraction.said == []


def test_rows_that_another_server_would_take_are_said_to_stay_out() -> None:
    extraction = limits(None, 100, resumed=True, overlong=2)
    assert extraction._limit(8000) == 100
    (said,) = extraction.said
    assert said.startswith("warning: rows of more than 100 tokens stay out, ")
    assert extraction._limit(100) == 100
    assert len(extraction.said) == 1


# --- A ledger that somebody else has ---


@pytest.fixture
def committing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An extraction with a change to commit, whose ledger `holder` has, as one does who reads in it for long."""
    monkeypatch.setattr(driver, "COMMIT_SECONDS", 0.0)
    extraction: Any = object.__new__(Extraction)
    extraction.output, extraction.stopping = tmp_path, None
    extraction.lanes = SimpleNamespace(wake=lambda: None)
    extraction.progress, extraction.report = driver.Progress(phase="", output=""), lambda _progress: None
    extraction.changes = [Change(0, "sent", 1)]
    with Ledger(tmp_path) as extraction.ledger, Ledger(tmp_path, read_only=True) as holder:
        extraction.ledger.add([Row("rows.jsonl", 1, [5], [1], False)])
        extraction.ledger.db.execute("PRAGMA busy_timeout = 1")
        holder.db.execute("BEGIN")
        holder.counts()
        extraction.holder = holder.db
        yield extraction


def test_what_cannot_be_committed_just_now_is_committed_later(committing: Any) -> None:
    tried, commit = [], committing._commit

    def commit_and_note() -> None:
        tried.append(committing.stopping)
        commit()

    async def go() -> None:
        keeper = asyncio.create_task(committing._commit_often())
        while len(tried) < 3:
            await asyncio.sleep(0)
        assert committing.ledger.counts()["pending"] == 1
        committing.holder.execute("COMMIT")
        while committing.changes:
            await asyncio.sleep(0)
        keeper.cancel()

    committing._commit = commit_and_note
    asyncio.run(go())
    assert (committing.stopping, committing.ledger.counts()["sent"]) == (None, 1)


def test_what_cannot_be_committed_at_the_end_ends_the_run(committing: Any, tmp_path: Path) -> None:
    with pytest.raises(Stop) as stopped:
        committing._finish()
    assert str(stopped.value) == (
        f"another program holds the ledger of {tmp_path}; nothing is lost: give the same command again"
    )


# --- The rows ---


def test_the_models_vocabulary_counts_and_not_its_tokenizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"input_ids": [5, 2999], "loss_mask": [0, 1]}\n{"input_ids": [5, 3000], "loss_mask": [0, 1]}\n')
    (tmp_path / "config.json").write_text('{"vocab_size": 3000}')
    (tmp_path / "set").mkdir()
    extraction: Any = object.__new__(Extraction)
    server = SimpleNamespace(model=str(tmp_path))
    extraction.job = SimpleNamespace(rows=str(rows), options=RowOptions(), server=server)
    extraction.output, extraction.progress = tmp_path, driver.Progress(phase="", output="")
    extraction.manifest = SimpleNamespace(input_hash="")
    extraction.report = extraction.say = lambda _what: None
    monkeypatch.setattr(driver.manifest, "write_manifest", lambda _output, _manifest: None)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, "a")))
    with Ledger(tmp_path / "set") as extraction.ledger:
        extraction._tokenise(tokenizer, None)
        assert [extraction.ledger.tokens(sample)[0] for sample in extraction.ledger.samples()] == [[5, 2999]]


# --- The probe before the first sample ---


def probing(monkeypatch: pytest.MonkeyPatch, found: Any, kept: Any = None) -> tuple[Any, list[Any]]:
    """An extraction of rows up to 300 tokens whose server comes to `found`, and what it asked of the probe."""
    asked: list[Any] = []
    monkeypatch.setattr(driver.probe, "kept", lambda _server, _tap, longest: asked.append(("kept", longest)) or kept)
    monkeypatch.setattr(driver.probe, "probe", lambda *_, most: asked.append(("probe", most)) or found)
    extraction: Any = object.__new__(Extraction)
    extraction.ledger, extraction.progress = SimpleNamespace(longest=lambda: 300), SimpleNamespace(phase="")
    extraction.told, extraction.said = [], []
    extraction.report = lambda _progress: None
    extraction.say = extraction.said.append
    extraction.tell = lambda event, **facts: extraction.told.append({"event": event, **facts})
    return extraction, asked


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


@pytest.mark.parametrize(("device", "most"), [("cuda", None), ("cpu", 300)])
def test_a_server_is_probed_before_the_first_sample(
    monkeypatch: pytest.MonkeyPatch, device: str, most: int | None
) -> None:
    sound = probed()
    extraction, asked = probing(monkeypatch, sound)
    assert extraction._pass_probe(None, None, {"device": device}, None) is sound
    assert asked == [("kept", 300), ("probe", most)]
    assert extraction.told == [{"event": "probed", "passed": True, "earlier": False, "lengths": [3, 300], "ranks": 2}]


def test_a_server_that_passed_before_is_not_probed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = probed()
    extraction, asked = probing(monkeypatch, None, kept=sound)
    assert extraction._pass_probe(None, None, {}, None) is sound
    assert asked == [("kept", 300)]
    assert extraction.told[0]["earlier"] is True


def test_a_server_that_fails_the_probe_gives_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    extraction, _ = probing(monkeypatch, probed("a", "b", "c", "d", "e"))
    with pytest.raises(driver.NotSafe) as refused:
        extraction._pass_probe(None, None, {}, None)
    assert str(refused.value) == "the probe failed: a; b; c; and 2 more, which the log and `layertap probe` name"
    assert extraction.said == [f"probe: {failure}" for failure in "abcde"]
    assert extraction.told[0]["passed"] is False
