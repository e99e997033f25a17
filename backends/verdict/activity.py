"""What a server's processes and GPUs did over the last seconds: evidence that a silent server works, or does not."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import msgspec

from backends.gpus import Gpu
from backends.processes import ProcessSample

SECONDS = 15.0  # that are looked back
WANTED = 20.0  # percent of the time that a process waits for a core: less is usual
MOST_STARVED = 20.0  # times; what gets even less may as well hang
SHORTEST = 1.0  # over which a rate says something
COMPILER_PERCENT = 5.0  # CPU of a compiler that works; below, it waits like everybody
READS = 1e6  # bytes/s: less is noise
WRITES = 1 << 16  # bytes in the time looked back: a compiled kernel takes more, a metric's page less
GROWTH = 4e6  # bytes/s of memory
BUSY = 95  # percent of a GPU
IDLE = 5
IDLE_POWER = 0.35  # of the limit: a real load draws more
FEW = 5  # looks, of which less than all say nothing


class Activity(msgspec.Struct):
    """What moved in the last `seconds`; None stands for not known.

    `compilers` are the titles of those that used CPU. `cpu_percent` is the mean use of one core by pid, `waiting` the
    processes that stood in disk sleep all the time, `running` those that ran or wanted to, however little of a core a
    busy host gave them, `starved` how many times as long as on an idle host what they do takes, `written_s` how long
    ago a rank wrote files, `stopped_s` how long one has been stopped. `gpus_spin`: every GPU of the server was busy
    throughout the last `gpu_seconds` with the power of an idle one, and its memory did not grow; `gpus_work`: some GPU
    was used, `gpus_draw`: with the power of a real load. `idle_gpu` is the only idle one among busy ones. `busy_power`:
    what the hungriest of those that were busy throughout draws now, and may draw, in watts.
    """

    seconds: float
    compilers: list[str] = []
    read_bytes_per_second: float | None = None
    memory_bytes_per_second: float | None = None
    cpu_percent: dict[int, float] = {}
    waiting: list[int] = []
    running: list[int] = []
    starved: float = 1.0
    written_s: float | None = None
    stopped_s: dict[int, float] = {}
    gpu_seconds: float = 0.0
    gpus_spin: bool = False
    gpus_work: bool = False
    gpus_draw: bool = False
    idle_gpu: int | None = None
    busy_power: tuple[float, float] | None = None

    @property
    def reads_move(self) -> bool:
        """Whether files are read."""
        return (self.read_bytes_per_second or 0.0) >= READS

    @property
    def memory_grows(self) -> bool:
        """Whether the server's processes take up memory."""
        return (self.memory_bytes_per_second or 0.0) >= GROWTH

    def sentences(self) -> list[str]:
        """What is worth telling."""
        said = []
        if self.starved >= 2:
            said.append(f"the host is busy: the server gets 1/{self.starved:.0f} of the CPU that it wants")
        if self.compilers:
            said.append(f"compilers at work: {', '.join(self.compilers)}")
        if self.reads_move:
            said.append(f"{(self.read_bytes_per_second or 0.0) / 1e6:.0f} MB/s read")
        if self.memory_grows:
            said.append(f"memory grows by {(self.memory_bytes_per_second or 0.0) / 1e6:.0f} MB/s")
        power = "{:.0f} of {:.0f} W".format(*self.busy_power) if self.busy_power else "power not known"
        if self.gpus_spin:
            said.append(f"every GPU at 100 % with the power of an idle one ({power})")
        if self.idle_gpu is not None:
            said.append(f"GPU {self.idle_gpu} idle while the others are at 100 % ({power})")
        return said


class _Look(NamedTuple):
    at: float
    processes: dict[int, ProcessSample]
    gpus: list[Gpu]


class ActivityWatch:
    """Remembers what was seen of a server, for as long as a judgement looks back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looks: deque[_Look] = deque()
        self._stopped: dict[int, float] = {}  # since when, by pid
        self._wrote: float | None = None

    def look(
        self,
        processes: Sequence[ProcessSample],
        gpus: Sequence[Gpu],
        ours: Collection[int],
        ranks: Collection[int] = (),
    ) -> Activity:
        """Take in what is seen now. `ours`: the server's own processes, without compilers and other helpers.

        `ranks` are those of them that write no log: the launcher logs each answer to /health.
        """
        now = self._clock()
        self._looks.append(_Look(now, {process.pid: process for process in processes}, list(gpus)))
        while len(self._looks) > 2 and self._looks[1].at <= now - SECONDS:
            self._looks.popleft()
        first, last = self._looks[0], self._looks[-1]
        seconds = last.at - first.at
        activity = Activity(seconds=seconds, compilers=self._compilers())
        both = [pid for pid in ours if pid in first.processes and pid in last.processes]
        if seconds >= SHORTEST and both:
            read = [(first.processes[pid].read_bytes, last.processes[pid].read_bytes) for pid in both]
            grown = sum(last.processes[pid].rss_bytes - first.processes[pid].rss_bytes for pid in both)
            known = [after - before for before, after in read if before is not None and after is not None]
            activity.read_bytes_per_second = sum(known) / seconds if known else None
            activity.memory_bytes_per_second = grown / seconds
        activity.cpu_percent = self._cpu(ours)
        activity.starved = self._times_starved(ours)
        activity.written_s = self._since_written(first, last, ranks)
        activity.waiting = [pid for pid in both if self._always("disk-sleep", pid)]
        if len(self._looks) >= FEW:
            activity.running = [pid for pid in both if self._always("running", pid)]
        stopped = {process.pid for process in processes if process.state == "stopped"}
        self._stopped = {pid: self._stopped.get(pid, now) for pid in stopped}
        activity.stopped_s = {pid: now - since for pid, since in self._stopped.items()}
        self._judge_gpus(activity)
        return activity

    def _compilers(self) -> list[str]:
        """Those that used CPU, or were seen only once, as short ones are."""
        working = {
            process.title
            for look in self._looks
            for process in look.processes.values()
            if process.compiler and (process.cpu_percent is None or process.cpu_percent >= COMPILER_PERCENT)
        }
        return sorted(working)

    def _cpu(self, pids: Collection[int]) -> dict[int, float]:
        found = {}
        for pid in pids:
            seen = [look.processes[pid].cpu_percent for look in self._looks if pid in look.processes]
            known = [percent for percent in seen if percent is not None]
            if known:
                found[pid] = sum(known) / len(known)
        return found

    def _since_written(self, first: _Look, last: _Look, ranks: Collection[int]) -> float | None:
        for pid in ranks:
            if pid in first.processes and pid in last.processes:
                before, after = first.processes[pid].write_bytes, last.processes[pid].write_bytes
                if before is not None and after is not None and after - before >= WRITES:
                    self._wrote = last.at
        return None if self._wrote is None else last.at - self._wrote

    def _times_starved(self, pids: Collection[int]) -> float:
        """Of those that use a core or want one, the one that gets least of it."""
        times = [1.0]
        for pid in pids:
            seen = [look.processes[pid] for look in self._looks if pid in look.processes]
            got = [(one.cpu_percent, one.starved_percent) for one in seen]
            known = [(cpu, starved) for cpu, starved in got if cpu is not None and starved is not None]
            used, wanted = (sum(values) / len(known) for values in zip(*known, strict=True)) if known else (0.0, 0.0)
            if wanted >= WANTED:
                times.append((min(used, 100.0) + wanted) / max(min(used, 100.0), 100.0 / MOST_STARVED))
        return min(max(times), MOST_STARVED)

    def _always(self, state: str, pid: int) -> bool:
        seen = [look.processes.get(pid) for look in self._looks]
        return all(process is not None and process.state == state for process in seen)

    def _judge_gpus(self, activity: Activity) -> None:
        looks = [look for look in self._looks if look.gpus]
        if not looks:
            return
        activity.gpu_seconds = looks[-1].at - looks[0].at
        by_index: dict[int, list[Gpu]] = {}
        for look in looks:
            for gpu in look.gpus:
                by_index.setdefault(gpu.index, []).append(gpu)
        busy = [
            index for index, seen in by_index.items() if all((gpu.utilisation_percent or 0) >= BUSY for gpu in seen)
        ]
        idle = [
            index
            for index, seen in by_index.items()
            if all(gpu.utilisation_percent is not None and gpu.utilisation_percent <= IDLE for gpu in seen)
        ]
        draws = [index for index, seen in by_index.items() if any(_draws_load(gpu) for gpu in seen)]
        grows = any((seen[-1].memory_used_bytes or 0) > (seen[0].memory_used_bytes or 0) for seen in by_index.values())
        activity.gpus_spin = len(busy) == len(by_index) and not draws and not grows
        activity.gpus_draw = any(_draws_load(gpu, unknown=False) for gpu in looks[-1].gpus)
        activity.gpus_work = bool(draws) or any((gpu.utilisation_percent or 0) > IDLE for gpu in looks[-1].gpus)
        if len(by_index) > 1 and len(idle) == 1 and len(busy) == len(by_index) - 1:
            activity.idle_gpu = idle[0]
        known = [
            (gpu.power_watts, gpu.power_limit_watts)
            for gpu in (by_index[index][-1] for index in busy)
            if gpu.power_watts is not None and gpu.power_limit_watts
        ]
        activity.busy_power = max(known, default=None)


def _draws_load(gpu: Gpu, unknown: bool = True) -> bool:
    """Whether a GPU draws more power than one that only spins; `unknown` where nobody knows."""
    if gpu.power_watts is None or not gpu.power_limit_watts:
        return unknown
    return gpu.power_watts > IDLE_POWER * gpu.power_limit_watts
