"""Runs: they outlive whoever started them, are found whatever they do, and a stop proves itself or says what is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from fake_nvml import UNINITIALIZED, Card, FakeNvml, process
from helpers import ROOT, SLEEP, gone, until
from tmpfs import fill, small_tmpfs

from backends import runs
from backends.errors import Locked, RunDied, UsageError
from backends.ports import free_port, port_free
from backends.runs import Run, Runs, machine_id, python_path, stop
from capture import events
from capture.server import Process

Start = Callable[..., Run]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop that does not wait long for what will not end."""
    for name in ("ASK_SECONDS", "TERM_SECONDS", "PORT_SECONDS"):
        monkeypatch.setattr(runs, name, 0.5)


def python(code: str, *words: str) -> list[str]:
    return [sys.executable, "-c", code, *words]


def ended(run: Run) -> runs.Exit:
    return until(lambda: run.exit, "the run has ended")


def forge(run: Run, **changes: object) -> None:
    """Rewrite run.json."""
    assert run.running is not None
    runs.write_json(run.folder / "run.json", msgspec.structs.replace(run.running, **changes))


def kill_supervisor(run: Run) -> None:
    assert run.running is not None
    os.kill(run.running.supervisor.pid, signal.SIGKILL)
    until(lambda: not run.running.supervisor.alive())


# --- From start to end ---


def test_a_run_that_ends(start: Start) -> None:
    run = start("verify", python("print('working'); raise SystemExit(3)"))
    exit = ended(run)
    assert (exit.code, exit.signal) == (3, None)
    assert run.state() == "exited"
    assert not run.alive()
    assert run.log.name == "verify.log"
    assert run.log.read_text() == "working\n"


def test_a_run_that_is_killed(start: Start) -> None:
    run = start("verify", python("import os; os.kill(os.getpid(), 9)"))
    exit = ended(run)
    assert (exit.code, exit.signal) == (None, 9)


def test_the_folder_says_who_runs_it(start: Start) -> None:
    run = start("verify", details={"output": "/data"})
    assert run.state() == "running"
    spec, running = run.spec, run.running
    assert (spec.id, spec.kind, spec.argv, spec.code, spec.details) == (
        run.id,
        "verify",
        SLEEP,
        "0123",
        {"output": "/data"},
    )
    assert running is not None
    assert psutil.Process(running.child.pid).cmdline() == SLEEP
    assert psutil.Process(running.child.pid).ppid() == running.supervisor.pid
    assert psutil.Process(running.child.pid).cwd() == str(run.folder)
    assert psutil.Process(running.child.pid).environ()["LAYERTAP_RUN"] == run.id
    assert running.machine == machine_id()
    assert {process.pid for process in run.processes()} == {running.child.pid, running.supervisor.pid}


def test_prepare_adds_files_and_environment(start: Start) -> None:
    def prepare(run: Run) -> dict[str, str]:
        (run.folder / "job.json").write_text("{}")
        return {"MORE": "put in"}

    run = start("verify", python("import os; print(os.listdir(), os.environ['MORE'])"), prepare=prepare)
    ended(run)
    assert "'job.json'" in run.log.read_text()
    assert "put in" in run.log.read_text()


def test_a_program_that_is_not_there(start: Start, all_runs: Runs) -> None:
    with pytest.raises(RunDied) as failed:
        start("verify", ["/nowhere/python"])
    assert str(failed.value) == "verify could not be started: layertap: /nowhere/python: No such file or directory"
    (run,) = all_runs.all()
    assert run.state() == "exited"
    assert ended(run).code == 127


def test_the_child_gets_its_own_environment_and_the_supervisor_a_short_path(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/inherited")
    run = start(env={"PATH": os.environ["PATH"], "PYTHONPATH": "/given"})
    assert run.running is not None
    assert psutil.Process(run.running.child.pid).environ()["PYTHONPATH"] == "/given"
    assert psutil.Process(run.running.supervisor.pid).environ()["PYTHONPATH"] == f"{ROOT}:/inherited"


def test_python_path_begins_with_ours() -> None:
    assert python_path([Path("/ours"), Path("/too")], {"PYTHONPATH": "/a::/ours:/b"}) == "/ours:/too:/a:/b"
    assert python_path([Path("/ours")], {}) == "/ours"


# --- Who may read it ---


def test_nobody_else_can_read_a_run_and_no_secret_is_shown(start: Start) -> None:
    before = os.umask(0)
    try:
        run = start(
            "verify",
            python("import signal; signal.pause()", "--api-key", "sk-123"),
            shown_argv=["python", "--api-key", "***"],
            env={**os.environ, "HF_TOKEN": "hf-456"},
        )
        stop(run, "the test is over")
    finally:
        os.umask(before)
    assert run.folder.stat().st_mode & 0o777 == 0o700
    modes = {path.name: path.stat().st_mode & 0o777 for path in run.folder.iterdir()}
    assert modes == dict.fromkeys(
        ["spec.json", "env.json", "run.json", "verify.log", "events.jsonl", "stop.json", "exit.json"], 0o600
    )
    holding = {
        path.name for path in run.folder.iterdir() if "sk-123" in path.read_text() or "hf-456" in path.read_text()
    }
    assert holding == {"env.json"}
    assert run.private.argv[-1] == "sk-123"
    assert run.private.env["HF_TOKEN"] == "hf-456"
    assert run.spec.argv == ["python", "--api-key", "***"]


# --- Its history ---


def history(run: Run) -> list[dict]:
    """The events without their times, which ascend."""
    found = events.latest(run.folder)
    times = [event.pop("at") for event in found]
    assert times == sorted(times) and all(abs(time.time() - at) < 600 for at in times)
    return found


def begun(run: Run) -> dict:
    assert run.running is not None
    return {"event": "started", "child": run.running.child.pid, "supervisor": run.running.supervisor.pid}


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("raise SystemExit(3)", {"code": 3, "signal": None}),
        ("import os; os.kill(os.getpid(), 9)", {"code": None, "signal": 9}),
    ],
)
def test_what_happened_to_a_run(start: Start, code: str, end: dict) -> None:
    run = start("verify", python(code))
    ended(run)
    assert history(run) == [begun(run), {"event": "ended", **end}]


def test_what_happened_to_a_run_that_was_stopped(start: Start) -> None:
    run = start("verify")
    made = stop(run, "enough")
    assert history(run) == [
        begun(run),
        {"event": "stop_asked", "why": "enough"},
        {"event": "ended", "code": None, "signal": 15},
        {"event": "stopped", "how": "asked", "seconds": made.seconds, "left": []},
    ]
    stop(run, "once more")
    assert len(history(run)) == 4


def test_what_happened_to_a_run_that_could_not_be_started(start: Start, all_runs: Runs) -> None:
    with pytest.raises(RunDied):
        start("verify", ["/nowhere/program"])
    (run,) = all_runs.all()
    assert history(run) == [{"event": "ended", "code": 127, "signal": None}]


def test_a_history_that_cannot_be_written_ends_no_run(start: Start) -> None:
    def prepare(run: Run) -> dict[str, str]:
        (run.folder / "events.jsonl").mkdir()
        return {}

    run = start("verify", python("raise SystemExit(3)"), prepare=prepare)
    assert ended(run).code == 3
    assert events.latest(run.folder) == []


# --- It outlives its starter ---

STARTER = """
import os, sys, time
from pathlib import Path
from backends.runs import Runs
run = Runs(Path(sys.argv[1])).start("verify", [sys.executable, "-c", "import signal; signal.pause()"], dict(os.environ), code="")
print(run.id, flush=True)
if sys.argv[2] == "stay":
    time.sleep(600)
"""


def starter(all_runs: Runs, what: str) -> tuple[subprocess.Popen, Run]:
    process = subprocess.Popen(python(STARTER, str(all_runs.state), what), stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    with process.stdout:
        return process, Run(all_runs.folder / process.stdout.readline().strip())


def test_a_run_outlives_a_starter_that_ends(all_runs: Runs) -> None:
    process, run = starter(all_runs, "leave")
    assert process.wait() == 0
    assert run.state() == "running"
    assert stop(run, "").left == []


def test_a_run_outlives_a_starter_that_is_killed(all_runs: Runs) -> None:
    process, run = starter(all_runs, "stay")
    process.kill()
    process.wait()
    assert run.state() == "running"
    assert stop(run, "").left == []
    exit = ended(run)  # whoever started it, its supervisor writes down how it ended
    assert (exit.code, exit.signal) == (None, 15)


def test_a_run_that_has_ended_leaves_no_zombie(start: Start) -> None:
    run = start("verify", python("pass"))
    assert run.running is not None
    until(lambda: not psutil.pid_exists(run.running.supervisor.pid), "the supervisor is waited for")


# --- Locks ---


def test_a_second_run_with_the_same_lock(start: Start, all_runs: Runs) -> None:
    lock = all_runs.lock_path(30000)
    first = start(lock=lock)
    with pytest.raises(Locked) as failed:
        start(lock=lock)
    assert str(failed.value) == f"{lock} is held by another process"
    assert failed.value.exit_code == 7
    assert [run.id for run in all_runs.all()] == [first.id]
    assert [folder.name for folder in all_runs.folder.iterdir()] == [first.id]
    stop(first, "")
    start(lock=lock)


def test_a_second_server_on_a_port_is_told_of_the_first(start: Start, all_runs: Runs, home: Path) -> None:
    lock, port = all_runs.lock_path(30000), free_port()

    def prepare(run: Run) -> dict[str, str]:
        (home / "dumps" / run.id).mkdir(parents=True)
        return {}

    first = start("server", lock=lock, port=port, dump_root=home / "dumps", prepare=prepare)
    with pytest.raises(Locked) as failed:
        start("server", lock=lock, port=port, dump_root=home / "dumps", prepare=prepare)
    assert str(failed.value) == (
        f"a server of ours runs on port {port} already: {first.id}; `layertap stop {first.id}` stops it, or choose "
        "another --port"
    )
    assert [folder.name for folder in (home / "dumps").iterdir()] == [first.id]


def test_the_child_holds_the_lock_when_its_supervisor_is_killed(start: Start, all_runs: Runs) -> None:
    lock = all_runs.lock_path(30000)
    run = start(lock=lock)
    kill_supervisor(run)
    assert run.state() == "running"
    with pytest.raises(Locked):
        start(lock=lock)
    stopped = stop(run, "")
    assert (stopped.how, stopped.left) == ("asked", [])
    assert run.state() == "died"  # nobody was there to write down how it ended
    start(lock=lock)


def test_a_stop_waits_until_the_driver_has_its_memory_back(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen on a busy host with two H200s: NVML still named a rank that was gone, with its memory."""
    run, held = start(), []

    def named() -> set[int]:
        held.append(not run.processes())
        return {run.running.child.pid, 1} if sum(held) < 4 else {1}

    monkeypatch.setattr(runs, "_gpu_pids", named)
    assert stop(run, "").left == []
    assert sum(held) >= 4


def test_shared_memory_of_a_killed_server_goes_with_it(start: Start) -> None:
    """What its processes have mapped, by the names that SGLang gives; nobody else's."""
    names = [f"{kind}_{os.getpid()}_{tag}" for tag in ("mine", "theirs") for kind in ("sgl_shm_mq", "another")]
    paths = [Path("/dev/shm", name) for name in names]
    for path in paths:
        path.write_bytes(bytes(4096))
    code = """
import mmap, sys, time
files = [open(path, "r+b") for path in sys.argv[1:]]
held = [mmap.mmap(file.fileno(), 0) for file in files]
print("mapped", flush=True)
time.sleep(600)
"""
    run = start("server", python(code, *map(str, paths[:2])))
    try:
        until(lambda: "mapped" in run.log.read_text())
        assert stop(run, "", first=signal.SIGKILL).left == []
        assert [path.exists() for path in paths] == [False, True, True, True]
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def test_gpu_memory_that_stays_is_named(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start()
    pid = run.running.child.pid
    monkeypatch.setattr(runs, "_gpu_pids", lambda: {pid, 1})
    monkeypatch.setattr(runs, "GPU_SECONDS", 0.3)
    assert stop(run, "").left == [f"GPU memory that NVML says process {pid} holds"]


def test_a_lost_gpu_keeps_no_stop_from_looking_at_the_others(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start()
    pid = run.running.child.pid
    cards = Card(0), Card(1, nvmlDeviceGetComputeRunningProcesses_v3=[process(pid, 1 << 30)])
    cards[0].lost = True
    nvml = FakeNvml(*cards)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(runs, "GPU_SECONDS", 0.3)
    assert stop(run, "").left == [f"GPU memory that NVML says process {pid} holds"]
    nvml.failing["nvmlDeviceGetCount"] = UNINITIALIZED
    assert stop(run, "").left == []
    assert nvml.users == 0


# --- Alive or not ---


def test_another_process_of_the_same_number_is_not_the_run(start: Start) -> None:
    run = start()
    supervisor, child = run.running.supervisor, run.running.child
    forge(run, supervisor=Process(supervisor.pid, supervisor.start + 1), child=Process(child.pid, child.start + 1))
    assert run.state() == "died"


def test_a_run_of_another_boot_is_dead(start: Start) -> None:
    run = start()
    forge(run, boot="another")
    assert run.state() == "died"


def test_a_run_of_another_machine_is_elsewhere_and_not_ours_to_stop(start: Start) -> None:
    run = start()
    forge(run, machine="another")
    assert run.state() == "elsewhere"
    with pytest.raises(UsageError) as failed:
        stop(run, "")
    assert str(failed.value) == f"{run.id} runs on another machine that shares this home; stop it from there"
    assert not run.stop_asked
    forge(run, machine=machine_id())
    assert run.state() == "running"


def test_a_zombie_is_not_alive(start: Start) -> None:
    run = start("verify", python("pass"))
    ended(run)
    zombie = subprocess.Popen(["true"])
    until(lambda: psutil.Process(zombie.pid).status() == psutil.STATUS_ZOMBIE)
    of = Process.of(zombie.pid)
    assert not of.alive()
    (run.folder / "exit.json").unlink()
    forge(run, supervisor=of, child=of)
    assert run.state() == "died"
    zombie.wait()


def test_a_run_without_a_supervisor_starts_for_a_while_and_is_then_dead(start: Start) -> None:
    run = start("verify", python("pass"))
    ended(run)
    (run.folder / "exit.json").unlink()
    (run.folder / "run.json").unlink()
    spec = run.spec
    runs.write_json(run.folder / "spec.json", msgspec.structs.replace(spec, created=time.time()))
    assert run.state() == "starting"
    runs.write_json(run.folder / "spec.json", msgspec.structs.replace(spec, created=time.time() - 31))
    assert run.state() == "died"


# --- Finding runs ---


@pytest.fixture
def written(all_runs: Runs) -> Callable[[str, float], None]:
    """Writes the spec of a run that never ran."""

    def write(run_id: str, created: float) -> None:
        (all_runs.folder / run_id).mkdir()
        spec = runs.Spec(id=run_id, kind=run_id.partition("-")[0], argv=[], created=created)
        runs.write_json(all_runs.folder / run_id / "spec.json", spec)

    return write


def test_runs_are_listed_newest_first_and_by_kind(all_runs: Runs, written: Callable) -> None:
    written("server-1", 1.0)
    written("server-3", 3.0)
    written("extract-2", 2.0)
    (all_runs.folder / "stray").mkdir()
    (all_runs.folder / "damaged").mkdir()
    (all_runs.folder / "damaged" / "spec.json").write_text('{"id":')
    assert [run.id for run in all_runs.all()] == ["server-3", "extract-2", "server-1"]
    assert [run.id for run in all_runs.all("server")] == ["server-3", "server-1"]


def test_a_run_is_found_by_the_beginning_of_its_id(all_runs: Runs, written: Callable) -> None:
    written("server-1", 1.0)
    written("server-10", 2.0)
    written("extract-2", 3.0)
    assert all_runs.get("ex").id == "extract-2"
    assert all_runs.get("server-1").id == "server-1"
    with pytest.raises(UsageError) as failed:
        all_runs.get("server")
    assert str(failed.value) == "several runs begin with 'server'; runs: server-10, server-1"
    with pytest.raises(UsageError) as failed:
        all_runs.get("plan")
    assert str(failed.value) == "no run begins with 'plan'; runs: extract-2, server-10, server-1"


def test_there_are_no_runs_at_all(all_runs: Runs) -> None:
    with pytest.raises(UsageError, match="no run begins with 'x'; runs: none at all"):
        all_runs.get("x")


def test_the_live_server(start: Start, all_runs: Runs) -> None:
    with pytest.raises(RunDied) as failed:
        all_runs.server(30001)
    assert str(failed.value) == "no server of ours runs here on port 30001; `layertap launch` it"
    first = start("server", port=free_port())
    assert all_runs.server().id == first.id
    second = start("server", port=free_port())
    with pytest.raises(UsageError) as several:
        all_runs.server()
    assert str(several.value) == (f"servers run on ports {second.spec.port}, {first.spec.port}; say which with --port")
    assert all_runs.server(first.spec.port).id == first.id
    kill_supervisor(second)
    os.kill(second.running.child.pid, signal.SIGKILL)
    until(lambda: not second.alive())
    assert all_runs.server().id == first.id


# --- Stop ---


def test_a_run_is_asked_first(start: Start) -> None:
    code = "import signal\ntry: print('here', flush=True); signal.pause()\nexcept KeyboardInterrupt: print('bye')"
    run = start("verify", python(code))
    until(lambda: run.log.read_text())
    stopped = stop(run, "enough", signal.SIGINT)
    assert (stopped.id, stopped.how, stopped.left) == (run.id, "asked", [])
    assert json.loads((run.folder / "stop.json").read_text())["why"] == "enough"
    assert run.log.read_text() == "here\nbye\n"
    assert ended(run).code == 0


def test_a_run_that_does_not_listen_is_killed(start: Start, quick: None) -> None:
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"
    run = start("verify", python(code))
    until(lambda: run.log.read_text())
    stopped = stop(run, "")
    assert (stopped.how, stopped.left) == ("ended by SIGKILL", [])
    assert ended(run).signal == 9


CHILD_OF_ITS_OWN = """
import os, subprocess, sys
env = {} if sys.argv[1] == "unmarked" else None
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], env=env, start_new_session=sys.argv[1] == "marked")
print(child.pid, flush=True)
"""


@pytest.mark.parametrize("kind", ["marked", "unmarked"])
def test_what_a_dead_run_left_is_found_and_ended(start: Start, kind: str) -> None:
    """By its mark where it left the session, by the session where it lost the mark."""
    run = start("verify", python(CHILD_OF_ITS_OWN, kind))
    ended(run)
    until(lambda: not run.running.supervisor.alive())
    (orphan,) = run.processes()
    assert orphan.pid == int(run.log.read_text())
    stopped = stop(run, "")
    assert (stopped.how, stopped.left) == ("ended by SIGTERM", [])
    assert gone(orphan.pid)


@contextlib.contextmanager
def leaderless(code: str, *words: str) -> Iterator[tuple[int, psutil.Process]]:
    """A session, by the number of its leader that has ended, and the process that `code` leaves in it."""
    stranger = subprocess.Popen(python(code, *words), stdout=subprocess.PIPE, start_new_session=True)
    with stranger.stdout:
        daemon = psutil.Process(int(stranger.stdout.readline()))
    stranger.wait()
    try:
        yield stranger.pid, daemon
    finally:
        daemon.kill()


def test_a_session_that_got_the_number_of_a_dead_run_is_not_touched(start: Start) -> None:
    """What began after the run had ended is somebody else's, whatever its session is called."""
    run = start("verify", python("pass"))
    exit = ended(run)
    with leaderless(CHILD_OF_ITS_OWN, "unmarked") as (session, daemon):
        forge(run, supervisor=Process(session, 1))
        assert [process.pid for process in run.processes()] == [daemon.pid]
        runs.write_json(run.folder / "exit.json", msgspec.structs.replace(exit, at=exit.at - 3600))
        assert run.processes() == []
        assert stop(run, "").how == "it was not running"
        assert daemon.is_running()


def test_a_session_that_got_the_number_of_a_run_of_which_no_end_is_known_is_not_touched(start: Start) -> None:
    """Its supervisor was killed; whose processes these are, their environment says."""
    run = start("verify", python("pass"))
    ended(run)
    code = CHILD_OF_ITS_OWN.replace("None", '{"PATH": "/bin"}')
    with leaderless(code, "") as (session, _):
        forge(run, supervisor=Process(session, 1))
        (run.folder / "exit.json").unlink()
        assert run.processes() == []


def test_a_file_that_cannot_be_written_leaves_none_beside_it(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "small", "64k") as small:
        runs.write_json(small / "a.json", 1)
        fill(small)
        before = sorted(small.iterdir())
        for _ in range(3):
            with pytest.raises(OSError, match="No space left"):
                runs.write_json(small / "a.json", "x" * 70_000)
        assert sorted(small.iterdir()) == before


def test_how_a_dead_run_ended_is_not_hidden_by_a_stop(start: Start) -> None:
    run = start("verify", python("raise SystemExit(3)"))
    ended(run)
    until(lambda: not run.processes())
    stopped = stop(run, "")
    assert (stopped.how, stopped.left) == ("it was not running", [])
    assert not run.stop_asked


def test_a_process_that_cannot_be_ended_is_named_with_its_dumps(
    start: Start, quick: None, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("verify", dump_root=home)
    (home / run.id).mkdir()
    monkeypatch.setattr(runs, "KILL_SECONDS", 0.5)
    monkeypatch.setattr(runs, "_signal", lambda pids, number: None)  # as for one that hangs in a driver
    stopped = stop(run, "")
    assert stopped.how == "ended by SIGKILL"
    supervisor = f"{sys.executable} -P -m backends.runs {run.folder}"
    assert stopped.left == [
        f"process {run.running.supervisor.pid} ({supervisor[:80]})",
        f"process {run.running.child.pid} ({' '.join(SLEEP)[:80]})",
        f"dump folder {home}/{run.id}",
    ]
    assert (home / run.id).is_dir()


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port on which a stranger listens."""
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        yield stranger.getsockname()[1]


def test_a_port_that_a_stranger_holds_is_named(start: Start, quick: None, home: Path, taken_port: int) -> None:
    run = start("server", port=taken_port, dump_root=home)
    (home / run.id).mkdir()
    stopped = stop(run, "")
    assert stopped.left == [f"port {taken_port} is still open"]
    assert not (home / run.id).exists()


def test_the_port_of_a_run_that_was_over_is_anybodys(start: Start, quick: None, taken_port: int) -> None:
    run = start("server", python("pass"), port=taken_port)
    ended(run)
    until(lambda: not run.processes())
    assert stop(run, "").left == []


def test_the_dumps_of_a_run_are_removed(start: Start, home: Path) -> None:
    run = start("server", port=free_port(), dump_root=home)
    (home / run.id / "req_0").mkdir(parents=True)
    (home / run.id / "req_0" / "aux_0.pt").write_bytes(b"states")
    assert stop(run, "").left == []
    assert not (home / run.id).exists()


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::"])
def test_a_port_is_taken_whatever_address_it_is_taken_on(address: str) -> None:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as stranger:
        stranger.bind((address, 0))
        port = stranger.getsockname()[1]
        stranger.listen()
        assert not port_free(port)
    assert port_free(port)
