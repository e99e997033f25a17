"""Where the processes of a server stand: `py-spy dump` of each, summarised. The processes are read, never ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from backends.errors import NotReady, UsageError
from backends.processes import RunProcesses
from backends.runs import Run
from backends.verdict.catalogue import Signature, catalogue
from backends.verdict.observation import TITLED

SECONDS = 10.0  # for each process; a healthy one takes a tenth of a second
AT_ONCE = 16
FRAMES_SHOWN = 60
WAITING = frozenset(
    {"benign-idle-loop", "benign-in-collective", "rank-skew-load", "nccl-init-stall"}
)  # for other ranks
PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
REFUSED = ("permission denied", "operation not permitted", "eperm")


class Frame(msgspec.Struct):
    """A function on a stack."""

    name: str
    short_filename: str | None = None
    filename: str | None = None
    line: int = 0

    def words(self) -> str:
        """The function with its place."""
        return f"{self.name} ({self.short_filename or self.filename or '?'}:{self.line})"


class Thread(msgspec.Struct):
    """A thread; `frames` from the innermost one outwards."""

    os_thread_id: int | None = None
    thread_name: str | None = None
    active: bool = False
    owns_gil: bool = False
    frames: list[Frame] = []


class Stack(msgspec.Struct):
    """A process of the server and its threads, or the sentence `error` that says why they could not be read."""

    name: str
    pid: int
    state: str
    threads: list[Thread] = []
    error: str | None = None

    @property
    def main(self) -> list[Frame]:
        """The main thread's frames, the innermost first."""
        for thread in self.threads:
            if thread.os_thread_id == self.pid or thread.thread_name == "MainThread":
                return thread.frames
        return self.threads[0].frames if self.threads else []


class HangReport(msgspec.Struct, kw_only=True):
    """Where a server's processes stood at `at` (epoch seconds); all of it is in the file `path`."""

    schema: int = 1
    run: str
    at: float
    path: str
    summary: list[str]
    apart: bool
    stacks: list[Stack]


def make_report(run: Run) -> HangReport:
    """Read the stacks of a live server's processes, and keep them in the run's folder.

    Takes a little more than `SECONDS` at worst. Raises UsageError for a run that is no server, NotReady where there is
    no py-spy or no process.
    """
    if run.spec.kind != "server":
        raise UsageError(f"{run.id} is no server")
    tool = find_py_spy()
    running = run.running
    launcher = running.child.pid if running and run.alive() else None
    found = [
        Stack("launcher" if process.pid == launcher else process.title.removeprefix(TITLED), process.pid, process.state)
        for process in RunProcesses(run).look()
        if process.title.startswith(TITLED) or process.pid == launcher
    ]
    if not found:
        raise NotReady(f"{run.id} has no process whose stack could be read; it does not run here")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        stacks = list(pool.map(lambda stack: _read(tool, stack), found))
    at = time.time()
    path = run.folder / f"stacks-{time.strftime('%Y%m%d-%H%M%S', time.localtime(at))}.txt"
    report = HangReport(
        run=run.id, at=at, path=str(path), summary=summarise(stacks), apart=apart(stacks), stacks=stacks
    )
    part = path.with_suffix(".part")
    part.write_text("".join(f"{line}\n" for line in _lines(report)), encoding="utf-8")
    part.replace(path)
    return report


def newest_report(run: Run) -> Path | None:
    """The newest report of a run, None where none was made."""
    return max(run.folder.glob("stacks-*.txt"), default=None)


def find_py_spy() -> str:
    """The py-spy of this Python, SGLang's own. Raises NotReady where there is none."""
    beside = Path(sys.executable).with_name("py-spy")
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")
    if found is None:
        raise NotReady(f"{sys.executable} has no py-spy beside it; install it there (pip install py-spy) and ask again")
    return found


def _read(tool: str, stack: Stack) -> Stack:
    """Fill in the threads of a process, or why not."""
    # A stopped process cannot be stopped once more to be read, and stands still anyway.
    ways: list[list[str]] = [["--nonblocking"]] if stack.state == "stopped" else [[], ["--nonblocking"]]
    for way in ways:
        code, told, errors = _run([tool, "dump", "--json", "--pid", str(stack.pid), *way])
        if code == 0:
            with contextlib.suppress(msgspec.MsgspecError):
                stack.threads = msgspec.json.decode(told, type=list[Thread])
                stack.error = None
                return stack
        stack.error = _why(code, errors)
        if any(word in errors.lower() for word in REFUSED):
            break
    return stack


def _run(argv: list[str]) -> tuple[int | None, bytes, str]:
    """Run a program; code None where it took too long. One that hangs in the kernel is left behind, not waited for."""
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        told, errors = process.communicate(timeout=SECONDS / 2)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        return None, b"", ""
    return process.returncode, told, errors.decode(errors="replace")


def _why(code: int | None, errors: str) -> str:
    """Why a stack could not be read, and what to do, in a sentence."""
    if code is None:
        return "py-spy was not done in time; the process may hang in the kernel (state D): see dmesg on the host"
    if any(word in errors.lower() for word in REFUSED):
        scope = _ptrace_scope()
        now = "" if scope is None else f" (kernel.yama.ptrace_scope is {scope})"
        return (
            f"py-spy may not read it{now}; give the container --cap-add SYS_PTRACE, or as root run "
            "sysctl kernel.yama.ptrace_scope=0 on the host"
        )
    said = [line.strip() for line in errors.partition("Stack backtrace")[0].splitlines() if line.strip()]
    return f"py-spy failed: {' '.join(said)[:200] or f'exit code {code}'}"


def _ptrace_scope() -> str | None:
    try:
        return PTRACE_SCOPE.read_text().strip()
    except OSError:
        return None


# --- In words ---


def summarise(stacks: list[Stack]) -> list[str]:
    """Which processes stand in the same function, which one differs, and what that may mean."""
    groups: dict[str, list[Stack]] = defaultdict(list)
    for stack in stacks:
        if stack.main:
            groups[_place(stack)].append(stack)
    ranks = [stack for stack in stacks if stack.main and stack.name.startswith("scheduler")]
    said = []
    for place, group in sorted(groups.items(), key=lambda item: -len(item[1])):
        names = ", ".join(stack.name for stack in group)
        stand = "stands" if len(group) == 1 else "stand"
        said.append(f"{names} {stand} in {place}{_meaning(group[0])}")
    said += _difference(ranks)
    said += [f"{stack.name} is stopped by a signal (state T)" for stack in stacks if stack.state == "stopped"]
    said += [f"{stack.name} was not read: {stack.error}" for stack in stacks if stack.error]
    return said


def apart(stacks: list[Stack]) -> bool:
    """Whether the ranks stand in different places, and not just in different lines of the loop in which they idle."""
    ranks = [stack for stack in stacks if stack.main and stack.name.startswith("scheduler")]
    return len({_place(rank) for rank in ranks}) > 1 and not all(_idles(rank) for rank in ranks)


def _idles(stack: Stack) -> bool:
    found = catalogue().of_stack([frame.name for frame in stack.main])
    return found is not None and found.id == "benign-idle-loop"


def _difference(ranks: list[Stack]) -> list[str]:
    """The rank that stands elsewhere than all the others, or does not wait for them."""
    places = [_place(rank) for rank in ranks]
    if len(ranks) > 1 and len(set(places)) == 1:
        return [f"all {len(ranks)} ranks stand in the same function"]
    alone = [rank.name for rank, place in zip(ranks, places, strict=True) if places.count(place) == 1]
    if len(ranks) > 2 and len(set(places)) == 2 and len(alone) == 1:
        return [f"{alone[0]} differs from the other {len(ranks) - 1} ranks: look at it first"]
    busy = [rank.name for rank in ranks if not _waits(rank)]
    if busy and len(busy) < len(ranks):
        return [f"the other ranks wait for {', '.join(busy)}: look there first"]
    return [f"the ranks stand in {len(set(places))} different functions"] if len(ranks) > 1 else []


def _waits(stack: Stack) -> bool:
    found = catalogue().of_stack([frame.name for frame in stack.main])
    return found is not None and found.id in WAITING


def _place(stack: Stack) -> str:
    """The innermost function, without its line: ranks in one loop are seldom in the same line of it."""
    frame = stack.main[0]
    return f"{frame.name} ({frame.short_filename or frame.filename or '?'})"


def _meaning(stack: Stack) -> str:
    found: Signature | None = catalogue().of_stack([frame.name for frame in stack.main])
    return f": {found.cause}" if found else ""


def _lines(report: HangReport) -> list[str]:
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(report.at))
    lines = [f"stacks of {report.run} at {moment}", *(f"  {line}" for line in report.summary)]
    for stack in report.stacks:
        lines += ["", f"{stack.name}  pid {stack.pid}  {stack.state}"]
        lines += [f"  {stack.error}"] if stack.error else []
        for thread in stack.threads:
            lines.append(f"  thread {_thread_words(thread)}")
            lines += [f"    {frame.words()}" for frame in thread.frames[:FRAMES_SHOWN]]
    return lines


def _thread_words(thread: Thread) -> str:
    flags = [word for word, true in (("active", thread.active), ("holds the GIL", thread.owns_gil)) if true]
    name = thread.thread_name or "?"
    return " ".join([f"{thread.os_thread_id or ''} {name}".strip(), *(f"[{flag}]" for flag in flags)])
