"""Login shells that read a command in their own way, or say something before it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import until
from packages import need
from sshd import Sshd, User

from backends.errors import ConnectionFailed

BANNERS = {
    "bash": (".bashrc", 'echo "Welcome to gpu-7"; printf "ready> "; echo oops >&2'),
    "fish": (".config/fish/config.fish", 'echo "Welcome to gpu-7"; printf "ready> "; echo oops >&2'),
    "tcsh": (".tcshrc", 'echo "Welcome to gpu-7"; printf "ready> "'),
    "csh": (".cshrc", 'echo "Welcome to gpu-7"; printf "ready> "'),
    "zsh": (".zshenv", 'echo "Welcome to gpu-7"; printf "ready> "; echo oops >&2'),
}
PACKAGES = {"csh": "tcsh"}  # by program, where they differ
ODD = ["env", 'ODD=it\'s \\ "$HOME" !! `x` {a,b}\n*']


@pytest.mark.parametrize("shell", ["sh", "dash", *BANNERS])
def test_login_shells(users_sshd: Callable[..., Sshd], user: User, shell: str) -> None:
    """The agent starts, its words are not taken apart, and a banner does no harm."""
    user.use_shell(need(shell, PACKAGES.get(shell, shell)))
    if shell in BANNERS:
        file, text = BANNERS[shell]
        rc = user.home / file
        rc.parent.mkdir(parents=True, exist_ok=True)
        rc.write_text(f"{text}\n")
    host = users_sshd().connect(f"User {user.name}", exec_prefix=ODD, python=None)
    try:
        assert host.request("hello")["user"] == user.name
        until(lambda: len(user.agents()) == 1, "there is one agent, and none of an earlier link")
        assert ODD[1].encode() in Path(f"/proc/{user.agents()[0].pid}/environ").read_bytes().split(b"\0")
    finally:
        host.close()


def test_a_python_below_the_home(users_sshd: Callable[..., Sshd], user: User, users_python: tuple[str, str]) -> None:
    user.use_shell("/bin/sh")
    python = user.home / "my python"
    python.symlink_to(users_python[0])
    host = users_sshd().connect(f"User {user.name}", python="~/my python")
    try:
        assert host.request("hello")["python"] == str(python)
    finally:
        host.close()


def test_a_user_who_may_not_log_in(users_sshd: Callable[..., Sshd], user: User) -> None:
    user.use_shell("/bin/false")
    with pytest.raises(
        ConnectionFailed, match=r"^gpu: the agent ended before it was up; can the Python there be used\?$"
    ):
        users_sshd().connect(f"User {user.name}", python=None)


def test_a_flood_of_text(users_sshd: Callable[..., Sshd], user: User) -> None:
    user.use_shell(need("bash", "bash"))
    (user.home / ".bashrc").write_text("yes\n")
    try:
        with pytest.raises(ConnectionFailed, match=r"^gpu: expected the agent's greeting, got a flood of other text$"):
            users_sshd().connect(f"User {user.name}", python=None)
    finally:
        (user.home / ".bashrc").unlink()


def test_a_home_that_cannot_be_written(users_sshd: Callable[..., Sshd], user: User) -> None:
    user.use_shell("/bin/sh")
    cache = user.home / "cache" / "layertap"
    cache.mkdir(parents=True, exist_ok=True)
    aside = cache.rename(user.home / "aside")
    cache.write_text("in the way")
    try:
        said = f"^gpu: {cache}.*: Not a directory; let us write there, or have XDG_CACHE_HOME name another folder$"
        with pytest.raises(ConnectionFailed, match=said):
            users_sshd().connect(f"User {user.name}", python=None)
    finally:
        cache.unlink()
        aside.rename(cache)
