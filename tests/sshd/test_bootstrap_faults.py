"""Hosts that are not fit for the agent: each works all the same or gets its own sentence, and keeps nothing half-written."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import until
from sshd import Sshd, User
from tmpfs import fill, small_tmpfs

from backends import payload
from backends.errors import ConnectionFailed, UsageError
from backends.host import Host
from backends.sglang import Overrides, ProfileError, load_profiles
from console.session import Session

PAGE = 4096  # what a small file takes
FULL = "No space left on device; make room there, or have {} name another folder"


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if not path.is_dir()]


def grow(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=50m,nr_inodes=10000", disk], check=True)


def verify_nothing(host: Host) -> dict:
    """Run a job that ends at once, because there is nothing to verify."""
    run = host.request("start", kind="verify", job={"output": "/nothing"})
    return until(lambda: (now := host.request("run", run_id=run["id"]))["exit"] and now, "the job has ended")


# --- A full disk ---


@pytest.mark.parametrize(("size", "options"), [("300k", []), ("50m", ["nr_inodes=20"])], ids=["bytes", "inodes"])
def test_the_payload_does_not_fit(start_sshd: Callable[..., Sshd], tmp_path: Path, size: str, options: list) -> None:
    name, archive = payload.pack()
    assert len(archive) > 300 << 10
    with small_tmpfs(tmp_path / "disk", size, *options) as disk:
        sshd = start_sshd(environment={"XDG_CACHE_HOME": str(disk)})
        with pytest.raises(ConnectionFailed) as failed:
            sshd.connect()
        assert str(failed.value).startswith(f"gpu: {disk}/layertap/payload/")
        assert str(failed.value).endswith(FULL.format("XDG_CACHE_HOME"))
        assert list((disk / "layertap" / "payload").iterdir()) == []
        grow(disk)
        host = sshd.connect()
        assert host.request("hello")["payload_folder"] == f"{disk}/layertap/payload/{name}"
        host.close()


def test_the_home_of_a_user_is_full(users_sshd: Callable[..., Sshd], user: User) -> None:
    user.use_shell("/bin/sh")
    shutil.rmtree(user.home / "cache", ignore_errors=True)
    with small_tmpfs(user.home, "64k") as home:
        shutil.chown(home, user.name)
        filler = fill(home)
        with pytest.raises(ConnectionFailed) as failed:
            users_sshd().connect(f"User {user.name}", python=None)
        assert str(failed.value).startswith(f"gpu: {home}/cache/layertap/payload/")
        assert str(failed.value).endswith(FULL.format("XDG_CACHE_HOME"))
        assert files(home) == [filler]


def test_there_is_no_room_for_the_state_folder(start_sshd: Callable[..., Sshd], tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "disk", "64k", "nr_inodes=1") as disk:
        sshd = start_sshd(environment={"XDG_STATE_HOME": str(disk)})
        with pytest.raises(ConnectionFailed) as failed:
            sshd.connect()
        assert str(failed.value) == f"gpu: {disk}/layertap: {FULL.format('XDG_STATE_HOME')}"
        grow(disk)
        sshd.connect().close()


@pytest.mark.parametrize("pages", range(5))
def test_there_is_no_room_for_a_run(start_sshd: Callable[..., Sshd], tmp_path: Path, pages: int) -> None:
    """Whichever file is the first that does not fit, nothing runs, and nothing is left."""
    with small_tmpfs(tmp_path / "disk", "256k") as disk:
        host = start_sshd(environment={"XDG_STATE_HOME": str(disk)}).connect()
        try:
            filler = fill(disk, leaving=pages * PAGE)
            with pytest.raises(UsageError) as failed:
                verify_nothing(host)
            assert str(failed.value).startswith(f"verify could not be started: {disk}/layertap/runs/verify-")
            assert str(failed.value).endswith(": No space left on device; make room there, or let us write there")
            assert files(disk) == [filler]
            assert host.request("all") == []
            filler.unlink()
            assert verify_nothing(host)["exit"]["code"] == 2
        finally:
            host.close()


def test_there_is_no_room_to_say_how_a_run_ended(start_sshd: Callable[..., Sshd], tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "disk", "256k") as disk:
        host = start_sshd(environment={"XDG_STATE_HOME": str(disk)}).connect()
        try:
            fill(disk, leaving=5 * PAGE)
            run = host.request("start", kind="verify", job={"output": "/nothing"})
            until(lambda: host.request("run", run_id=run["id"])["state"] == "died", "it is seen to be dead")
            assert host.request("run", run_id=run["id"])["exit"] is None
        finally:
            host.close()


# --- Other faults ---


def test_a_home_without_execution(start_sshd: Callable[..., Sshd], tmp_path: Path) -> None:
    """Nothing of ours is executed from there: code is read by a Python that lies elsewhere."""
    with small_tmpfs(tmp_path / "home", "50m", "noexec") as home:
        python = home / "python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        sshd = start_sshd(
            environment={"HOME": str(home), "XDG_CACHE_HOME": f"{home}/.cache", "XDG_STATE_HOME": f"{home}/.state"}
        )
        host = sshd.connect()
        try:
            assert host.request("hello")["payload_folder"].startswith(f"{home}/.cache/")
            assert verify_nothing(host)["result"] == {"error": "/nothing is no dataset: there is no such folder"}
        finally:
            host.close()
        with pytest.raises(ConnectionFailed) as failed:
            sshd.connect(python=str(python))
        assert str(failed.value).startswith(f"gpu: {python} is no program that can be run there; set --python")


def test_a_python_that_is_too_old(sshd: Sshd, tmp_path: Path) -> None:
    """It is given what the real one would be, and says what Python 3.10 says of itself."""
    older = "import sys; sys.version_info = (3, 10, 12, 'final', 0); exec(sys.argv.pop(1))"
    python = tmp_path / "python3.10"
    python.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} -u -c {shlex.quote(older)} "$@"\n')
    python.chmod(0o755)
    with pytest.raises(ConnectionFailed) as failed:
        sshd.connect(python=str(python))
    assert str(failed.value) == (
        f"gpu: {sys.executable} is Python 3.10; SGLang's own Python, 3.11 or newer, is wanted: name it with --python"
    )
    assert not (sshd.home / "cache").exists()


def test_a_python_without_what_sglang_brings(sshd: Sshd, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    with pytest.raises(ConnectionFailed) as failed:
        sshd.connect(python=str(python))
    assert str(failed.value) == f"gpu: {sys.executable}: No module named 'msgspec'; SGLang's own Python is wanted"


def test_an_sglang_that_is_too_old(start_sshd: Callable[..., Sshd], tmp_path: Path) -> None:
    """What needs no server of ours works there; a launch is refused, and starts nothing."""
    metadata = tmp_path / "packages" / "sglang-0.5.10.post1.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.10.post1\n")
    host = start_sshd(environment={"PYTHONPATH": f"{tmp_path}/packages"}).connect()
    try:
        session = Session(host, load_profiles({}))
        assert session.hello["sglang"] == "0.5.10.post1"
        with pytest.raises(ProfileError) as failed:
            session.plan_launch("base", "/model", 30000, Overrides())
        assert str(failed.value) == ("SGLang 0.5.10.post1 has no plugins, which the tap needs: use 0.5.11 or newer")
        assert verify_nothing(host)["exit"]["code"] == 2
    finally:
        host.close()
