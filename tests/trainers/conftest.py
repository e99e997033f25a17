"""A dataset out of the embedded engine, in native, and all the other formats exported from it."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "end_to_end"))

from command import ENGINE, ROOT, Layertap, write_rows
from drawn import DRAFT, FORMATS, SAMPLES, Drawn

from backends.ports import free_port


@pytest.fixture(scope="session")
def drawn() -> Iterator[Drawn]:
    if not ENGINE.exists():
        pytest.skip(f"{ENGINE} is not there: `make engine` sets the embedded engine up")
    folder = Path(tempfile.mkdtemp(prefix="layertap-trainers-"))
    layertap, port = Layertap(folder), free_port()
    layertap.command = [str(ROOT / ".venv" / "bin" / "layertap")]
    try:
        server = layertap.json("launch", "embedded-llama", "--port", port)
        try:
            rows = write_rows(folder / "rows.jsonl", SAMPLES)
            layertap("extract", rows, "--output", folder / "native")
        finally:
            layertap("stop", "--port", port, code=None)
        made = layertap.json("export", folder / "native", "--format", ",".join(FORMATS), "--output", folder / "exports")
        assert (made["written"], made["failed"]) == (SAMPLES, 0)
        with_maps = ("--format", "specforge,speculators", "--draft-vocab", DRAFT)
        layertap("export", folder / "native", *with_maps, "--output", folder / "exports")
        yield Drawn(folder / "native", folder / "exports", Path(server["details"]["model"]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def environments(pytestconfig: pytest.Config) -> Path:
    """Where environments are kept from one run to the next."""
    return pytestconfig.cache.mkdir("trainers")
