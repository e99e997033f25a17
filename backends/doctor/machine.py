"""The machine around the GPUs: memory, limits, CPU, clock, and whether runs outlive the session."""

from __future__ import annotations

import ctypes
import re
import resource

from backends.doctor.report import CONTROL, Asked, Check, Place, Question, amount, judge, unknown
from backends.survival import danger
from capture.tap.memory import rooms

GB = 10**9
NEEDED_BYTES = 32 * GB  # beside what is pinned: SGLang's processes, the tokenizer, the page cache
NEEDED_EMBEDDED = 4 * GB  # the embedded engine's
SWAPPED_BYTES = 1 * GB  # less was put away long ago, and hurts nobody
HUGEPAGES_BYTES = 1 * GB
OPEN_FILES = 65_535  # SGLang raises its own soft limit that far if the hard one lets it, and else only says so
FEW_FILES = 4_096
ENDLESS = (resource.RLIM_INFINITY, -1)
UNSYNCHRONISED = 5  # what adjtimex says then


def memory(place: Place, asked: Asked) -> Check:
    """Is there room in main memory, and in the container's share of it?"""
    known = _meminfo(place)
    if "MemAvailable" not in known:
        return unknown("host.memory", "/proc/meminfo does not tell what is available")
    needed = NEEDED_BYTES if place.path(CONTROL).exists() else NEEDED_EMBEDDED
    available, limit = known["MemAvailable"], min(rooms(place.text), default=None)
    room = available if limit is None else min(available, limit)
    bound = "" if limit is None or limit >= available else " within the container's limit"
    return judge(
        "host.memory",
        f"{amount(room)} available{bound}, of {amount(known.get('MemTotal', 0))}",
        f"make room, or raise the container's limit: a server with its jobs wants {amount(needed)} beside the model",
        fail=room < needed,
        available_bytes=room,
    )


def swap(place: Place, asked: Asked) -> Check:
    """What was swapped out comes back slowly, in the middle of a run."""
    known = _meminfo(place)
    if "SwapTotal" not in known:
        return unknown("host.swap", "/proc/meminfo does not tell of swap")
    used = known["SwapTotal"] - known.get("SwapFree", 0)
    return judge(
        "host.swap",
        f"{amount(used)} of {amount(known['SwapTotal'])} swap in use",
        "find out what fills the memory, or `swapoff -a` (root)",
        warn=used > SWAPPED_BYTES,
        used_bytes=used,
    )


def huge_pages(place: Place, asked: Asked) -> Check:
    """Memory that is reserved for huge pages, which nothing here uses."""
    known = _meminfo(place)
    if "HugePages_Total" not in known or "Hugepagesize" not in known:
        return unknown("host.huge_pages", "/proc/meminfo does not tell of huge pages")
    reserved = known["HugePages_Total"] * known["Hugepagesize"]
    return judge(
        "host.huge_pages",
        f"{amount(reserved)} reserved for huge pages",
        "`sysctl vm.nr_hugepages=0` (root), unless something else needs them",
        warn=reserved > HUGEPAGES_BYTES,
        reserved_bytes=reserved,
    )


def open_files(place: Place, asked: Asked) -> Check:
    """Can a server of many ranks open what it needs?"""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return judge(
        "host.open_files",
        f"{_limit(soft)} open files, and up to {_limit(hard)} for whoever asks, as SGLang does",
        f"raise the hard limit to {OPEN_FILES:,}: limits.conf, or docker's --ulimit nofile={OPEN_FILES}",
        fail=hard not in ENDLESS and hard < FEW_FILES,
        warn=hard not in ENDLESS and hard < OPEN_FILES,
        soft=soft,
        hard=hard,
    )


def locked_memory(place: Place, asked: Asked) -> Check:
    """NCCL over InfiniBand wants locked memory; CUDA's own pinned memory does not count against the limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limited = soft not in ENDLESS
    return judge(
        "host.locked_memory",
        f"at most {amount(soft)} may be locked" if limited else "locked memory is not limited",
        "docker's --ulimit memlock=-1, or limits.conf; only NCCL over InfiniBand needs it",
        warn=limited,
        soft_bytes=soft,
    )


def governor(place: Place, asked: Asked) -> Check:
    """Do the cores run at their full clock?"""
    paths = place.path("/sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")
    names = sorted({text for path in paths if (text := place.text(str(path.relative_to(place.root))))})
    if not names:
        return unknown("host.governor", "the kernel shows no CPU governor here (a virtual machine, or a container)")
    return judge(
        "host.governor",
        f"CPU governor: {', '.join(names)}",
        "`cpupower frequency-set -g performance` (root)",
        warn=names != ["performance"],
    )


def numa(place: Place, asked: Asked) -> Check:
    """Pages that the kernel moves between sockets stall whoever uses them."""
    nodes = len(list(place.path("/sys/devices/system/node").glob("node[0-9]*")))
    balancing = place.text("/proc/sys/kernel/numa_balancing")
    if not nodes or balancing is None:
        return unknown("host.numa", "the kernel shows no NUMA nodes here")
    return judge(
        "host.numa",
        f"NUMA nodes: {nodes}, automatic balancing {'off' if balancing == '0' else 'on'}",
        "`sysctl kernel.numa_balancing=0` (root)",
        warn=nodes > 1 and balancing != "0",
        nodes=nodes,
    )


def clock(place: Place, asked: Asked) -> Check:
    """Is the clock kept right? How far it is from the console's, the console says."""
    state = _kernel_clock()
    if state < 0:
        return unknown("host.clock_kept", "the kernel does not tell whether its clock is kept right")
    return judge(
        "host.clock_kept",
        "the kernel says that nothing keeps its clock right" if state == UNSYNCHRONISED else "the clock is kept right",
        "run chrony or systemd-timesyncd (root), unless a hypervisor keeps it",
        warn=state == UNSYNCHRONISED,
    )


def survival(place: Place, asked: Asked) -> Check:
    """Do runs outlive the link?"""
    why = danger()
    if why is None:
        return judge("session.survival", "runs outlive the session that starts them, as far as can be told", "")
    seen, _, remedy = why.partition(": ")
    return judge("session.survival", seen, remedy, fail=True)


def _meminfo(place: Place) -> dict[str, int]:
    """/proc/meminfo in bytes, and counts of huge pages."""
    found = re.findall(r"^(\w+):\s+(\d+)( kB)?", place.text("/proc/meminfo") or "", re.MULTILINE)
    return {name: int(number) * (1024 if unit else 1) for name, number, unit in found}


def _limit(value: int) -> str:
    return "any number of" if value in ENDLESS else f"{value:,}"


def _kernel_clock() -> int:
    """What adjtimex says: 5 for a clock that nothing keeps right, -1 where it may not be asked."""
    return int(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512)))


QUESTIONS: dict[str, Question] = {
    "host.memory": memory,
    "host.swap": swap,
    "host.huge_pages": huge_pages,
    "host.open_files": open_files,
    "host.locked_memory": locked_memory,
    "host.governor": governor,
    "host.numa": numa,
    "host.clock_kept": clock,
    "session.survival": survival,
}
