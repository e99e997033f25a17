"""A server that dies in the middle of an extraction is launched again, and every sample is there once. Minutes long."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checks import check, history
from command import Layertap, until, write_rows

from backends.ports import free_port

pytestmark = pytest.mark.slow


@pytest.fixture
def own_server(layertap: Layertap, server: dict[str, Any], work: Path) -> Iterator[dict[str, Any]]:
    """A server that a test may kill, with its model in a folder that it may move away."""
    source = next((layertap.folder / "cache" / "layertap" / "models").glob("llama-*"))
    model = shutil.copytree(source, work / "model")
    port = free_port()
    yield layertap.json("launch", "embedded-llama", "--model", model, "--port", port)
    for run in layertap.runs():
        if run["kind"] == "server" and run["port"] == port:
            layertap("stop", run["id"], code=None)


def kill_scheduler(layertap: Layertap, server: dict[str, Any], output: Path) -> None:
    layertap.until_under_way(output)
    os.kill(json.loads((Path(server["dump_dir"]) / "tap.json").read_text())["pid"], signal.SIGKILL)


def test_a_dead_server_is_launched_again_and_the_run_goes_on(
    layertap: Layertap, own_server: dict[str, Any], work: Path
) -> None:
    rows, output, port = write_rows(work / "rows.jsonl", 250), work / "out", own_server["port"]
    words = ("extract", rows, "--output", output, "--port", port, "--restart-server", "1", "--json")
    console = layertap.start(*words)
    kill_scheduler(layertap, own_server, output)
    said, narration = console.communicate(timeout=400)
    assert console.returncode == 0, narration
    made = json.loads(said)
    assert (made["samples"], made["written"], made["failed"]) == (250, 250, 0)
    check(layertap, output, 250)
    everything = history(layertap)
    told = [event for event in everything if not event["event"].startswith(("trouble", "probed"))]
    assert [event["event"] for event in told] == [
        "started", "prepared", "server_lost", "relaunch", "relaunched", "started", "prepared", "finished", "ended",
    ]  # fmt: skip
    assert (told[3]["server"], told[3]["attempt"], told[3]["most"]) == (own_server["id"], 1, 1)
    assert told[6]["resumed"] and 0 < told[6]["written"] < 250
    assert f"the server {own_server['id']} died" in narration and "is launched again, 1 of 1" in narration
    assert [(event["event"], event["id"]) for event in everything if event["event"].startswith("trouble")] == [
        ("trouble", "server-crashed"),
        ("trouble_over", "server-crashed"),
    ]
    # It is the same server: port, layers, arguments, model; the dead one is dead, stopped by nobody, and left nothing.
    now = layertap.json("status", "--port", port)["server"]
    assert (now["id"], now["verdict"]["verdict"]) == (told[4]["server"], "healthy")
    assert now["details"] == own_server["details"] | {"relaunch_of": own_server["id"]}
    dead = layertap.json("runs", own_server["id"])
    assert (dead["state"], dead["stop_asked"], Path(dead["dump_dir"]).exists()) == ("exited", False, False)
    assert dead["argv"] == layertap.json("runs", now["id"])["argv"]


def test_a_server_that_cannot_come_up_again_ends_the_run_and_says_why(
    layertap: Layertap, own_server: dict[str, Any], work: Path
) -> None:
    rows, output, port = write_rows(work / "rows.jsonl", 250), work / "out", own_server["port"]
    console = layertap.start("extract", rows, "--output", output, "--port", port, "--restart-server", "2")
    until(lambda: (now := layertap.progress(output)) and now["written"] > 0)
    (work / "model").rename(work / "elsewhere")
    kill_scheduler(layertap, own_server, output)
    _, narration = console.communicate(timeout=400)
    assert console.returncode == 9, narration
    why = (
        "the server was launched again 2 times and did not come up, the same way each time: "
        f"model {work / 'model'}: there is no such folder; give that of a downloaded model on the host"
    )
    assert f"layertap: {why}\n" in narration
    told = [event for event in history(layertap) if not event["event"].startswith("trouble")]
    assert [event["event"] for event in told][-6:] == [
        "relaunch", "relaunch_failed", "relaunch", "relaunch_failed", "error", "ended",
    ]  # fmt: skip
    assert told[-2]["reason"] == why
    # Nothing is lost: with the model back, the same command goes on.
    (work / "elsewhere").rename(work / "model")
    layertap.json("launch", "embedded-llama", "--model", work / "model", "--port", port)
    layertap("extract", rows, "--output", output, "--port", port)
    check(layertap, output, 250)
