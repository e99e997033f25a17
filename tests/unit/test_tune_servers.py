"""The servers of a tuning run end with it, whatever became of either before."""

from __future__ import annotations

from collections.abc import Callable

from helpers import SLEEP, until

from backends.runs import Run, Runs
from backends.tune.servers import stop_servers, stop_tuning

Start = Callable[..., Run]
ORPHAN = ["/bin/sh", "-c", "sleep 600 & exit 3"]


def test_a_server_is_stopped_with_its_tuning_run_and_no_other_is(all_runs: Runs, start: Start) -> None:
    tune, other = start("tune"), start("tune")
    mine, theirs = start("server", details={"tune": tune.id}), start("server", details={"tune": other.id})
    assert stop_tuning(all_runs, tune, "the test asks for it").left == []
    assert (tune.alive(), mine.alive(), other.alive(), theirs.alive()) == (False, False, True, True)
    assert mine.stop_asked


def test_a_server_whose_tuning_run_died(all_runs: Runs, start: Start) -> None:
    tune = start("tune", ["/bin/true"])
    server = start("server", details={"tune": tune.id})
    until(lambda: tune.exit)
    assert stop_tuning(all_runs, tune, "the test asks for it").how == "it was not running"
    assert not server.alive()


def test_what_a_stop_that_was_cut_short_left(all_runs: Runs, start: Start) -> None:
    tune = start("tune", SLEEP)
    server = start("server", ORPHAN, details={"tune": tune.id})
    until(lambda: server.exit)
    assert not server.alive() and server.processes()
    assert stop_servers(all_runs, tune, "the test asks for it") == []
    assert server.processes() == []
