"""What all tests of screens share."""

from __future__ import annotations

import pytest
from textual.widgets import Input


@pytest.fixture(autouse=True)
def no_cursor_blinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture is the same whenever it is taken."""
    monkeypatch.setattr(Input, "_toggle_cursor", lambda self: None)
