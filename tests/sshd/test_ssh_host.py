"""The agent over SSH: everything that works on this machine works there, whatever lies in between."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, gone, until
from sshd import Relay, Sshd

from backends import payload
from backends.errors import ConnectionFailed, RunDied, UsageError
from backends.ssh import SshHost
from backends.ssh.connection import _connect
from backends.ssh.host import DEAD_SECONDS, KEEPALIVE_SECONDS

QUICK = {"keepalive": 0.2, "dead_after": 2.0}


@pytest.fixture
def host(sshd: Sshd) -> Iterator[SshHost]:
    made = sshd.connect()
    yield made
    made.close()


@pytest.fixture
def closing() -> Iterator[Callable[[SshHost], SshHost]]:
    """Closes what it is given at the end."""
    made: list[SshHost] = []

    def close_later(host: SshHost) -> SshHost:
        made.append(host)
        return host

    yield close_later
    for host in made:
        host.close()


@pytest.fixture
def stuck(tmp_path: Path) -> str:
    """A file that cannot be opened before somebody writes to it."""
    os.mkfifo(tmp_path / "stuck")
    return str(tmp_path / "stuck")


# --- The agent ---


def test_a_round_trip(host: SshHost, sshd: Sshd) -> None:
    hello = host.request("hello")
    assert hello["python"] == sys.executable
    assert hello["state"] == f"{sshd.home}/state/layertap"
    assert hello["payload"] == payload.pack()[0]
    assert (host.name, host.state.state, host.state.notes) == ("gpu", "live", [])
    assert host.state.heard_age is not None and host.state.heard_age < 60


def test_what_the_agent_meets_comes_back_as_it_was(host: SshHost) -> None:
    with pytest.raises(UsageError, match="/none: No such file or directory"):
        host.read("/none", 0)
    with pytest.raises(RunDied, match="no server of ours runs here"):
        host.request("server")


def test_a_long_line_and_any_bytes(host: SshHost, tmp_path: Path) -> None:
    data = b"x" * (1 << 20) + b"\r\n\x00\xff" + os.urandom(3 << 20)
    (tmp_path / "log").write_bytes(data)
    found, body = host.read(f"{tmp_path}/log", 0, 16 << 20)
    assert (found["size"], body) == (len(data), data)
    assert host.read(f"{tmp_path}/log", (1 << 20) + 2, 2)[1] == b"\x00\xff"


def test_many_threads_ask_at_once(host: SshHost, tmp_path: Path) -> None:
    for number in range(50):
        (tmp_path / f"{number}").write_bytes(b"%d" % number * 50_000)
    with ThreadPoolExecutor(8) as pool:
        bodies = list(pool.map(lambda number: host.read(f"{tmp_path}/{number}", 0)[1], range(50)))
    assert bodies == [b"%d" % number * 50_000 for number in range(50)]


def test_the_payload_goes_over_once(sshd: Sshd, relay: Relay) -> None:
    _, archive = payload.pack()
    sshd.connect(port=relay.port).close()
    first = relay.sent
    assert first > len(archive)
    sshd.connect(port=relay.port).close()
    assert relay.sent - first < len(archive)
    assert [path.name for path in (sshd.home / "cache/layertap/payload").iterdir()] == [payload.pack()[0]]


def test_the_agent_ends_with_its_link(sshd: Sshd) -> None:
    host = sshd.connect()
    until(lambda: sshd.agents(), "the agent runs")
    [agent] = sshd.agents()
    host.close()
    until(lambda: gone(agent.pid), "the agent ended")
    with pytest.raises(ConnectionFailed, match=r"^gpu: closed$"):
        host.request("hello")


def test_an_agent_that_is_killed(sshd: Sshd, closing: Callable[[SshHost], SshHost]) -> None:
    host = closing(sshd.connect())
    until(lambda: sshd.agents(), "the agent runs")
    for agent in sshd.agents():
        agent.kill()
    assert host.ended.wait(60)
    assert (host.state.state, host.state.why) == ("failed", "the agent ended")


def test_much_on_stderr_stops_nothing(sshd: Sshd, tmp_path: Path, closing: Callable[[SshHost], SshHost]) -> None:
    noisy = script(tmp_path / "python", f'head -c 30000000 /dev/zero >&2; exec {sys.executable} "$@"')
    assert closing(sshd.connect(python=noisy)).request("all") == []


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


# --- Which Python ---


def test_the_python_of_the_host_s_environment(
    start_sshd: Callable[..., Sshd], closing: Callable[[SshHost], SshHost]
) -> None:
    sshd = start_sshd(environment={"LAYERTAP_PYTHON": sys.executable})
    assert closing(sshd.connect(python=None)).request("hello")["python"] == sys.executable


def test_the_first_python_there_that_has_sglang(
    start_sshd: Callable[..., Sshd], tmp_path: Path, closing: Callable[[SshHost], SshHost]
) -> None:
    (tmp_path / "sglang-0.5.23.dist-info").mkdir()
    (tmp_path / "sglang-0.5.23.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n"
    )
    for name in ("without", "with"):
        (tmp_path / name).mkdir()
    script(tmp_path / "without" / "python3", f'exec {sys.executable} "$@"')
    script(tmp_path / "with" / "python", f'export PYTHONPATH={tmp_path}; exec {sys.executable} "$@"')
    path = f"{tmp_path}/without:{tmp_path}/with:/usr/bin:/bin"
    sshd = start_sshd(environment={"PATH": path})
    hello = closing(sshd.connect(python=None)).request("hello")
    assert (hello["sglang"], hello["python"]) == ("0.5.23", sys.executable)


@pytest.mark.parametrize(
    ("python", "said"),
    [
        (None, "gpu: no Python on the PATH there has sglang: name SGLang's own with --python"),
        ("/none/python", "gpu: /none/python is no program that can be run there; set --python to SGLang's Python"),
        ("/bin/false", "gpu: the agent ended before it was up; can /bin/false be used?"),
        ("{tmp}/broken", "gpu: the agent ended before it was up; can {tmp}/broken be used? (it said: no; none of it)"),
    ],
)
def test_no_python(start_sshd: Callable[..., Sshd], tmp_path: Path, python: str | None, said: str) -> None:
    script(tmp_path / "broken", "echo no >&2; echo none of it >&2; exit 1")
    sshd = start_sshd(environment={"PATH": "/usr/bin:/bin"})
    with pytest.raises(ConnectionFailed) as failed:
        sshd.connect(python=python and python.format(tmp=tmp_path))
    assert str(failed.value).startswith(said.format(tmp=tmp_path))


def test_an_agent_that_ends_over_its_payload(sshd: Sshd, tmp_path: Path) -> None:
    python = script(tmp_path / "python", "echo; echo LAYERTAP need; echo no memory >&2; exit 137")
    with pytest.raises(ConnectionFailed, match=r"^gpu: the agent ended .*\(it said: no memory\)$"):
        sshd.connect(python=python)


# --- What lies in between ---


def test_an_exec_prefix(sshd: Sshd, tmp_path: Path, closing: Callable[[SshHost], SshHost]) -> None:
    """Whatever its words are, they arrive as they are."""
    odd = 'it\'s \\ "$HOME" !! `x`\n*'
    inside = script(
        tmp_path / "in side",
        f'echo "Welcome to $1"; printf "%s" "$2" > {tmp_path}/odd; shift 2; exec env WITHIN=1 "$@"',
    )
    python = script(tmp_path / "python", f'test "$WITHIN" = 1 && exec {sys.executable} "$@"')
    host = closing(sshd.connect(exec_prefix=[inside, "a box", odd], python=python))
    assert host.request("all") == []
    assert (tmp_path / "odd").read_text() == odd


def test_a_namespace_of_its_own(sshd: Sshd, closing: Callable[[SshHost], SshHost]) -> None:
    prefix = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces for us here")
    host = closing(sshd.connect(exec_prefix=prefix))
    assert host.request("all") == []


def test_an_exec_prefix_that_is_no_program(sshd: Sshd) -> None:
    with pytest.raises(ConnectionFailed, match=r"can .* be used\? \(it said: .*nothing-like-docker.*not found"):
        sshd.connect(exec_prefix=["nothing-like-docker", "exec"])


def test_one_session_is_enough(start_sshd: Callable[..., Sshd], closing: Callable[[SshHost], SshHost]) -> None:
    sshd = start_sshd(MaxSessions="1", AllowTcpForwarding="no", environment={"LAYERTAP_PYTHON": sys.executable})
    assert closing(sshd.connect(python=None)).request("all") == []


def test_no_session_at_all(start_sshd: Callable[..., Sshd]) -> None:
    with pytest.raises(ConnectionFailed, match=r"^gpu: "):
        start_sshd(MaxSessions="0").connect()


def jump_through(*doors: Sshd) -> list[str]:
    """Configuration that leads through other servers, one after the other."""
    lines = []
    for number, door in enumerate(doors):
        lines += [
            f"Host door{number}",
            "HostName 127.0.0.1",
            f"Port {door.port}",
            f"UserKnownHostsFile {door.known_hosts}",
            f"IdentityFile {door.keys('id')}",
        ]
    names = ",".join(f"door{number}" for number in range(len(doors)))
    return [*lines, "Host gpu", f"ProxyJump {names}", "Host *"]


def test_a_jump(start_sshd: Callable[..., Sshd], tmp_path: Path, closing: Callable[[SshHost], SshHost]) -> None:
    door, sshd = start_sshd(), start_sshd()
    (tmp_path / "file").write_bytes(data := os.urandom(5 << 20))
    host = closing(sshd.connect(*jump_through(door), **QUICK))
    assert host.read(f"{tmp_path}/file", 0, 8 << 20)[1] == data
    assert len(door.process.children()) == 1
    host.close()
    until(lambda: not door.process.children() and not sshd.process.children(), "both ended")


def test_a_chain_of_jumps(start_sshd: Callable[..., Sshd], closing: Callable[[SshHost], SshHost]) -> None:
    first, second, sshd = start_sshd(), start_sshd(), start_sshd()
    host = closing(sshd.connect(*jump_through(first, second)))
    assert host.request("all") == []
    assert [len(one.process.children()) for one in (first, second, sshd)] == [1, 1, 1]


def test_a_jump_host_that_freezes(start_sshd: Callable[..., Sshd]) -> None:
    door, sshd = start_sshd(), start_sshd()
    host = sshd.connect(*jump_through(door), **QUICK)
    with door.stopped():
        assert host.ended.wait(60)
        assert host.state.why == "nothing heard for 2 s"
        assert seconds(host.close) < 1


def test_a_jump_host_that_leads_nowhere(start_sshd: Callable[..., Sshd]) -> None:
    door, sshd = start_sshd(AllowTcpForwarding="no"), start_sshd()
    with pytest.raises(ConnectionFailed) as failed:
        sshd.connect(*jump_through(door))
    assert str(failed.value) == (
        f"gpu: the jump host does not lead to 127.0.0.1 port {sshd.port}: Administratively prohibited"
    )


RELAY = (
    "import socket, sys, threading; s = socket.create_connection(('%h', %p)); "
    "c = lambda f, g: [g(d) for d in iter(f, b'')]; "
    "threading.Thread(target=c, args=(lambda: s.recv(65536), lambda d: (sys.stdout.buffer.write(d), "
    "sys.stdout.flush())), daemon=True).start(); c(lambda: sys.stdin.buffer.raw.read(65536), s.sendall)"
)


def test_a_proxy_command(sshd: Sshd, tmp_path: Path) -> None:
    command = f'echo $$ > {tmp_path}/pid; exec {sys.executable} -c "{RELAY}"'
    host = sshd.connect(f"ProxyCommand sh -c '{command.replace(chr(39), chr(39) + chr(92) + chr(39) + chr(39))}'")
    assert host.request("all") == []
    host.close()
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_proxy_command_that_fails(sshd: Sshd) -> None:
    with pytest.raises(ConnectionFailed, match=r"^gpu: the ProxyCommand ended with 3: sh -c 'exit 3' # gpu$"):
        sshd.connect("ProxyCommand sh -c 'exit 3' # %n")


def test_nobody_listens(sshd: Sshd) -> None:
    sshd.stop()
    with pytest.raises(ConnectionFailed) as failed:
        sshd.connect()
    assert str(failed.value) == f"gpu: cannot connect to 127.0.0.1 port {sshd.port}: Connection refused"


def test_no_such_host(sshd: Sshd) -> None:
    with pytest.raises(ConnectionFailed, match=r"gpu: cannot find nowhere\.invalid: "):
        sshd.connect("HostName nowhere.invalid")


def test_paramiko_says_nothing(sshd: Sshd, relay: Relay, capfd: pytest.CaptureFixture[str]) -> None:
    """It logs what fails, and what nobody takes of that ends on the terminal."""
    host = sshd.connect(port=relay.port)
    relay.cut()
    assert host.ended.wait(60)
    for lines in (["ProxyCommand exit 1"], ["User nobody-there"], ["UserKnownHostsFile /dev/null"]):
        with pytest.raises(Exception, match="gpu: "):
            sshd.connect(*lines)
    assert capfd.readouterr() == ("", "")


# --- Links that break ---


def seconds(what: Callable[[], Any]) -> float:
    began = time.monotonic()
    what()
    return time.monotonic() - began


def test_a_link_waits_for_no_full_packet_and_not_for_ever(sshd: Sshd) -> None:
    with contextlib.closing(_connect(sshd.target())) as link:
        assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert KEEPALIVE_SECONDS + DEAD_SECONDS < 20


@pytest.mark.parametrize("how", ["stopped", "frozen"])
def test_a_dead_peer_is_noticed(sshd: Sshd, relay: Relay, how: str, stuck: str) -> None:
    host = sshd.connect(port=relay.port, **QUICK)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(host.read, stuck, 0)
        until(lambda: host._waiting, "the request is on its way")
        if how == "frozen":
            relay.freeze()
        with sshd.stopped() if how == "stopped" else threading.Lock():
            began = time.monotonic()
            until(lambda: host.state.state == "stale", "it looks stale first")
            assert host.state.heard_age is not None and host.state.heard_age > 0.4
            assert str(asked.exception(60)) == "gpu: nothing heard for 2 s"
            assert 1 < time.monotonic() - began < 15
            assert (host.state.state, host.state.why) == ("failed", "nothing heard for 2 s")
            assert seconds(host.close) < 1


def test_a_slow_answer_is_no_dead_peer(sshd: Sshd, stuck: str, closing: Callable[[SshHost], SshHost]) -> None:
    host = closing(sshd.connect(keepalive=0.1, dead_after=1.0))
    with pytest.raises(ConnectionFailed, match="no answer to 'read' within 2 s"):
        host.request("read", seconds=2, path=stuck, offset=0, most=1)
    assert host.state.state == "live"


CONSOLE = """
import sys
from backends.ssh import SshHost
from backends.ssh_config import resolve
host = SshHost(resolve("gpu", sys.argv[1]), python=sys.executable, keepalive=0.1, dead_after=1.0)
for line in sys.stdin:
    print(host.request("hello")["python"], flush=True)
"""


def test_a_console_that_was_stopped_itself(sshd: Sshd) -> None:
    """As by Ctrl+Z: it does not take its own silence for the host's."""
    console = subprocess.Popen(
        [sys.executable, "-c", CONSOLE, str(sshd.config())],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )

    def ask() -> str:
        assert console.stdin is not None and console.stdout is not None
        console.stdin.write("\n")
        console.stdin.flush()
        return console.stdout.readline().strip()

    with console:
        assert ask() == sys.executable
        console.send_signal(signal.SIGSTOP)
        time.sleep(2)  # there is nothing to be seen that would end it
        console.send_signal(signal.SIGCONT)
        assert ask() == sys.executable


@pytest.mark.parametrize("full", [False, True])
def test_close_does_not_wait_for_a_dead_peer(sshd: Sshd, relay: Relay, full: bool) -> None:
    host = sshd.connect(port=relay.port)
    relay.freeze()
    if full:  # a request that is larger than what is taken on the way
        threading.Thread(target=fail, args=(host, "x" * (64 << 20)), daemon=True).start()
        until(lambda: host._lock.locked(), "it is stuck in sending")
    assert seconds(host.close) < 1
    assert host.ended.wait(60)


def fail(host: SshHost, method: str) -> None:
    with pytest.raises(ConnectionFailed):
        host.request(method)


def test_a_link_that_is_cut_fails_what_waits(sshd: Sshd, relay: Relay, stuck: str) -> None:
    host = sshd.connect(port=relay.port)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(host.read, stuck, 0)
        until(lambda: host._waiting, "the request is on its way")
        relay.cut()
        assert str(asked.exception(60)).startswith("gpu: the link broke (")
    assert host.state.state == "failed"
    with pytest.raises(ConnectionFailed, match=r"^gpu: the link broke"):
        host.request("hello")


@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
def test_a_link_that_is_cut_over_the_payload(sshd: Sshd, relay: Relay, part: float) -> None:
    """The next one starts afresh: there is no half payload."""
    _, archive = payload.pack()
    relay.cut_after = 2000 + int(part * len(archive))
    with pytest.raises(ConnectionFailed):
        sshd.connect(port=relay.port)
    cache = sshd.home / "cache/layertap/payload"
    host = sshd.connect(port=relay.port)
    assert host.request("all") == []
    host.close()
    # what the cut one had begun to unpack is gone, or whole, once it notices
    until(lambda: [path.name for path in cache.iterdir()] == [payload.pack()[0]], "there is no half payload")


def test_a_peer_that_freezes_before_it_has_said_anything(sshd: Sshd, relay: Relay) -> None:
    relay.freeze()
    with pytest.raises(ConnectionFailed, match=rf"^gpu: no SSH from 127.0.0.1 port {relay.port} within 1 s \("):
        sshd.connect("ConnectTimeout 1", port=relay.port)


def test_a_link_leaves_nothing_behind(sshd: Sshd) -> None:
    def held() -> tuple[int, int]:
        return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))

    sshd.connect().close()  # what is opened only once
    threads, files = held()
    for end in (SshHost.close, lambda host: sshd.hang_up(), lambda host: [agent.kill() for agent in sshd.agents()]):
        host = sshd.connect()
        end(host)
        assert host.ended.wait(60)
    until(lambda: held()[0] <= threads and held()[1] <= files, "threads and files are gone")


def test_two_consoles_on_one_host(sshd: Sshd, closing: Callable[[SshHost], SshHost]) -> None:
    target = sshd.target()
    with ThreadPoolExecutor(3) as pool:
        hosts = list(pool.map(lambda _: closing(SshHost(target, python=sys.executable)), range(3)))
    assert [host.request("hello")["payload"] for host in hosts] == [payload.pack()[0]] * 3


def test_a_growing_file_comes_whole(host: SshHost, tmp_path: Path) -> None:
    """By offsets, as a log is followed."""
    path = tmp_path / "log"
    done = threading.Event()

    def write() -> None:
        with path.open("wb", buffering=0) as log:
            for _ in range(200):
                log.write(os.urandom(10_000))
        done.set()

    path.touch()
    threading.Thread(target=write, daemon=True).start()
    heard, offset = hashlib.sha256(), 0
    while not (done.is_set() and offset == path.stat().st_size):
        data = host.read(str(path), offset, 1 << 16)[1]
        heard.update(data)
        offset += len(data)
    assert heard.digest() == hashlib.sha256(path.read_bytes()).digest()
