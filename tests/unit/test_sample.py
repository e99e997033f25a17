"""Samples of a host: its disks, a run's processes and dumps, whatever hangs left behind, and all of it cheaply."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from fake_nvml import Card, FakeNvml, process
from helpers import SLEEP, Clock, until

from backends import gpus, processes, sample
from backends.agent import Agent
from backends.errors import UsageError
from backends.gpus import Gpus, GpuSample
from backends.logs import LogCursor
from backends.processes import Rate, RunProcesses, read_stat
from backends.runs import Run, Runs, stop
from backends.sample import Aside, Disk, DumpWatch, HostWatch, LiveRuns, Pace, RunState, Sampler, read_disk
from capture.dumps import dump

Start = Callable[..., Run]


@pytest.fixture
def clock() -> Clock:
    return Clock()


class NoGpus(Gpus):
    def sample(self, ours: object = None) -> GpuSample:
        return GpuSample("no_gpu", "NVML sees no GPU")


@pytest.fixture
def sampler(all_runs: Runs, clock: Clock) -> Sampler:
    return Sampler(all_runs, NoGpus(), clock)


# --- A sample in whole ---


def test_a_host_where_nothing_runs(sampler: Sampler, all_runs: Runs) -> None:
    now = sampler.sample()
    assert abs(now["at"] - time.time()) < 60
    assert now["host"]["cpu_percent"] is None
    assert now["host"]["cores"] == os.cpu_count()
    assert len(now["host"]["load"]) == 3
    assert now["host"]["memory_total_bytes"] == psutil.virtual_memory().total
    assert 0 < now["host"]["memory_available_bytes"] <= now["host"]["memory_total_bytes"]
    assert now["host"]["swap_used_bytes"] >= 0
    assert [disk["path"] for disk in now["host"]["disks"]] == [str(all_runs.state)]
    assert now["gpus"] == {"state": "no_gpu", "why": "NVML sees no GPU", "driver": None, "cuda": None, "gpus": []}
    assert (now["processes"], now["dumps"], now["runs"]) == (None, None, [])


def test_a_server_run(sampler: Sampler, start: Start, all_runs: Runs, tmpfs: Path) -> None:
    run = start("server", dump_root=tmpfs)
    (tmpfs / run.id).mkdir()
    write(tmpfs / run.id, [line(0, 100)])
    now = sampler.sample(run.id, ["/proc", str(tmpfs)])
    assert [disk["path"] for disk in now["host"]["disks"]] == [str(tmpfs), str(all_runs.state), "/proc"]
    assert [entry["title"] for entry in now["processes"]][1:] == ["sleep"]
    assert now["dumps"]["states"] == {"done": {"requests": 1, "bytes": 100}, "failed": {"requests": 0, "bytes": 0}}
    assert now["runs"] == [{"id": run.id, "kind": "server", "state": "running"}]
    json.dumps(now)


def test_a_run_that_draws_nothing(sampler: Sampler, start: Start) -> None:
    run = start("verify")
    now = sampler.sample(run.id[:-1])
    assert now["dumps"] is None
    assert len(now["processes"]) == 2


def test_no_such_run(sampler: Sampler) -> None:
    with pytest.raises(UsageError, match="no run begins with 'server-1'"):
        sampler.sample("server-1")


def test_the_agent_is_asked(home: Path, payload_folder: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    run = start()
    agent = Agent(payload_folder)
    until(lambda: agent.sample(run.id, ["/proc"])["host"]["disks"][-1]["filesystem"] == "proc")
    now = agent.sample(run.id)
    assert now["gpus"]["state"] == "no_nvml"
    assert now["runs"][0]["id"] == run.id


def test_the_agent_reads_a_log_that_rotates(home: Path, payload_folder: Path) -> None:
    agent, log, cursor = Agent(payload_folder), home / "server.log", LogCursor()
    log.write_bytes(b"one\n")
    assert cursor.advance(*agent.read(str(log), most=100, **cursor.asks)).data == b"one\n"
    log.rename(home / "server.log.1")
    log.write_bytes(b"two\n")
    assert cursor.advance(*agent.read(str(log), most=100, **cursor.asks)).kind == "rotated"
    assert cursor.advance(*agent.read(str(log), most=100, **cursor.asks)).data == b"two\n"
    with pytest.raises(UsageError) as failed:
        agent.read(str(home / "nothing"), 0, 1)
    assert str(failed.value) == f"{home}/nothing: No such file or directory"


def test_samples_from_many_threads(sampler: Sampler, start: Start, clock: Clock) -> None:
    run, failed = start(), []

    def ask() -> None:
        try:
            for _ in range(20):
                clock.now += 0.5
                assert len(sampler.sample(run.id)["processes"]) == 2
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


# --- Host ---


def test_cpu_use_of_all_cores(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([(1000, 4000), (1150, 4200), (1151, 4201), (1150, 4600)])
    monkeypatch.setattr(sample, "_cpu_ticks", lambda: next(ticks))
    host = HostWatch(clock)
    shown = [host.look([]).cpu_percent for _ in range(4)]
    assert shown == [None, 75.0, 75.0, 0.0]  # the third look came too early to tell


def test_cpu_ticks_grow() -> None:
    busy, total = sample._cpu_ticks()
    later = until(lambda: (now := sample._cpu_ticks())[1] > total and now)
    assert later[0] >= busy
    assert busy < total


@pytest.mark.parametrize(
    ("path", "filesystem"), [("/proc", "proc"), ("/proc/self/nothing/at/all", "proc"), ("/sys", "sysfs")]
)
def test_the_file_system_of_a_path(path: str, filesystem: str) -> None:
    assert read_disk(path).filesystem == filesystem


def test_a_folder_that_will_be_made_is_on_the_disk_of_the_one_above(tmp_path: Path) -> None:
    missing, there = read_disk(f"{tmp_path}/a/b"), read_disk(str(tmp_path))
    assert missing.path == f"{tmp_path}/a/b"
    assert (missing.total_bytes, missing.filesystem) == (there.total_bytes, there.filesystem)
    assert 0 < there.free_bytes <= there.total_bytes == os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize


def test_mount_points_with_spaces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mounts = [
        "22 1 0:20 / / rw - ext4 /dev/sda1 rw",
        r"23 22 0:21 / /mnt/my\040data rw,relatime shared:5 - nfs4 server:/x rw",
        "24 22 0:22 / /mnt/my rw - xfs /dev/sdb rw",
        "25 22 0:23 / / rw - overlay overlay rw",
    ]
    (tmp_path / "mountinfo").write_text("\n".join(mounts) + "\n")
    real_open = open
    monkeypatch.setattr("builtins.open", lambda *_, **known: real_open(tmp_path / "mountinfo", **known))
    assert sample.filesystem(Path("/mnt/my data/out")) == "nfs4"
    assert sample.filesystem(Path("/mnt/my/out")) == "xfs"
    assert sample.filesystem(Path("/mnt/mine")) == "overlay"


# --- What hangs ---


@pytest.fixture
def stuck() -> Iterator[threading.Event]:
    """A question waits for it."""
    over = threading.Event()
    yield over
    over.set()


def test_a_disk_that_does_not_answer_delays_nothing(
    clock: Clock, stuck: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [50]

    def read(path: str) -> Disk:
        if free == [40]:
            stuck.wait()
        return Disk(path, 100, free[0], "nfs4")

    monkeypatch.setattr(sample, "read_disk", read)
    monkeypatch.setattr(sample, "DISK_WAIT", 0.02)
    host = HostWatch(clock)
    until(lambda: host.look(["/data"]).disks == [Disk("/data", 100, 50, "nfs4")])
    free[0] = 40
    for later, shown in ((1.9, 50), (2.0, 50), (9.0, 50), (13.0, None)):
        clock.now = 1000 + later
        assert host.look(["/data"]).disks[0].free_bytes == shown
    stuck.set()
    until(lambda: host.look(["/data"]).disks == [Disk("/data", 100, 40, "nfs4")], "it answers at last")


def test_nvml_that_hangs(all_runs: Runs, clock: Clock, stuck: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hung(Gpus):
        asked = 0

        def sample(self, ours: object = None) -> GpuSample:
            self.asked += 1
            stuck.wait()
            return GpuSample("ok")

    monkeypatch.setattr(sample, "GPU_SECONDS", 0.01)
    hung = Hung()
    sampler = Sampler(all_runs, hung, clock)
    sampler.sample()
    clock.now += 12.3
    now = sampler.sample()
    assert now["gpus"]["state"] == "error"
    assert now["gpus"]["why"] == "NVML has not answered for 12 s"
    assert now["host"]["memory_total_bytes"] > 0
    assert hung.asked == 1
    stuck.set()
    until(lambda: sampler.sample()["gpus"]["state"] == "ok", "it answers at last")


def test_a_question_that_fails_says_so(clock: Clock) -> None:
    def question() -> int:
        raise ZeroDivisionError("ours")

    aside = Aside(question, wait=10.0, clock=clock)
    with pytest.raises(ZeroDivisionError, match="ours"):
        aside.ask()


# --- Processes ---


def test_rates() -> None:
    rate = Rate()
    assert [rate.of(count, at) for count, at in [(100, 5.0), (150, 5.5), (160, 5.55), (160, 6.5)]] == [
        None,
        100.0,
        100.0,
        10.0,
    ]


FAMILY = """
ln -s /bin/sleep "$1/nvcc"; ln -s /bin/sleep "$1/c++"
"$1/nvcc" 600 & "$1/c++" 600 &
bash -c 'exec -a torch/_inductor/compile_worker/__main__.py sleep 600' &
bash -c 'exec -a sglang::scheduler_TP0 sleep 600' &
setsid sleep 600 &
exec sleep 600
"""


def test_the_processes_of_a_run(start: Start, tmp_path: Path, clock: Clock) -> None:
    run = start("server", ["/bin/bash", "-c", FAMILY, "family", str(tmp_path)])
    wanted = ["__main__.py", "c++", "nvcc", "sglang::scheduler_TP0", "sleep", "sleep"]
    following = RunProcesses(run, clock)

    def look() -> list[processes.ProcessSample]:
        clock.now += 2
        return following.look()

    until(lambda: sorted(one.title for one in look() if "python" not in one.title) == wanted, "all are there")
    seen = look()
    assert [one.pid for one in seen] == sorted({one.pid for one in run.processes()})
    assert {one.title for one in seen if one.compiler} == {"nvcc", "c++", "__main__.py"}
    supervisor = next(one for one in seen if one.pid == run.running.supervisor.pid)
    assert supervisor.title.endswith(" -m backends.runs")
    rank = next(one for one in seen if one.title == "sglang::scheduler_TP0")
    of = psutil.Process(rank.pid)
    assert (rank.state, rank.cpu_percent) == ("sleeping", 0.0)
    assert abs(rank.rss_bytes - of.memory_info().rss) < 1 << 20  # the kernel counts in batches here
    counted = of.io_counters()
    assert rank.read_bytes >= max(counted.read_bytes, counted.read_chars)


def test_a_process_that_ends_and_one_that_comes(start: Start, clock: Clock) -> None:
    run = start()
    following = RunProcesses(run, clock)
    supervisor, child = (one.pid for one in following.look())
    os.kill(child, 9)
    until(lambda: [one.pid for one in following.look()] in ([], [supervisor]), "it is gone")


def test_another_process_of_the_same_number(start: Start, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start()
    following = RunProcesses(run, clock)
    assert len(following.look()) == 2
    monkeypatch.setattr(processes, "read_stat", lambda pid: read_stat(pid)._replace(start=1))
    assert following.look() == []


def test_cpu_use_of_a_process(start: Start, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    run, ticks = start(), [100]
    monkeypatch.setattr(processes, "TICKS", 100)
    monkeypatch.setattr(processes, "read_stat", lambda pid: read_stat(pid)._replace(cpu=ticks[0]))
    following, shown = RunProcesses(run, clock), []
    for now in (100, 150, 350):
        ticks[0] = now
        shown.append([one.cpu_percent for one in following.look()])
        clock.now += 1
    assert shown == [[None, None], [50.0, 50.0], [200.0, 200.0]]


def test_names_with_brackets_and_spaces(tmp_path: Path, start: Start, clock: Clock) -> None:
    (tmp_path / "a) R (b").symlink_to("/bin/sleep")
    run = start("verify", [f"{tmp_path}/a) R (b", "600"])
    sleeps = ("a) R (b", "sleeping")
    found = until(lambda: ((now := read_stat(run.running.child.pid)).name, now.state) == sleeps and now)
    assert found.start == run.running.child.start


def test_only_new_processes_are_looked_at_closely(start: Start, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    run, searched = start(), Run.processes
    pids, ours = psutil.pids(), {process.pid for process in run.processes()}
    looked: list[set[int]] = []
    with monkeypatch.context() as patched:
        patched.setattr(psutil, "pids", lambda: pids)
        patched.setattr(Run, "processes", lambda run, among: looked.append(set(among)) or searched(run, among))
        following = RunProcesses(run, clock)
        for _ in range(20):
            following.look()
            clock.now += 0.2
        assert looked[0] == set(pids)
        assert len(looked) == 2  # the other one two seconds later
        assert {pid % processes.SLICES for pid in looked[1]} <= {1}
        for _ in range(processes.SLICES):
            clock.now += 2
            following.look()
    assert set().union(*looked[2:]) == set(pids) - ours


# --- Dumps ---


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    """A folder where dumps lie."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def line(n: int, size: int, state: str = "done") -> dump.Line:
    return dump.Line(n, f"s.e.{n}.0.9", state, size, None if state == "done" else "no room")


def write(folder: Path, lines: list[dump.Line]) -> None:
    with (folder / "dumps.jsonl").open("ab") as file:
        file.write(b"".join(msgspec.json.encode(one) + b"\n" for one in lines))


TAP = dump.TapState(
    code="0123",
    pid=1,
    sglang="0.5.23",
    model="m",
    model_class="M",
    reserve=16 << 20,
    slots=8,
    slots_free=6,
    slot_wait_seconds=1.5,
    writer_pids=[77, 78],
    writers_lost=1,
    seen={"ours": 3, "warm_up": 1, "health": 812, "stranger": 0},
)


def test_dumps_are_counted(tmpfs: Path, clock: Clock) -> None:
    dump.write_json(tmpfs / "tap.json", TAP)
    write(tmpfs, [line(0, 100), line(1, 0, "failed"), line(2, 50)])
    (tmpfs / "req_0").mkdir()
    (tmpfs / "req_2").mkdir()
    (tmpfs / "arena").touch()
    watch = DumpWatch(tmpfs, clock)
    now = msgspec.to_builtins(watch.look())
    disk = os.statvfs(tmpfs)
    assert now.pop("free_bytes") <= now.pop("total_bytes") == disk.f_blocks * disk.f_frsize
    assert now == {
        "states": {"done": {"requests": 2, "bytes": 150}, "failed": {"requests": 1, "bytes": 0}},
        "requests_per_second": None,
        "bytes_per_second": None,
        "on_disk": 2,
        "seconds_to_full": None,
        "seen": {"ours": 3, "warm_up": 1, "health": 812, "stranger": 0},
        "reserve": 16 << 20,
        "slots": 8,
        "slots_free": 6,
        "slot_wait_seconds": 1.5,
        "writer_pids": [77, 78],
        "writers_lost": 1,
        "error": None,
    }


def test_the_rate_is_that_of_the_last_seconds(tmpfs: Path, clock: Clock) -> None:
    watch = DumpWatch(tmpfs, clock)
    write(tmpfs, [line(0, 1_000_000)])  # from before the first look: no rate comes of it
    rates = []
    for second in range(30):
        now = watch.look()
        rates.append((now.requests_per_second, now.bytes_per_second))
        write(tmpfs, [line(second, 100)] * (4 if second < 10 else 2) + [line(second, 0, "failed")])
        clock.now += 1
    assert rates[:3] == [(None, None), (4.0, 400.0), (4.0, 400.0)]
    assert rates[10] == (4.0, 400.0)
    assert rates[15] == (3.0, 300.0)
    assert rates[20:] == [(2.0, 200.0)] * 10


def test_looks_that_are_far_apart(tmpfs: Path, clock: Clock) -> None:
    watch = DumpWatch(tmpfs, clock)
    watch.look()
    write(tmpfs, [line(0, 6000)] * 3)
    clock.now += 60
    now = watch.look()
    assert (now.requests_per_second, now.bytes_per_second) == (0.05, 300.0)


def test_fifty_thousand_requests(tmpfs: Path, clock: Clock) -> None:
    watch = DumpWatch(tmpfs, clock)
    write(tmpfs, [line(n, 1000, "failed" if n % 10 == 0 else "done") for n in range(50_000)])
    assert watch.look().states["done"].requests == 45_000
    # What was read is never read again: here it is no longer JSON.
    size = (tmpfs / "dumps.jsonl").stat().st_size
    (tmpfs / "dumps.jsonl").write_bytes(b"\0" * size)
    write(tmpfs, [line(50_000, 5)])
    now = watch.look()
    assert (now.states["done"].requests, now.states["done"].bytes) == (45_001, 45_000_005)
    assert (now.states["failed"].requests, now.error) == (5_000, None)


def test_half_a_line_is_left_for_later(tmpfs: Path, clock: Clock) -> None:
    watch = DumpWatch(tmpfs, clock)
    whole = msgspec.json.encode(line(0, 7)) + b"\n"
    (tmpfs / "dumps.jsonl").write_bytes(whole[:20])
    assert watch.look().states["done"].requests == 0
    (tmpfs / "dumps.jsonl").write_bytes(whole)
    assert watch.look().states["done"].requests == 1


def test_files_that_cannot_be_read_are_told(tmpfs: Path, clock: Clock) -> None:
    watch = DumpWatch(tmpfs, clock)
    (tmpfs / "tap.json").write_text('{"format": 99}')
    now = watch.look()
    assert now.error.startswith(f"{tmpfs}/tap.json: Object missing required field `code`")
    assert (now.seen, now.slots, now.reserve) == (None, None, None)
    (tmpfs / "dumps.jsonl").write_text("{}\n")
    for _ in range(2):  # what was not counted stays uncounted
        assert watch.look().error.startswith(f"{tmpfs}/dumps.jsonl: Object missing required field `n`")


def test_a_folder_that_is_removed(tmpfs: Path, clock: Clock) -> None:
    (tmpfs / "run").mkdir()
    watch = DumpWatch(tmpfs / "run", clock)
    assert watch.look() is not None
    (tmpfs / "run").rmdir()
    assert watch.look() is None


@pytest.mark.parametrize(
    ("free", "seconds"),
    [
        ((10_000, 9_000), 80.0),  # 100 a second are gone, 8,000 are left above the reserve
        ((10_000, 10_000), None),
        ((10_000, 12_000), None),
        ((10_000, 9_998), 44990.0),
        ((100_000, 99_999), None),  # in more than a day
        ((10_000, 1_000), 0.0),
        ((900, 950), 0.0),
    ],
)
def test_when_it_will_be_full(free: tuple[int, int], seconds: float | None) -> None:
    first, last = Pace(50.0, 0, 0, free[0]), Pace(60.0, 0, 0, free[1])
    assert sample.seconds_to_full(first, last, 1_000) == seconds


# --- Runs ---


def test_live_runs(start: Start, all_runs: Runs, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, alive = start("verify", ["/bin/true"]), start("server", SLEEP)
    until(lambda: ended.exit)
    (all_runs.folder / "being-made").mkdir()
    looked, state = [], Run.state
    monkeypatch.setattr(Run, "state", lambda run: looked.append(run.id) or state(run))
    live = LiveRuns(all_runs, clock)
    assert live.look() == [RunState(alive.id, "server", "running")]
    assert sorted(looked) == sorted([alive.id, ended.id])
    clock.now += 0.5
    live.look()
    assert len(looked) == 2  # half a second later, nobody was asked
    clock.now += 0.6
    live.look()
    assert looked[2:] == [alive.id]  # the one that is over is never looked at again
    stop(alive, "enough")
    clock.now += 1
    assert live.look() == []


# --- What it costs ---


def test_samples_at_five_hertz_cost_less_than_two_percent_of_a_core(
    all_runs: Runs, start: Start, tmpfs: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPU time of this process over ten seconds' worth of samples: 8 GPUs, 20 processes, 40 requests a second."""
    run = start("server", ["/bin/bash", "-c", "for i in {1..18}; do sleep 600 & done; wait"], dump_root=tmpfs)
    (tmpfs / run.id).mkdir()
    dump.write_json(tmpfs / run.id / "tap.json", TAP)
    until(lambda: len(run.processes()) == 20)
    cards = [Card(i, nvmlDeviceGetComputeRunningProcesses_v3=[process(run.running.child.pid, 1)]) for i in range(8)]
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*cards))
    monkeypatch.setattr(gpus, "XID_WAIT_MS", 50)
    all_gpus = Gpus(clock)
    sampler = Sampler(all_runs, all_gpus, clock)
    sampler.sample(run.id)
    begun = time.process_time()
    for n in range(50):
        clock.now += 0.2
        write(tmpfs / run.id, [line(n, 100_000_000)] * 8)
        now = sampler.sample(run.id)
    spent = time.process_time() - begun
    all_gpus.close()
    assert (len(now["processes"]), len(now["gpus"]["gpus"]), now["dumps"]["states"]["done"]["requests"]) == (20, 8, 400)
    assert now["gpus"]["gpus"][0]["processes"][0]["ours"] is True
    assert spent / 10 < 0.02
