"""An extraction on a host behind sshd whose link is cut twenty times and frozen once; a second console looks on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import until
from remote import Console, write_rows
from sshd import Relay

from backends.ports import free_port

CUTS = 20
ROWS = 6000  # more than are drawn by the time that the link has been frozen


@pytest.mark.slow
def test_twenty_cuts_lose_and_double_nothing(engine_console: Console, relay: Relay, tmp_path: Path) -> None:
    port, output = free_port(), tmp_path / "out"
    server = engine_console.json("launch", "embedded-llama", "--port", port)
    assert server["verdict"]["verdict"] == "healthy"
    rows = write_rows(tmp_path / "rows.jsonl", ROWS)
    extraction = engine_console.start("extract", rows, "--output", output, "--json", "--watch")
    assert extraction.stdout is not None
    lines = iter(extraction.stdout)
    for _ in range(CUTS):
        assert next(lines)  # the link works: a line of progress came over it
        before = relay.connections
        relay.cut()
        until(lambda before=before: relay.connections > before, "it dials again")  # type: ignore[misc]
    assert next(lines)
    before = relay.connections
    relay.freeze()  # nobody says that anything is wrong
    until(lambda: relay.connections > before, "the watchdog has noticed, and it dials again", 90)
    relay.thaw()
    other = engine_console.json("status")  # a second console, while the first one goes on
    assert other["extraction"]["details"]["output"] == str(output)
    last = [*lines][-1]
    assert extraction.wait(120) == 0
    assert (json.loads(last)["written"], json.loads(last)["failed"]) == (ROWS, 0)
    report = engine_console.json("verify", output)
    assert (report["samples"], report["verified"], report["failed"]) == (ROWS, ROWS, 0)
    files = [int(path.stem) for path in output.glob("native/*/*.safetensors")]
    assert sorted(files) == list(range(ROWS))
