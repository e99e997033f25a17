"""Watching a server: what its log, processes, port, /health and tap come to. The server is a fake, the rest is real."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from helpers import suspend, until

from backends import processes, runs
from backends.gpus import Gpu, GpuProcess, Xid
from backends.ports import free_port
from backends.runs import Run, stop
from backends.verdict import health, watch
from backends.verdict.diagnose import SILENCE, Limits
from backends.verdict.health import Health
from backends.verdict.observation import Standing
from backends.verdict.watch import ServerWatch
from capture.dumps import dump

Server = Callable[..., Run]


def look_until(seen: ServerWatch, verdict: str, cause: str | None = None) -> dict[str, Any]:
    """Look until the verdict is this one; returns what was seen."""

    def judged() -> dict[str, Any] | None:
        now = seen.look()
        return now if (now["verdict"]["verdict"], now["verdict"]["cause"]) == (verdict, cause) else None

    return until(judged, f"{verdict}: {cause}; {seen.look()['verdict']}")


def stamp(seconds_ago: float = 0.0) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - seconds_ago))


@pytest.fixture
def quiet(start: Callable[..., Run], home: Path) -> Run:
    """A server run that prints nothing: its log is the test's to write."""
    (home / "dumps").mkdir()
    run = start("server", port=free_port(), dump_root=home / "dumps")
    (home / "dumps" / run.id).mkdir()
    return run


def write(run: Run, text: str) -> None:
    with run.log.open("a") as file:
        file.write(text)


# --- The verdict ---


def test_a_healthy_server(server: Server) -> None:
    run = server()
    now = look_until(ServerWatch(run), "healthy")
    assert [phase["id"] for phase in now["phases"]] == ["args", "weights", "ready"]
    assert now["phase"] == "ready"
    assert now["health"] == 200
    assert now["layers"] == "outputs of layers 2 (boundaries 3)"
    evidence = now["verdict"]["evidence"]
    assert evidence[0] == "process alive"
    assert f"port {run.spec.port} open, listener is this run" in evidence
    assert any(re.fullmatch(r"/health 200 after \d+\.\d s", line) for line in evidence)
    assert evidence[-1] == "tap in"
    assert now["tap"]["seen"] == {"ours": 0, "warm_up": 1, "health": 0, "stranger": 0}


def test_a_server_that_is_sick(server: Server) -> None:
    look_until(ServerWatch(server("sick")), "degraded", "the log says ready, but /health answers 503")


def test_a_server_without_the_tap(server: Server) -> None:
    now = look_until(ServerWatch(server("no-tap")), "unknown", "the server is up without the tap")
    assert now["tap"] is None


def test_a_server_that_says_ready_and_does_not_listen(server: Server) -> None:
    run = server("no-port")
    look_until(ServerWatch(run), "unknown", f"the log says ready, but port {run.spec.port} is closed")


@pytest.fixture
def stranger() -> Iterator[Callable[[int], None]]:
    """Listens on a port, and would answer 200."""
    servers: list[ThreadingHTTPServer] = []

    def listen(port: int) -> None:
        servers.append(ThreadingHTTPServer(("127.0.0.1", port), Answer))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()

    yield listen
    for one in servers:
        one.shutdown()
        one.server_close()


class Answer(BaseHTTPRequestHandler):
    asked: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_false_ready(server: Server, stranger: Callable[[int], None]) -> None:
    """The log says ready and /health would answer 200, but it is another process that answers."""
    run = server("no-port")
    stranger(run.spec.port)
    port = run.spec.port
    now = look_until(ServerWatch(run), "crashed", f"port {port} belongs to another process; this server never got it")
    assert now["health"] is None
    assert f"port {port} open, listener is another process" in now["verdict"]["evidence"]


def test_a_start_that_will_not_get_its_port(server: Server, stranger: Callable[[int], None]) -> None:
    run = server("silent")
    stranger(run.spec.port)
    now = look_until(
        ServerWatch(run), "starting", f"port {run.spec.port} belongs to another process, so this start will fail"
    )
    assert now["verdict"]["remedy"] == "stop what holds the port, or launch on another one"


def test_a_crash(server: Server) -> None:
    run = server("crash")
    until(lambda: not run.alive())
    now = look_until(ServerWatch(run), "crashed", "GPU memory ran out while the weights were loading")
    assert "process gone" in now["verdict"]["evidence"]
    assert "exit code 1" in now["verdict"]["evidence"]
    assert now["phase"] == "weights"


def test_a_server_that_was_killed(server: Server) -> None:
    run = server("silent")
    os.kill(run.running.child.pid, signal.SIGKILL)
    now = look_until(
        ServerWatch(run), "crashed", "a process was killed by SIGKILL, most often by the kernel's OOM killer"
    )
    assert "ended by SIGKILL" in now["verdict"]["evidence"]


def test_what_is_said_between_two_glances_of_a_look_counts(quiet: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = ServerWatch(quiet)
    look_at_processes = seen._look_at_processes

    def die_first() -> Any:
        write(
            quiet,
            f"[{stamp()}] Scheduler hit an exception: Traceback (most recent call last):\n"
            '  File "/x/scheduler.py", line 1, in run\n'
            "ValueError: Unsupported architectures: NoSuchModel\n",
        )
        os.kill(quiet.running.child.pid, signal.SIGKILL)
        until(lambda: not quiet.alive())
        return look_at_processes()

    monkeypatch.setattr(seen, "_look_at_processes", die_first)
    now = seen.look()["verdict"]
    assert now["verdict"] == "crashed"
    assert "log says: ValueError: Unsupported architectures: NoSuchModel" in now["evidence"]


def test_a_verdict_repeats_no_secret(quiet: Run) -> None:
    write(
        quiet,
        f"[{stamp()}] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "/x/scheduler.py", line 1, in run\n'
        "HTTPError: 401 for url: https://me:s3cretpw@hub.example/api (Authorization: Bearer hf_abcdefghijklmnopqrstuv)\n",
    )
    shown = "HTTPError: 401 for url: https://***@hub.example/api (Authorization: Bearer ***)"
    now = look_until(ServerWatch(quiet), "crashed", shown)
    assert f"log says: {shown}" in now["verdict"]["evidence"]


def test_a_server_that_somebody_else_stopped(server: Server) -> None:
    run = server("silent")
    os.kill(run.running.child.pid, signal.SIGTERM)
    look_until(ServerWatch(run), "stopped", "ended by SIGTERM, which was not sent from here")


def test_a_server_that_died_with_its_supervisor(server: Server) -> None:
    run = server("silent")
    for process in (run.running.supervisor, run.running.child):
        os.kill(process.pid, signal.SIGKILL)
    look_until(ServerWatch(run), "crashed", "the process is gone, and its exit code is not known")


def test_a_server_that_was_stopped(server: Server) -> None:
    run = server("silent")
    stop(run, "")
    look_until(ServerWatch(run), "stopped", "stop was asked for")


def test_a_server_of_another_machine(server: Server) -> None:
    run = server("silent")
    runs.write_json(run.folder / "run.json", msgspec.structs.replace(run.running, machine="another"))
    look_until(ServerWatch(run), "unknown", "whether the process is alive is not known")


def test_a_tap_that_failed(server: Server) -> None:
    run = server()
    seen = ServerWatch(run)
    now = look_until(seen, "healthy")
    broken = msgspec.convert(now["tap"], dump.TapState)
    broken.error = "the arena does not fit"
    dump.write_json(Path(run.spec.dump_dir) / "tap.json", broken)
    look_until(seen, "unknown", "the tap failed: the arena does not fit")


def test_a_tap_of_another_version(server: Server) -> None:
    run = server("silent")
    path = Path(run.spec.dump_dir) / "tap.json"
    path.write_text("{}")
    now = ServerWatch(run).look()
    assert now["tap"] is None
    assert now["verdict"]["evidence"][-1].startswith(f"tap: {path}: Object missing required field")
    assert now["verdict"]["evidence"][-1].endswith("was the server started by another version of Layertap?")


# --- Hangs, for real ---

LIMITS = Limits(silence=dict.fromkeys(SILENCE, 3.0), quiet=1.0, window=1.5, stopped=0.5)


def suspected(seen: ServerWatch, allowed: float) -> dict[str, Any]:
    """Look until a hang is suspected, which must not be before the log is silent for as long as is allowed.

    On a host so busy that the server gets little CPU, that is said first, and the silence may be longer.
    """

    def looked() -> dict[str, Any] | None:
        now = seen.look()
        silent = time.time() - seen.run.log.stat().st_mtime
        if now["verdict"]["verdict"] != "hang_suspected":
            busy = now["verdict"]["findings"] == ["host-busy"]
            assert now["verdict"]["verdict"] == "starting" or busy, now["verdict"]
            return None
        assert silent > allowed
        return now

    return until(looked, seconds=180)


def loading(run: Run) -> Run:
    until(lambda: run.log.exists() and "Load weight begin" in run.log.read_text())
    return run


def test_a_start_that_spins(server: Server) -> None:
    seen = ServerWatch(loading(server("spin")), limits=LIMITS)
    suspected(seen, 3.0)
    # Other tests on this machine may leave it less than a core for a while.
    until(lambda: seen.look()["verdict"]["findings"][0] == "start-spins")


def test_a_start_that_stands(server: Server) -> None:
    now = suspected(ServerWatch(loading(server("silent")), limits=LIMITS), 3.0)
    assert "start-spins" not in now["verdict"]["findings"]
    assert now["verdict"]["cause"] == "loading the weights stands still: nothing is read, and nothing is logged"


def test_where_the_ranks_stand_is_evidence_until_the_log_goes_on(server: Server) -> None:
    run = loading(server("silent"))
    seen = ServerWatch(run, limits=LIMITS)
    suspected(seen, 3.0)
    seen.standing = Standing(time.time(), ["scheduler_TP1 stands in all_reduce (x.py)"], apart=True)
    now = seen.look()
    assert "ranks-apart" in now["verdict"]["findings"]
    assert "stacks: scheduler_TP1 stands in all_reduce (x.py)" in now["verdict"]["evidence"]
    write(run, f"[{stamp()}] Load weight end. elapsed=1.00 s, type=X, avail mem=1.00 GB, mem usage=1.00 GB.\n")
    until(lambda: not any("stacks: " in line for line in seen.look()["verdict"]["evidence"]))


def test_a_start_that_was_stopped(server: Server) -> None:
    run = loading(server("silent"))
    seen = ServerWatch(run, limits=msgspec.structs.replace(LIMITS, silence=dict.fromkeys(SILENCE, 600.0)))
    assert seen.look()["verdict"]["verdict"] == "starting"
    suspend(run.running.child.pid)
    now = suspected(seen, 0.5)
    assert now["verdict"]["findings"][0] == "rank-stopped"
    assert now["verdict"]["evidence"][-1].endswith("stopped")
    os.kill(run.running.child.pid, signal.SIGCONT)
    look_until(seen, "starting")


def test_a_server_that_was_stopped_while_it_is_idle(server: Server) -> None:
    run = server()
    seen = ServerWatch(run, limits=LIMITS)
    look_until(seen, "healthy")
    suspend(run.running.child.pid)
    now = until(lambda: (now := seen.look())["verdict"]["verdict"] == "hang_suspected" and now)
    assert now["verdict"]["findings"][0] == "rank-stopped"
    os.kill(run.running.child.pid, signal.SIGCONT)
    look_until(seen, "healthy")


def test_a_start_that_compiles_is_slow_but_fine(server: Server) -> None:
    seen = ServerWatch(loading(server("compile")), limits=LIMITS)
    now = look_until(seen, "slow_but_fine", "kernels are being compiled")
    assert "compilers at work: nvcc" in now["verdict"]["evidence"]
    until(lambda: time.time() - seen.run.log.stat().st_mtime > 5.0)
    for _ in range(20):
        assert seen.look()["verdict"]["verdict"] == "slow_but_fine"


def test_weights_from_a_slow_disk_are_slow_but_fine(quiet: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel counts the bytes that a process reads from a disk; here they are counted up."""
    write(quiet, f"[{stamp()}] Load weight begin. avail mem=1.00 GB\n")
    begun = time.monotonic()
    look = processes.RunProcesses.look

    def reading(self: processes.RunProcesses) -> list[processes.ProcessSample]:
        read = int(30e6 * (time.monotonic() - begun))
        return [msgspec.structs.replace(one, read_bytes=read) for one in look(self)]

    monkeypatch.setattr(processes.RunProcesses, "look", reading)
    now = look_until(ServerWatch(quiet, limits=LIMITS), "slow_but_fine", "weights are being read from disk")
    assert any(line.endswith("MB/s read") for line in now["verdict"]["evidence"])


def test_graphs_that_count_up_are_slow_but_fine(quiet: Run) -> None:
    seen = ServerWatch(quiet, limits=msgspec.structs.replace(LIMITS, usual=1.0, bar=60.0))
    bar = "\rCapturing batches (bs=8 avail_mem=3.10 GB):  33%|###  | {}/36 [00:10<00:20,  1.00s/it]\r"
    write(quiet, f"[{stamp(9)}] Capture cuda graph begin. This can take up to several minutes. avail mem=9.00 GB\n")
    write(quiet, bar.format(12))
    assert seen.look()["verdict"]["verdict"] == "starting"
    write(quiet, bar.format(13))
    now = look_until(seen, "slow_but_fine", "it takes long, and its bar moves")
    assert any("13 of 36 graphs" in line for line in now["verdict"]["evidence"])


def gpu(index: int, busy: int, watts: float, owner: GpuProcess, **known: Any) -> Gpu:
    return Gpu(
        index=index,
        utilisation_percent=busy,
        power_watts=watts,
        power_limit_watts=600.0,
        memory_used_bytes=10**9,
        processes=[owner],
        **known,
    )


OURS = GpuProcess(1, 10**9, ours=True, visible=True)
THEIRS = GpuProcess(2, 10**9, ours=False, visible=True)
HIDDEN = GpuProcess(3, 10**9)


@pytest.mark.parametrize("owner", [OURS, HIDDEN])
def test_a_collective_that_spins_is_told_before_its_silence_is_long(quiet: Run, owner: GpuProcess) -> None:
    """Every GPU of the run is at 100 % with little power; one that others use works, and does not count."""
    write(quiet, f"[{stamp()}] Init torch distributed begin.\n")
    gpus = [gpu(0, 100, 140.0, owner), gpu(1, 100, 145.0, owner)]
    others = [gpu(2, 100, 590.0, THEIRS)] if owner is OURS else []
    limits = msgspec.structs.replace(LIMITS, silence=dict.fromkeys(SILENCE, 600.0), spin=2.0)
    now = suspected(ServerWatch(quiet, lambda _: [*gpus, *others], limits=limits), 2.0)
    assert now["verdict"]["findings"][0] == "pcie-p2p-deadlock"
    assert "every GPU at 100 % with the power of an idle one (145 of 600 W)" in now["verdict"]["evidence"]


def test_what_makes_a_server_degraded(server: Server) -> None:
    run = server()
    created = run.spec.created
    found: dict[str, Any] = {"throttle": ["sw_power_cap"], "pcie_width": 16, "pcie_max_width": 16, "xid": []}
    seen = ServerWatch(run, lambda _: [gpu(0, 50, 400.0, OURS, **found)], limits=LIMITS)
    look_until(seen, "healthy")
    found["xid"] = [Xid(43, created + 1), Xid(79, created - 60)]  # of a process that was ended, of an earlier run
    assert seen.look()["verdict"]["verdict"] == "healthy"
    found |= {"throttle": ["hw_thermal", "sw_power_cap"], "pcie_width": 8, "xid": [Xid(31, created + 1)]}
    now = look_until(seen, "degraded", "a GPU is slowed down by heat or by its power supply")
    assert now["verdict"]["findings"] == ["gpu-throttled", "pcie-width", "gpu-xid"]
    assert "GPU 0 throttled: hw_thermal" in now["verdict"]["evidence"]
    assert "GPU 0 has a PCIe link of x8 instead of x16" in now["verdict"]["evidence"]
    assert "GPU 0 reported XID 31" in now["verdict"]["evidence"]


def test_a_queue_that_nobody_serves(server: Server) -> None:
    run = server()
    seen = ServerWatch(run, limits=msgspec.structs.replace(LIMITS, queue=2.0))
    look_until(seen, "healthy")
    batch = "Prefill batch, #new-seq: 1, #new-token: 8, #cached-token: 0, #running-req: {}, #queue-req: {}, x"
    write(run, f"[{stamp(60)}] {batch.format(3, 7)}\n")
    assert seen.look()["verdict"]["verdict"] == "healthy"
    write(run, f"[{stamp(60)}] {batch.format(0, 7)}\n")
    now = look_until(seen, "degraded", "requests wait, and the scheduler admits none")
    assert any(line.startswith("7 requests wait and 0 run, as of 6") for line in now["verdict"]["evidence"])


def test_answers_to_health_are_no_sign_of_life(quiet: Run) -> None:
    seen = ServerWatch(quiet, limits=LIMITS)
    write(quiet, f"[{stamp()}] INFO:     Uvicorn running on http://127.0.0.1:30000\n")

    def looked() -> dict[str, Any] | None:
        write(quiet, f'[{stamp()}] INFO:     127.0.0.1:1 - "GET /health HTTP/1.1" 503 Service Unavailable\n')
        now = seen.look()
        return now if now["verdict"]["verdict"] == "hang_suspected" else None

    assert until(looked)["verdict"]["findings"][0] == "warmup-hang"


def test_a_rank_that_vanishes(start: Callable[..., Run], home: Path) -> None:
    titled = "import subprocess; subprocess.run(['sglang::scheduler_TP1', '600'], executable='/bin/sleep')"
    run = start("server", [sys.executable, "-c", f"{titled}; import time; time.sleep(600)"], port=free_port())
    seen = ServerWatch(run, limits=LIMITS)
    until(lambda: seen.look()["verdict"]["evidence"][-1].startswith("rank scheduler_TP1"))
    for process in run.processes():
        if process.cmdline()[:1] == ["sglang::scheduler_TP1"]:
            process.kill()
    look_until(seen, "crashed", "scheduler_TP1 is dead while the launcher still runs")


# --- The log ---


def test_a_log_that_grows_is_read_once(quiet: Run) -> None:
    seen = ServerWatch(quiet)
    assert seen.look()["phase"] is None
    write(quiet, f"[{stamp()}] server_args=ServerArgs(model_path='x')\n[{stamp()}] Load weight beg")
    now = seen.look()
    assert (now["phase"], now["log_lines"]) == ("args", 1)
    write(quiet, "in. avail mem=1.00 GB\n")
    now = seen.look()
    assert (now["phase"], now["log_lines"], now["log_bytes"]) == ("weights", 2, quiet.log.stat().st_size)
    now = seen.look()
    assert (now["phase"], now["log_lines"], now["log_bytes"]) == ("weights", 2, quiet.log.stat().st_size)


def test_a_loading_bar_moves(quiet: Run) -> None:
    """It ends in a carriage return, and no newline comes before it is full."""
    seen = ServerWatch(quiet)
    bar = "Loading safetensors checkpoint shards: {:3d}% Completed | {}/14 [00:10<00:13,  1.6s/it]"
    write(quiet, f"[{stamp()}] Load weight begin. avail mem=1.00 GB\n" + bar.format(7, 1) + "\r")
    assert seen.look()["phases"][-1]["detail"] == "shard 1 of 14"
    write(quiet, bar.format(43, 6))
    assert seen.look()["phases"][-1]["detail"] == "shard 1 of 14"
    write(quiet, "\r")
    now = seen.look()
    assert now["phases"][-1]["detail"] == "shard 6 of 14"
    assert now["log_lines"] == 1


def test_a_log_is_read_in_steps_of_any_size(quiet: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LOG_STEP", 7)
    write(quiet, f"größer, größer\r[{stamp()}] Load weight begin. avail mem=1.00 GB\n· · ·\n")
    now = ServerWatch(quiet).look()
    assert (now["phase"], now["log_lines"], now["log_bytes"]) == ("weights", 2, quiet.log.stat().st_size)


def test_how_long_a_phase_takes(quiet: Run) -> None:
    write(
        quiet,
        f"[{stamp(300)}] server_args=ServerArgs(model_path='x')\n[{stamp(100)}] Load weight begin. avail mem=1 GB\n",
    )
    now = ServerWatch(quiet).look()
    assert 99 <= now["phase_seconds"] < 160
    args, weights = now["phases"]
    assert args["ended"] - args["started"] == pytest.approx(200, abs=1)
    assert weights["ended"] is None


def test_how_long_a_log_is_silent(quiet: Run) -> None:
    write(quiet, "a line\n")
    then = time.time() - 100
    os.utime(quiet.log, (then, then))
    said = ServerWatch(quiet).look()["verdict"]["evidence"]
    (silent,) = (line for line in said if line.startswith("log silent"))
    assert re.fullmatch(r"log silent for 1[0-4]\d s at line 1", silent)


# --- Processes and port ---


def test_ranks_are_told_by_their_titles(start: Callable[..., Run], home: Path) -> None:
    titled = "import os; os.execv('/bin/sleep', ['sglang::scheduler_TP0', '600'])"
    run = start("server", [sys.executable, "-c", titled], port=free_port())
    assert run.running is not None
    rank = psutil.Process(run.running.child.pid)
    until(lambda: rank.cmdline()[:1] == ["sglang::scheduler_TP0"] and rank.status() == "sleeping")
    seen = ServerWatch(run)
    ranks = until(lambda: [line for line in seen.look()["verdict"]["evidence"] if line.startswith("rank")])
    assert ranks == ["rank scheduler_TP0 sleeping"]
    until(lambda: seen.look()["verdict"]["evidence"][-1] == "rank scheduler_TP0 0 % CPU, sleeping")


def test_who_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        assert watch._listener(port, {os.getpid()}) is None
        server.listen()
        assert watch._listener(port, {os.getpid()}) is True
        assert watch._listener(port, {1 << 22, os.getppid()}) is False
    with socket.socket(socket.AF_INET6) as server:
        server.bind(("::", 0))
        server.listen()
        assert watch._listener(server.getsockname()[1], {os.getpid()}) is True


@pytest.mark.parametrize("address", ["127.0.0.2", "::1"])
def test_who_listens_on_another_address_is_not_in_the_way(address: str) -> None:
    """SGLang can have 127.0.0.1 beside it."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as other:
        other.bind((address, 0))
        other.listen()
        port = other.getsockname()[1]
        assert watch._listener(port, {os.getppid()}) is None
        with socket.socket() as server:
            server.bind(("127.0.0.1", port))
            server.listen()
            assert watch._listener(port, {os.getpid()}) is True


def test_a_file_that_closes_meanwhile_does_not_hide_the_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy server opens and closes connections all the time."""
    read, calls = os.readlink, []

    def readlink(path: str) -> str:
        calls.append(path)
        if len(calls) == 1:
            raise FileNotFoundError(path)
        return read(path)

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        monkeypatch.setattr(os, "readlink", readlink)
        assert watch._listener(server.getsockname()[1], {os.getpid()}) is True
    assert len(calls) > 1


def test_of_a_long_log_the_beginning_and_the_end_are_read(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    run = server()
    look_until(ServerWatch(run), "healthy")
    size = run.log.stat().st_size
    batch = "[2026-06-01 09:20:00] Prefill batch, #new-seq: 1, #new-token: 9, #running-req: {}, #queue-req: 0\n"
    write(run, batch.format(1) * 2000 + batch.format(7))
    whole = ServerWatch(run)
    lines = whole.look()["log_lines"]
    heard: list[str] = []
    monkeypatch.setattr(watch, "LOG_HEAD", size)
    monkeypatch.setattr(watch, "LOG_TAIL", 4000)
    monkeypatch.setattr(watch, "LOG_STEP", 1000)
    long = ServerWatch(run)
    hear = long.hear
    monkeypatch.setattr(long, "hear", lambda text, at: (heard.append(text), hear(text, at)))
    now = long.look()
    assert (now["log_lines"], now["log_bytes"], now["phase"]) == (lines, run.log.stat().st_size, "ready")
    assert size <= len("".join(heard)) < size + 4001
    assert long.follower.reader.batch.running == 7
    write(run, batch.format(8))
    assert long.look()["log_lines"] == lines + 1
    assert long.follower.reader.batch.running == 8


# --- Health ---


def test_health_is_asked_seldom_once_it_is_good(
    stranger: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every 200 costs the server a generated token."""
    port = free_port()
    stranger(port)
    monkeypatch.setattr(Answer, "asked", [])
    asked = Health(port, 60.0)
    assert [asked.ask(600.0) for _ in range(50)] == [200] * 50  # the first call waits for its answer
    until(lambda: not asked._asking)
    assert Answer.asked == ["/health"]
    until(lambda: asked.ask(0.0) == 200 and len(Answer.asked) > 2)


def test_a_server_that_does_not_answer_is_asked_once() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        asked = Health(server.getsockname()[1], 0.2)
        assert [asked.ask(0.0) for _ in range(50)] == [None] * 50
        server.settimeout(60)
        first, _ = server.accept()
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.accept()
        first.close()
        until(lambda: asked.seconds is not None, "the answer is lost")
        assert asked.ask(0.0) is None


PREFILL = "Prefill batch, #new-seq: 1, #new-token: 40, #cached-token: 0, token usage: 0.01, #running-req: {}, #queue-req: {}, "
ANSWERED = '[{}] INFO:     127.0.0.1:1 - "POST /generate HTTP/1.1" 200 OK\n'


@pytest.mark.parametrize(
    ("lines", "rest"),
    [
        ("", health.IDLE),
        (ANSWERED.format(stamp()), health.FLOWING),
        (f"[{stamp(60)}] {PREFILL.format(3, 2)}\n", health.SUSPICIOUS),
        (f"[{stamp(60)}] {PREFILL.format(3, 2)}\n{ANSWERED.format(stamp())}", health.SUSPICIOUS),
        (f"[{stamp(60)}] {PREFILL.format(0, 0)}\n", health.IDLE),
        (f"[{stamp(60)}] {PREFILL.format(0, 0)}\n{ANSWERED.format(stamp())}", health.FLOWING),
    ],
    ids=["idle", "answers", "silent with work", "silent with work, and one answer", "nothing to do", "traffic flows"],
)
def test_how_closely_health_is_watched(quiet: Run, lines: str, rest: float) -> None:
    seen = ServerWatch(quiet)
    write(quiet, f"[{stamp(90)}] Load weight begin. avail mem=1.00 GB\n")
    seen.look()
    write(quiet, lines)
    seen.look()
    assert seen._rest() == rest


def test_answers_of_long_ago_are_no_traffic(quiet: Run) -> None:
    write(quiet, ANSWERED.format(stamp(600)))
    os.utime(quiet.log, (time.time() - 600, time.time() - 600))
    seen = ServerWatch(quiet)
    seen.look()
    assert seen._rest() == health.IDLE
