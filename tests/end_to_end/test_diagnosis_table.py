"""Real faults on the embedded engine against what Layertap says of them; `python -m tests.diagnosis_table` shows it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from command import ENGINE, ROOT


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_every_fault_is_told_right() -> None:
    if not ENGINE.exists():
        pytest.skip(f"{ENGINE} is not there: `make engine` sets the embedded engine up")
    command = [sys.executable, "-m", "tests.diagnosis_table", "--json"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2900, check=False)
    table = json.loads(made.stdout)["table"]
    assert any(line["right"] for line in table), made.stderr
    assert [json.dumps(line, indent=1) for line in table if line["right"] is False] == []
