"""A launch as the session follows it: what settles it, and what does not."""

from __future__ import annotations

from typing import Any

import pytest

from console import session
from console.session import Session


class Told:
    """A host whose server goes through these states."""

    def __init__(self, *states: dict[str, Any]) -> None:
        self.states = list(states)

    def request(self, method: str, **_: Any) -> Any:
        return {} if method == "hello" else self.states.pop(0)


def status(verdict: str, health: int | None = None, phase: str = "weights") -> dict[str, Any]:
    return {"verdict": {"verdict": verdict}, "health": health, "phase": phase, "tap": {"inside": True}}


@pytest.mark.parametrize(
    "last",
    [status("healthy", 200, "ready"), status("crashed"), status("stopped"), status("degraded", 200, "ready")],
)
def test_a_hang_is_followed_until_it_is_settled(last: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "POLL_SECONDS", 0.0)
    going_on = [
        status("starting"),
        status("slow_but_fine"),
        status("hang_suspected"),
        status("unknown"),
        status("degraded", 503, "ready"),
    ]
    host = Told(*going_on, last, status("never asked"))
    seen = [now["verdict"]["verdict"] for now in Session(host, {}).follow_launch("server-1", 60.0)]
    assert seen == ["starting", "slow_but_fine", "hang_suspected", "unknown", "degraded", last["verdict"]["verdict"]]
