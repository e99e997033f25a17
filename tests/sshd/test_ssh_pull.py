"""A pull over SSH whose link breaks in the middle of files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_dataset import make_dataset, require_copy
from sshd import Relay, Sshd

from backends.host import Reconnecting
from backends.ssh import SshHost
from console.pull import pull
from console.pull import source as pull_source

CUTS = 5
SIZE = 300_000


@pytest.mark.parametrize("break_it", [Relay.cut, Relay.freeze])
def test_links_that_break_in_the_middle_of_files(
    sshd: Sshd,
    relay: Relay,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    break_it: Callable[[Relay], None],
) -> None:
    """Nothing is missing, and nothing that had come is fetched again."""
    monkeypatch.setattr(pull_source, "CHUNK", 100_000)
    source = make_dataset(tmp_path / "source", size=SIZE)
    target = sshd.target(port=relay.port)

    def dial() -> SshHost:
        relay.thaw()
        return SshHost(target, python=sys.executable, keepalive=0.2, dead_after=1.0)

    host = Reconnecting(dial, first_delay=0.05, longest_delay=0.2)
    real, cut = host.read, []

    def read(path: str, offset: int, most: int = 1 << 20, **rotating: Any) -> Any:
        if offset == 200_000 and len(cut) < CUTS and path not in cut:
            cut.append(path)
            break_it(relay)
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
