"""The supervisor of an extraction: which server it launches again, how often, and what it says. Driver and server are
fakes, the rest is real."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from helpers import until

from backends import runs, supervise
from backends.jobs import describe, read_job
from backends.runs import Run, Runs
from backends.supervise import gave_up
from backends.verdict.alarms import Limits
from capture import events

Server = Callable[..., Run]
Extract = Callable[..., Run]

# A driver that ends with 9 as often as it is told, once its server is dead, and with 0 after that.
DRIVER = """
import json, os, sys, time
from pathlib import Path
server = json.loads(Path("job.json").read_text())["server"]
lost = Path("lost")
count = len(lost.read_text()) if lost.exists() else 0
if count >= int(sys.argv[1]):
    Path("result.json").write_text('{"written": 3}')
    sys.exit(0)
lost.write_text("x" * (count + 1))
Path("progress.json").write_text('{"phase": "stopped", "written": 1}')
Path("result.json").write_text('{"error": "the server is dead"}')
Path("ready").touch()
while "wait" in sys.argv and Path(f"/proc/{server['process']['pid']}/cmdline").exists():
    time.sleep(0.05)
while "stay" in sys.argv:
    time.sleep(0.05)
sys.exit(9)
"""


@pytest.fixture
def extract(all_runs: Runs) -> Extract:
    """Starts a driver that loses its server `lost` times; `server` is killed first."""

    def started(server: Run, lost: int, restarts: int, *words: str, beside: Sequence[Run] = ()) -> Run:
        first, *more = [{"server": msgspec.to_builtins(describe(one))} for one in (server, *beside)]
        job = first | {"beside": more}

        def prepare(run: Run) -> dict[str, str]:
            runs.write_json(run.folder / "job.json", job)
            return {}

        return all_runs.start(
            "extract",
            [sys.executable, "-c", DRIVER, str(lost), *words],
            dict(os.environ),
            code="0123",
            prepare=prepare,
            details={"restart_server": restarts, "output": str(all_runs.state / "out")},
            supervisor="backends.supervise",
        )

    return started


def kill(server: Run) -> None:
    os.kill(server.running.child.pid, signal.SIGKILL)


def ended(run: Run) -> runs.Exit:
    return until(lambda: run.exit, "the run has ended", 60.0)


def told(run: Run) -> list[dict[str, Any]]:
    """What happened, without what the watch saw; it saw nothing that it could not look at."""
    assert "Traceback" not in run.log.read_text()
    beside = ("started", "ended", "trouble", "trouble_over")
    return [event for event in events.latest(run.folder) if event["event"] not in beside]


def ready(run: Run) -> None:
    until((run.folder / "ready").exists)


def test_a_dead_server_is_launched_again_as_it_was(extract: Extract, server: Server, all_runs: Runs) -> None:
    first = server()
    run = extract(first, 1, 1, "wait")
    ready(run)
    kill(first)
    assert ended(run).code == 0
    second = all_runs.server(first.spec.port)
    assert second.id != first.id
    assert (second.spec.argv, second.spec.port, second.private.argv) == (
        first.spec.argv,
        first.spec.port,
        first.private.argv,
    )
    changed = ("LAYERTAP_RUN", "LAYERTAP_TAP")
    assert {name: value for name, value in second.private.env.items() if name not in changed} == {
        name: value for name, value in first.private.env.items() if name not in changed
    }
    taps = [json.loads(one.private.env["LAYERTAP_TAP"]) for one in (first, second)]
    assert taps[0]["layers"] == taps[1]["layers"]
    assert (taps[1]["dump_dir"], Path(taps[0]["dump_dir"]).exists()) == (second.spec.dump_dir, False)
    assert taps[0]["secret"] != taps[1]["secret"]
    assert read_job(run)["server"] == msgspec.to_builtins(describe(second))
    relaunch, relaunched = told(run)
    assert (relaunch["event"], relaunch["server"], relaunch["attempt"], relaunch["most"]) == (
        "relaunch",
        first.id,
        1,
        1,
    )
    assert (relaunched["event"], relaunched["server"], relaunched["instead_of"]) == ("relaunched", second.id, first.id)
    assert not first.stop_asked  # it died, and shall be shown so
    assert json.loads((run.folder / "result.json").read_text()) == {"written": 3}
    trouble = [event for event in events.latest(run.folder) if event["event"].startswith("trouble")]
    assert [(event["event"], event["id"]) for event in trouble] == [
        ("trouble", "server-crashed"),
        ("trouble_over", "server-crashed"),
    ]
    assert trouble[0]["severity"] == "critical"
    assert trouble[0]["cause"] == "a process was killed by SIGKILL, most often by the kernel's OOM killer"


def test_only_as_often_as_was_allowed(extract: Extract, server: Server, all_runs: Runs) -> None:
    first = server()
    run = extract(first, 9, 1, "wait")
    ready(run)
    kill(first)
    second = until(lambda: next((one for one in all_runs.all("server") if one.id != first.id), None))
    until(lambda: len((run.folder / "lost").read_text()) == 2, seconds=60.0)
    kill(second)
    assert ended(run).code == 9
    assert [event["event"] for event in told(run)] == ["relaunch", "relaunched", "error"]
    assert told(run)[-1]["reason"] == (
        "the server died 2 times, the same way each time: a process was killed by SIGKILL, most often by the kernel's "
        "OOM killer; it was launched again as often as --restart-server allows, see its log (layertap logs)"
    )
    assert len(all_runs.all("server")) == 2


def test_a_server_that_cannot_be_launched_again(extract: Extract, server: Server, model: Path) -> None:
    first = server()
    run = extract(first, 1, 1, "wait")
    ready(run)
    shutil.rmtree(model)
    kill(first)
    assert ended(run).code == 9
    why = f"model {model}: there is no such folder; give that of a downloaded model on the host"
    assert [(event["event"], event.get("reason")) for event in told(run)] == [
        ("relaunch", None),
        ("relaunch_failed", why),
        ("error", f"the server was launched again once and did not come up: {why}"),
    ]
    assert json.loads((run.folder / "result.json").read_text()) == {"error": told(run)[-1]["reason"]}


def test_a_server_that_crashes_as_it_starts(extract: Extract, server: Server, all_runs: Runs) -> None:
    first = server("crash")
    run = extract(first, 1, 1)
    assert ended(run).code == 9
    assert len(all_runs.all("server")) == 2
    reason = told(run)[-1]["reason"]
    assert reason.startswith("the server was launched again once and did not come up: ")
    assert "memory" in reason


def test_a_server_that_lives_or_was_stopped_is_left_alone(extract: Extract, server: Server, all_runs: Runs) -> None:
    first = server()
    run = extract(first, 1, 5, "wait")
    ready(run)
    runs.stop(first, "enough")
    assert ended(run).code == 9
    assert told(run) == []
    assert [one.id for one in all_runs.all("server")] == [first.id]
    assert json.loads((run.folder / "result.json").read_text()) == {"error": "the server is dead"}


def test_a_driver_that_does_not_notice_that_its_server_is_dead_is_ended(
    extract: Extract, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAYERTAP_PATIENCE", "0.02")  # 2.4 s instead of two minutes
    first = server()
    run = extract(first, 1, 0, "wait", "stay")
    ready(run)
    kill(first)
    assert ended(run).code == 9
    why = f"the server {first.id} is dead; `layertap launch` it, then give the command again"
    assert [(event["event"], event["reason"]) for event in told(run)] == [("server_lost", why)]
    assert json.loads((run.folder / "result.json").read_text()) == {"error": why}


def test_a_driver_goes_on_while_one_of_its_servers_lives(
    extract: Extract, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of them died, and for longer than a driver may go on without any."""
    monkeypatch.setenv("LAYERTAP_PATIENCE", "0.02")
    first, second = server(), server()
    run = extract(first, 1, 0, "stay", beside=[second])
    ready(run)
    kill(first)
    told_of = ("trouble", "server-crashed")
    until(lambda: [one for one in events.latest(run.folder) if (one["event"], one.get("id")) == told_of])
    begun = time.monotonic()
    until(lambda: run.exit is not None or time.monotonic() > begun + 2 * 0.02 * Limits().linger, seconds=60.0)
    assert run.exit is None
    kill(second)
    assert ended(run).code == 9
    why = f"the servers {first.id} and {second.id} are dead; `layertap launch` one, then give the command again"
    assert [(event["event"], event["reason"]) for event in told(run)] == [("server_lost", why)]


def test_a_stop_is_heeded_while_the_server_comes_up(extract: Extract, server: Server, all_runs: Runs) -> None:
    first = server("silent")
    run = extract(first, 1, 1, "wait")
    ready(run)
    kill(first)
    second = until(lambda: next((one for one in all_runs.all("server") if one.id != first.id), None), seconds=60.0)
    shown = until(lambda: json.loads((run.folder / "progress.json").read_text()))
    assert shown == {"phase": "relaunching", "written": 1}
    assert runs.stop(run, "enough").how == "asked"
    assert ended(run).code == 130
    assert second.alive()  # the server is not the extraction's to stop


@pytest.mark.parametrize(
    ("reasons", "said"),
    [
        (["a"], "the server was launched again once and did not come up: a"),
        (["a", "b"], "the server was launched again 2 times and did not come up: b"),
        (["b", "b"], "the server was launched again 2 times and did not come up, the same way each time: b"),
    ],
)
def test_why_it_gave_up(reasons: list[str], said: str) -> None:
    assert gave_up(reasons) == said


def test_a_server_that_is_stopped_while_its_remains_are_ended_is_not_launched_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def relaunch(*_: Any) -> None:
        raise AssertionError("launched")

    monkeypatch.setattr(supervise, "stop", lambda *_args, **_known: SimpleNamespace(left=[]))
    monkeypatch.setattr(supervise, "relaunch", relaunch)
    for of_run, of_server in ((True, False), (False, True)):
        supervision: Any = SimpleNamespace(run=SimpleNamespace(stop_asked=of_run))
        dead: Any = SimpleNamespace(id="server-1", stop_asked=of_server)
        with pytest.raises(supervise.StopAsked):
            supervise.Supervisor._launch(supervision, dead)
