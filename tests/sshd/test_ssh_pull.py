"""A pull over SSH whose link is cut in the middle of files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_dataset import make_dataset, require_copy
from sshd import Relay, Sshd

from backends.host import Reconnecting
from console.pull import pull
from console.pull import source as pull_source

CUTS = 5
SIZE = 300_000


def test_cuts_in_the_middle_of_files(sshd: Sshd, relay: Relay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is missing, and nothing that had come is fetched again."""
    monkeypatch.setattr(pull_source, "CHUNK", 100_000)
    source = make_dataset(tmp_path / "source", size=SIZE)
    host = Reconnecting(lambda: sshd.connect(port=relay.port), first_delay=0.05, longest_delay=0.2)
    real, cut = host.read, []

    def read(path: str, offset: int, most: int = 1 << 20, **rotating: Any) -> Any:
        if offset == 200_000 and len(cut) < CUTS and path not in cut:
            cut.append(path)
            relay.cut()
        return real(path, offset, most, **rotating)

    monkeypatch.setattr(host, "read", read)
    try:
        made = pull(host, str(source), tmp_path / "target")
    finally:
        host.close()
    assert len(cut) == CUTS and relay.connections > 1
    assert made.failed == []
    assert made.bytes <= made.fetched_bytes < made.bytes + 10_000  # and the tokens
    require_copy(tmp_path / "target", source, list(range(8)))
