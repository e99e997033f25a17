"""The driver's patience: with writers that are too slow, which counts no attempt, and with a ledger that is held."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from capture import driver
from capture.dataset.ledger import Change, Ledger
from capture.draw import DrawError
from capture.driver import Extraction
from capture.dumps import dump
from capture.extraction import Progress
from capture.rows.tokenise import Row
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


# --- A ledger that somebody else has ---


@pytest.fixture
def committing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An extraction with a change to commit, whose ledger `holder` has, as one does who reads in it for long."""
    monkeypatch.setattr(driver, "COMMIT_SECONDS", 0.0)
    extraction: Any = object.__new__(Extraction)
    extraction.output, extraction.stopping = tmp_path, None
    extraction.lanes = SimpleNamespace(wake=lambda: None)
    extraction.progress, extraction.report = Progress(phase="", output=""), lambda _progress: None
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
        committing.finish()
    assert str(stopped.value) == (
        f"another program holds the ledger of {tmp_path}; nothing is lost: give the same command again"
    )


def test_a_run_that_is_asked_to_stop_while_it_finishes_stops(
    committing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parquet files of a million rows take minutes."""
    handler = signal.getsignal(signal.SIGTERM)
    committing.holder.execute("COMMIT")
    committing.manifest = SimpleNamespace(settings=SimpleNamespace(formats=[]))
    reported: list[str] = []
    committing.report = lambda progress: reported.append(progress.phase)
    monkeypatch.setattr(driver, "finish", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Stop) as stopped:
        committing.finish()
    assert (stopped.value.exit_code, str(stopped.value)) == (130, "it was asked to stop")
    assert reported == ["finishing", "stopped"]
    assert committing.ledger.counts()["sent"] == 1  # what was under way is drawn again
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_run_that_nobody_looks_after_ends(committing: Any) -> None:
    async def keep() -> None:
        raise ZeroDivisionError

    asyncio.run(committing._keep_up(keep))
    assert isinstance(committing.stopping, ZeroDivisionError)
