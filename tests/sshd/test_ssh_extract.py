"""An extraction on a host behind sshd whose link is cut twenty times, with a second console looking on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from demo import ENGINE
from helpers import free_port, until
from remote import Console
from sshd import Relay, Sshd

CUTS = 20
ROWS = 3000


@pytest.fixture
def console(sshd: Sshd, relay: Relay, tmp_path: Path) -> Iterator[Console]:
    if not ENGINE.exists():
        pytest.skip(f"{ENGINE} is not there: `make engine` sets the embedded engine up")
    made = Console(tmp_path / "console", sshd, ENGINE, port=relay.port)
    yield made
    for run in made.json("runs")["runs"]:
        if run["kind"] == "server" and run["state"] == "running":
            made.json("stop", run["id"])


def write_rows(path: Path) -> Path:
    rows = ({"input_ids": [9 + (7 * i + j) % 1000 for j in range(40)], "loss_mask": [1] * 40} for i in range(ROWS))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
def test_twenty_cuts_lose_and_double_nothing(console: Console, relay: Relay, tmp_path: Path) -> None:
    port, output = free_port(), tmp_path / "out"
    server = console.json("launch", "embedded-llama", "--port", port)
    assert server["verdict"]["verdict"] == "healthy"
    rows = write_rows(tmp_path / "rows.jsonl")
    extraction = console.start("extract", rows, "--output", output, "--json", "--watch")
    assert extraction.stdout is not None
    lines = iter(extraction.stdout)
    for _ in range(CUTS):
        assert next(lines)  # the link works: a line of progress came over it
        before = relay.connections
        relay.cut()
        until(lambda before=before: relay.connections > before, "it dials again")  # type: ignore[misc]
    other = console.json("status")  # a second console, while the first one goes on
    assert other["extraction"]["details"]["output"] == str(output)
    last = [*lines][-1]
    assert extraction.wait(120) == 0
    assert (json.loads(last)["written"], json.loads(last)["failed"]) == (ROWS, 0)
    report = console.json("verify", output)
    assert (report["samples"], report["verified"], report["failed"]) == (ROWS, ROWS, 0)
    files = [int(path.stem) for path in output.glob("native/*/*.safetensors")]
    assert sorted(files) == list(range(ROWS))
