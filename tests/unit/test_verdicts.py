"""Verdicts of a live server from fixed evidence: the truth of every case, and the traps that must not alarm."""

from __future__ import annotations

from typing import Any

import pytest

from backends.verdict.activity import Activity
from backends.verdict.catalogue import catalogue
from backends.verdict.diagnose import SILENCE, Limits, diagnose
from backends.verdict.evidence import Evidence, Rank
from backends.verdict.reading import Batch, Hit

LOOKED = 15.0
STILL = Activity(seconds=LOOKED, read_bytes_per_second=0.0, memory_bytes_per_second=0.0)


def activity(**known: Any) -> Activity:
    given = {"seconds": LOOKED, "read_bytes_per_second": 0.0, "memory_bytes_per_second": 0.0}
    return Activity(**given | known)


def ranks(*cpu: float, state: str = "sleeping") -> list[Rank]:
    return [Rank(f"scheduler_TP{rank}", 100 + rank, percent, state) for rank, percent in enumerate(cpu)]


def starting(phase: str, silent: float, **known: Any) -> Evidence:
    given = {
        "process_alive": True,
        "port": 30000,
        "port_open": False,
        "ready_seen": False,
        "phase": phase,
        "phase_s": silent,
        "log_silent_s": silent,
        "log_lines": 217,
        "activity": STILL,
        "ranks": ranks(0.0, 0.0),
    }
    return Evidence(**given | known)


def up(**known: Any) -> Evidence:
    given = {
        "process_alive": True,
        "port": 30000,
        "port_open": True,
        "listener_is_ours": True,
        "health": 200,
        "health_s": 1.0,
        "log_silent_s": 5.0,
        "log_lines": 700,
        "phase": "ready",
        "ready_seen": True,
        "tap_in": True,
        "activity": STILL,
        "ranks": ranks(2.0, 1.0),
    }
    return Evidence(**given | known)


SICK = {"health": 503, "health_s": 20.0}
SPIN = activity(gpu_seconds=LOOKED, gpus_spin=True)
LOAD = activity(gpu_seconds=LOOKED, gpus_work=True)
IDLE_GPUS = activity(gpu_seconds=LOOKED)


def hit(name: str, line: int = 217, count: int = 1) -> Hit:
    return Hit(name, line, "x", None, line, None, count)


TABLE = {
    # Starts that are as they should be.
    "just begun": (starting("args", 3), "starting", None),
    "NCCL takes 89 s": (starting("dist", 89), "starting", None),
    "silent, but for less than its phase allows": (starting("weights", 170), "starting", None),
    "as long as last time": (starting("weights", 400, earlier_s=310), "starting", None),
    # Slow but fine.
    "a silent compile of four minutes": (
        starting("kv", 250, activity=activity(compilers=["cicc", "ninja"]), ranks=ranks(0.0, 0.0)),
        "slow_but_fine",
        "jit-compile",
    ),
    "FlashInfer compiles": (
        starting("kv", 250, activity=activity(compilers=["nvcc"]), hits=[hit("flashinfer-jit")]),
        "slow_but_fine",
        "flashinfer-jit",
    ),
    "DeepGEMM compiles": (
        starting("tune", 1000, activity=activity(compilers=["ptxas"]), hits=[hit("deepgemm-precompile")]),
        "slow_but_fine",
        "deepgemm-precompile",
    ),
    "weights from a slow disk": (
        starting("weights", 600, activity=activity(read_bytes_per_second=28e6), ranks=ranks(9.0, 8.0, state="disk-sleep")),
        "slow_but_fine",
        "weights-slow-io",
    ),
    "weights out of the page cache": (
        starting("weights", 600, activity=activity(memory_bytes_per_second=900e6)),
        "slow_but_fine",
        "weights-memory-grows",
    ),
    "kernels are compiled inside a rank": (
        starting("kv", 250, ranks=ranks(100.0, 100.0), activity=activity(written_s=20.0)), "slow_but_fine", "writes-files"
    ),
    "the last kernel was compiled long ago": (
        starting("kv", 250, ranks=ranks(100.0, 100.0), activity=activity(written_s=90.0)), "hang_suspected", "start-spins"
    ),
    "graph capture counts up": (
        starting("graphs", 8, phase_s=1300, detail="12 of 36 graphs", detail_s=8),
        "slow_but_fine",
        "graphs-count-up",
    ),
    "a bar counts, and the phase is no longer than usual": (
        starting("graphs", 8, phase_s=70, detail="12 of 36 graphs", detail_s=8),
        "starting",
        None,
    ),
    "compilers at the first request": (up(**SICK, activity=activity(compilers=["nvcc"])), "slow_but_fine", "jit-compile"),
    # Hangs.
    "ranks never find each other": (
        starting("dist", 400, hits=[hit("nccl-init-stall")], last_lines=["nccl-init-stall"]),
        "hang_suspected",
        "nccl-init-stall",
    ),
    "weights stand still": (starting("weights", 200), "hang_suspected", "weights-stall"),
    "loaded, and then nothing": (starting("weights", 200, weights_loaded=True), "hang_suspected", "start-stands"),
    "a disk that does not come back": (
        starting("weights", 200, ranks=ranks(0.0, 0.0, state="disk-sleep")),
        "hang_suspected",
        "weights-stall",
    ),
    "longer than twice last time": (starting("weights", 700, earlier_s=310), "hang_suspected", "weights-stall"),
    "one rank is behind": (starting("kv", 150, laggard="TP1"), "hang_suspected", "rank-behind"),
    "capture stands": (
        starting("graphs", 400, detail="12 of 36 graphs", detail_s=400), "hang_suspected", "capture-stall"
    ),
    "a process spins without a GPU": (starting("kv", 150, ranks=ranks(99.0, 98.0)), "hang_suspected", "start-spins"),
    "a process that would spin, but gets little CPU": (
        starting("kv", 150, ranks=ranks(12.0, 9.0), activity=activity(running=[100])), "hang_suspected", "start-spins"
    ),
    "silent for long, on a host that is too busy": (starting("kv", 150, starved=4.0, ranks=ranks(20.0)), "slow_but_fine", "host-busy"),
    "silent even for a busy host": (starting("kv", 500, starved=4.0, ranks=ranks(20.0)), "hang_suspected", "start-stands"),
    "the stacks tell that the ranks stand apart": (
        starting("kv", 150, ranks_apart=True, stacks=["scheduler_TP0 stands in all_reduce"]),
        "hang_suspected",
        "ranks-apart",
    ),
    "the tap had no room, and the server ended with it": (
        starting("weights", 3, crashed="MemoryError: a slot of the arena takes 5 bytes", tap_error="a slot of the arena takes 5 bytes"),
        "crashed",
        "tap-failed",
    ),
    "a GPU is lost, whatever the line says that ended the server": (
        up(
            crashed="torch.AcceleratorError: CUDA error: unspecified launch failure",
            crashed_line=690,
            kernel=["NVRM: Xid (PCI:0000:81:00): 79, pid=7, GPU has fallen off the bus."],
        ),
        "crashed",
        "gpu-lost",
    ),
    "nothing at all moves": (starting("kv", 150), "hang_suspected", "start-stands"),
    "the warm-up does not come back": (starting("warm_up", 620), "hang_suspected", "warmup-hang"),
    "a spinning collective, long before the silence is long": (
        starting("dist", 70, activity=SPIN, ranks=ranks(100.0, 100.0)), "hang_suspected", "pcie-p2p-deadlock"
    ),
    "all GPUs but one busy": (
        starting("graphs", 400, activity=activity(gpu_seconds=LOOKED, gpus_work=True, idle_gpu=3)),
        "hang_suspected",
        "tp-divergence",
    ),
    "a stopped rank": (
        starting("weights", 6, ranks=[*ranks(0.0), Rank("scheduler_TP1", 7, 0.0, "stopped")]),
        "hang_suspected",
        "rank-stopped",
    ),
    "a stopped rank while idle": (
        up(ranks=[*ranks(2.0), Rank("scheduler_TP1", 7, 0.0, "stopped")]), "hang_suspected", "rank-stopped"
    ),
    "a stopped rank, though the log goes on": (
        up(
            ranks=[*ranks(2.0), Rank("scheduler_TP1", 7, 0.0, "stopped")],
            log_silent_s=1.0,
            activity=activity(stopped_s={7: 6.0}),
        ),
        "hang_suspected",
        "rank-stopped",
    ),
    "a rank that is stopped for a moment, as while it is read": (
        up(ranks=[*ranks(2.0), Rank("scheduler_TP1", 7, 0.0, "stopped")], log_silent_s=1.0), "healthy", None
    ),
    "no answer, and nothing computes": (up(**SICK), "hang_suspected", "idle-rank-stuck"),
    "no answer, and idle GPUs, though the schedulers spin": (
        up(**SICK, ranks=ranks(82.0, 65.0), activity=IDLE_GPUS), "hang_suspected", "idle-rank-stuck"
    ),
    "no answer, and every GPU spins": (
        up(**SICK, health_failing_s=65, activity=SPIN, ranks=ranks(100.0)), "hang_suspected", "collective-spin"
    ),
    "no answer for long, on a host that is too busy": (
        up(health=None, health_failing_s=70, ranks=ranks(50.0), activity=activity(starved=2.0)), "degraded", "overloaded"
    ),
    "the tokenizer": (
        up(**SICK, launcher=Rank("python", 1, 100.0, "running")), "hang_suspected", "tokenizer-cpu"
    ),
    "no answer for ever": (up(health=None, health_failing_s=70, ranks=ranks(50.0)), "hang_suspected", "idle-rank-stuck"),
    # Degraded.
    "503 at once, without asking the scheduler": (
        up(health=503, health_s=0.01, health_failing_s=90), "degraded", None
    ),
    "a long prefill": (up(**SICK, activity=LOAD, ranks=ranks(100.0)), "degraded", "overloaded"),
    "a long prefill on a CPU": (up(**SICK, ranks=ranks(100.0)), "degraded", "overloaded"),
    "a queue that nobody serves": (up(batch=Batch(0, 7, None), batch_s=90.0), "degraded", "queue-stuck"),
    "heat": (up(throttled={0: ["hw_thermal"]}), "degraded", "gpu-throttled"),
    "half a PCIe link": (up(narrow={2: "x8 instead of x16"}), "degraded", "pcie-width"),
    "an XID": (up(xids={1: [31]}), "degraded", "gpu-xid"),
    "requests are taken back again and again": (up(hits=[hit("kv-retract", 690, 9)]), "degraded", "kv-retract"),
    # Up and well, whatever it looks like.
    "healthy": (up(), "healthy", None),
    "idle schedulers spin": (up(ranks=ranks(82.0, 65.0), activity=IDLE_GPUS), "healthy", None),
    "an hour without a request": (up(log_silent_s=3600), "healthy", None),
    "a small model at low power": (up(activity=SPIN), "healthy", None),
    "a queue that moves": (up(batch=Batch(48, 7, None), batch_s=90.0), "healthy", None),
    "one retraction, once": (up(hits=[hit("kv-retract", 300)]), "healthy", None),
    "an error that was survived": (up(hits=[hit("runtime-oom", 690)]), "healthy", None),
    # Ends.
    "a false ready": (up(listener_is_ours=False), "crashed", "port-foreign"),
    "a crash whose port lingers": (
        up(crashed="Subprocess detokenizer (pid=7) crashed with exit code -11.", crashed_line=690), "crashed", "child-died"
    ),
    "a rank is gone": (up(missing=["scheduler_TP1"]), "crashed", "rank-gone"),
    "a port that another process took": (
        starting("weights", 3, port_open=True, listener_is_ours=False), "starting", "port-foreign"
    ),
    "a tap that failed": (starting("weights", 3, tap_error="no room"), "starting", "tap-failed"),
    "up without the tap": (up(tap_in=False), "unknown", "tap-missing"),
    "the kernel names the victim": (
        Evidence(process_alive=False, exit_code=1, kernel=["Out of memory: Killed process 7 (sglang::schedul) total-vm:1kB"]),
        "crashed",
        "host-oom-kill",
    ),
    "no crash: our own stop": (
        up(stop_requested=True, crashed="Subprocess scheduler_0 (pid=7) crashed with exit code -9."), "stopped", None
    ),
    "no crash: somebody else's stop": (up(stopping=True, missing=["scheduler_TP0"]), "stopped", None),
    "503 at once before it is ready": (
        starting("warm_up", 2, port_open=True, listener_is_ours=True, health=503, health_s=0.0), "starting", None
    ),
}  # fmt: skip


IN_EXACT_WORDS = ("port-foreign", "rank-gone", "tap-failed")  # which port, which rank, why


@pytest.mark.parametrize(("evidence", "verdict", "first"), TABLE.values(), ids=TABLE.keys())
def test_verdict(evidence: Evidence, verdict: str, first: str | None) -> None:
    found = diagnose(evidence)
    assert (found.verdict, next(iter(found.findings), None)) == (verdict, first)
    if first:
        assert found.remedy == catalogue().by_id[first].remedy
        assert first in IN_EXACT_WORDS or found.cause == catalogue().by_id[first].cause


@pytest.mark.parametrize("phase", SILENCE)
def test_every_phase_has_its_patience(phase: str) -> None:
    reached = None if phase == "launch" else phase
    assert diagnose(starting(reached, SILENCE[phase])).verdict == "starting"
    assert diagnose(starting(reached, SILENCE[phase] + 1)).verdict == "hang_suspected"
    assert diagnose(starting(reached, SILENCE[phase] + 1), Limits().scaled(2)).verdict == "starting"
    assert diagnose(starting(reached, SILENCE[phase] / 10 + 1), Limits().scaled(0.1)).verdict == "hang_suspected"


def test_silence_alone_is_no_hang() -> None:
    for unknown in (None, activity(seconds=0.0), activity(seconds=9.0)):
        found = diagnose(starting("weights", 1000, activity=unknown))
        assert (found.verdict, found.cause) == (
            "starting",
            "the log is silent for long; whether anything moves is not known yet",
        )
        assert "--watch" in (found.remedy or "")


def test_no_answer_is_no_hang_before_one_has_looked() -> None:
    assert diagnose(up(**SICK, activity=activity(seconds=0.5))).verdict == "degraded"


def test_what_is_said_of_a_silent_start() -> None:
    found = diagnose(
        starting(
            "weights", 600, earlier_s=310.2, detail="shard 43 of 64", activity=activity(read_bytes_per_second=28e6)
        )
    )
    assert found.evidence[1:4] == [
        "in phase weights for 600 s, last time 310 s: shard 43 of 64",
        "log silent for 600 s at line 217",
        "port 30000 closed",
    ]
    assert "28 MB/s read" in found.evidence


def test_a_rank_that_is_gone_is_named() -> None:
    found = diagnose(up(missing=["scheduler_TP1"]))
    assert found.cause == "scheduler_TP1 is dead while the launcher still runs"
    assert found.evidence[-1] == "rank scheduler_TP1 gone"


def test_what_is_said_of_gpus() -> None:
    evidence = up(throttled={0: ["hw_thermal"]}, narrow={2: "x8 instead of x16"}, xids={1: [31, 13]})
    assert diagnose(evidence).evidence[-5:-2] == [
        "GPU 0 throttled: hw_thermal",
        "GPU 2 has a PCIe link of x8 instead of x16",
        "GPU 1 reported XID 31, 13",
    ]
    assert diagnose(evidence).findings == ["gpu-throttled", "pcie-width", "gpu-xid"]


def test_what_a_hang_is_told_by_is_shown_though_health_was_good_a_while_ago() -> None:
    """An answer of /health holds for some seconds, in which a rank may be stopped and the others wait for it."""
    waits = activity(gpu_seconds=LOOKED, gpus_work=True, idle_gpu=1, busy_power=(126.5, 700.0), stopped_s={101: 20.0})
    stopped = [*ranks(100.0), Rank("scheduler_TP1", 101, 0.0, "stopped")]
    found = diagnose(up(activity=waits, ranks=stopped))
    assert (found.verdict, found.findings[0]) == ("hang_suspected", "rank-stopped")
    assert "GPU 1 idle while the others are at 100 % (126 of 700 W)" in found.evidence
    assert "GPU 1 idle" not in " ".join(diagnose(up(activity=waits)).evidence)  # nothing to do: healthy
