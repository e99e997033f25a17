"""A launch as the session follows it: what settles it, what does not, and the exit code that it comes to."""

from __future__ import annotations

from typing import Any

import pytest

from backends.errors import ExitCode
from console import headless, session
from console.session import Session


class Told:
    """A host whose server goes through these states."""

    def __init__(self, *states: dict[str, Any]) -> None:
        self.states = list(states)

    def request(self, method: str, **_: Any) -> Any:
        return {} if method == "hello" else self.states.pop(0)


def status(verdict: str, health: int | None = None, phase: str = "weights", tap: bool = True) -> dict[str, Any]:
    return {"verdict": {"verdict": verdict}, "health": health, "phase": phase, "tap": {"inside": tap}}


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


@pytest.mark.parametrize(
    ("last", "code"),
    [
        (status("healthy", 200, "ready"), ExitCode.OK),
        (status("degraded", 200, "ready"), ExitCode.OK),
        (status("degraded", 503, "ready"), ExitCode.TIMEOUT),
        (status("degraded", None, "ready"), ExitCode.TIMEOUT),
        (status("unknown", None, "ready"), ExitCode.TIMEOUT),
        (status("starting"), ExitCode.TIMEOUT),
        (status("slow_but_fine"), ExitCode.TIMEOUT),
        (status("hang_suspected"), ExitCode.TIMEOUT),
        (status("unknown", 200, "ready", tap=False), ExitCode.NOT_READY),
        (status("crashed"), ExitCode.NOT_READY),
        (status("stopped"), ExitCode.NOT_READY),
    ],
)
def test_what_a_launch_comes_to(last: dict[str, Any], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert headless.ready_code(last, 5.0) == code
    goes_on = "not ready after 5 s; it goes on, `layertap status --watch` follows it\n"
    assert capsys.readouterr().err == (goes_on if code == ExitCode.TIMEOUT else "")
