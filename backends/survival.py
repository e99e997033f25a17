"""Will what is started here outlive the session that starts it?

systemd-logind ends every process of a login session when its user logs out, where KillUserProcesses is on and the user
does not linger. Nothing is changed here, only said.
"""

from __future__ import annotations

import getpass
import subprocess
from pathlib import Path

LOGIND = ("org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager", "KillUserProcesses")
SECONDS = 3.0


def danger(cgroup: str | None = None) -> str | None:
    """Why runs would end with this session, and what to do; None where they outlive it, or where that is not known.

    `cgroup` is this process's /proc/self/cgroup.
    """
    if "session-" not in (_own_cgroup() if cgroup is None else cgroup):
        return None  # a container, a service, a session without logind
    if _says("busctl", "get-property", *LOGIND) != "b true":
        return None
    user = getpass.getuser()
    if _says("loginctl", "show-user", user, "--property=Linger", "--value") == "yes":
        return None
    return (
        "this host ends all processes of a user who logs out (KillUserProcesses=yes), and so our runs with the link: "
        f"have `loginctl enable-linger {user}` run there once"
    )


def _own_cgroup() -> str:
    try:
        return Path("/proc/self/cgroup").read_text()
    except OSError:
        return ""


def _says(*words: str) -> str:
    """What a command prints, nothing where it fails or is not there."""
    try:
        ran = subprocess.run(
            words, capture_output=True, text=True, timeout=SECONDS, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ran.stdout.strip() if ran.returncode == 0 else ""
