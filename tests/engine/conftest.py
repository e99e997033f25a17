"""The embedded engine's servers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from engines import Engines, running


@pytest.fixture(scope="session")
def engines() -> Iterator[Engines]:
    with running() as made:
        yield made
