"""Verdicts: ready that is not, crashes that are none, servers that answer and are useless, and what to do."""

import pytest

from backends.verdict.diagnose import diagnose
from backends.verdict.evidence import Evidence, Rank

UP = {
    "process_alive": True,
    "port": 30000,
    "port_open": True,
    "listener_is_ours": True,
    "health": 200,
    "health_s": 1.0,
    "phase": "ready",
    "ready_seen": True,
    "tap_in": True,
}
STARTING = {"process_alive": True, "port": 30000, "port_open": False, "ready_seen": False, "phase": "weights"}


def judged(known: dict, **more):
    return diagnose(Evidence(**{**known, **more}))


# --- Healthy takes everything ---


def test_healthy() -> None:
    verdict = judged(UP, ranks=[Rank("TP0", 7, 98.2, "running")])
    assert (verdict.verdict, verdict.cause, verdict.remedy) == ("healthy", None, None)
    assert verdict.evidence == [
        "process alive",
        "in phase ready",
        "port 30000 open, listener is this run",
        "/health 200 after 1.0 s",
        "tap in",
        "rank TP0 98 % CPU, running",
    ]


@pytest.mark.parametrize(
    ("more", "verdict", "cause"),
    [
        ({"listener_is_ours": False}, "crashed", "port 30000 belongs to another process; this server never got it"),
        ({"port_open": False, "health": None}, "unknown", "the log says ready, but port 30000 is closed"),
        ({"health": 503, "health_s": 20.0}, "degraded", "the log says ready, but /health answers 503"),
        ({"tap_in": False}, "unknown", "the server is up without the tap"),
        ({"tap_error": "no such layer 99"}, "unknown", "the tap failed: no such layer 99"),
        ({"health": None}, "unknown", "the log says ready; not known yet: /health"),
        (
            {"listener_is_ours": None, "tap_in": None},
            "unknown",
            "the log says ready; not known yet: who listens, the tap",
        ),
        ({"ready_seen": False}, "starting", None),
        ({"process_alive": None}, "unknown", "whether the process is alive is not known"),
    ],
)
def test_what_one_missing_condition_makes_of_it(more: dict, verdict: str, cause: str | None) -> None:
    result = judged(UP, **more)
    assert (result.verdict, result.cause) == (verdict, cause)


def test_a_server_without_the_tap_comes_with_a_remedy() -> None:
    assert "why SGLang skipped the plugin layertap" in (judged(UP, tap_in=False).remedy or "")


def test_nothing_known_is_unknown() -> None:
    verdict = diagnose(Evidence())
    assert (verdict.verdict, verdict.evidence) == ("unknown", [])


# --- Starting ---


def test_a_silent_start_stays_a_start_with_the_silence_in_evidence() -> None:
    verdict = judged(STARTING, log_silent_s=158.4, log_lines=217, phase_s=160)
    assert (verdict.verdict, verdict.cause) == ("starting", None)
    assert verdict.evidence == [
        "process alive",
        "in phase weights for 160 s",
        "log silent for 158 s at line 217",
        "port 30000 closed",
    ]


def test_health_503_before_ready_is_normal() -> None:
    assert judged(STARTING, port_open=True, listener_is_ours=True, health=503, phase="warm_up").verdict == "starting"


def test_a_start_whose_port_is_taken_is_told_before_it_fails() -> None:
    verdict = judged(STARTING, port_open=True, listener_is_ours=False, health=200)
    assert verdict.verdict == "starting"
    assert verdict.cause == "port 30000 belongs to another process, so this start will fail"
    assert verdict.remedy is not None


def test_a_tap_that_failed_is_told_before_the_server_is_up() -> None:
    verdict = judged(STARTING, tap_error="layer 99")
    assert (verdict.verdict, verdict.cause) == (
        "starting",
        "the tap failed (layer 99), and the server will come up without it",
    )


# --- Crashes ---


def test_an_open_port_after_a_crash_is_not_healthy() -> None:
    verdict = judged(UP, crashed="Subprocess scheduler_0 (pid=7) crashed with exit code -9. Triggering SIGQUIT")
    assert verdict.verdict == "crashed"
    assert verdict.cause == "a process was killed by SIGKILL, most often by the kernel's OOM killer"
    assert "SGLang can take 75 s to end after a crash, with its port open" in verdict.evidence


def test_a_ready_line_beside_a_taken_port_is_a_crash() -> None:
    line = "[Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): address already in use"
    verdict = judged(UP, listener_is_ours=False, crashed=line)
    assert (verdict.verdict, verdict.cause) == ("crashed", "a port that the server needs is taken")
    assert f"log says: {line}" in verdict.evidence


def test_a_dead_rank_behind_an_open_port() -> None:
    verdict = judged(UP, ranks=[Rank("TP0", 7, 99.0, "running"), Rank("TP1", 8, 0.0, "zombie")])
    assert (verdict.verdict, verdict.cause) == ("crashed", "TP1 is dead while the launcher still runs")
    assert verdict.evidence[-1] == "rank TP1 0 % CPU, zombie"


@pytest.mark.parametrize(
    ("line", "phase", "cause", "remedy"),
    [
        (
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: 0.8",
            "kv",
            "the weights leave no GPU memory for the KV cache",
            "raise mem-fraction-static",
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
            "weights",
            "GPU memory ran out while the weights were loading",
            "free the GPUs of other processes",
        ),
        (
            "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 64.00 MiB",
            "graphs",
            "GPU memory ran out while the graphs were captured",
            "lower mem-fraction-static",
        ),
        (
            "launch_server.py: error: unrecognized arguments: --foo",
            None,
            "this SGLang does not take one of the arguments",
            "--help",
        ),
        (
            "OSError: /models/kimi does not appear to have a file named config.json.",
            "args",
            "the model is not there: the path is wrong, or the hub refuses it",
            "config.json",
        ),
        (
            "RuntimeError: Rank 0 scheduler died during initialization (exit code: -9). If exit code is -9",
            "weights",
            "a process was killed by SIGKILL, most often by the kernel's OOM killer",
            "dmesg",
        ),
        (
            "OSError: [Errno 28] No space left on device: '/data/cache'",
            "weights",
            "a disk of the host is full",
            "HF_HOME",
        ),
        (
            "ImportError: /home/u/.cache/tvm-ffi/x.so: failed to map segment from shared object",
            "weights",
            "compiled code lies on a file system that is mounted noexec, most often the home",
            "XDG_CACHE_HOME",
        ),
        (
            "RuntimeError: NCCL error: Error while creating shared memory segment /dev/shm/nccl-x (size 33030528)",
            "dist",
            "/dev/shm is too small",
            "--shm-size",
        ),
        (
            "ValueError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes.",
            "dist",
            "the GPUs do not have the same amount of memory free",
            "layertap doctor",
        ),
        (
            "ValueError: The repository x contains custom code. Please pass the argument `trust_remote_code=True`",
            "args",
            "the model brings its own code, which SGLang runs only when told to",
            "trust-remote-code = true",
        ),
        ("/usr/bin/python3: No module named sglang", None, "this Python has no SGLang", "--python"),
        ("KeyError: 'odd'", "weights", "KeyError: 'odd'", "read the log"),
    ],
)
def test_known_crashes(line: str, phase: str | None, cause: str, remedy: str) -> None:
    verdict = judged(STARTING, crashed=line, phase=phase)
    assert (verdict.verdict, verdict.cause) == ("crashed", cause)
    assert remedy in (verdict.remedy or "")
    assert f"log says: {line}" in verdict.evidence


# --- Ended ---


@pytest.mark.parametrize(
    ("known", "verdict", "cause"),
    [
        ({"exit_code": 0}, "stopped", "the server ended by itself, with exit code 0"),
        ({"exit_code": -15}, "stopped", "ended by SIGTERM, which was not sent from here"),
        ({"exit_code": 143}, "stopped", "ended by SIGTERM, which was not sent from here"),
        ({"signal": 2}, "stopped", "ended by SIGINT, which was not sent from here"),
        (
            {"exit_code": 137},
            "crashed",
            "a process was killed by SIGKILL, most often by the kernel's OOM killer",
        ),
        ({"exit_code": -11}, "crashed", "the server was ended by SIGSEGV (exit code -11)"),
        ({"exit_code": 1}, "crashed", "the server ended with exit code 1"),
        ({}, "crashed", "the process is gone, and its exit code is not known"),
    ],
)
def test_how_a_process_ended(known: dict, verdict: str, cause: str) -> None:
    result = judged({"process_alive": False}, **known)
    assert (result.verdict, result.cause) == (verdict, cause)


def test_a_signal_is_named_in_the_evidence() -> None:
    assert "ended by SIGKILL" in judged({"process_alive": False}, exit_code=-9).evidence
    assert "exit code 1" in judged({"process_alive": False}, exit_code=1).evidence


@pytest.mark.parametrize("crashed", [None, "Subprocess scheduler_0 (pid=7) crashed with exit code -9."])
def test_our_own_stop_is_never_a_crash(crashed: str | None) -> None:
    ended = judged({"process_alive": False}, stop_requested=True, exit_code=-9, crashed=crashed)
    assert (ended.verdict, ended.cause) == ("stopped", "stop was asked for")
    ending = judged(UP, stop_requested=True, health=503, crashed=crashed)
    assert (ending.verdict, ending.cause) == ("stopped", "stop was asked for; the process is still ending")
