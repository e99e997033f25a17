"""Servers on this machine's GPU; skips aloud where there is none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from engines import Engines, running


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Say at once why a test failed: a machine that is lent for minutes may be gone before pytest does."""
    if report.failed and report.nodeid.startswith("tests/gpu/"):
        print(f"\n{report.nodeid} failed in its {report.when}:\n{report.longreprtext}", flush=True)


@pytest.fixture(scope="session")
def engines() -> Iterator[Engines]:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    with running() as made:
        yield made
