"""Servers, relays and users for the tests over SSH. Without OpenSSH they are skipped, and say so."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from demo import ENGINE
from packages import ROOT, need
from remote import Console
from sshd import Keys, Relay, Sshd, User


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    need("ssh-keygen", "openssh-client")
    return Keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture
def start_sshd(tmp_path: Path, keys: Keys) -> Iterator[Callable[..., Sshd]]:
    """Starts a server; options of sshd_config by name, and what its sessions find in the environment."""
    need("sshd", "openssh-server")
    if ROOT:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    started: list[Sshd] = []

    def start(*, environment: dict[str, str] | None = None, **options: str) -> Sshd:
        started.append(Sshd(tmp_path / f"sshd{len(started)}", keys, options, environment or {}))
        return started[-1]

    yield start
    for sshd in started:
        sshd.stop()


@pytest.fixture
def sshd(start_sshd: Callable[..., Sshd]) -> Sshd:
    return start_sshd()


@pytest.fixture
def relay(sshd: Sshd) -> Iterator[Relay]:
    made = Relay(sshd.port)
    yield made
    made.close()


@pytest.fixture(scope="session")
def user() -> Iterator[User]:
    """Somebody with a password and a login shell of his own."""
    if not ROOT:
        pytest.skip("needs root, to make a user")
    with tempfile.TemporaryDirectory(prefix="layertap-") as folder:
        os.chmod(folder, 0o755)
        made = User(Path(folder) / "home")
        try:
            made.create()
            yield made
        finally:
            made.delete()


@pytest.fixture(scope="session")
def users_python(user: User) -> tuple[str, str]:
    """A Python that this user may run, and the PYTHONPATH with which it has what SGLang's environment has."""
    packages = user.home.parent / "packages"
    for name in ("msgspec", "psutil"):
        spec = importlib.util.find_spec(name)
        assert spec and spec.origin
        shutil.copytree(Path(spec.origin).parent, packages / name)
    for python in (sys.executable, "/usr/bin/python3"):
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            subprocess.run(
                [python, "-c", "import sys; assert sys.version_info >= (3, 11); import msgspec, psutil"],
                user=user.name,
                env={"PYTHONPATH": str(packages)},
                cwd="/",
                check=True,
                capture_output=True,
            )
            return python, str(packages)
    return pytest.skip("no Python here can be run by another user")


@pytest.fixture
def users_sshd(
    start_sshd: Callable[..., Sshd], user: User, users_python: tuple[str, str], keys: Keys
) -> Callable[..., Sshd]:
    """Starts a server on which `user` has the key `id`, a password, and a Python to be found."""
    python, packages = users_python
    authorized_keys = user.home.parent / "authorized_keys"  # read as the user
    authorized_keys.write_text(keys.public("id").read_text())
    environment = {
        "XDG_STATE_HOME": f"{user.home}/state",
        "XDG_CACHE_HOME": f"{user.home}/cache",
        "PYTHONPATH": packages,
        "LAYERTAP_PYTHON": python,
    }
    return lambda **options: start_sshd(environment=environment, AuthorizedKeysFile=str(authorized_keys), **options)


@pytest.fixture
def engine_console(sshd: Sshd, relay: Relay, tmp_path: Path) -> Iterator[Console]:
    """The command, on a host with the embedded engine behind a relay; servers that it leaves are stopped."""
    if not ENGINE.exists():
        pytest.skip(f"{ENGINE} is not there: `make engine` sets the embedded engine up")
    made = Console(tmp_path / "console", sshd, ENGINE, port=relay.port)
    yield made
    for run in made.json("runs")["runs"]:
        if run["kind"] == "server" and run["state"] == "running":
            made.json("stop", run["id"])
