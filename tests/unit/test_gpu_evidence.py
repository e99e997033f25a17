"""What GPUs tell of a silent start or a server that does not answer, from made samples: utilisation against power."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import pytest

from backends.gpus import Gpu, Xid
from backends.processes import ProcessSample
from backends.verdict.diagnose import Limits, Verdict, diagnose
from backends.verdict.observation import Follower, HealthAnswer, Observation
from capture.dumps.dump import TapState

BEGUN = 1_790_000_000.0
LIMIT = 600.0  # watts; an RTX PRO 6000
VRAM = 40 << 30
EVERY = 2.0  # seconds between two looks
Samples = Callable[[float], list[Gpu]]


def gpus(*each: tuple[int | None, float | None], limit: float | None = LIMIT, **known: Any) -> Samples:
    """GPUs with a utilisation (percent) and a power (watts) that stay as they are."""
    return lambda _: [
        Gpu(
            index=index,
            utilisation_percent=busy,
            power_watts=watts,
            power_limit_watts=limit,
            **{"memory_used_bytes": VRAM} | known,
        )
        for index, (busy, watts) in enumerate(each)
    ]


def filling(_: float) -> list[Gpu]:
    """Weights are copied in: busy, little power, and memory grows."""
    return gpus(*[(100, 130.0)] * 4, memory_used_bytes=VRAM + int(_ * (1 << 20)))(0)


def flickering(seconds: float) -> list[Gpu]:
    """Kernels that are tried out one after another."""
    return gpus(*[(100 if int(seconds / EVERY) % 3 else 20, 200.0)] * 4)(0)


def soon_at_work(seconds: float) -> list[Gpu]:
    """A spin that comes to an end: the other ranks arrive, and the load begins."""
    return gpus(*[(100, 140.0 if seconds < 40 else 560.0)] * 4)(0)


SPIN = gpus(*[(100, 140.0)] * 4)
IDLE = gpus(*[(0, 90.0)] * 4)
LOAD = gpus(*[(99, 540.0)] * 4)
ONE_IDLE = gpus((100, 140.0), (100, 141.0), (0, 88.0), (100, 139.0))
LOGS = {
    "dist": "Init torch distributed begin.",
    "weights": "Load weight begin. avail mem=93.90 GB",
    "tune": "Running FlashInfer autotune with cache: /x.json",
    "graphs": "Capture target decode CUDA graph begin. backend=full, avail mem=12.80 GB",
    "ready": "The server is fired up and ready to roll!",
}


class Case(NamedTuple):
    phase: str
    silent: float
    gpus: Samples
    verdict: str
    first: str | None
    cpu: float = 100.0
    compilers: tuple[str, ...] = ()
    health: int = 200


TABLE = {
    # A collective that spins: 100 % at the power of an idle GPU, told long before the phase's silence is over.
    "the first collective over PCIe": Case("dist", 70, SPIN, "hang_suspected", "pcie-p2p-deadlock"),
    "a collective in the capture": Case("graphs", 70, SPIN, "hang_suspected", "pcie-p2p-deadlock"),
    "the same on GPUs of 700 W": Case(
        "graphs", 70, gpus(*[(100, 200.0)] * 2, limit=700.0), "hang_suspected", "pcie-p2p-deadlock"
    ),
    "the same while it tunes": Case("tune", 70, SPIN, "hang_suspected", "autotune-stuck"),
    "the same, but not for long enough": Case("graphs", 50, SPIN, "starting", None),
    "the same, on a server that does not answer": Case("ready", 70, SPIN, "hang_suspected", "collective-spin", health=503),
    "one GPU idle, the others wait": Case("graphs", 310, ONE_IDLE, "hang_suspected", "tp-divergence"),
    # Nothing computes at all.
    "idle GPUs in a silent capture": Case("graphs", 310, IDLE, "hang_suspected", "capture-stall", cpu=0.0),
    "idle GPUs in a capture, within its time": Case("graphs", 290, IDLE, "starting", None, cpu=0.0),
    "no answer, and idle GPUs": Case("ready", 70, IDLE, "hang_suspected", "idle-rank-stuck", health=503),
    # It works, or may: no alarm within the time that the phase has.
    "a load that draws power": Case("graphs", 290, LOAD, "starting", None),
    "a spin that ended": Case("graphs", 70, soon_at_work, "starting", None),
    "weights go to the GPUs": Case("weights", 70, filling, "starting", None),
    "kernels are tried out": Case("tune", 290, flickering, "starting", None),
    "a spin of some GPUs beside a load": Case("graphs", 70, gpus((100, 140.0), (100, 520.0)), "starting", None),
    "spinning ranks wait for one that compiles": Case(
        "graphs", 400, SPIN, "slow_but_fine", "jit-compile", compilers=("cicc",)
    ),
    "power is not known": Case("graphs", 70, gpus(*[(100, None)] * 4), "starting", None),
    "its limit is not known": Case("graphs", 70, gpus(*[(100, 140.0)] * 4, limit=None), "starting", None),
    "utilisation is not known": Case("graphs", 70, gpus(*[(None, 140.0)] * 4), "starting", None),
    "a long prefill": Case("ready", 70, LOAD, "degraded", "overloaded", health=503),
    "a small model at little power that answers": Case("ready", 3600, SPIN, "healthy", None),
    # How the GPUs are.
    "heat": Case("ready", 60, gpus((99, 400.0), throttle=["hw_thermal"]), "degraded", "gpu-throttled"),
    "a power cap is normal": Case("ready", 60, gpus((99, 590.0), throttle=["sw_power_cap"]), "healthy", None),
    "an XID": Case("ready", 60, gpus((99, 400.0), xid=[Xid(13, BEGUN + 1)]), "degraded", "gpu-xid"),
    "an XID of a process that was ended": Case("ready", 60, gpus((99, 400.0), xid=[Xid(45, BEGUN + 1)]), "healthy", None),
    "half a link": Case("ready", 60, gpus((9, 90.0), pcie_width=8, pcie_max_width=16), "degraded", "pcie-width"),
}  # fmt: skip


def verdicts(case: Case) -> Iterator[Verdict]:
    """What is said at every look, until the log has been silent for as long as the case says."""
    follower = Follower(Limits())
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(BEGUN))
    follower.hear(f"[{stamp} TP0] {LOGS[case.phase]}\n", BEGUN)
    seconds = 0.0
    while seconds <= case.silent:
        seconds += EVERY
        yield diagnose(follower.evidence(seen(case, seconds)))


def seen(case: Case, seconds: float) -> Observation:
    up = case.phase == "ready"
    ranks = [process(10 + rank, f"sglang::scheduler_TP{rank}", case.cpu) for rank in range(4)]
    failing = None if case.health == 200 else seconds
    return Observation(
        at=BEGUN + seconds,
        tick=seconds,
        created=BEGUN,
        state="running",
        port=30000,
        listener_is_ours=True if up else None,
        health=HealthAnswer(status=case.health, seconds=20.0, age=0.1, failing_for=failing) if up else None,
        log_age=seconds,
        tap=TapState(inside=True, code="", pid=1, sglang="", model="", model_class="") if up else None,
        processes=[*ranks, *(process(20, name, 99.0, compiler=True) for name in case.compilers)],
        gpus=case.gpus(seconds),
    )


def process(pid: int, title: str, cpu: float, compiler: bool = False) -> ProcessSample:
    state = "running" if cpu > 90 else "sleeping"
    return ProcessSample(pid, title, cpu, state, rss_bytes=1 << 30, read_bytes=0, compiler=compiler)


@pytest.mark.parametrize("case", TABLE.values(), ids=TABLE.keys())
def test_what_gpus_tell(case: Case) -> None:
    said = list(verdicts(case))
    assert (said[-1].verdict, next(iter(said[-1].findings), None)) == (case.verdict, case.first)
    if case.verdict != "hang_suspected":
        assert "hang_suspected" not in {one.verdict for one in said}


def test_a_child_of_a_rank_that_has_its_title_for_a_moment_leaves_no_rank_dead() -> None:
    """Between fork and exec it is called as its parent: a compiler, a writer."""
    case = Case("ready", 60, gpus((99, 400.0)), "healthy", None)
    follower = Follower(Limits())
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(BEGUN))
    follower.hear(f"[{stamp} TP0] {LOGS['ready']}\n", BEGUN)
    child = process(99, "sglang::scheduler_TP0", 0.0)
    with_child = seen(case, 2.0)
    with_child = msgspec.structs.replace(with_child, processes=[*with_child.processes, child])
    follower.evidence(with_child)
    for seconds in (4.0, 20.0, 40.0):
        evidence = follower.evidence(seen(case, seconds))
        assert evidence.missing == []
    without = seen(case, 42.0)
    without = msgspec.structs.replace(without, processes=without.processes[1:])
    follower.evidence(without)
    assert follower.evidence(msgspec.structs.replace(without, at=BEGUN + 60, tick=60.0)).missing == ["scheduler_TP0"]
    assert follower.evidence(seen(case, 62.0)).missing == []  # another of that name is back
