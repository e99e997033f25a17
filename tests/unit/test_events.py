"""The history of a run: a line an event, whoever writes; what is damaged is left out and harms no other line."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from backends import runs
from capture import driver, events
from capture.events import append, latest


def names(folder: Path) -> list[str]:
    return [event["event"] for event in latest(folder)]


def test_an_event_comes_back_as_it_was(tmp_path: Path) -> None:
    before = time.time()
    append(tmp_path, "failed", sample=3, file="rows.jsonl", line=4, reason="not finite\nin row 0 …")
    append(tmp_path, "stopped", left=["process 7"])
    failed, stopped = latest(tmp_path)
    assert before - 0.001 <= failed.pop("at") <= stopped.pop("at") <= time.time() + 0.001
    assert failed == {
        "event": "failed",
        "sample": 3,
        "file": "rows.jsonl",
        "line": 4,
        "reason": "not finite\nin row 0 …",
    }
    assert stopped == {"event": "stopped", "left": ["process 7"]}
    path = tmp_path / "events.jsonl"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["failed", "stopped"]


def test_there_is_no_history(tmp_path: Path) -> None:
    assert latest(tmp_path) == []
    assert latest(tmp_path / "none") == []
    append(tmp_path / "none", "started")
    (tmp_path / "events.jsonl").touch()
    assert latest(tmp_path) == []


@pytest.mark.parametrize(
    "damage", [b'{"at": 1, "event": "half', b"\xff\xfe\x00", b"[1]", b"{}", b'{"at": "x", "event": "y"}', b"\n\n"]
)
def test_a_damaged_line_is_left_out_and_harms_no_other(tmp_path: Path, damage: bytes) -> None:
    append(tmp_path, "one")
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(damage)
    assert names(tmp_path) == ["one"]
    append(tmp_path, "two")
    assert names(tmp_path) == ["one", "two"]


def test_only_the_last_events_of_a_long_history_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(2000):
        append(tmp_path, "retry", sample=number, reason="x" * 50)
    assert (tmp_path / "events.jsonl").stat().st_size > events.TAIL
    assert [event["sample"] for event in latest(tmp_path)] == list(range(1950, 2000))
    monkeypatch.setattr(events, "TAIL", 250)
    assert [event["sample"] for event in latest(tmp_path)] == [1998, 1999]  # the third begins before that


def test_a_long_text_is_cut(tmp_path: Path) -> None:
    append(tmp_path, "error", reason="x" * 1_000_000)
    assert latest(tmp_path)[0]["reason"] == "x" * events.LONGEST


def test_many_write_at_once(tmp_path: Path) -> None:
    def write(writer: int) -> None:
        for number in range(50):
            append(tmp_path, "retry", writer=writer, number=number, reason="y" * 900)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines() if line]
    for writer in range(4):
        assert [line["number"] for line in lines if line["writer"] == writer] == list(range(50))


def test_an_extraction_tells_of_so_many_samples_and_then_of_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "SAMPLE_EVENTS", 3)
    told: list[tuple[str, dict[str, Any]]] = []
    extraction: Any = object.__new__(driver.Extraction)
    extraction.sample_events, extraction.tell = 0, lambda event, **facts: told.append((event, facts))
    for sample in range(6):
        extraction._tell_of_sample("retry", sample=sample)
    assert told == [*(("retry", {"sample": sample}) for sample in range(3)), ("log_only", {"most": 3})]


def test_what_is_under_way_ends_before_a_stop_loses_its_patience() -> None:
    assert driver.DRAIN_SECONDS + 5 < runs.ASK_SECONDS
