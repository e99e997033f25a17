"""What moves in a server's processes and GPUs: compilers, reads, memory, CPU, and GPUs that spin."""

from __future__ import annotations

from helpers import Clock

from backends.gpus import Gpu
from backends.processes import ProcessSample
from backends.verdict.activity import FEW, MOST_STARVED, SECONDS, ActivityWatch


def process(pid: int, title: str = "sglang::scheduler", cpu: float | None = 0.0, **known) -> ProcessSample:
    given = {"state": "sleeping", "rss_bytes": 0, "read_bytes": 0, "compiler": False}
    return ProcessSample(pid=pid, title=title, cpu_percent=cpu, **given | known)


def gpu(index: int, busy: int | None, watts: float | None, used: int = 1000, limit: float = 600.0) -> Gpu:
    return Gpu(
        index=index, utilisation_percent=busy, power_watts=watts, power_limit_watts=limit, memory_used_bytes=used
    )


def looked(*looks: tuple[list[ProcessSample], list[Gpu]], ours: tuple[int, ...] = (1,), step: float = 5.0):
    """What is known after these looks, some seconds apart."""
    clock = Clock()
    watch = ActivityWatch(clock)
    for processes, gpus in looks:
        found = watch.look(processes, gpus, ours)
        clock.now += step
    return found


def test_one_look_tells_no_rate() -> None:
    found = looked(([process(1)], []))
    assert (found.seconds, found.read_bytes_per_second, found.memory_bytes_per_second) == (0.0, None, None)
    assert not (found.reads_move or found.memory_grows)


def test_reads_and_memory_over_the_time_looked() -> None:
    found = looked(([process(1)], []), ([process(1, read_bytes=100_000_000, rss_bytes=50_000_000)], []))
    assert (found.read_bytes_per_second, found.memory_bytes_per_second) == (20e6, 10e6)
    assert (found.reads_move, found.memory_grows) == (True, True)
    assert found.sentences() == ["20 MB/s read", "memory grows by 10 MB/s"]


def test_reads_of_other_processes_and_unknown_ones_do_not_count() -> None:
    found = looked(
        ([process(1, read_bytes=None), process(2)], []),
        ([process(1, read_bytes=None), process(2, read_bytes=10**9)], []),
    )
    assert found.read_bytes_per_second is None


def test_it_looks_back_no_farther_than_it_should() -> None:
    looks = [([process(1, read_bytes=int(1e9) if index else 0)], []) for index in range(8)]
    found = looked(*looks)
    assert SECONDS <= found.seconds <= SECONDS + 5
    assert found.read_bytes_per_second == 0.0


def test_compilers_that_work_and_one_that_waits() -> None:
    compilers = [process(7, "cicc", 99.0, compiler=True), process(8, "ninja", 0.0, compiler=True)]
    assert looked(([process(1), *compilers], [])).compilers == ["cicc"]
    assert looked(([process(1), process(9, "ptxas", None, compiler=True)], [])).compilers == ["ptxas"]
    seen_before = looked(([process(1), *compilers], []), ([process(1)], []))
    assert seen_before.compilers == ["cicc"]
    assert looked(([process(1), *compilers], []), *[([process(1)], [])] * 5).compilers == []


def test_cpu_is_a_mean_and_disk_sleep_lasts() -> None:
    found = looked(
        ([process(1, cpu=None, state="disk-sleep")], []),
        ([process(1, cpu=80.0, state="disk-sleep")], []),
        ([process(1, cpu=20.0, state="disk-sleep")], []),
    )
    assert (found.cpu_percent, found.waiting) == ({1: 50.0}, [1])
    assert looked(([process(1, state="disk-sleep")], []), ([process(1)], [])).waiting == []


def test_a_process_that_runs_whenever_it_may_is_told_from_one_that_runs_now_and_then() -> None:
    """On a busy host either gets a small part of a core."""
    starved = [([process(1, cpu=10.0, state="running")], [])] * FEW
    assert looked(*starved, step=1.0).running == [1]
    assert looked(*starved[:-1], step=1.0).running == []
    assert looked(*starved, ([process(1, cpu=10.0)], []), step=1.0).running == []


def test_files_that_a_rank_wrote() -> None:
    """A metric's page now and then is no sign of work, and what the launcher writes is the log."""
    clock = Clock()
    watch = ActivityWatch(clock)

    def wrote(pid: int, written: int) -> float | None:
        clock.now += 5
        return watch.look([process(pid, write_bytes=written)], [], [1, 2], [pid] if pid == 1 else []).written_s

    assert [wrote(1, written) for written in range(0, 200_000, 4096)] == [None] * 49
    assert [wrote(1, 300_000), *(wrote(1, 300_000) for _ in range(4))] == [0.0, 0.0, 0.0, 5.0, 10.0]
    assert [wrote(2, 10**8), wrote(2, 10**9)] == [15.0, 20.0]


def test_how_starved_a_server_is() -> None:
    """One that uses a core or would: a tenth of what it wants makes all that it does ten times as long."""
    starved = process(1, cpu=10.0, starved_percent=90.0)
    assert looked(([starved], [])).starved == 10.0
    assert looked(([starved, process(2, cpu=50.0, starved_percent=50.0)], []), ours=(1, 2)).starved == 10.0
    assert looked(([process(1, cpu=80.0, starved_percent=5.0)], [])).starved == 1.0
    assert looked(([process(1, cpu=0.0, starved_percent=0.0)], [])).starved == 1.0  # it sleeps: nobody keeps it
    assert looked(([process(1, cpu=0.0, starved_percent=100.0)], [])).starved == MOST_STARVED
    assert looked(([process(1, cpu=10.0)], [])).starved == 1.0  # the kernel does not say
    assert looked(([starved], [])).sentences() == ["the host is busy: the server gets 1/10 of the CPU that it wants"]


def test_how_long_a_process_is_stopped() -> None:
    stopped = ([process(1, state="stopped")], [])
    running = ([process(1)], [])
    assert looked(running, stopped, stopped, stopped).stopped_s == {1: 10.0}
    assert looked(stopped, stopped, running, stopped).stopped_s == {1: 0.0}
    assert looked(stopped, running).stopped_s == {}


def test_gpus_that_spin_draw_little_power() -> None:
    spin = ([process(1)], [gpu(0, 100, 140.0), gpu(1, 100, 145.0)])
    found = looked(spin, spin, spin)
    assert (found.gpus_spin, found.gpus_work, found.gpu_seconds) == (True, True, 10.0)
    assert found.sentences() == ["every GPU at 100 % with the power of an idle one (145 of 600 W)"]


def test_gpus_that_work_or_load_do_not_spin() -> None:
    def both(*gpus: Gpu) -> bool:
        return looked(([process(1)], list(gpus)), ([process(1)], list(gpus))).gpus_spin

    assert not both(gpu(0, 100, 140.0), gpu(1, 100, 480.0))
    assert not both(gpu(0, 100, 140.0), gpu(1, 40, 140.0))
    assert not both(gpu(0, 100, None))
    grows = looked(([process(1)], [gpu(0, 100, 140.0, 1000)]), ([process(1)], [gpu(0, 100, 140.0, 9000)]))
    assert not grows.gpus_spin
    assert looked(([process(1)], [gpu(0, 0, 80.0)])).gpus_work is False


def test_the_one_gpu_that_is_idle() -> None:
    busy = [gpu(index, 100, 140.0) for index in range(3)]
    odd = looked(*[([process(1)], [*busy, gpu(3, 0, 80.0)])] * 2)
    assert odd.idle_gpu == 3
    assert odd.sentences() == ["GPU 3 idle while the others are at 100 % (140 of 600 W)"]
    unknown = looked(*[([process(1)], [gpu(0, 100, None), gpu(1, 0, None)])] * 2)
    assert unknown.sentences() == ["GPU 1 idle while the others are at 100 % (power not known)"]
    assert looked(*[([process(1)], busy)] * 2).idle_gpu is None
    assert looked(*[([process(1)], [gpu(0, 0, 80.0)])] * 2).idle_gpu is None
