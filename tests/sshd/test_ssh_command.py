"""The command against a host behind sshd: a server's life seen from two machines, logs without a gap, exit codes."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers import FAKE_SGLANG, SLEEP, end_all, until
from remote import Console
from sshd import Keys, Relay, Sshd, User

from backends.errors import UsageError
from backends.ports import free_port
from backends.runs import Run, Runs, machine_id
from backends.sglang import Overrides, load_profiles
from backends.ssh import SshHost
from capture.layers import LayerChoice
from console.session import Session

CUTS = 5


@pytest.fixture
def sshd(start_sshd: Callable[..., Sshd]) -> Iterator[Sshd]:
    """A host that has a fake SGLang."""
    made = start_sshd(environment={"PYTHONPATH": str(FAKE_SGLANG)})
    yield made
    end_all(made.home / "state" / "layertap")


@pytest.fixture
def profile(tmp_path: Path) -> str:
    """The fake server's table of layertap.toml."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"hidden_size": 8, "dtype": "bfloat16"}')
    return f'[profile.fake]\nmodel = "{tmp_path}/model"\nlayers = {{ outputs = [2] }}\n'


@pytest.fixture
def consoles(sshd: Sshd, relay: Relay, tmp_path: Path, profile: str) -> Callable[[str], Console]:
    """Makes a console, on a machine of its own, whose links go over the relay."""
    return lambda name: Console(tmp_path / name, sshd, sys.executable, port=relay.port, tables=profile)


@pytest.fixture
def console(consoles: Callable[[str], Console]) -> Console:
    return consoles("here")


# --- A server's life ---


def test_a_server_is_launched_here_and_adopted_elsewhere(console: Console, consoles: Callable[[str], Console]) -> None:
    run = console.json("launch", "fake", "--port", free_port(), "--detach")
    assert console.narration.startswith(f"launched {run['id']} on port ")
    elsewhere = consoles("elsewhere")
    until(lambda: "fired up" in elsewhere("logs"), "it is up")
    seen = elsewhere.json("status")
    assert (seen["server"]["id"], seen["server"]["verdict"]["verdict"]) == (run["id"], "healthy")
    assert seen["link"]["state"] == "live"
    assert elsewhere("logs") == console("logs")
    assert elsewhere.json("stop", run["id"])["left"] == []
    assert console.json("status", code=9)["server"]["verdict"]["verdict"] == "stopped"
    told = console.json("runs", run["id"])["events"]
    assert [event["event"] for event in told] == ["started", "stop_asked", "ended", "stopped"]


def test_two_consoles_launch_on_one_port(console: Console, consoles: Callable[[str], Console]) -> None:
    port = free_port()
    both = [console, consoles("elsewhere")]
    with ThreadPoolExecutor(2) as pool:
        begun = [one.start("launch", "fake", "--port", port, "--detach") for one in both]
        said = list(pool.map(lambda one: one.communicate(timeout=120), begun))
    assert sorted(one.returncode for one in begun) == [0, 7], said
    assert [run["state"] for run in console.json("runs")["runs"]] == ["running"]


# --- What goes on while links break ---


def test_a_log_is_followed_over_cuts_and_a_rotation(console: Console, relay: Relay) -> None:
    """Every line comes once and in order, be it a megabyte long or no text at all."""
    run = console.json("launch", "fake", "--port", free_port(), "--env", "FAKE=silent", "--detach")
    log = Path(run["log"])
    following = console.start("logs", "--follow")
    assert following.stdout is not None
    assert "server_args=" in following.stdout.readline()
    read = (line for line in iter(following.stdout.readline, "") if line.startswith("line "))
    written = [b"line %d " % number + b"x" * 100_000 + b"\xff\x00" for number in range(CUTS)]
    written.append(b"line of a megabyte " + b"y" * (1 << 20))
    for number, line in enumerate(written):
        with log.open("ab") as file:
            file.write(line + b"\n")
        if number == 2:  # somebody may be in the middle of it
            log.rename(log.with_name(f"{log.name}.1"))
        if number < CUTS:
            relay.cut()
        assert next(read) == f"{line.decode(errors='replace')}\n"
    assert relay.connections > CUTS
    following.send_signal(signal.SIGINT)
    _, said = following.communicate(timeout=60)
    assert (following.returncode, said) == (130, "the log was rotated, 0 bytes of it are gone\n")


def freeze(relay: Relay) -> None:
    """Until the watchdog has noticed, and the link is dialled again."""
    before = relay.connections
    relay.freeze()
    until(lambda: relay.connections > before, "it dials again", 90)
    relay.thaw()


def test_a_log_is_followed_over_a_freeze(console: Console, relay: Relay) -> None:
    run = console.json("launch", "fake", "--port", free_port(), "--env", "FAKE=silent", "--detach")
    following = console.start("logs", "--follow")
    assert following.stdout is not None
    assert "server_args=" in following.stdout.readline()
    relay.freeze()
    with Path(run["log"]).open("a") as file:
        file.writelines(f"line {number}\n" for number in range(1000))
    freeze(relay)
    read = (line for line in iter(following.stdout.readline, "") if line.startswith("line "))
    assert [next(read) for _ in range(1000)] == [f"line {number}\n" for number in range(1000)]
    following.send_signal(signal.SIGINT)
    _, said = following.communicate(timeout=60)
    assert (following.returncode, said) == (130, "")


def test_a_launch_is_followed_over_a_freeze(console: Console, relay: Relay) -> None:
    launching = console.start("launch", "fake", "--port", free_port(), "--json")
    assert launching.stderr is not None
    assert launching.stderr.readline().startswith("launched server-")
    freeze(relay)
    said, narration = launching.communicate(timeout=120)
    assert launching.returncode == 0, narration
    assert json.loads(said)["verdict"]["verdict"] == "healthy"


def test_a_status_is_watched_over_cuts(console: Console, relay: Relay) -> None:
    run = console.json("launch", "fake", "--port", free_port(), "--detach")
    watching = console.start("status", "--watch", "--json")
    assert watching.stdout is not None

    def states_until(state: str) -> set[str]:
        seen: set[str] = set()
        while state not in seen:
            now = json.loads(watching.stdout.readline())
            assert now["server"]["id"] == run["id"]  # what was heard last stays, however the link is
            seen.add(now["link"]["state"])
        return seen

    assert states_until("live") == {"live"}
    relay.refuses = True
    relay.cut()
    states_until("reconnecting")
    relay.refuses = False
    assert states_until("live") <= {"live", "reconnecting", "connecting"}
    while json.loads(watching.stdout.readline())["server"]["verdict"]["verdict"] != "healthy":
        pass
    watching.send_signal(signal.SIGINT)
    _, said = watching.communicate(timeout=60)
    assert (watching.returncode, said) == (130, "")


# --- Hosts, and what is refused ---


def test_hosts(console: Console) -> None:
    with console.config.open("a") as config:
        config.write('[host.down]\nssh = "nowhere.invalid"\n')
    (console.folder / ".ssh").mkdir()
    (console.folder / ".ssh" / "config").write_text("Host lab-7 *.lab\nHostName nowhere-else.invalid\n")
    hosts = {host["name"]: host for host in console.json("hosts", "--python", sys.executable)["hosts"]}
    assert list(hosts) == ["local", "gpu", "down", "lab-7"]
    gpu, down = hosts["gpu"], hosts["down"]
    assert (gpu["state"], gpu["sglang"], gpu["why"]) == ("live", "0.5.23", None)
    assert (hosts["local"]["state"], hosts["local"]["sglang"]) == ("live", None)
    assert (down["state"], down["sglang"], down["gpus"]) == ("failed", None, None)
    assert "cannot find nowhere.invalid" in down["why"]
    assert "\n+ gpu                  SGLang 0.5.23 · " in console("hosts", "--python", sys.executable)


def test_a_host_is_examined_and_its_clock_compared_with_ours(console: Console, sshd: Sshd) -> None:
    report = console.json("doctor", "--output", "/data/hs", "--port", free_port())
    checks = {check["id"]: check for check in report["checks"]}
    assert checks["sglang.version"]["status"] == "pass"
    assert checks["link.clock"]["status"] == "pass"
    assert checks["disks.state"]["seen"].startswith(f"{sshd.home}/state/layertap: ")
    assert checks["disks.output"]["seen"].startswith("/data/hs: ")


def test_a_host_key_that_is_not_known(console: Console, sshd: Sshd, keys: Keys) -> None:
    sshd.known_hosts.write_text("")
    right, wrong = keys.fingerprint("host"), keys.fingerprint("other")
    assert console("runs", code=5) == ""
    assert console.narration.startswith("layertap: gpu: ") and f"--accept-new-host-key {right}" in console.narration
    console("runs", "--accept-new-host-key", wrong, code=5)
    console("runs", "--accept-new-host-key", right)
    assert f"{right} of " in console.narration
    console("runs")
    assert console.narration == ""
    sshd.know("other")
    console("runs", "--accept-new-host-key", right, code=5)
    assert "is not the one in" in console.narration


def test_a_host_that_does_not_let_one_in(console: Console, sshd: Sshd) -> None:
    sshd.authorized_keys.write_text("")
    assert console("runs", code=3) == ""
    assert console.narration.startswith("layertap: gpu: ")


# --- Odd hosts ---


def test_a_host_that_ends_what_is_left_at_logout(sshd: Sshd, tmp_path: Path, profile: str) -> None:
    """As logind does with KillUserProcesses=yes: it is said before a server is launched there."""
    (tmp_path / "cgroup").write_text("0::/user.slice/user-0.slice/session-4.scope\n")
    for name, says in (("busctl", "b true"), ("loginctl", "no")):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\necho {says}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    script = f'mount --bind {tmp_path}/cgroup /proc/$$/cgroup && PATH={tmp_path}/bin:$PATH exec "$@"'
    prefix = ["unshare", "--mount", "sh", "-c", script, "sh"]
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        pytest.skip("/proc/self/cgroup cannot be replaced in a namespace here")
    console = Console(tmp_path / "here", sshd, sys.executable, tables=f"exec_prefix = {json.dumps(prefix)}\n{profile}")
    console("launch", "fake", "--port", free_port(), "--detach")
    assert console.narration.startswith(
        "warning: this host ends all processes of a user who logs out (KillUserProcesses=yes), and so our runs with "
        "the link: have `loginctl enable-linger "
    )


def test_the_whole_life_of_a_server_as_a_plain_user(
    users_sshd: Callable[..., Sshd], user: User, users_python: tuple[str, str]
) -> None:
    """Everything is the user's, and nothing needs more than that."""
    user.use_shell("/bin/sh")
    packages = Path(users_python[1])
    shutil.copytree(FAKE_SGLANG, packages, dirs_exist_ok=True)
    host = users_sshd().connect(f"User {user.name}", python=None)
    try:
        port, model = host.request("free_port"), user.home / "model"
        model.mkdir()
        (model / "config.json").write_text('{"hidden_size": 8, "dtype": "bfloat16"}')
        session = Session(host, load_profiles({"fake": {"model": str(model)}}), f"{user.home}/dumps")
        run = session.launch(session.plan_launch("fake", None, port, Overrides()), LayerChoice(outputs=[2]))
        healthy = until(lambda: (now := session.status(run["id"]))["verdict"]["verdict"] == "healthy" and now)
        processes = host.request("sample", run_id=run["id"])["processes"]
        assert processes and healthy["tap"]["inside"]
        folders = [Path(run["folder"]), Path(run["dump_dir"]), Path(session.hello["payload_folder"])]
        assert {folder.owner() for folder in folders} == {user.name}
        assert session.stop(run["id"], "enough")["left"] == []
        assert not folders[1].exists()
    finally:
        host.close()
        for entry in FAKE_SGLANG.iterdir():
            shutil.rmtree(packages / entry.name)


# --- A home that several machines share ---


def test_a_home_that_two_machines_share(sshd: Sshd, tmp_path: Path) -> None:
    """A run of the other one is seen to be elsewhere, neither dead nor ours to stop."""
    (tmp_path / "machine-id").write_text("fedcba9876543210fedcba9876543210\n")
    other = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        'mount --bind "$0" /etc/machine-id && exec "$@"',
        f"{tmp_path}/machine-id",
    ]
    if subprocess.run([*other, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no other machine can be made up here: /etc/machine-id cannot be replaced in a namespace")
    run: Run = Runs(sshd.home / "state" / "layertap").start("verify", SLEEP, {}, code="")
    here, there = sshd.connect(), SshHost(sshd.target(), python=sys.executable, exec_prefix=other)
    try:
        assert there.request("hello")["machine"] == "fedcba987654" != here.request("hello")["machine"] == machine_id()
        assert there.request("hello")["payload_folder"] == here.request("hello")["payload_folder"]
        assert [one["state"] for one in there.request("all")] == ["elsewhere"]
        with pytest.raises(UsageError) as failed:
            there.request("stop", run_id=run.id)
        assert str(failed.value) == f"{run.id} runs on another machine that shares this home; stop it from there"
        assert here.request("run", run_id=run.id)["state"] == "running"
        assert here.request("stop", run_id=run.id)["left"] == []
        assert there.request("run", run_id=run.id)["state"] == "exited"
    finally:
        here.close()
        there.close()
