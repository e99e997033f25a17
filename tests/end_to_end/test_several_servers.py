"""One extraction from two servers of this host, of which one is killed on the way."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checks import check, history
from command import Layertap, until, write_rows

from backends.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
ROWS = 300


@pytest.fixture(scope="module")
def second(layertap: Layertap) -> Iterator[dict[str, Any]]:
    """Another server like the first, which a test may kill."""
    made = layertap.json("launch", "embedded-llama", "--port", free_port())
    assert made["verdict"]["verdict"] == "healthy", made
    yield made
    layertap("stop", made["id"], code=None)


def test_two_servers_draw_one_dataset_and_one_of_them_is_killed(
    layertap: Layertap, server: dict[str, Any], second: dict[str, Any], work: Path
) -> None:
    rows, output = write_rows(work / "rows.jsonl", ROWS), work / "out"
    victim = json.loads((Path(second["dump_dir"]) / "tap.json").read_text())["pid"]
    parent = json.loads((Path(second["folder"]) / "run.json").read_text())["child"]["pid"]
    console = layertap.start("extract", rows, "--output", output, "--port", server["port"], "--port", second["port"])

    def now() -> dict[str, Any]:
        return layertap.progress(output) or {}

    def under_way() -> bool:
        return now().get("phase") == "extracting" and now()["sent"] > ROWS // 2

    until(under_way, 600)
    os.kill(victim, signal.SIGSTOP)  # so that what it was given is there when it dies, however fast it would have been
    layertap("try", "hello", "--port", second["port"], code=7)
    layertap("try", "hello", "--port", server["port"], code=7)
    for pid in (parent, victim):
        os.kill(pid, signal.SIGKILL)
    _, narration = console.communicate(timeout=900)
    assert console.returncode == 0, narration
    check(layertap, output, ROWS)
    events = history(layertap)
    (lost,) = [event for event in events if event["event"] == "server_lost"]
    assert (lost["server"], lost["left"]) == (second["id"], 1)
    # one event for all of them; on a busy host a sample may be drawn again for other reasons
    assert [event for event in events if event["event"] == "retry" and second["id"] in event["reason"]] == []
    log = (Path(layertap.run_of("extract")["folder"]) / "extract.log").read_text()
    again = log.count(f"is drawn again: the server {second['id']} is dead")
    assert 0 < again <= lost["samples"]
    assert sum(now()["written_by"].values()) == ROWS
    assert now()["written_by"][server["id"]] >= again
    manifest = json.loads((output / "manifest.json").read_text())
    assert [(one["run"], one["probe"]["run"]) for one in manifest["beside"]] == [(second["id"], second["id"])]
    assert list(Path(server["dump_dir"]).glob("req_*")) == []

    grown = write_rows(rows, ROWS + 20)
    layertap("extract", grown, "--output", output, "--port", server["port"])
    check(layertap, output, ROWS + 20)


def test_servers_that_draw_other_states_are_refused(layertap: Layertap, server: dict[str, Any], work: Path) -> None:
    rows, output = write_rows(work / "rows.jsonl", 2), work / "out"
    other = layertap.json("launch", "embedded-llama", "--port", free_port(), "--outputs", "0", "3", "4")
    try:
        ports = ("--port", server["port"], "--port", other["port"])
        layertap("extract", rows, "--output", output, *ports, code=6)
        assert "the servers draw other states: layers is " in layertap.narration
    finally:
        layertap("stop", other["id"])
