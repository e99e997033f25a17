"""The command, and a server for it."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command import ENGINE, Layertap

from backends.ports import free_port


@pytest.fixture(scope="session")
def layertap() -> Iterator[Layertap]:
    if not ENGINE.exists():
        pytest.skip(f"{ENGINE} is not there: `make engine` sets the embedded engine up")
    folder = Path(tempfile.mkdtemp(prefix="layertap-tests-"))
    made = Layertap(folder)
    try:
        yield made
    finally:
        for run in made.runs():
            if run["state"] in ("running", "starting") or (run["dump_dir"] and Path(run["dump_dir"]).exists()):
                made("stop", run["id"], code=None)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def port() -> int:
    return free_port()


@pytest.fixture
def server(layertap: Layertap, port: int) -> dict[str, Any]:
    """A tiny Llama with the tap in it: the one that runs, started where there is none, or none any more."""
    now = json.loads(layertap("status", "--port", port, "--json", code=None) or "{}").get("server")
    if now is None or now["verdict"]["verdict"] != "healthy":
        now = layertap.json("launch", "embedded-llama", "--port", port)
        assert now["verdict"]["verdict"] == "healthy", now
    return dict(now)


@pytest.fixture
def work(layertap: Layertap, request: pytest.FixtureRequest) -> Path:
    """A folder of a test's own, on disk."""
    folder = layertap.folder / str(request.node.name).replace("/", "_")
    folder.mkdir()
    return folder
