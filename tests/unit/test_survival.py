"""Whether a logout would end what was started."""

from __future__ import annotations

import getpass
from pathlib import Path

import pytest

from backends import survival

SESSION = "0::/user.slice/user-1000.slice/session-4.scope\n"
SERVICE = "0::/system.slice/docker-abc.scope\n"


@pytest.fixture
def logind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH; what busctl and loginctl print there is up to the test."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def program(folder: Path, name: str, prints: str, code: int = 0) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{prints}'\nexit {code}\n")
    path.chmod(0o700)


def test_a_session_that_is_cleaned_up_is_said_with_the_remedy(logind: Path) -> None:
    program(logind, "busctl", "b true")
    program(logind, "loginctl", "no")
    assert survival.danger(SESSION) == (
        "this host ends all processes of a user who logs out (KillUserProcesses=yes), and so our runs with the link: "
        f"have `loginctl enable-linger {getpass.getuser()}` run there once"
    )


def test_lingering_users_services_and_mild_hosts_are_safe(logind: Path) -> None:
    program(logind, "busctl", "b true")
    program(logind, "loginctl", "yes")
    assert survival.danger(SESSION) is None
    program(logind, "loginctl", "no")
    assert survival.danger(SERVICE) is None
    program(logind, "busctl", "b false")
    assert survival.danger(SESSION) is None


def test_what_cannot_be_asked_is_not_alarmed_about(logind: Path) -> None:
    assert survival.danger(SESSION) is None
    program(logind, "busctl", "b true", code=1)
    assert survival.danger(SESSION) is None
