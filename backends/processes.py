"""The processes of a run, read so cheaply that they can be looked at many times a second.

Everything here comes from files of /proc that the kernel writes without asking the process. Only the title is its own
memory, which a process that hangs in a driver may hold locked: it is read once for every name that it takes.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import psutil

from backends.runs import Run

REFRESH_SECONDS = 2.0  # between two searches for new processes
SLICES = 60  # searches after which every process of the host was looked at again
SHORTEST = 0.1  # seconds over which a rate is taken; the kernel counts CPU time in hundredths
COMPILERS = frozenset(
    {
        "nvcc",
        "cudafe++",
        "cicc",
        "ptxas",
        "fatbinary",
        "nvlink",
        "ninja",
        "c++",
        "g++",
        "cc1plus",
        "clang++",
        "cc1",
        "ld",
    }
)
COMPILE_WORKER = "compile_worker"  # torch.compile's: a Python, told by its command line
STATES = {
    "R": psutil.STATUS_RUNNING,
    "S": psutil.STATUS_SLEEPING,
    "D": psutil.STATUS_DISK_SLEEP,
    "T": psutil.STATUS_STOPPED,
    "t": psutil.STATUS_TRACING_STOP,
    "Z": psutil.STATUS_ZOMBIE,
    "X": psutil.STATUS_DEAD,
    "I": psutil.STATUS_IDLE,
}
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


class ProcessSample(msgspec.Struct):
    """A process of a run. None stands for not known.

    `title` holds no arguments, which may be secrets. `cpu_percent` is of one core, since the look before, and
    `starved_percent` the time that its main thread was ready to run and got no core; `state` psutil's word;
    `read_bytes` what it read since it began, by whichever way counts most: from disks, by read(2), which is all that
    some network file systems count, or by page faults of mapped files, and `write_bytes` what it wrote to files of
    disks. Both are None for another user's process.
    """

    pid: int
    title: str
    cpu_percent: float | None
    state: str
    rss_bytes: int
    read_bytes: int | None
    compiler: bool
    starved_percent: float | None = None
    write_bytes: int | None = None


class Stat(NamedTuple):
    """What /proc/<pid>/stat says; `start` and `cpu` in clock ticks, `faults` those that had to wait for a disk."""

    name: str
    state: str
    start: int
    cpu: int
    rss_bytes: int
    faults: int


class Rate:
    """How fast a counter grows, over the time since the look before."""

    def __init__(self) -> None:
        self._at = math.nan
        self._count = 0.0
        self._rate: float | None = None

    def of(self, count: float, at: float, shortest: float = SHORTEST) -> float | None:
        """Growth of `count` for each unit of `at`; None at the first look. Looks closer than `shortest` are one."""
        if not at - self._at < shortest:
            self._rate = None if math.isnan(self._at) else (count - self._count) / (at - self._at)
            self._at, self._count = at, count
        return self._rate


class RunProcesses:
    """Follows the processes of one run."""

    def __init__(self, run: Run, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._clock = clock
        self._members: dict[int, _Member] = {}
        self._known: set[int] = set()
        self._searched = -math.inf
        self._turns = itertools.cycle(range(SLICES))

    def look(self) -> list[ProcessSample]:
        """The run's processes as they are now, by pid; one that is up to `REFRESH_SECONDS` old may be missing."""
        now = self._clock()
        if now - self._searched >= REFRESH_SECONDS:
            self._searched = now
            self._search()
        seen = {pid: member.look(now) for pid, member in sorted(self._members.items())}
        for pid in [pid for pid, sample in seen.items() if sample is None]:
            del self._members[pid]
            self._known.discard(pid)
        return [sample for sample in seen.values() if sample]

    def _search(self) -> None:
        """Look for processes that came since the last search, and again at some of the others.

        Again, because a number may be another process's by now, and because one may have been seen between fork and
        exec, before it bore the run's mark.
        """
        turn = next(self._turns)
        pids = set(psutil.pids())
        unknown = {pid for pid in pids if pid not in self._known or pid % SLICES == turn}
        for process in self._run.processes(unknown - self._members.keys()):
            try:
                self._members[process.pid] = _Member(process.pid)
            except OSError:
                continue  # it is gone
        self._known = pids


class _Member:
    """A process of the run."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._start = read_stat(pid).start
        self._name = ""
        self._title = ""
        self._compiler = False
        self._cpu = Rate()
        self._starved = Rate()

    def look(self, now: float) -> ProcessSample | None:
        """What it does now; None once it is gone."""
        try:
            stat = read_stat(self._pid)
            if stat.start != self._start:
                return None
            if stat.name != self._name:  # setproctitle and exec change both
                argv = read_argv(self._pid)
                self._name, self._title = stat.name, title(argv, stat.name)
                self._compiler = stat.name in COMPILERS or any(COMPILE_WORKER in word for word in argv)
        except OSError:
            return None
        ticks = self._cpu.of(stat.cpu, now)
        read, written = _read_and_written(self._pid, stat.faults)
        waited = _waited(self._pid)
        starved = None if waited is None else self._starved.of(waited, now)
        return ProcessSample(
            pid=self._pid,
            title=self._title,
            cpu_percent=None if ticks is None else round(100 * ticks / TICKS, 1),
            state=stat.state,
            rss_bytes=stat.rss_bytes,
            read_bytes=read,
            compiler=self._compiler,
            starved_percent=None if starved is None else round(100 * starved, 1),
            write_bytes=written,
        )


def read_stat(pid: int) -> Stat:
    """A process's /proc/<pid>/stat. Raises OSError where there is none."""
    # The name stands in brackets and may hold anything, also brackets and spaces.
    before, _, after = _read(f"/proc/{pid}/stat").rpartition(b")")
    fields = after.split()
    return Stat(
        name=before.partition(b"(")[2].decode(errors="replace"),
        state=STATES.get(fields[0].decode(), fields[0].decode()),
        start=int(fields[19]),
        cpu=int(fields[11]) + int(fields[12]),
        rss_bytes=int(fields[21]) * PAGE,
        faults=int(fields[9]),
    )


def read_argv(pid: int) -> list[str]:
    """A process's command line, empty for a zombie or a kernel thread. Raises OSError where there is no process."""
    return [word.decode(errors="replace") for word in _read(f"/proc/{pid}/cmdline").split(b"\0") if word]


def open_files(pid: int) -> set[str]:
    """What a process has open, as in `/dev/nvidia0`; empty where there is none, or it is not ours to look at."""
    folder = f"/proc/{pid}/fd"
    found = set()
    try:
        for entry in os.listdir(folder):
            with contextlib.suppress(OSError):  # closed since
                found.add(os.readlink(f"{folder}/{entry}"))
    except OSError:
        pass
    return found


def title(argv: list[str], name: str) -> str:
    """What a process is, in a few words and without its arguments, which may be secrets.

    `sglang::scheduler_TP0` as SGLang titles its own, `python -m sglang.launch_server`, or the program's name; `name`
    is the kernel's word for it, used where there is no command line.
    """
    if not argv:
        return name
    if "::" in argv[0]:
        return argv[0].strip()
    program = os.path.basename(argv[0])
    options = list(itertools.takewhile(lambda word: word.startswith("-"), argv[1:]))
    if program.startswith("python") and options[-1:] == ["-m"] and len(argv) > len(options) + 1:
        return f"{program} -m {argv[len(options) + 1]}"
    return program


def _read_and_written(pid: int, faults: int) -> tuple[int | None, int | None]:
    try:
        text = _read(f"/proc/{pid}/io")
    except OSError:
        return None, None
    counts = dict(line.split(b": ") for line in text.splitlines())
    return max(int(counts[b"read_bytes"]), int(counts[b"rchar"]), faults * PAGE), int(counts[b"write_bytes"])


def _waited(pid: int) -> float | None:
    """Seconds that a process's main thread waited for a core; None where the kernel does not count them."""
    try:
        return int(_read(f"/proc/{pid}/schedstat").split()[1]) / 1e9
    except (OSError, IndexError):
        return None


def _read(path: str) -> bytes:
    """All of a small file of /proc, at a third of what `open` costs."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.read(handle, 1 << 16)
    finally:
        os.close(handle)
    return data
