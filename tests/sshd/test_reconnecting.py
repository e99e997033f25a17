"""A link that is dialled again for as long as it takes; what was asked over it is answered, or said to be unknown."""

from __future__ import annotations

import hashlib
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers import until
from sshd import Relay, Sshd

from backends.errors import ConnectionFailed, HostKeyRefused, UsageError
from backends.host import LinkState, Reconnecting
from backends.ssh import SshHost

# --- Any host ---


class FakeHost:
    """A host whose link the test breaks."""

    name = "fake"

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.asked: list[str] = []
        self.closed = False
        self.breaks_on: str | None = None
        self.fails: Exception | None = None

    @property
    def state(self) -> LinkState:
        state = "failed" if self.ended.is_set() else "live"
        return LinkState(state=state, since=0, why="it broke" if self.ended.is_set() else None, notes=["a note"])

    def request(self, method: str, /, *, seconds: float = 60, **parameters: Any) -> Any:
        self.asked.append(method)
        if method == self.breaks_on:
            self.ended.set()
            raise ConnectionFailed("fake: it broke")
        if self.fails:
            raise self.fails
        return parameters

    def read(self, path: str, offset: int, most: int = 1 << 20) -> tuple[dict[str, Any], bytes]:
        return {}, self.request("read", path=path)["path"].encode()

    def close(self) -> None:
        self.closed = True
        self.ended.set()


class Dial:
    """Makes hosts, or fails, as it is told; by default with another host each time."""

    def __init__(self, *outcomes: Exception | None) -> None:
        self.outcomes = list(outcomes)
        self.hosts: list[FakeHost] = []
        self.times: list[float] = []
        self.goes_on = threading.Event()  # until then, an attempt takes its time
        self.goes_on.set()

    def __call__(self) -> FakeHost:
        self.times.append(time.monotonic())
        self.goes_on.wait(60)
        outcome = self.outcomes.pop(0) if self.outcomes else None
        if outcome:
            raise outcome
        self.hosts.append(FakeHost())
        return self.hosts[-1]


DOWN = ConnectionFailed("fake: no route to host")


@pytest.fixture
def keep() -> Iterator[Callable[..., Reconnecting]]:
    made: list[Reconnecting] = []

    def reconnecting(dial: Callable[[], Any], **delays: float) -> Reconnecting:
        made.append(Reconnecting(dial, **({"first_delay": 0.01, "longest_delay": 0.05} | delays)))
        return made[-1]

    yield reconnecting
    for host in made:
        host.close()


def test_the_first_failure_is_raised() -> None:
    with pytest.raises(ConnectionFailed, match="no route"):
        Reconnecting(Dial(DOWN))


def test_a_live_link_is_as_it_is(keep: Callable[..., Reconnecting]) -> None:
    dial = Dial()
    host = keep(dial)
    assert host.name == "fake"
    assert host.request("launch", profile="p") == {"profile": "p"}
    assert host.read("/x", 0) == ({}, b"/x")
    assert (host.state.state, host.state.notes, host.ended.is_set()) == ("live", ["a note"], False)
    assert len(dial.hosts) == 1


def test_what_reads_is_asked_again(keep: Callable[..., Reconnecting]) -> None:
    dial = Dial()
    host = keep(dial)
    dial.hosts[0].breaks_on = "status"
    assert host.request("status", run_id="x") == {"run_id": "x"}
    dial.hosts[1].breaks_on = "read"
    assert host.read("/x", 0) == ({}, b"/x")
    assert [one.asked for one in dial.hosts] == [["status"], ["status", "read"], ["read"]]
    assert dial.hosts[0].closed


def test_what_acts_is_not_asked_again(keep: Callable[..., Reconnecting]) -> None:
    dial = Dial()
    host = keep(dial)
    dial.hosts[0].breaks_on = "launch"
    with pytest.raises(ConnectionFailed) as failed:
        host.request("launch")
    assert str(failed.value) == "fake: it broke; it is not known whether 'launch' still happened"
    assert host.request("launch", profile="p") == {"profile": "p"}  # the caller has looked, and asks anew
    dial.hosts[1].breaks_on = "status"
    with pytest.raises(ConnectionFailed, match="not known whether 'status'"):
        host.request("status", retry=False)


def test_what_fails_on_a_good_link_is_raised(keep: Callable[..., Reconnecting]) -> None:
    dial = Dial()
    host = keep(dial)
    for error in (UsageError("wrong"), ConnectionFailed("fake: no answer to 'run' within 1 s")):
        dial.hosts[0].fails = error
        with pytest.raises(type(error)) as failed:
            host.request("run")
        assert failed.value is error
    assert len(dial.hosts) == 1


def test_attempts_are_further_and_further_apart(keep: Callable[..., Reconnecting]) -> None:
    dial = Dial(None, *[DOWN] * 5)
    host = keep(dial, first_delay=0.05, longest_delay=0.2)
    dial.hosts[0].ended.set()
    until(lambda: len(dial.hosts) == 2, "it is dialled again")
    waits = [after - before for before, after in zip(dial.times[1:], dial.times[2:], strict=False)]
    for wait, least in zip(waits, [0.1, 0.2, 0.2, 0.2, 0.2], strict=True):
        assert wait >= least
    until(lambda: host.state.state == "live")


def test_the_state_says_what_it_waits_for(keep: Callable[..., Reconnecting]) -> None:
    dial = Dial(None, DOWN)
    host = keep(dial, first_delay=30.0, longest_delay=30.0)
    dial.hosts[0].ended.set()
    state = until(lambda: host.state.state == "reconnecting" and host.state)
    assert (state.why, state.attempt) == ("it broke", 1)
    assert 0 < state.next_in <= 30
    with pytest.raises(ConnectionFailed) as failed:
        host.request("hello", seconds=0.1)
    assert str(failed.value) == "fake: no link for 0.1 s, still trying: it broke"


def test_the_state_while_it_dials(keep: Callable[..., Reconnecting]) -> None:
    dial = Dial(None, DOWN)
    host = keep(dial)
    dial.goes_on.clear()
    dial.hosts[0].ended.set()
    state = until(lambda: host.state.state == "connecting" and host.state)
    assert (state.why, state.attempt, state.next_in) == ("it broke", 1, None)
    dial.goes_on.set()
    until(lambda: host.state.state == "live")


@pytest.mark.parametrize("error", [HostKeyRefused("fake: changed"), RuntimeError("a bug")])
def test_what_time_does_not_heal_ends_it(keep: Callable[..., Reconnecting], error: Exception) -> None:
    dial = Dial(None, error)
    host = keep(dial)
    dial.hosts[0].ended.set()
    assert host.ended.wait(60)
    assert (host.state.state, host.state.why) == ("failed", str(error))
    with pytest.raises(type(error)) as failed:
        host.request("hello")
    assert failed.value is error
    assert len(dial.times) == 2


def test_close_ends_waiting(keep: Callable[..., Reconnecting]) -> None:
    dial = Dial()
    host = keep(dial, first_delay=30.0, longest_delay=30.0)
    dial.hosts[0].ended.set()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(host.request, "hello")
        until(lambda: host.state.state == "reconnecting")
        host.close()
        assert str(asked.exception(60)) == "fake: closed"
    assert (host.state.state, host.ended.is_set()) == ("closed", True)
    with pytest.raises(ConnectionFailed, match="fake: closed"):
        host.request("hello")


def test_what_is_reached_after_close_is_closed(keep: Callable[..., Reconnecting]) -> None:
    dial = Dial()
    host = keep(dial)
    dial.goes_on.clear()
    dial.hosts[0].ended.set()
    until(lambda: host.state.state == "connecting")
    host.close()
    dial.goes_on.set()
    until(lambda: len(dial.hosts) == 2 and dial.hosts[1].closed)
    assert host.state.state == "closed"


# --- Over SSH ---


@pytest.fixture
def reconnecting(sshd: Sshd, relay: Relay, keep: Callable[..., Reconnecting]) -> Reconnecting:
    target = sshd.target(port=relay.port)
    return keep(lambda: SshHost(target, python=sys.executable), first_delay=0.05)


def test_a_growing_file_comes_whole_over_five_cuts(reconnecting: Reconnecting, relay: Relay, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.touch()
    done = threading.Event()

    def write() -> None:
        with path.open("wb", buffering=0) as log:
            while relay.connections <= 5:
                log.write(os.urandom(random.randrange(10_000)))
                time.sleep(0.005)
        done.set()

    def cut() -> None:
        for number in range(1, 6):
            until(lambda number=number: relay.connections == number and reconnecting.state.state == "live")
            sent = relay.sent
            until(lambda sent=sent: relay.sent > sent + 2000, "some requests are through")
            relay.cut()

    for work in (write, cut):
        threading.Thread(target=work, daemon=True).start()
    heard, offset = hashlib.sha256(), 0
    while not (done.is_set() and offset == path.stat().st_size):
        data = reconnecting.read(str(path), offset, 1 << 16)[1]
        heard.update(data)
        offset += len(data)
    assert relay.connections == 6
    assert heard.digest() == hashlib.sha256(path.read_bytes()).digest()


def test_a_launch_that_was_cut_is_not_repeated(
    reconnecting: Reconnecting, relay: Relay, tmp_path: Path, sshd: Sshd
) -> None:
    os.mkfifo(tmp_path / "stuck")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(reconnecting.request, "remove_demo", path=str(tmp_path / "stuck" / "x"))
        asked.exception(60)
        slow = pool.submit(reconnecting.request, "read", retry=False, path=str(tmp_path / "stuck"), offset=0, most=1)
        until(lambda: reconnecting._host._waiting, "the request is on its way")
        relay.cut()
        assert str(slow.exception(60)).endswith("; it is not known whether 'read' still happened")
    assert reconnecting.request("all") == []


def test_a_frozen_host_comes_back(sshd: Sshd, relay: Relay, keep: Callable[..., Reconnecting]) -> None:
    target = sshd.target("ConnectTimeout 1", port=relay.port)
    host = keep(lambda: SshHost(target, python=sys.executable, keepalive=0.2, dead_after=1.0))
    relay.freeze()
    until(lambda: host.state.attempt >= 2, "it does not get through")
    assert "no SSH from 127.0.0.1" in str(host.state.why)
    relay.thaw()
    assert host.request("all") == []
    assert host.state.state == "live"


def test_a_host_that_is_someone_else_now(start_sshd: Callable[..., Sshd], keep: Callable[..., Reconnecting]) -> None:
    sshd = start_sshd()
    target = sshd.target()
    host = keep(lambda: SshHost(target, python=sys.executable))
    sshd.know("other")
    for agent in sshd.agents():
        agent.kill()
    with pytest.raises(HostKeyRefused, match="is not the one in"):
        host.request("hello")
    assert host.state.state == "failed"
