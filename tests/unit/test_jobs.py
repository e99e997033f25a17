"""Jobs: what each is started with, and what becomes of the ways in which one ends."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import FAKE_SGLANG, until

from backends import runs
from backends.errors import Interrupted, Locked, NotVerified, OurBug, RunDied, UsageError
from backends.host import LocalHost
from backends.jobs import describe, draw_lock, draws_from, start_job
from backends.ports import free_port
from backends.runs import Run, Runs, machine_id
from capture.dumps.dump import TapState, write_json
from console import headless
from console.session import Session

Server = Callable[..., Run]
Start = Callable[..., Run]


@pytest.fixture(autouse=True)
def given(home: Path) -> None:
    """What the jobs here read."""
    (home / "rows.jsonl").write_text("{}\n")
    (home / "data").mkdir()


@pytest.fixture
def job(all_runs: Runs, payload_folder: Path) -> Callable[..., Run]:
    def started(kind: str, **asked: object) -> Run:
        return start_job(all_runs, payload_folder, kind, asked, None)

    return started


# --- What a job is started with ---


def test_a_job_stands_in_its_run_with_the_payload_and_no_gpu(
    job: Callable[..., Run], payload_folder: Path, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/inherited")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    run = job("verify", output="data")
    env = run.private.env
    assert run.spec.argv == [sys.executable, "-P", "-m", "capture.job", "verify"]
    assert env["PYTHONPATH"] == f"{payload_folder}/engine:/inherited"
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    assert env["HF_HUB_OFFLINE"] == "1"
    assert json.loads((run.folder / "job.json").read_text()) == {"output": f"{home}/data"}
    assert run.spec.details == {"output": f"{home}/data"}


@pytest.mark.parametrize(
    ("kind", "asked", "lacks"),
    [
        ("plan", {"rows": "none.jsonl", "model": "/m"}, "none.jsonl"),
        ("extract", {"rows": "none.jsonl", "output": "new"}, "none.jsonl"),
        ("verify", {"output": "none"}, "none"),
        ("sample", {"output": "none"}, "none"),
        ("export", {"dataset": "none", "output": "new"}, "none"),
        ("diff", {"dataset": "data", "other": "none"}, "none"),
    ],
)
def test_what_is_not_there_is_said_without_a_run(
    job: Callable[..., Run], server: Server, model: Path, all_runs: Runs, home: Path, kind: str, asked: Any, lacks: str
) -> None:
    server("silent")
    with pytest.raises(UsageError) as refused:
        job(kind, **{name: str(model) if name == "model" else value for name, value in asked.items()})
    assert str(refused.value) == f"{home}/{lacks}: there is no such file or folder on this host"
    assert [run.spec.kind for run in all_runs.all()] == ["server"]


def test_only_the_job_that_measures_sees_the_gpus(
    job: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, all_runs: Runs, home: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    run = job("doctor", output="data", env={"NCCL_P2P_LEVEL": "SYS"})
    assert run.private.env["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert json.loads((run.folder / "job.json").read_text()) == {
        "output": f"{home}/data",
        "env": {"NCCL_P2P_LEVEL": "SYS"},
        "state": str(all_runs.state),
    }


@pytest.mark.parametrize(
    ("kind", "profile"), [("server", "kimi-k2_5-int4-8x-rtxpro6000"), ("server", None), ("doctor", None)]
)
def test_nothing_is_measured_on_gpus_that_are_in_use(
    job: Callable[..., Run], start: Start, kind: str, profile: str | None
) -> None:
    user = start(kind, details={"profile": profile} if profile else {})
    with pytest.raises(Locked) as failed:
        job("doctor")
    assert str(failed.value) == f"{user.id} uses the GPUs; `layertap stop {user.id}`, and measure then"


def test_an_embedded_server_uses_no_gpu(job: Callable[..., Run], start: Start) -> None:
    start("server", details={"profile": "embedded-llama"})
    assert job("doctor").spec.kind == "doctor"


def test_what_a_job_is_told_of_its_server(job: Callable[..., Run], server: Server, home: Path, model: Path) -> None:
    run = server("silent")
    asked = job("try", text="hello")
    secret = json.loads(run.private.env["LAYERTAP_TAP"])["secret"]
    child = run.running.child
    path = asked.folder / "job.json"
    assert json.loads(path.read_text()) == {
        "text": "hello",
        "server": {
            "run": run.id,
            "url": f"http://127.0.0.1:{run.spec.port}",
            "dump_dir": f"{home}/dumps/{run.id}",
            "secret": secret,
            "process": {"pid": child.pid, "start": child.start},
            "model": str(model),
            "profile": "fake",
            "trust_remote_code": False,
            "api_key": None,
            "replica": None,
        },
        "lock": f"{home}/state/layertap/locks/{machine_id()}-{run.spec.port}.draw",
    }
    assert path.stat().st_mode & 0o777 == 0o600
    assert asked.spec.details == {"server": run.id}


def test_an_extraction_keeps_what_it_takes_to_ask_for_it_again(
    job: Callable[..., Run], server: Server, home: Path
) -> None:
    run = server("silent")
    again = {"formats": ["native"], "options": {"max_length": 100}, "allow_volatile": True, "restart_server": 1}
    asked = job("extract", rows="rows.jsonl", output="data", layertap="0.1.0", **again)
    assert asked.spec.details == {"rows": f"{home}/rows.jsonl", "output": f"{home}/data", "server": run.id, **again}


def test_several_servers_are_told_each_with_its_lock(
    job: Callable[..., Run], server: Server, all_runs: Runs, payload_folder: Path
) -> None:
    first, second, third = (server("silent", port=free_port()) for _ in range(3))
    ports = [one.spec.port for one in (first, second, third)]
    asked = {"rows": "rows.jsonl", "output": "data"}
    run = start_job(all_runs, payload_folder, "extract", asked | {"beside_ports": ports[1:]}, ports[0])
    told = json.loads((run.folder / "job.json").read_text())
    sources = [told, *told["beside"]]
    assert [source["server"]["run"] for source in sources] == [first.id, second.id, third.id]
    assert [source["lock"] for source in sources] == [str(draw_lock(all_runs, one)) for one in (first, second, third)]
    assert (run.spec.details["server"], run.spec.details["beside"]) == (first.id, [second.id, third.id])
    assert [draws_from(run, one) for one in (first, second, third)] == [True, True, True]

    for more, failed, message in (
        ({"beside_ports": ports[:1]}, UsageError, "--port names the same server twice"),
        ({"beside_ports": ports[1:], "restart_server": 1}, UsageError, "--restart-server goes with one server"),
        ({"beside_ports": [free_port()]}, RunDied, "no server of ours runs here on port"),
    ):
        with pytest.raises(failed, match=message):
            start_job(all_runs, payload_folder, "extract", {"rows": "r", "output": "other"} | more, ports[0])


def test_a_server_of_replicas_is_told_as_each_of_them(
    job: Callable[..., Run], server: Server, home: Path, all_runs: Runs
) -> None:
    run = server("silent")
    dumps = Path(describe(run).dump_dir)
    for k in (0, 1):
        (dumps / f"replica_{k}").mkdir()
        tap = TapState(code="", pid=1, sglang="", model="", model_class="", replicas=2)
        write_json(dumps / f"replica_{k}" / "tap.json", tap)
    told = json.loads((job("extract", rows="rows.jsonl", output="data").folder / "job.json").read_text())
    parts = [told, *told["beside"]]
    assert [(part["server"]["replica"], part["server"]["dump_dir"]) for part in parts] == [
        (0, str(dumps / "replica_0")), (1, str(dumps / "replica_1")),
    ]  # fmt: skip
    assert {part["lock"] for part in parts} == {str(draw_lock(all_runs, run))}
    tried = json.loads((job("try", text="hello").folder / "job.json").read_text())
    assert tried["server"]["replica"] == 0
    assert "beside" not in tried


def test_the_lock_for_drawing_is_the_servers(all_runs: Runs, server: Server) -> None:
    run = server("silent")
    assert draw_lock(all_runs, run) == all_runs.lock_path(run.spec.port, ".draw")
    assert draw_lock(all_runs, run) != all_runs.lock_path(run.spec.port)


def test_key_and_trust_come_from_the_servers_own_arguments(all_runs: Runs, server: Server, model: Path) -> None:
    argv = ["-m", "sglang.launch_server", "--api-key", "sk-123", "--trust-remote-code"]
    run = server(argv=argv, shown_argv=["--api-key", "***"], env={"FAKE": "silent"})
    made = describe(run)
    assert made.api_key == "sk-123"
    assert made.trust_remote_code is True
    assert made.headers == {"Authorization": "Bearer sk-123"}


def test_a_dead_server_cannot_be_described(server: Server) -> None:
    run = server("silent")
    runs.stop(run, "")
    with pytest.raises(RunDied) as failed:
        describe(run)
    assert str(failed.value) == f"the server {run.id} is dead; `layertap launch` it"


def test_a_plan_takes_the_model_of_the_server(job: Callable[..., Run], server: Server, model: Path) -> None:
    server("silent")
    run = job("plan", rows="rows.jsonl", model=None)
    asked = json.loads((run.folder / "job.json").read_text())
    assert (asked["model"], asked["server"]["model"]) == (str(model), str(model))
    assert asked["server"]["url"].startswith("http://127.0.0.1:")  # which is asked how many tokens it takes


def test_a_plan_of_a_model_that_is_named(job: Callable[..., Run], model: Path, home: Path) -> None:
    run = job("plan", rows="rows.jsonl", model=str(model))
    assert json.loads((run.folder / "job.json").read_text()) == {"rows": f"{home}/rows.jsonl", "model": str(model)}
    with pytest.raises(UsageError, match="model /none: there is no such folder"):
        job("plan", rows="rows.jsonl", model="/none")


def test_a_plan_without_server_and_model(job: Callable[..., Run]) -> None:
    with pytest.raises(UsageError) as failed:
        job("plan", rows="rows.jsonl")
    assert str(failed.value) == ("no server runs here to take the model from; name the model's folder with --model")


# --- How a job ends, as both doors tell it ---


@pytest.fixture
def session(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    monkeypatch.setenv("PYTHONPATH", str(FAKE_SGLANG))
    link = LocalHost(sys.executable)
    yield Session(link, {})
    link.close()


def ending(start: Start, code: str) -> Run:
    """A job of these lines of Python; waits for its end."""
    run = start("verify", [sys.executable, "-c", code])
    until(lambda: run.exit)
    return run


def result(value: object, code: int) -> str:
    return f"import json, sys; json.dump({value!r}, open('result.json', 'w')); sys.exit({code})"


def finish(session: Session, run: Run) -> tuple[int, object]:
    (*_, last) = session.follow(run.id)
    return session.finish(last)


def test_a_job_that_succeeds(session: Session, start: Start) -> None:
    assert finish(session, ending(start, result({"samples": 3}, 0))) == (0, {"samples": 3})


def test_a_job_whose_result_is_bad_news(session: Session, start: Start) -> None:
    assert finish(session, ending(start, result({"failed": 1}, 1))) == (1, {"failed": 1})


@pytest.mark.parametrize(
    ("code", "kind"), [(1, NotVerified), (2, UsageError), (7, Locked), (9, RunDied), (130, Interrupted)]
)
def test_an_error_of_a_job_keeps_its_exit_code(session: Session, start: Start, code: int, kind: type) -> None:
    with pytest.raises(kind, match=r"^what was wrong$") as failed:
        finish(session, ending(start, result({"error": "what was wrong"}, code)))
    assert failed.value.exit_code == code


def test_a_bug_of_a_job_shows_the_end_of_its_log_without_secrets(session: Session, start: Start) -> None:
    code = "import sys; print('early ' * 1000); print('api_key=sk-123'); print('boom'); sys.exit(1)"
    run = ending(start, code)
    with pytest.raises(OurBug) as failed:
        finish(session, run)
    said = str(failed.value)
    assert said.startswith(f"the run {run.id} failed:\n")
    assert said.endswith("early \napi_key=***\nboom")
    assert len(said) < 4100
    assert failed.value.exit_code == 70


def test_a_job_that_was_killed(session: Session, start: Start) -> None:
    run = ending(start, "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(RunDied) as failed:
        finish(session, run)
    assert str(failed.value) == (
        f"the run {run.id} was ended by signal 9; give the same command again, nothing is lost"
    )


def test_a_job_that_was_killed_with_its_supervisor(session: Session, start: Start) -> None:
    run = start()
    for process in (run.running.supervisor, run.running.child):
        os.kill(process.pid, signal.SIGKILL)
    until(lambda: not run.alive())
    with pytest.raises(RunDied) as failed:
        finish(session, run)
    assert str(failed.value) == (
        f"the run {run.id} was ended and could not write down how; give the same command again, nothing is lost"
    )


def test_ctrl_c_stops_a_job_that_is_followed(
    session: Session, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    run = start()
    (run.folder / "progress.json").write_text('{"done": 1}')

    def interrupted(_: object) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        headless.follow_job(session, run.id, interrupted)
    assert run.exit is not None
    assert run.exit.signal == signal.SIGINT
    assert capsys.readouterr().err == f"stopping {run.id} …\n"
