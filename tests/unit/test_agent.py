"""What the agent answers: runs, the server's state, stops with all that hangs on them, and an earlier demo removed."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import SLEEP, until

from backends import agent as agents
from backends import runs
from backends.agent import Agent
from backends.errors import Locked, RunDied, UsageError
from backends.jobs import JOBS
from backends.runs import Run
from capture import events

Start = Callable[..., Run]


@pytest.fixture
def agent(home: Path, payload_folder: Path) -> Agent:
    return Agent(payload_folder)


@pytest.mark.parametrize("patience", ["soon", "0", "-1", "inf"])
def test_a_patience_that_is_none(
    home: Path, payload_folder: Path, monkeypatch: pytest.MonkeyPatch, patience: str
) -> None:
    monkeypatch.setenv("LAYERTAP_PATIENCE", patience)
    with pytest.raises(UsageError, match=f"LAYERTAP_PATIENCE is '{patience}'; give a factor such as 2"):
        Agent(payload_folder)


# --- Runs ---


def test_a_run_as_it_is_shown(agent: Agent, start: Start, home: Path) -> None:
    run = start("verify", details={"output": "/data"})
    assert agent.run(run.id) == {
        "schema": 1,
        "id": run.id,
        "kind": "verify",
        "state": "running",
        "folder": f"{home}/state/layertap/runs/{run.id}",
        "log": f"{home}/state/layertap/runs/{run.id}/verify.log",
        "port": None,
        "dump_dir": None,
        "code": "0123",
        "sglang": None,
        "created": run.spec.created,
        "stop_asked": False,
        "exit": None,
        "details": {"output": "/data"},
        "argv": SLEEP,
        "progress": None,
        "result": None,
        "events": events.latest(run.folder),
    }
    made = agent.stop(run.id[:-1], "enough")
    assert (made.id, made.how, made.left) == (run.id, "asked", [])
    shown = agent.run(run.id)
    assert (shown["state"], shown["stop_asked"], shown["exit"].signal) == ("exited", True, signal.SIGINT)
    assert [event["event"] for event in shown["events"]] == ["started", "stop_asked", "ended", "stopped"]


def test_progress_and_result_are_read_from_the_folder(agent: Agent, start: Start) -> None:
    run = start("verify")
    (run.folder / "progress.json").write_text('{"done": 1}')
    (run.folder / "result.json").write_text('{"half')
    shown = agent.run(run.id)
    assert shown["progress"] == {"done": 1}
    assert shown["result"] is None


def test_runs_are_listed(agent: Agent, start: Start) -> None:
    first, second = start("verify"), start("extract")
    assert [run["id"] for run in agent.all()] == [second.id, first.id]
    assert [run["id"] for run in agent.all("verify")] == [first.id]
    assert [run["id"] for run in agent.all(most=1)] == [second.id]
    assert len(agent.all(most=2)) == len(agent.all(most=3)) == 2


def test_the_newest_extraction(agent: Agent, start: Start) -> None:
    assert agent.extraction() is None
    into_a, into_b = (start("extract", details={"output": output}) for output in ("/a", "/b"))
    newest, of_a = agent.extraction(), agent.extraction("/a")
    assert newest is not None
    assert newest["id"] == into_b.id
    assert of_a is not None
    assert of_a["id"] == into_a.id
    assert agent.extraction("/c") is None


def test_an_extraction_that_runs_comes_before_a_later_one_that_is_over(agent: Agent, start: Start) -> None:
    goes_on, over = (start("extract", details={"output": "/a"}) for _ in range(2))
    agent.stop(over.id, "a mistake")
    for found in (agent.extraction(), agent.extraction("/a"), agent.overview()["extraction"]):
        assert found is not None
        assert found["id"] == goes_on.id
    assert [run.id for run in agent._of_bundle(None, None)] == [goes_on.id]
    agent.stop(goes_on.id, "enough")
    found = agent.extraction()
    assert found is not None
    assert found["id"] == over.id


# --- Servers ---


def test_the_state_of_a_server(agent: Agent, server: Callable[..., Run]) -> None:
    run = server()
    now = until(lambda: (now := agent.status(run.id))["verdict"]["verdict"] == "healthy" and now)
    assert now["id"] == run.id
    assert now["port"] == run.spec.port
    assert now["layers"] == "outputs of layers 2 (boundaries 3)"
    assert agent.server()["id"] == run.id
    # An agent that comes later reads the log from its start.
    later = until(lambda: (now := Agent(agent.payload).status(run.id))["verdict"]["verdict"] == "healthy" and now)
    assert [phase["id"] for phase in later["phases"]] == ["args", "weights", "ready"]


def test_a_whole_look_in_one_answer(agent: Agent, server: Callable[..., Run], start: Start) -> None:
    empty = agent.overview()
    assert (empty["server"], empty["extraction"]) == (None, None)
    run, job = server(), start("extract", details={"output": "/data"})
    seen = agent.overview()
    assert (seen["server"]["id"], seen["extraction"]["id"]) == (run.id, job.id)
    until(lambda: {one["id"] for one in agent.overview()["sample"]["runs"]} == {run.id, job.id})
    assert any(process["title"] for process in seen["sample"]["processes"])
    assert agent.overview(port=1)["server"] is None
    other = server()
    with pytest.raises(UsageError, match="say which with --port"):
        agent.overview()
    assert agent.overview(run_id=run.id)["server"]["id"] == run.id
    assert agent.overview(port=other.spec.port)["server"]["id"] == other.id
    for one in (run, other):
        agent.stop(one.id)
    assert agent.overview()["server"]["id"] == other.id  # the one that ran last


def test_a_look_does_not_read_again_what_is_over(
    agent: Agent, server: Callable[..., Run], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    really = runs._read
    monkeypatch.setattr(runs, "_read", lambda path, kind: read.append(path) or really(path, kind))
    for number in range(40):
        name = f"{('server', 'extract', 'verify')[number % 3]}-{number}"
        (agent.runs.folder / name).mkdir()
        kind, _, _ = name.partition("-")
        spec = runs.Spec(id=name, kind=kind, argv=[], created=float(number), port=1, details={"output": "/data"})
        runs.write_json(agent.runs.folder / name / "spec.json", spec)
        runs.write_json(agent.runs.folder / name / "exit.json", runs.Exit(code=0, signal=None, at=float(number)))
    live = {server().id, start("extract", details={"output": "/data"}).id}
    read.clear()
    assert {agent.overview()["server"]["id"], agent.overview()["extraction"]["id"]} == live
    assert not {path for path in read if path.parent.name not in live and read.count(path) > 1}
    read.clear()
    agent.sampler._live._looked = -math.inf  # else it is asked once a second only
    agent.overview()
    agent.overview(port=2)
    agent.extraction("/data")
    assert {path.parent.name for path in read} == live


def test_what_was_launched_in_place_of_a_server(agent: Agent, start: Start) -> None:
    dead = start("server")
    assert agent.successor(dead.id) is None
    second = start("server", details={"relaunch_of": dead.id})
    last = start("server", details={"relaunch_of": second.id})
    start("server")
    assert [agent.successor(run.id) for run in (dead, second, last)] == [last.id, last.id, None]


def test_how_long_the_start_before_took(agent: Agent, server: Callable[..., Run]) -> None:
    first = server()
    until(lambda: agent.status(first.id)["verdict"]["verdict"] == "healthy")
    assert agent.status(first.id)["earlier"] is None
    agent.stop(first.id)
    silent = server("silent")  # never came up: the next start is compared with the first
    agent.stop(silent.id)
    earlier = agent.status(server().id)["earlier"]
    assert earlier.run == first.id
    assert earlier.seconds >= 0
    assert set(earlier.phases) == {"args", "weights"}
    other = server(profile="another")
    assert agent.status(other.id)["earlier"] is None


def test_what_the_gate_says(agent: Agent, server: Callable[..., Run]) -> None:
    run = server()
    until(lambda: agent.status(run.id)["verdict"]["verdict"] == "healthy")
    said = agent.gate(run.id)
    assert {finding.id for finding in said["findings"]} == {
        "radix",
        "graphs_prefill",
        "graphs_decode",
    }
    assert said["effective"] == {"api_key": "***", "tp_size": "1"}
    assert said["probe"] is None
    agent.stop(run.id)
    with pytest.raises(RunDied, match=f"the server {run.id} is dead"):
        agent.gate(run.id)


def test_only_a_server_has_a_state(agent: Agent, start: Start) -> None:
    run = start("verify")
    with pytest.raises(UsageError, match=f"{run.id} is no server"):
        agent.status(run.id)


def test_a_stop_of_a_server_stops_what_draws_from_it(agent: Agent, server: Callable[..., Run], start: Start) -> None:
    run = server("mute")
    until(lambda: agent.status(run.id)["verdict"]["verdict"] == "healthy")
    drawing = agent.start("try", {"text": "hello"})
    until(lambda: "asked for /server_info" in run.log.read_text(), "the job talks to the server")
    bystander = start("verify", details={"server": "server-of-somebody-else"})
    made = agent.stop(run.id, "enough")
    assert made.left == []
    ended = agent.run(drawing["id"])
    assert ended["state"] == "exited"
    assert ended["exit"].code == 130
    assert ended["result"] == {"error": "it was asked to stop"}
    stopped = json.loads((agent.runs.get(drawing["id"]).folder / "stop.json").read_text())
    assert stopped["why"] == f"its server {run.id} is stopped"
    assert not run.alive()
    assert bystander.alive()


def test_what_a_job_of_a_stopped_server_left_is_named(
    agent: Agent, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start("server")
    job = start("extract")
    runs.write_json(job.folder / "job.json", {"server": {"run": server.id}})
    stop = runs.stop

    def stopped(run: Run, why: str, first: signal.Signals = signal.SIGTERM) -> runs.Stopped:
        made = stop(run, why, first)
        return runs.Stopped(id=run.id, seconds=1.0, how="asked", left=["process 7 (x)"]) if run.id == job.id else made

    monkeypatch.setattr(agents.runs, "stop", stopped)
    assert agent.stop(server.id).left == [f"process 7 (x) of {job.id}"]


# --- What is wrong ---


def test_a_server_that_died_is_an_alarm(agent: Agent, server: Callable[..., Run]) -> None:
    run = server()
    until(lambda: agent.overview()["server"]["verdict"]["verdict"] == "healthy")
    assert agent.overview()["alarms"] == []
    os.kill(run.running.child.pid, signal.SIGKILL)
    (alarm,) = until(lambda: agent.overview()["alarms"])
    assert (alarm.id, alarm.severity) == ("server-crashed", "critical")
    assert alarm.cause == "a process was killed by SIGKILL, most often by the kernel's OOM killer"
    assert alarm.remedy


def test_what_the_supervisor_of_an_extraction_sees_counts(
    agent: Agent, server: Callable[..., Run], start: Start
) -> None:
    server()
    job = start("extract", details={"output": "/data"})
    alarm = {"id": "throughput-collapsed", "severity": "warning", "since": 1.0}
    runs.write_json(job.folder / "alarms.json", {"schema": 1, "at": 1.0, "alarms": [alarm]})
    assert agent.overview()["alarms"] == []  # it says nothing any more
    runs.write_json(job.folder / "alarms.json", {"schema": 1, "at": time.time(), "alarms": [alarm]})
    assert agent.overview()["alarms"] == [alarm]
    mistaken = start("extract", details={"output": "/mistaken"})
    agent.stop(mistaken.id)
    assert agent.overview()["alarms"] == [alarm]  # a later one that is over says nothing of the one that runs
    agent.stop(job.id)
    assert agent.overview()["alarms"] == []  # nobody watches it any more


# --- Jobs ---


def test_a_job_of_an_unknown_kind(agent: Agent) -> None:
    with pytest.raises(UsageError) as failed:
        agent.start("dance", {})
    assert str(failed.value) == f"no job is called 'dance'; there are {', '.join(JOBS)}"


@pytest.mark.parametrize("kind", ["try", "extract"])
def test_a_job_that_needs_a_server_when_none_runs(agent: Agent, kind: str) -> None:
    with pytest.raises(RunDied) as failed:
        agent.start(kind, {"output": "/data"}, 30001)
    assert str(failed.value) == "no server of ours runs here on port 30001; `layertap launch` it"
    assert failed.value.exit_code == 9
    assert agent.all() == []


@pytest.mark.parametrize("output", ["{home}/data", "data", "~/data/"])
def test_a_second_extraction_into_the_same_folder(agent: Agent, start: Start, home: Path, output: str) -> None:
    first = start("extract", details={"output": f"{home}/data"})
    with pytest.raises(Locked) as failed:
        agent.start("extract", {"output": output.format(home=home)})
    assert str(failed.value) == (
        f"an extraction into {home}/data runs already: {first.id}; `layertap stop {first.id}` stops it"
    )
    assert failed.value.exit_code == 7


@pytest.mark.parametrize("output", ["{home}/data", "data", "~/data/"])
def test_an_extraction_is_found_by_its_folder_however_that_is_named(
    agent: Agent, start: Start, home: Path, output: str
) -> None:
    other, run = (start("extract", details={"output": f"{home}/{name}"}) for name in ("other", "data"))
    for one in (other, run):
        one.log.write_text("sample 7 is drawn again\n")
    asked = output.format(home=home)
    found = agent.extraction(asked)
    assert found and found["id"] == run.id
    assert [log.run for log in agent.sample_log(asked, 7)] == [run.id]


def test_a_job_that_fails_says_why(agent: Agent, home: Path) -> None:
    (home / "nothing").mkdir()
    run = agent.start("verify", {"output": "nothing"})
    ended: dict[str, Any] = until(lambda: (now := agent.run(run["id"]))["exit"] and now)
    assert ended["exit"].code == 2
    assert ended["result"] == {"error": f"{home}/nothing is no dataset: it has no manifest.json"}
    assert ended["details"] == {"output": f"{home}/nothing"}
    assert [event["event"] for event in ended["events"]] == ["started", "error", "ended"]
    assert ended["events"][1]["reason"] == ended["result"]["error"]


# --- An earlier demo ---


DEMO_ROWS = "/cache/payload-0123/host/backends/embedded/conversations.jsonl"


@pytest.fixture
def dataset(home: Path) -> Callable[..., Path]:
    def made(profile: str, input: str = DEMO_ROWS) -> Path:
        (home / "data" / "native").mkdir(parents=True)
        manifest = {"profile": profile, "input": input, "settings": {"formats": ["native", "specforge"]}}
        (home / "data" / "manifest.json").write_text(json.dumps(manifest))
        return home / "data"

    return made


def test_an_earlier_demo_is_removed(agent: Agent, dataset: Callable[[str], Path]) -> None:
    folder = dataset("embedded-kimi-k2_5")
    for name in ("native/rows_0-2000/0.safetensors", "specforge/a", "tokens/ids.bin", "ledger.sqlite"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    for name in (".lock", "ledger.sqlite-journal", ".manifest.json.4711"):
        (folder / name).touch()
    agent.remove_demo(str(folder))
    assert not folder.exists()
    agent.remove_demo(str(folder))


def test_a_demo_that_did_not_come_far_is_removed(agent: Agent, home: Path) -> None:
    (home / "data").mkdir()
    (home / "data" / ".lock").touch()
    agent.remove_demo(f"{home}/data")
    assert not (home / "data").exists()


def test_a_dataset_that_is_no_demo_is_never_removed(agent: Agent, dataset: Callable[[str], Path]) -> None:
    folder = dataset("kimi-k2_5-int4-8x-rtxpro6000")
    with pytest.raises(UsageError) as failed:
        agent.remove_demo(str(folder))
    assert str(failed.value) == f"{folder} is not empty and holds no demo; give another folder"
    assert (folder / "native").is_dir()


def test_a_dataset_of_other_rows_is_never_removed(agent: Agent, dataset: Callable[..., Path]) -> None:
    folder = dataset("embedded-llama", "/home/me/rows.jsonl")
    with pytest.raises(UsageError, match="is not empty and holds no demo"):
        agent.remove_demo(str(folder))
    assert (folder / "native").is_dir()


@pytest.mark.parametrize("kept", ["notes/thesis.txt", "notes.md", "speculators/data_0.pt", "pull.json", "ledger.md"])
def test_what_somebody_put_beside_a_demo_is_never_removed(
    agent: Agent, dataset: Callable[..., Path], kept: str
) -> None:
    folder = dataset("embedded-llama")
    (folder / kept).parent.mkdir(exist_ok=True)
    (folder / kept).touch()
    with pytest.raises(UsageError) as failed:
        agent.remove_demo(str(folder))
    named = kept.partition("/")[0]
    assert str(failed.value) == f"{folder} holds more than a demo: {named}; move that away, or give another folder"
    assert (folder / kept).exists()


@pytest.mark.parametrize("manifest", [None, "{", "[]", "{}", '{"profile": "embedded-llama"}'])
def test_a_folder_of_something_else_is_never_removed(agent: Agent, home: Path, manifest: str | None) -> None:
    (home / "thesis.txt").touch()
    if manifest is not None:
        (home / "manifest.json").write_text(manifest)
    with pytest.raises(UsageError, match="is not empty and holds no demo"):
        agent.remove_demo(str(home))
    assert (home / "thesis.txt").exists()


def test_a_demo_behind_a_symbolic_link_is_not_removed(agent: Agent, dataset: Callable[[str], Path], home: Path) -> None:
    folder = dataset("embedded-llama")
    os.symlink(folder, home / "link")
    with pytest.raises(UsageError, match="symbolic link"):
        agent.remove_demo(f"{home}/link")
    assert folder.exists()


def test_a_demo_that_is_being_drawn_is_not_removed(agent: Agent, dataset: Callable[[str], Path], start: Start) -> None:
    folder = dataset("embedded-llama")
    start("extract", details={"output": str(folder)})
    for path in (str(folder), "data", "~/data"):
        with pytest.raises(Locked):
            agent.remove_demo(path)
    assert folder.exists()
