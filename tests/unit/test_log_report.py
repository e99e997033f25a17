"""`layertap diagnose`: what a log by itself comes to, from the first line to the exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_startup import CPU_0_5_23, GPU_0_5_11, LAUNCHER_ECHO, OOM, RECEIVED_SIGQUIT, scheduler_exception, upto

from backends.errors import UsageError
from backends.verdict.catalogue import catalogue
from backends.verdict.diagnose import Limits
from backends.verdict.log_report import judge, report, silence
from backends.verdict.reading import LogReader

BEGUN = "[2026-06-01 09:00:00] server_args=ServerArgs(model_path='/m', api_key='sk-secret')\n"
READY = "[2026-06-01 09:10:00] The server is fired up and ready to roll!\n"


def judged(*parts: str, later: float = 1.0):
    reader = LogReader()
    for part in parts:
        reader.feed(part)
    stamp = reader.startup.last_stamp or 0.0
    return judge(reader, stamp + later, Limits(), stamp)


def ids(made) -> list[str]:
    return [finding.id for finding in made.findings]


# --- Nothing is wrong ---


@pytest.mark.parametrize("log", [CPU_0_5_23, GPU_0_5_11])
def test_a_healthy_log(log: str) -> None:
    made = judged(log, later=1e6)
    assert (made.verdict, made.findings, made.fine) == ("healthy", [], True)
    assert made.phases[-1].id == "ready"


def test_every_benign_line_in_a_healthy_log() -> None:
    traceback = f"Traceback (most recent call last):\nRuntimeError: {OOM}\n"
    benign = [one for one in catalogue().signatures if one.kind == "benign"]
    stamped = "".join(
        f"[2026-06-01 09:00:01] {line}\n{traceback if one.traceback else ''}" for one in benign for line in one.examples
    )
    made = judged(BEGUN, stamped, READY, stamped)
    assert (made.verdict, made.findings) == ("healthy", [])


def test_words_of_the_arguments_mean_nothing() -> None:
    arguments = (
        "[2026-06-01 09:00:00] server_args={'trust_remote_code': False, 'note': 'CUDA out of memory', 'tp_size': 1}\n"
    )
    assert judged(arguments, READY).verdict == "healthy"
    assert judged(arguments, later=5).verdict == "starting"


def test_an_error_before_it_was_ready_was_survived() -> None:
    error = f"[2026-06-01 09:05:00] retrying: {OOM}\n"
    assert judged(BEGUN, error, READY).verdict == "healthy"
    assert judged(BEGUN, error).verdict == "crashed"


def test_a_start_that_goes_on() -> None:
    made = judged(upto(GPU_0_5_11, "67% Completed"), later=100)
    assert (made.verdict, made.findings, made.fine) == ("starting", [], True)


def test_a_start_that_compiles() -> None:
    entering = "[2026-06-01 09:00:05] Entering DeepGEMM JIT Pre-Compile session. It may take a long time\n"
    made = judged(BEGUN, entering, later=800)
    assert (made.verdict, ids(made), made.fine) == ("slow_but_fine", ["deepgemm-precompile"], True)


def test_a_normal_stop() -> None:
    stop = "[2026-06-01 10:00:00] SIGTERM received. signum=15 frame=None. Draining requests and shutting down...\n"
    died = "[2026-06-01 10:00:05] Subprocess scheduler_0 (pid=7) crashed with exit code -9. Triggering SIGQUIT\n"
    assert (judged(BEGUN, READY, stop, died).verdict, judged(BEGUN, READY, stop).fine) == ("stopped", True)


def test_a_server_that_survived_an_error() -> None:
    batches = "[2026-06-01 09:20:00] Prefill batch, #new-seq: 1, #running-req: 0, #queue-req: 0, x\n" * 300
    assert judged(BEGUN, READY, OOM + "\n", batches).verdict == "healthy"


# --- Something is ---


def test_a_crash_with_line_time_and_phases() -> None:
    log = upto(GPU_0_5_11, "67% Completed") + "\n" + scheduler_exception(OOM, " TP1") + RECEIVED_SIGQUIT + LAUNCHER_ECHO
    made = judged(log)
    assert (made.verdict, ids(made), made.fine) == ("crashed", ["cuda-oom-load"], False)
    (finding,) = made.findings
    number = log[: log.index(OOM)].count("\n") + 1
    assert finding.evidence[0] == f"line {number}: {OOM}"
    assert finding.evidence[-1].startswith("phase reached: weights (shard 43 of 64); before it args ")
    assert time.strftime("%H:%M", time.localtime(finding.since)) == "09:01"
    assert "tp-size" in finding.remedy


def test_the_first_failure_speaks_and_not_its_echoes() -> None:
    killed = "[2026-06-01 09:01:01] Subprocess scheduler_3 (pid=99) crashed with exit code -9. Triggering SIGQUIT\n"
    echo = scheduler_exception("RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:41414", " TP0")
    made = judged(BEGUN, echo, killed)
    assert (made.verdict, ids(made)) == ("crashed", ["host-oom-kill"])


def test_a_line_above_tells_more_than_the_crash_itself() -> None:
    shm = "host:1:2 [0] NCCL WARN Error while creating shared memory segment /dev/shm/nccl-x (size 9637888)\n"
    made = judged(BEGUN, shm, scheduler_exception("RuntimeError: NCCL error: unhandled system error"))
    assert ids(made) == ["shm-too-small"]
    assert made.findings[0].evidence[1].startswith("line 2: host:1:2 [0] NCCL WARN Error while creating")


def test_a_crash_that_nobody_listed() -> None:
    made = judged(BEGUN, scheduler_exception("KeyError: 'odd'"))
    assert (made.verdict, ids(made)) == ("crashed", ["child-exception"])
    assert made.findings[0].cause == "KeyError: 'odd'"
    assert made.findings[0].evidence[0] == "line 6: KeyError: 'odd'"
    made = judged(BEGUN, LAUNCHER_ECHO.replace("Initialization failed. Please see the error messages above.", "odd"))
    assert (made.verdict, ids(made), made.findings[0].cause) == ("crashed", ["unlisted"], "RuntimeError: odd")


def test_an_excerpt_with_nothing_but_the_error() -> None:
    made = judged(
        "[2026-06-01 09:00:00 TP3] some line\ntorch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
    )
    assert (made.verdict, ids(made)) == ("crashed", ["illegal-access"])


def test_a_false_ready() -> None:
    bind = "[2026-06-01 09:09:00] ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): address already in use\n"
    made = judged(BEGUN, bind, READY)
    assert (made.verdict, ids(made)) == ("crashed", ["http-port-in-use"])


def test_a_degraded_server() -> None:
    retract = "[2026-06-01 09:20:00] KV cache pool is full. Retract requests. #retracted_reqs: 1\n"
    made = judged(BEGUN, READY, retract * 3)
    assert (made.verdict, ids(made), made.fine) == ("degraded", ["kv-retract"], False)
    assert made.findings[0].evidence[1] == "2 more such lines, the last one 5"


@pytest.mark.parametrize(
    ("last", "later", "verdict", "first"),
    [
        ("[2026-06-01 09:00:03] Init torch distributed begin.\n", 200, "starting", None),
        ("[2026-06-01 09:00:03] Init torch distributed begin.\n", 400, "hang_suspected", "nccl-init-stall"),
        ("[2026-06-01 09:00:03] Load weight begin. avail mem=94.02 GB\n", 170, "starting", None),
        ("[2026-06-01 09:00:03] Load weight begin. avail mem=94.02 GB\n", 200, "hang_suspected", "log-ends"),
        ("[2026-06-01 09:00:03] Running FlashInfer autotune...\n", 600, "slow_but_fine", "autotune-long"),
        ("[2026-06-01 09:00:03] Running FlashInfer autotune...\n", 1000, "hang_suspected", "autotune-stuck"),
    ],
)
def test_a_log_that_ends_in_its_start(last: str, later: float, verdict: str, first: str | None) -> None:
    made = judged(BEGUN, last, later=later)
    assert (made.verdict, next(iter(ids(made)), None)) == (verdict, first)


# --- The command ---


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    layertap = str(Path(sys.executable).with_name("layertap"))
    return subprocess.run([layertap, "diagnose", *arguments], capture_output=True, text=True, check=False)


def test_the_command_says_what_since_when_and_what_to_do(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(BEGUN + scheduler_exception(OOM))
    made = command(str(log))
    assert made.returncode == 1
    lines = made.stdout.splitlines()
    assert lines[0] == "! crashed"
    assert lines[2] == "cuda-oom-load since 2026-06-01 09:01:00"
    assert lines[3] == "  cause: GPU memory ran out while the weights were loading"
    assert lines[4].startswith("  remedy: free the GPUs")
    assert lines[5] == f"  - line 6: {OOM}"
    assert "sk-secret" not in made.stdout


def test_the_command_in_json(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(CPU_0_5_23)
    made = command(str(log), "--json")
    found = json.loads(made.stdout)
    assert made.returncode == 0
    assert (found["schema"], found["verdict"], found["findings"]) == (1, "healthy", [])
    log.write_text(BEGUN + scheduler_exception(OOM))
    made = command(str(log), "--json")
    (finding,) = json.loads(made.stdout)["findings"]
    assert made.returncode == 1
    assert set(finding) == {"id", "since", "evidence", "cause", "remedy"}


def test_what_is_no_log(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        report(tmp_path / "none", 0)
    (tmp_path / "poem").write_text("a rose is a rose\n")
    with pytest.raises(UsageError, match="holds no line of SGLang's"):
        report(tmp_path / "poem", 0)
    assert command(str(tmp_path / "poem")).returncode == 2


HOUR = 3600.0


@pytest.mark.parametrize(
    ("stamp", "now", "written", "seconds"),
    [
        (0.0, 700.0, 0.0, 700.0),  # a start that hangs, on its own host
        (0.0, 700.0, 3.0, 700.0),
        (0.0, 9 * HOUR + 5, 9 * HOUR + 1, 4.0),  # one that goes on nine hours to the west
        (0.0, 5.5 * HOUR + 700, 5.5 * HOUR, 700.0),  # one that hangs in India
        (0.0, 700 - 8 * HOUR, -8 * HOUR, 700.0),  # and to the east
        (0.0, -8 * HOUR, 1000.0 - 9 * HOUR, HOUR - 1000.0),  # a stamp that is to come is no time of here
        (0.0, 4000.0, 3900.0, 4000.0),  # a copy that was made later
    ],
)
def test_for_how_long_a_log_is_silent_wherever_it_was_written(
    stamp: float, now: float, written: float, seconds: float
) -> None:
    assert silence(stamp, now, written) == seconds


@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo", "America/Los_Angeles", "Asia/Kolkata"])
def test_a_log_is_judged_alike_in_every_time_zone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zone: str) -> None:
    log, now = tmp_path / "server.log", time.time()
    verdicts = []
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        for silent in (5.0, 5000.0):
            stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(now - silent))  # the host has UTC
            log.write_text(BEGUN.replace("2026-06-01 09:00:00", stamp))
            os.utime(log, (now - silent, now - silent))
            verdicts.append(report(log, now).verdict)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert verdicts == ["starting", "hang_suspected"]
