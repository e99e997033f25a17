"""What tests look at when an extraction is over."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from command import Layertap


def check(layertap: Layertap, output: Path, samples: int, formats: tuple[str, ...] = ("native",)) -> None:
    """The dataset holds exactly `samples` samples, each once a format, and all verify."""
    report = layertap.json("verify", output)
    assert (report["samples"], report["verified"], report["failed"], report["failures"]) == (samples, samples, 0, [])
    assert report["total"] == samples
    for name in formats:
        files = [path for path in (output / name).rglob("*") if path.is_file()]
        assert len(files) == samples
    with sqlite3.connect(output / "ledger.sqlite") as ledger:
        assert ledger.execute("SELECT count(*) FROM files").fetchone() == (samples * len(formats),)
        assert ledger.execute("SELECT DISTINCT state FROM samples").fetchall() == [("written",)]


def history(layertap: Layertap) -> list[dict[str, Any]]:
    """What happened to the newest extraction."""
    return layertap.json("runs", layertap.run_of("extract")["id"])["events"]
