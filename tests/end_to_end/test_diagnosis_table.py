"""Real faults on the embedded engine against what Layertap says of them; `python -m tests.diagnosis_table` shows it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from command import ENGINE, ROOT


def wrong(*options: str, seconds: float) -> list[str]:
    """The lines of the table that are wrong."""
    if not ENGINE.exists():
        pytest.skip(f"{ENGINE} is not there: `make engine` sets the embedded engine up")
    command = [sys.executable, "-m", "tests.diagnosis_table", "--json", *options]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
    table = json.loads(made.stdout)["table"]
    assert any(line["right"] for line in table), made.stderr
    return [json.dumps(line, indent=1) for line in table if line["right"] is False]


@pytest.mark.timeout(1000)
def test_what_is_told_at_once() -> None:
    assert wrong("--short", seconds=950) == []


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_whole_table() -> None:
    assert wrong(seconds=2900) == []
