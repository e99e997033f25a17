"""A start of a real server, recorded by the command that anybody may run on a host, and judged again from its file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.recorded import record
from tests.recorded.replay import Pace, read, replay


@pytest.mark.slow
def test_a_start_is_recorded_and_comes_to_the_same_verdict_again(tmp_path: Path) -> None:
    file = tmp_path / "start.jsonl.gz"
    command = [sys.executable, record.__file__, "embedded-llama", str(file), "--ready", "5"]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    assert "left: nothing" in made.stdout
    told = list(replay(*read(file), Pace()))
    assert told[-1].verdict.verdict == "healthy"
    phases = list(dict.fromkeys(one.phase for one in told))  # short ones pass between two looks of a busy host
    assert phases[-1] == "ready" and len(phases) > 2
