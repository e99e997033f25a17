"""Where processes stand: real ranks read by py-spy, and what is said where it is missing, refused or not done in time."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from helpers import ROOT, SLEEP, suspend, until

from backends.agent import Agent
from backends.errors import NotReady, UsageError
from backends.ports import free_port
from backends.runs import Run
from backends.verdict import stacks
from backends.verdict.stacks import Frame, Stack, Thread, make_report, summarise

PY_SPY = ROOT / ".venv-engine" / "bin" / "py-spy"

RANK = """
import time
def recv_requests():
    while True: time.sleep(1000)
def all_reduce():
    while True: pass
print("there", flush=True)
{function}()
"""
# Starts processes that are titled as SGLang titles its own, and a detokenizer.
TREE = """
import subprocess, sys, time
code = {code!r}
for name, function in {ranks!r}.items():
    subprocess.Popen(["sglang::" + name, "-c", code.replace("{{function}}", function)], executable=sys.executable)
def uvicorn_main():
    time.sleep(1000)
print("there", flush=True)
uvicorn_main()
"""

Tree = Callable[[dict[str, str]], Run]


@pytest.fixture
def py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    if not PY_SPY.exists():
        pytest.skip(f"no py-spy: {PY_SPY} is missing")
    monkeypatch.setenv("PATH", f"{PY_SPY.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(stacks.sys, "executable", str(PY_SPY.with_name("python")))


@pytest.fixture
def tree(start: Callable[..., Run]) -> Tree:
    """A server of titled processes, each standing in the function that is said."""

    def made(ranks: dict[str, str]) -> Run:
        run = start("server", [sys.executable, "-c", TREE.format(code=RANK, ranks=ranks)], port=free_port())
        until(lambda: run.log.read_text().count("there") == len(ranks) + 1)
        return run

    return made


def titled(run: Run) -> dict[str, psutil.Process]:
    """The run's processes that are titled as SGLang's, by name."""
    named = {"".join(process.cmdline()[:1]): process for process in run.processes()}
    return {name.removeprefix("sglang::"): process for name, process in named.items() if name.startswith("sglang::")}


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A py-spy that does what a shell script says."""

    def made(script: str) -> None:
        path = tmp_path / "bin" / "py-spy"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(stacks, "find_py_spy", lambda: str(path))

    return made


def stack(name: str, *functions: str, state: str = "sleeping", error: str | None = None) -> Stack:
    frames = [Frame(function, "x.py", "/x.py", 7) for function in functions]
    threads = [Thread(1, "helper", frames=[Frame("run", "t.py")]), Thread(100, "MainThread", True, True, frames)]
    return Stack(name, 100, state, threads if functions else [], error)


# --- Summaries ---


def test_which_rank_differs() -> None:
    ranks = [stack(f"scheduler_TP{rank}", "all_reduce", "forward") for rank in (0, 1, 3)]
    odd = stack("scheduler_TP2", "open", "load_model")
    assert summarise([*ranks, odd, stack("detokenizer", "recv")]) == [
        "scheduler_TP0, scheduler_TP1, scheduler_TP3 stand in all_reduce (x.py): in a collective, where it waits for "
        "ranks that have not come",
        "scheduler_TP2 stands in open (x.py): weights are being read from disk",
        "detokenizer stands in recv (x.py)",
        "scheduler_TP2 differs from the other 3 ranks: look at it first",
    ]


def test_ranks_that_stand_together() -> None:
    said = summarise([stack("scheduler_TP0", "nap"), stack("scheduler_TP1", "nap")])
    assert said == ["scheduler_TP0, scheduler_TP1 stand in nap (x.py)", "all 2 ranks stand in the same function"]


def test_two_ranks_that_differ_are_not_judged() -> None:
    said = summarise([stack("scheduler_TP0", "nap"), stack("scheduler_TP1", "doze")])
    assert said[-1] == "the ranks stand in 2 different functions"


def test_of_two_ranks_the_one_that_does_not_wait_is_named() -> None:
    said = summarise([stack("scheduler_TP0", "broadcast", "broadcast_pyobj"), stack("scheduler_TP1", "sleep_in_load")])
    assert said[-1] == "the other ranks wait for scheduler_TP1: look there first"


def test_what_was_not_read_is_said() -> None:
    said = summarise([stack("scheduler", state="stopped", error="py-spy failed: odd")])
    assert said == ["scheduler is stopped by a signal (state T)", "scheduler was not read: py-spy failed: odd"]


# --- For real ---


def test_real_ranks(py_spy: None, tree: Tree) -> None:
    run = tree(
        {
            "scheduler_TP0": "recv_requests",
            "scheduler_TP1": "recv_requests",
            "scheduler_TP2": "all_reduce",
            "detokenizer": "recv_requests",
        }
    )
    suspend(titled(run)["scheduler_TP1"].pid)
    report = make_report(run)
    assert report.summary[0].startswith("scheduler_TP0, scheduler_TP1, detokenizer stand in recv_requests (<string>)")
    assert "scheduler_TP2 differs from the other 2 ranks: look at it first" in report.summary
    assert "scheduler_TP1 is stopped by a signal (state T)" in report.summary
    kept = Path(report.path)
    assert kept.parent == run.folder
    text = kept.read_text()
    assert "uvicorn_main (<string>:" in text
    assert "  scheduler_TP2 differs from the other 2 ranks" in text
    assert stacks.newest_report(run) == kept
    assert titled(run)["scheduler_TP1"].status() == psutil.STATUS_STOPPED
    assert titled(run)["scheduler_TP2"].is_running()


def test_a_suspected_hang_is_reported_once_a_phase_by_itself(
    py_spy: None, tree: Tree, home: Path, payload_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAYERTAP_PATIENCE", "0.1")
    run = tree({"scheduler": "recv_requests"})
    agent = Agent(payload_folder)
    assert agent.status(run.id)["stacks"] is None
    suspend(titled(run)["scheduler"].pid)
    now = until(lambda: (now := agent.status(run.id))["stacks"] and now)
    assert now["verdict"]["findings"][0] == "rank-stopped"
    assert "scheduler is stopped by a signal (state T)" in Path(now["stacks"]).read_text()
    for _ in range(10):
        agent.status(run.id)
    assert [Path(now["stacks"])] == list(run.folder.glob("stacks-*.txt"))
    made = Path(now["stacks"]).stat().st_mtime_ns
    with run.log.open("a") as log:
        log.write("[2026-11-29 12:00:00] Load weight begin. avail mem=1.00 GB\n")
    until(lambda: Path(agent.status(run.id)["stacks"]).stat().st_mtime_ns != made)


# --- What hinders ---


def test_no_py_spy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(stacks.sys, "executable", str(tmp_path / "python"))
    with pytest.raises(NotReady, match=r"has no py-spy beside it; install it there \(pip install py-spy\)"):
        stacks.find_py_spy()


def test_a_missing_permission_says_what_to_do(
    tree: Tree, tool: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tool("echo 'Permission Denied: Try running again with elevated permissions' >&2; exit 1")
    monkeypatch.setattr(stacks, "PTRACE_SCOPE", tmp_path / "scope")
    (tmp_path / "scope").write_text("1\n")
    report = make_report(tree({"scheduler": "recv_requests"}))
    assert (
        "scheduler was not read: py-spy may not read it (kernel.yama.ptrace_scope is 1); give the container --cap-add "
        "SYS_PTRACE, or as root run sysctl kernel.yama.ptrace_scope=0 on the host"
    ) in report.summary


def test_a_py_spy_that_hangs_is_not_waited_for(
    tree: Tree, tool: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "SECONDS", 0.4)
    tool("sleep 600")
    report = make_report(tree({"scheduler": "recv_requests"}))
    assert any(line.startswith("scheduler was not read: py-spy was not done in time") for line in report.summary)


def test_a_py_spy_that_fails_or_talks_nonsense(tree: Tree, tool: Callable[[str], None]) -> None:
    run = tree({"scheduler": "recv_requests"})
    tool("echo 'Error: Failed to find python version' >&2; echo 'Stack backtrace:' >&2; exit 1")
    assert "scheduler was not read: py-spy failed: Error: Failed to find python version" in make_report(run).summary
    tool("echo nonsense")
    assert "scheduler was not read: py-spy failed: exit code 0" in make_report(run).summary


def test_what_has_no_stacks(tool: Callable[[str], None], start: Callable[..., Run]) -> None:
    tool("exit 1")
    with pytest.raises(UsageError, match="is no server"):
        make_report(start("verify", SLEEP))
    ended = start("server", ["/bin/true"], port=free_port())
    until(lambda: not ended.alive())
    with pytest.raises(NotReady, match="has no process whose stack could be read"):
        make_report(ended)
