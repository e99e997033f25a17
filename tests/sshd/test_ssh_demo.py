"""The whole of the demo over SSH, with the link cut on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
from demo import ENGINE, run_demo
from sshd import Sshd


@pytest.mark.slow
def test_cut_links_lose_nothing_of_the_demo(sshd: Sshd, tmp_path: Path) -> None:
    if not ENGINE.exists():
        pytest.skip(f"{ENGINE} is not there: `make engine` sets the embedded engine up")
    outcome = run_demo(tmp_path / "demo")
    assert outcome.line.startswith("demo: 24 samples written, 24 verified, 0 failed; ")
    assert (outcome.cuts, outcome.log_bytes_missing, outcome.samples_lost, outcome.duplicated) == (3, 0, 0, 0)
