"""The feed: what it keeps of a host, and how it says that it hears nothing. The host is this machine, the server fake."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers import until

from backends.errors import ConnectionFailed, HostKeyRefused, UsageError
from backends.host import LocalHost, Reconnecting
from backends.launch import relaunch
from backends.runs import Run, Runs, stop
from console import feed as feeds
from console.feed import Feed
from console.session import Session, going_on

Server = Callable[..., Run]


@pytest.fixture
def watch(home: Any) -> Iterator[Callable[..., Feed]]:
    """Starts a feed of this machine; `open` may be another way to connect."""
    made: list[Feed] = []

    def started(open: Callable[..., Session] | None = None, **known: Any) -> Feed:
        feed = Feed("local", open or (lambda ask: local()), **known)
        made.append(feed)
        feed.start()
        return feed

    yield started
    for feed in made:
        feed.close()


def local() -> Session:
    return Session(Reconnecting(lambda: LocalHost(sys.executable)), {})


def lines(feed: Feed, key: str) -> list[str]:
    buffer = feed.logs[key]
    return [line.text for line in buffer.lines(buffer.first, buffer.next)]


def test_before_it_is_connected_nothing_is_known(watch: Callable[..., Feed]) -> None:
    hold = threading.Event()
    feed = watch(lambda ask: hold.wait() and local())  # type: ignore[arg-type, return-value]
    now = feed.snapshot()
    assert (now["link"]["state"], now["server"], now["host"]) == ("connecting", None, None)
    assert now["streams"] == [{"name": "samples", "state": "waiting", "heard_age": None, "lost_bytes": 0}]
    hold.set()
    until(lambda: feed.snapshot()["host"], "heard")


def test_a_server_with_its_log(watch: Callable[..., Feed], server: Server) -> None:
    run = server()
    feed = watch()
    until(lambda: (feed.snapshot()["server"] or {}).get("phase") == "ready", "ready")
    now = feed.snapshot()
    assert now["link"]["state"] == "live"
    assert now["server"]["id"] == run.id
    assert [one["id"] for one in now["runs"]] == [run.id]
    until(lambda: any("fired up" in line for line in lines(feed, "server")), "the log")
    assert lines(feed, "server")[0] == f"run {run.id}"
    assert {one["name"]: one["state"] for one in feed.snapshot()["streams"]} == {
        "samples": "live",
        "server log": "live",
    }
    until(lambda: feed.history, "a point")
    assert feed.log_state("server") == "live"
    assert feed.log_state("job") == "no run yet"


def test_the_next_run_s_log_comes_after_a_mark(watch: Callable[..., Feed], server: Server) -> None:
    first = server()
    feed = watch()
    until(lambda: any("fired up" in line for line in lines(feed, "server")), "the first log")
    stop(first, "the next")
    second = server()
    until(lambda: f"run {second.id}" in lines(feed, "server"), "the mark")
    until(lambda: sum("fired up" in line for line in lines(feed, "server")) == 2, "the second log")
    texts = lines(feed, "server")
    assert texts.index(f"run {first.id}") < texts.index(f"run {second.id}")


def test_of_several_servers_one_is_shown_and_the_others_are_said(watch: Callable[..., Feed], server: Server) -> None:
    older, newer = server(), server()
    feed = watch()
    until(lambda: (feed.snapshot()["server"] or {}).get("id") == newer.id, "the newest")
    feed.watch(older.id)
    until(lambda: feed.snapshot()["server"]["id"] == older.id, "the chosen one")


def shows(feed: Feed, run: Run) -> bool:
    return (feed.snapshot()["server"] or {}).get("id") == run.id


def looked_again(feed: Feed) -> None:
    """Wait until the host was looked at a few times more."""
    for _ in range(3):
        before = feed._heard
        until(lambda before=before: feed._heard != before, "heard again")


def test_a_server_that_nobody_chose_gives_way_to_one_that_runs(watch: Callable[..., Feed], server: Server) -> None:
    older, newer = server(), server()
    feed = watch()
    until(lambda: shows(feed, newer), "the newest")
    stop(newer, "enough")
    until(lambda: shows(feed, older), "the one that runs")
    stop(older, "enough")
    until(lambda: shows(feed, newer), "of those that are over, the one that was launched last")
    third = server()
    until(lambda: shows(feed, third), "the next one")


def test_a_chosen_server_is_followed_to_what_is_launched_in_its_place(
    watch: Callable[..., Feed], server: Server, all_runs: Runs
) -> None:
    chosen, other = server(), server()
    feed = watch()
    until(lambda: shows(feed, other), "the newest")
    feed.watch(chosen.id)
    until(lambda: shows(feed, chosen), "the chosen one")
    stop(chosen, "it dies")
    until(lambda: not going_on(feed.snapshot()["server"]), "it is over")
    looked_again(feed)
    assert shows(feed, chosen)  # until there is another in its place
    again = relaunch(all_runs, chosen)
    until(lambda: shows(feed, again), "the one in its place")
    stop(again, "it dies as well")
    once_more = relaunch(all_runs, again)
    until(lambda: shows(feed, once_more), "the next one in its place")
    stop(once_more, "it dies too")
    feed.watch(once_more.id)
    looked_again(feed)
    third = relaunch(all_runs, once_more)
    until(lambda: shows(feed, third), "also of one that was dead when it was chosen")
    feed.watch(chosen.id)
    until(lambda: shows(feed, chosen), "a dead one that is chosen as such")
    looked_again(feed)
    assert shows(feed, chosen)


def test_secrets_in_a_log_are_masked(watch: Callable[..., Feed], server: Server) -> None:
    run = server()
    with run.log.open("a") as file:
        file.write("--api-key hunter2\n")
    feed = watch()
    until(lambda: "--api-key ***" in lines(feed, "server"), "masked")
    assert not any("hunter2" in line for line in lines(feed, "server"))


def test_a_long_log_is_shown_from_near_its_end(
    watch: Callable[..., Feed], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "FIRST_LOG", 1000)
    run = server()
    with run.log.open("a") as file:
        file.writelines(f"line {number}\n" for number in range(2000))
    feed = watch()
    until(lambda: "line 1999" in lines(feed, "server"), "the end")
    assert "line 5" not in lines(feed, "server")
    assert any(line.endswith(f"bytes before this are in {run.log}") for line in lines(feed, "server"))


def test_a_log_that_is_cut_is_said(watch: Callable[..., Feed], server: Server) -> None:
    run = server()
    feed = watch()
    until(lambda: any("fired up" in line for line in lines(feed, "server")), "the log")
    run.log.write_text("anew\n")
    until(lambda: "anew" in lines(feed, "server"), "what came after")
    assert any(line.startswith("the log was truncated") for line in lines(feed, "server"))
    log = next(one for one in feed.snapshot()["streams"] if one["name"] == "server log")
    assert log["lost_bytes"] is None


class Silent:
    """A host that answers until it is told not to."""

    def __init__(self, session: Session) -> None:
        self.host = session.host
        self.silent = threading.Event()
        self.name = "silent"
        self.ended = session.host.ended

    @property
    def state(self) -> Any:
        return self.host.state

    def request(self, method: str, /, **known: Any) -> Any:
        if self.silent.is_set():
            time.sleep(0.2)
            raise ConnectionFailed("no answer")
        return self.host.request(method, **known)

    def read(self, *known: Any, **more: Any) -> Any:
        if self.silent.is_set():
            raise ConnectionFailed("no answer")
        return self.host.read(*known, **more)

    def close(self) -> None:
        self.host.close()


def test_what_is_no_longer_heard_is_stale(
    watch: Callable[..., Feed], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "STALE_SECONDS", 0.8)
    server()
    session = local()
    session.host = silent = Silent(session)  # type: ignore[assignment]
    feed = watch(lambda ask: session)
    until(lambda: [one["state"] for one in feed.snapshot()["streams"]] == ["live", "live"], "both streams")
    silent.silent.set()
    until(lambda: {one["state"] for one in feed.snapshot()["streams"]} == {"stale"}, "stale")
    assert feed.log_state("server").startswith("stale for ")
    before = feed.snapshot()["server"]["id"]
    silent.silent.clear()
    until(lambda: {one["state"] for one in feed.snapshot()["streams"]} == {"live"}, "live again")
    assert feed.snapshot()["server"]["id"] == before


def test_a_broken_link_is_told_and_comes_back(watch: Callable[..., Feed], server: Server) -> None:
    server()
    feed = watch()
    until(lambda: feed.snapshot()["server"], "heard")
    feed.session.host._host._process.kill()  # type: ignore[union-attr]
    until(lambda: feed.snapshot()["link"]["state"] in ("reconnecting", "connecting"), "told")
    assert feed.log_state("server").startswith(("reconnecting", "connecting"))
    until(lambda: feed.snapshot()["link"]["state"] == "live", "live again")


def test_a_first_failure_waits_for_a_person(watch: Callable[..., Feed]) -> None:
    tries: list[int] = []

    def open(ask: Any) -> Session:
        tries.append(1)
        if len(tries) < 3:
            raise HostKeyRefused("the key has changed")
        return local()

    feed = watch(open)
    for attempt in (1, 2):
        until(lambda: feed.snapshot()["link"]["state"] == "failed", "failed")
        assert feed.snapshot()["link"]["why"] == "the key has changed"
        assert len(tries) == attempt
        feed._link = feeds.LinkState(state="connecting", since=time.time())
        feed.retry()
    until(lambda: feed.snapshot()["host"], "heard")


def test_a_link_that_has_ended_for_good_is_made_anew_when_asked(watch: Callable[..., Feed]) -> None:
    refused = threading.Event()

    def dial() -> LocalHost:
        if refused.is_set():
            raise HostKeyRefused("the key has changed")
        return LocalHost(sys.executable)

    feed = watch(lambda ask: Session(Reconnecting(dial, first_delay=0.01), {}))
    until(lambda: feed.snapshot()["host"], "heard")
    first = feed.session
    feed.retry()  # changes nothing while the link is live, nor is it remembered
    until(lambda: not feed._begin.is_set(), "put aside")
    assert feed.session is first
    refused.set()
    first.host._host._process.kill()  # type: ignore[union-attr]
    until(lambda: feed.snapshot()["link"]["state"] == "failed", "failed")
    feed.retry()
    until(lambda: feed.session is None and feed.snapshot()["link"]["state"] == "failed", "failed again")
    assert feed.snapshot()["link"]["why"] == "the key has changed"
    assert first.host.state.state == "closed"  # type: ignore[union-attr]
    refused.clear()
    feed.retry()
    until(lambda: feed.snapshot()["link"]["state"] == "live" and feed._heard, "live again")
    heard = feed._heard
    until(lambda: feed._heard != heard, "heard of again")


def test_a_question_waits_for_its_answer(watch: Callable[..., Feed]) -> None:
    from backends.ssh import Question

    answers: list[str | None] = []

    def open(ask: Any) -> Session:
        answers.append(ask(Question(kind="password", text="password of me")))
        return local()

    feed = watch(open)
    until(lambda: feed.snapshot()["question"], "asked")
    assert feed.snapshot()["question"] == {
        "kind": "password",
        "text": "password of me",
        "fingerprint": None,
        "again": False,
    }
    feed.answer("hunter2")
    assert feed.snapshot()["question"] is None
    until(lambda: answers == ["hunter2"], "answered")


def test_leaving_answers_the_question(watch: Callable[..., Feed]) -> None:
    from backends.ssh import Question

    answers: list[str | None] = []

    def open(ask: Any) -> Session:
        answers.append(ask(Question(kind="password", text="password of me")))
        raise ConnectionFailed("no")

    feed = watch(open)
    until(lambda: feed.snapshot()["question"], "asked")
    feed.close()
    until(lambda: answers == [None], "no answer")


def test_a_call_s_error_is_its_future_s(watch: Callable[..., Feed]) -> None:
    feed = watch(lambda ask: local())
    until(lambda: feed.session, "connected")
    with pytest.raises(UsageError, match="no run begins with 'nothing'"):
        feed.call(lambda session: session.host.request("run", run_id="nothing")).result(30)
    assert feed.call(lambda session: session.hello["python"]).result(30)


def test_a_call_before_the_link_is_up(watch: Callable[..., Feed]) -> None:
    hold = threading.Event()
    feed = watch(lambda ask: hold.wait() and local())  # type: ignore[arg-type, return-value]
    with pytest.raises(ConnectionFailed, match="local is not connected yet"):
        feed.call(lambda session: session.hello).result(30)
    hold.set()
