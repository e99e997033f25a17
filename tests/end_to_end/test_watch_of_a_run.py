"""What goes wrong while an extraction runs is told, on stderr and in its history, and what is well raises nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from checks import check, history
from command import Layertap, until
from test_faults import poison

from backends.ports import free_port

pytestmark = pytest.mark.slow
BAD = 500  # the token that gives NaN


@pytest.fixture
def own_server(layertap: Layertap, server: dict[str, Any], work: Path) -> Iterator[dict[str, Any]]:
    """A server that a test may harm; a token of its model gives NaN."""
    source = next((layertap.folder / "cache" / "layertap" / "models").glob("llama-*"))
    model = shutil.copytree(source, work / "model")
    assert poison(model) == BAD
    made = layertap.json("launch", "embedded-llama", "--model", model, "--port", free_port())
    yield made
    layertap("stop", made["id"], code=None)


def write_ids(path: Path, count: int, bad_each: int | None = None) -> Path:
    """`count` rows of 60 tokens, each its own; every so many holds the token that gives NaN."""
    with path.open("w") as file:
        for i in range(count):
            ids = [20 + (i * 31 + j * 7) % 400 for j in range(58)] + [30 + i % 400, 30 + i // 400]
            if bad_each and i % bad_each == 0:
                ids[5] = BAD
            file.write(json.dumps({"input_ids": ids, "loss_mask": [0, *[1] * 59]}) + "\n")
    return path


def trouble(layertap: Layertap) -> list[dict[str, Any]]:
    return [event for event in history(layertap) if event["event"].startswith("trouble")]


def test_the_detokenizer_is_killed(layertap: Layertap, own_server: dict[str, Any], work: Path) -> None:
    rows, output = write_ids(work / "rows.jsonl", 2000), work / "out"
    console = layertap.start("extract", rows, "--output", output, "--port", own_server["port"])
    layertap.until_under_way(output)
    processes = layertap.json("status", "--port", own_server["port"])["processes"]
    (pid,) = [process["pid"] for process in processes if "detokenizer" in process["title"]]
    os.kill(pid, signal.SIGKILL)
    _, narration = console.communicate(timeout=300)
    assert console.returncode == 9, narration
    (crashed,) = [event for event in trouble(layertap) if event["id"] == "server-crashed"]
    assert (crashed["event"], crashed["severity"]) == ("trouble", "critical")
    assert "detokenizer" in crashed["cause"] + crashed["evidence"]
    assert f"  critical: {crashed['cause']}" in narration and crashed["remedy"] in narration


def test_the_scheduler_is_stopped_and_goes_on(layertap: Layertap, own_server: dict[str, Any], work: Path) -> None:
    rows, output = write_ids(work / "rows.jsonl", 400), work / "out"
    console = layertap.start("extract", rows, "--output", output, "--port", own_server["port"])
    layertap.until_under_way(output)
    scheduler = psutil.Process(json.loads((Path(own_server["dump_dir"]) / "tap.json").read_text())["pid"])
    scheduler.suspend()
    try:
        now = until(lambda: (now := layertap.json("status", "--port", own_server["port"], code=None))["alarms"] and now)
        assert [alarm["id"] for alarm in now["alarms"]] == ["server-hangs"]
    finally:
        scheduler.resume()
    assert console.wait(300) == 0
    check(layertap, output, 400)
    assert [(event["event"], event["id"]) for event in trouble(layertap)] == [
        ("trouble", "server-hangs"),
        ("trouble_over", "server-hangs"),
    ]


def test_states_that_are_not_finite(layertap: Layertap, own_server: dict[str, Any], work: Path) -> None:
    rows, output = write_ids(work / "rows.jsonl", 1500, bad_each=3), work / "out"
    console = layertap.start("extract", rows, "--output", output, "--port", own_server["port"], "--json")
    said, narration = console.communicate(timeout=300)
    assert console.returncode == 1, narration
    made = json.loads(said)
    assert (made["written"], made["failed"], made["not_finite"]) == (1000, 500, 500)
    assert [event["id"] for event in trouble(layertap)] == ["states-not-finite"]
    assert "critical: the model computes NaN or infinity for more and more samples (" in narration


def test_a_run_that_does_well_raises_nothing_and_asks_health_seldom(
    layertap: Layertap, own_server: dict[str, Any], work: Path
) -> None:
    rows, output = write_ids(work / "rows.jsonl", 1500), work / "out"
    layertap("extract", rows, "--output", output, "--port", own_server["port"])
    check(layertap, output, 1500)
    assert trouble(layertap) == []
    seconds = history(layertap)[-1]["at"] - history(layertap)[0]["at"]
    log = layertap("logs", own_server["id"])
    assert log.count('"POST /generate') > 1500
    assert log.count('"GET /health') < 10 + seconds / 10  # two watch it, and before, its start is followed
