"""What a host does at this moment: CPU, memory, disks, GPUs, and the processes and dumps of one run.

Made to be asked several times a second. Whatever may hang (a GPU's driver, a network disk) is asked in a thread of its
own and is not waited for; whatever grows is read on from where the last look ended.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from backends.gpus import Gpu, Gpus, GpuSample
from backends.processes import ProcessSample, Rate, RunProcesses
from backends.runs import Run, Runs
from capture.dumps.dump import DumpError, Journal, TapState, read_tap, tap_folders

GPU_SECONDS = 1.0  # that a look waits for NVML; it takes milliseconds unless it opens or hangs
DISK_EVERY = 2.0
DISK_WAIT = 0.05
DISK_PATIENCE = 10.0  # after which what was last known of a disk that does not answer is forgotten
RUNS_EVERY = 1.0
WINDOW = 10.0  # seconds over which rates of dumps are taken
SHORTEST_TICKS = 10  # of all cores together, over which their use is taken
NEVER_FULL = 86400.0  # seconds: what fills so slowly is not about to be full

T = TypeVar("T")


class Disk(msgspec.Struct):
    """The file system that `path` is on, or will be; `free_bytes` without what is kept for root. None: not known."""

    path: str
    total_bytes: int | None = None
    free_bytes: int | None = None
    filesystem: str | None = None


class HostSample(msgspec.Struct):
    """`cpu_percent` of all cores since the look before, None at the first one; `load` over 1, 5 and 15 minutes."""

    cpu_percent: float | None
    cores: int | None
    load: list[float]
    memory_total_bytes: int
    memory_available_bytes: int
    swap_used_bytes: int
    disks: list[Disk]


class Settled(msgspec.Struct):
    """How many requests came to a state since the run began, and the bytes of their dumps."""

    requests: int = 0
    bytes: int = 0


class DumpSample(msgspec.Struct):
    """What a run's dump folder holds and how fast it changes. None stands for not known.

    `states`: done and failed, from dumps.jsonl. The rates are those of the last seconds. `on_disk` counts the requests
    whose folder is there now. `seconds_to_full` is None also while space does not shrink, or hardly. `seen` (requests
    by class) and all that follows come from tap.json; `error` says why one of the two could not be read. Where that is
    dumps.jsonl, `states` counts too few.
    """

    states: dict[str, Settled]
    requests_per_second: float | None
    bytes_per_second: float | None
    on_disk: int | None
    free_bytes: int
    total_bytes: int
    seconds_to_full: float | None
    seen: dict[str, int] | None
    reserve: int | None
    slots: int | None
    slots_free: int | None
    slot_wait_seconds: float | None
    writer_pids: list[int] | None
    writers_lost: int | None
    error: str | None


class RunState(msgspec.Struct):
    """A live run."""

    id: str
    kind: str
    state: str


class Sample(msgspec.Struct):
    """A host at the moment `at` (seconds since the epoch). `processes` and `dumps` are None where no run is meant.

    `dumps` is None also where the run has no dump folder, or no longer.
    """

    at: float
    host: HostSample
    gpus: GpuSample
    processes: list[ProcessSample] | None
    dumps: DumpSample | None
    runs: list[RunState]


class Sampler:
    """Takes samples of this host; one for each agent. May be asked from any thread."""

    def __init__(self, runs: Runs, gpus: Gpus | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._runs = runs
        self._clock = clock
        self._gpus = Aside((gpus or Gpus(clock)).sample, wait=GPU_SECONDS, clock=clock)
        self._host = HostWatch(clock)
        self._live = LiveRuns(runs, clock)
        self._watches: dict[str, RunWatch] = {}
        self._lock = threading.Lock()

    def sample(self, run_id: str | None = None, paths: Iterable[str] = ()) -> dict[str, Any]:
        """A `Sample` as JSON has it, with processes and dumps of that run, and the disks that `paths` are on.

        Raises UsageError where there is no such run.
        """
        with self._lock:
            watch = self._watch(run_id) if run_id else None
            processes = watch.processes.look() if watch else None
            sample = Sample(
                at=time.time(),
                host=self._host.look([*(watch.disks if watch else []), str(self._runs.state), *paths]),
                gpus=self._gpu_sample(processes),
                processes=processes,
                dumps=watch.dumps.look() if watch and watch.dumps else None,
                runs=self._live.look(),
            )
            return dict(msgspec.to_builtins(sample))

    def gpus(self, ours: Collection[int]) -> list[Gpu]:
        """The GPUs now, as far as they can be read; `ours` are the processes of the run that is asked about."""
        with self._lock:
            sample = self._gpus.ask(set(ours))
            return sample.gpus if sample else []

    def _watch(self, run_id: str) -> RunWatch:
        if run_id not in self._watches:
            self._watches[run_id] = RunWatch(self._runs.get(run_id), self._clock)
        return self._watches[run_id]

    def _gpu_sample(self, processes: list[ProcessSample] | None) -> GpuSample:
        ours = None if processes is None else {process.pid for process in processes}
        sample = self._gpus.ask(ours)
        return sample or GpuSample("error", f"NVML has not answered for {self._gpus.silent():.0f} s")


class Aside(Generic[T]):
    """Asks what may hang, in a thread of its own and one question at a time; while one hangs, no other is asked."""

    def __init__(
        self,
        question: Callable[..., T],
        *,
        wait: float,
        every: float = 0.0,
        patience: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._question = question
        self._wait, self._every, self._patience = wait, every, patience
        self._clock = clock
        self._asked = -math.inf
        self._answered = threading.Event()
        self._answered.set()
        self._answer: T | None = None
        self._error: Exception | None = None

    def ask(self, *arguments: Any) -> T | None:
        """The answer to a new question, or to the last one where that was asked less than `every` seconds ago.

        Waits at most `wait` seconds, and not at all for a question that hung before. What was last known is good for
        `patience` seconds then, after that it is None. Raises what the question raised.
        """
        now = self._clock()
        if self._answered.is_set() and now - self._asked >= self._every:
            self._asked = now
            self._answered.clear()
            threading.Thread(target=self._put, args=arguments, daemon=True).start()
            self._answered.wait(self._wait)
        if self._answered.is_set() and self._error:
            raise self._error
        return self._answer if self._answered.is_set() or self.silent() < self._patience else None

    def silent(self) -> float:
        """Seconds since the last question was put."""
        return self._clock() - self._asked

    def _put(self, *arguments: Any) -> None:
        try:
            self._answer, self._error = self._question(*arguments), None
        except Exception as error:
            self._error = error
        finally:
            self._answered.set()


class HostWatch:
    """Follows CPU, memory and disks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._cpu = Rate()
        self._disks: dict[str, Aside[Disk]] = {}

    def look(self, paths: Iterable[str]) -> HostSample:
        """The host now, with the disks that `paths` are on."""
        memory = _memory()
        busy, total = _cpu_ticks()
        cpu = self._cpu.of(busy, total, shortest=SHORTEST_TICKS)
        return HostSample(
            cpu_percent=None if cpu is None else round(100 * cpu, 1),
            cores=os.cpu_count(),
            load=[round(load, 2) for load in os.getloadavg()],
            memory_total_bytes=memory["MemTotal"],
            memory_available_bytes=memory["MemAvailable"],
            swap_used_bytes=memory["SwapTotal"] - memory["SwapFree"],
            disks=[self._disk(path) for path in dict.fromkeys(paths)],
        )

    def _disk(self, path: str) -> Disk:
        if path not in self._disks:
            self._disks[path] = Aside(
                read_disk, wait=DISK_WAIT, every=DISK_EVERY, patience=DISK_PATIENCE, clock=self._clock
            )
        return self._disks[path].ask(path) or Disk(path)


class LiveRuns:
    """The runs that live, looked for now and then."""

    def __init__(self, runs: Runs, clock: Callable[[], float] = time.monotonic) -> None:
        self._runs = runs
        self._clock = clock
        self._looked = -math.inf
        self._live: list[RunState] = []

    def look(self) -> list[RunState]:
        """Live runs by id, as they were at most `RUNS_EVERY` seconds ago."""
        now = self._clock()
        if now - self._looked >= RUNS_EVERY:
            self._looked = now
            found = [RunState(run.id, run.spec.kind, state) for run, state in self._runs.live_states()]
            self._live = sorted(found, key=lambda one: one.id)
        return self._live


class RunWatch:
    """Follows one run: its processes and, of a server, its dumps."""

    def __init__(self, run: Run, clock: Callable[[], float] = time.monotonic) -> None:
        folder = run.spec.dump_dir
        self.processes = RunProcesses(run, clock)
        self.dumps = DumpWatch(Path(folder), clock) if folder else None
        self.disks = [str(Path(folder).parent)] if folder else []


class Pace(NamedTuple):
    """Where a dump folder stands at one moment; `at` in seconds, the rest counts requests and bytes."""

    at: float
    requests: int
    bytes: int
    free: int


class DumpWatch:
    """Follows a dump folder: reads only what is new in dumps.jsonl, and keeps counters instead of lines."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._journals: dict[Path, Journal] = {}
        self._states = {"done": Settled(), "failed": Settled()}
        self._paces: deque[Pace] = deque()
        self._broken: str | None = None

    def look(self) -> DumpSample | None:
        """The folder now; None while there is none."""
        try:
            links, disk = os.stat(self._folder).st_nlink, os.statvfs(self._folder)
        except OSError:
            return None
        self._count()
        tap, tap_error = self._tap()
        free = disk.f_bavail * disk.f_frsize
        first, last = self._pace(free)
        return DumpSample(
            states=self._states,
            requests_per_second=_per_second(first, last, last.requests - first.requests),
            bytes_per_second=_per_second(first, last, last.bytes - first.bytes),
            on_disk=links - 2 if links >= 2 else None,  # a folder's folders link to it, except on a few file systems
            free_bytes=free,
            total_bytes=disk.f_blocks * disk.f_frsize,
            seconds_to_full=seconds_to_full(first, last, tap.reserve if tap else 0),
            seen=tap.seen if tap else None,
            reserve=tap.reserve if tap else None,
            slots=tap.slots if tap else None,
            slots_free=tap.slots_free if tap else None,
            slot_wait_seconds=tap.slot_wait_seconds if tap else None,
            writer_pids=tap.writer_pids if tap else None,
            writers_lost=tap.writers_lost if tap else None,
            error=self._broken or tap_error,
        )

    def _count(self) -> None:
        try:
            for folder in tap_folders(self._folder):
                for line in self._journals.setdefault(folder, Journal(folder)).read():
                    settled = self._states.setdefault(line.state, Settled())
                    settled.requests += 1
                    settled.bytes += line.bytes
        except DumpError as error:
            self._broken = str(error)

    def _tap(self) -> tuple[TapState | None, str | None]:
        try:
            return read_tap(self._folder), None
        except DumpError as error:
            return None, str(error)

    def _pace(self, free: int) -> tuple[Pace, Pace]:
        """Where the folder stood at the start of the window, and where it stands now."""
        done = self._states["done"]
        self._paces.append(Pace(self._clock(), done.requests, done.bytes, free))
        while len(self._paces) > 2 and self._paces[1].at <= self._paces[-1].at - WINDOW:
            self._paces.popleft()
        return self._paces[0], self._paces[-1]


def _per_second(first: Pace, last: Pace, growth: int) -> float | None:
    return round(growth / (last.at - first.at), 3) if last.at > first.at else None


def seconds_to_full(first: Pace, last: Pace, reserve: int) -> float | None:
    """When only `reserve` bytes will be free, if it goes on like this; None if it does not fill, or hardly."""
    if last.free <= reserve:
        return 0.0
    fallen = first.free - last.free
    if fallen <= 0:
        return None
    seconds = (last.free - reserve) * (last.at - first.at) / fallen
    return round(seconds, 1) if seconds < NEVER_FULL else None


def read_disk(path: str) -> Disk:
    """The disk of `path`, or of the nearest folder above it that is there."""
    place = Path(path)
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    try:
        found = os.statvfs(place)
    except OSError:
        return Disk(path)
    return Disk(path, found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize, filesystem(place))


def filesystem(path: Path) -> str | None:
    """The type of the file system that `path` is on, such as tmpfs, ext4 or nfs4."""
    real = Path(os.path.realpath(path))
    best, kind = -1, None
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            mount = Path(_unescaped(before.split()[4]))
            # Of two at the same place, the later one hides the other.
            if len(mount.parts) >= best and real.is_relative_to(mount):
                best, kind = len(mount.parts), after.split()[0]
    return kind


def _unescaped(path: str) -> str:
    r"""A path as mountinfo writes it: `\040` for a space, and so on."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def _cpu_ticks() -> tuple[int, int]:
    """Clock ticks that all cores together were busy since boot, and all of them."""
    with open("/proc/stat", "rb") as file:
        user, nice, system, idle, iowait, irq, softirq, steal = map(int, file.readline().split()[1:9])
    busy = user + nice + system + irq + softirq + steal
    return busy, busy + idle + iowait


def _memory() -> dict[str, int]:
    """/proc/meminfo in bytes."""
    with open("/proc/meminfo", "rb") as file:
        lines = [line.split() for line in file]
    return {line[0].rstrip(b":").decode(): int(line[1]) * 1024 for line in lines if line[2:] == [b"kB"]}
