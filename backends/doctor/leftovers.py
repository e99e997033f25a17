"""What earlier runs left: servers that nobody watches, dumps, shared memory, and old payloads."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from backends import payloads
from backends.doctor.report import Asked, Check, Place, Question, amount, judge
from backends.processes import title
from backends.runs import RUN_VARIABLE
from backends.shared_memory import FOLDER, SGLANG
from capture.dumps.dump import DumpError, read_tap

NEVER = float("inf")


def servers(place: Place, asked: Asked) -> Check:
    """SGLang processes of no server that is watched hold GPUs and ports."""
    live = place.runs.live("server")
    watched = {process.pid for run in live for process in run.processes()}
    orphans, foreign = [], []
    for process in sglang_processes():
        if process.pid in watched:
            continue
        run_id = _mark(process)
        if run_id and (place.runs.folder / run_id).is_dir():
            orphans.append(f"process {process.pid} of {run_id}")
        else:
            foreign.append(f"process {process.pid} of {_owner(process)}")
    ours = f"ours: {', '.join(run.id for run in live)}" if live else "none of ours runs"
    seen = [ours]
    if orphans:
        seen.append(f"left by dead runs: {', '.join(orphans[:5])}")
    if foreign:
        seen.append(f"{len(foreign)} SGLang processes that are not ours: {', '.join(foreign[:3])}")
    remedy = "`layertap stop RUN` ends what a run of ours left" if orphans else "see that they use other GPUs and ports"
    return judge(
        "leftovers.servers",
        "; ".join(seen),
        remedy,
        fail=bool(orphans),
        warn=bool(foreign),
        live=len(live),
        orphans=len(orphans),
        foreign=len(foreign),
    )


def dumps(place: Place, asked: Asked) -> Check:
    """Dump folders whose server is gone take memory."""
    root = Path(asked.dump_root or f"/dev/shm/layertap-{os.geteuid()}").expanduser()
    kept = {run.id for run in place.runs.all("server") if run.state() not in ("exited", "died")}
    stray = [
        folder for folder in _entries(root) if folder.is_dir() and folder.name not in kept and not _written(folder)
    ]
    size = sum(_size(folder) for folder in stray)
    return judge(
        "leftovers.dumps",
        f"{root}: {len(stray)} folders whose server is gone, {amount(size)}"
        if stray
        else f"{root}: no folder whose server is gone",
        "the next launch removes those of runs known here; the others may go once their user runs no server",
        warn=bool(stray),
        folders=len(stray),
        bytes=size,
    )


def _written(folder: Path) -> bool:
    """Whether the writer of that folder lives, as of a server that another state folder knows."""
    try:
        tap = read_tap(folder)
    except DumpError:
        return False
    return tap is not None and any(map(psutil.pid_exists, tap.writer_pids))


def shared_memory(place: Place, asked: Asked) -> Check:
    """Segments that a killed SGLang could not remove. One that a live SGLang may use is none."""
    folder = place.path(str(FOLDER))
    started = min((process.create_time() for process in sglang_processes()), default=NEVER)
    stray = [path for path in _entries(folder) if SGLANG.fullmatch(path.name) and _dead(path, started)]
    size = sum(path.stat().st_size for path in stray)
    remedy = f"rm {' '.join(sorted({_pattern(folder, path.name) for path in stray}))}"
    return judge(
        "leftovers.shared_memory",
        f"{folder}: {len(stray)} segments of killed SGLang servers, {amount(size)}"
        if stray
        else f"{folder}: no segment of a killed SGLang server",
        f"once no SGLang runs: {remedy}" if started < NEVER else remedy,
        warn=bool(stray),
        segments=len(stray),
        bytes=size,
    )


def _dead(path: Path, started: float) -> bool:
    """Whether its maker is gone: by the number in its name, else by being older than every SGLang that lives."""
    found = SGLANG.fullmatch(path.name)
    assert found is not None
    if found["pid"]:
        return not psutil.pid_exists(int(found["pid"]))
    return path.stat().st_mtime < started


def _pattern(folder: Path, name: str) -> str:
    return f"{folder}/{name}" if name.startswith("sgl_shm_") else f"{folder}/sglang_loads_*.shm"


def old_payloads(place: Place, asked: Asked) -> Check:
    """Code of earlier consoles goes by itself after a while; what stays could not be removed."""
    folder = place.payload.parent
    count, unused = len(_entries(folder)), payloads.unused(place.payload, place.runs)
    return judge(
        "leftovers.payloads",
        f"{folder}: {len(unused)} of {count} not used for 30 days",
        f"see why they cannot be removed: {', '.join(path.name for path in unused[:3])}",
        warn=bool(unused),
        payloads=count,
        unused=len(unused),
    )


def sglang_processes() -> list[psutil.Process]:
    """Every process of SGLang on this host, ours or not."""
    found = []
    for process in psutil.process_iter():
        try:
            argv = process.cmdline()
            if process.status() != psutil.STATUS_ZOMBIE and _is_sglang(title(argv, "")):
                found.append(process)
        except psutil.Error:
            continue
    return found


def _is_sglang(name: str) -> bool:
    return name.startswith("sglang::") or name.endswith("-m sglang.launch_server")


def _mark(process: psutil.Process) -> str:
    """The run that a process says it belongs to, "" for none."""
    try:
        return str(process.environ().get(RUN_VARIABLE, ""))
    except psutil.Error:
        return ""


def _owner(process: psutil.Process) -> str:
    try:
        return str(process.username())
    except (psutil.Error, KeyError):
        return "?"


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _size(folder: Path) -> int:
    found = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                found += os.lstat(os.path.join(place, name)).st_size
            except OSError:
                continue  # it is gone
    return found


QUESTIONS: dict[str, Question] = {
    "leftovers.servers": servers,
    "leftovers.dumps": dumps,
    "leftovers.shared_memory": shared_memory,
    "leftovers.payloads": old_payloads,
}
