"""The faults, and the truth about each: what a person who knew the cause would say and do."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from console.session import Session
from tests.diagnosis_table.trial import Case, listened_on, sent

MEMORY_CGROUPS = Path("/sys/fs/cgroup/memory")  # version 1; of version 2 a plain user's part is nowhere in particular
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
SMALL_TMPFS = "4m"  # less than one slot of the arena


def in_shards(work: Path, session: Session) -> str:
    """A tiny Llama in two shards."""
    folder = work / "model"
    path = os.pathsep.join(str(Path(session.hello["payload_folder"]) / part) for part in ("host", "engine"))
    command = [session.hello["python"], "-P", "-m", "backends.embedded.models", "llama", str(folder)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True, capture_output=True)
    whole = folder / "model.safetensors"
    data = whole.read_bytes()
    (head,) = struct.unpack("<Q", data[:8])
    tensors = {name: entry for name, entry in json.loads(data[8 : 8 + head]).items() if name != "__metadata__"}
    names = sorted(tensors, key=lambda name: tensors[name]["data_offsets"])
    shards = {SHARDS[0]: names[: len(names) // 2], SHARDS[1]: names[len(names) // 2 :]}
    for shard, held in shards.items():
        begin, end = tensors[held[0]]["data_offsets"][0], tensors[held[-1]]["data_offsets"][1]
        moved = {
            name: tensors[name] | {"data_offsets": [at - begin for at in tensors[name]["data_offsets"]]}
            for name in held
        }
        header = json.dumps(moved).encode()
        (folder / shard).write_bytes(struct.pack("<Q", len(header)) + header + data[8 + head + begin : 8 + head + end])
    index = {"metadata": {}, "weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    whole.unlink()
    return str(folder)


@contextlib.contextmanager
def shard_removed(now: dict[str, Any]) -> Iterator[None]:
    """Take a shard away once the launch has seen that all are there."""
    (Path(now["details"]["model"]) / SHARDS[1]).unlink()
    yield


@contextlib.contextmanager
def small_tmpfs(_: Path, session: Session) -> Iterator[None]:
    """A dump folder's root with hardly any room."""
    with tempfile.TemporaryDirectory(prefix="layertap-trial-") as folder:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SMALL_TMPFS},mode=700", "tmpfs", folder], check=True)
        try:
            session.dump_root = folder
            yield
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


def no_mounts() -> str | None:
    return None if os.geteuid() == 0 else "only root may mount a small tmpfs"


@contextlib.contextmanager
def cgroups_removed(_: Path, __: Session) -> Iterator[None]:
    yield
    for group in MEMORY_CGROUPS.glob("layertap-fault-*"):
        group.rmdir()


def no_cgroups() -> str | None:
    return None if os.access(MEMORY_CGROUPS, os.W_OK) else f"{MEMORY_CGROUPS} cannot be written"


SLOW = {"expected": "slow_but_fine", "never": ("hang_suspected", "crashed", "stopped"), "then": "healthy"}

CASES = [
    Case(
        id="port-taken",
        cause="the port is taken while the server starts: told before it fails",
        act=listened_on,
        expected="starting",
        remedy="port-foreign",
    ),
    Case(
        id="port-never-got",
        cause="the same to its end, where the log of SGLang says ready",
        act=listened_on,
        expected="crashed",
        remedy="http-port-in-use",
    ),
    Case(
        id="missing-shard",
        cause="a shard of the model is not there",
        model=in_shards,
        act=shard_removed,
        expected="crashed",
        remedy="bad-checkpoint",
        short=True,
    ),
    Case(
        id="first-patch",
        cause="a plugin switches SGLang's capture on, and the warm-up's forward is not unpacked",
        fault="capture",
        expected="crashed",
        remedy="aux-capture",
    ),
    Case(
        id="detokenizer-killed",
        cause="kill -9 of the detokenizer",
        act=partial(sent, "sglang::detokenizer", signal.SIGKILL),
        when="ready",
        expected="crashed",
        remedy="host-oom-kill",
        short=True,
    ),
    Case(
        id="first-patch-wedged",
        cause="the same on one rank of two, whose error is never printed",
        fault="capture-and-wedge",
        ranks=2,
        budget="warm_up",
        expected="hang_suspected",
        remedy="ranks-apart",
        stacks="the other ranks wait for scheduler_TP0: look there first",
    ),
    Case(
        id="sleep-in-load",
        cause="a plugin sleeps while the weights are loaded",
        fault="sleep",
        budget="weights",
        expected="hang_suspected",
        remedy="weights-stall",
        stacks="sleep (layertap_faults.py:",
    ),
    Case(
        id="collective-deadlock",
        cause="rank 1 of two waits in a collective that rank 0 never joins",
        fault="deadlock",
        ranks=2,
        budget="weights",
        expected="hang_suspected",
        remedy="ranks-apart",
        stacks="scheduler_TP1 stands in all_reduce",
    ),
    Case(
        id="spin",
        cause="a plugin spins while the weights are loaded",
        fault="spin",
        budget="weights",
        expected="hang_suspected",
        remedy="start-spins",
        stacks="spin (layertap_faults.py:",
    ),
    Case(
        id="scheduler-stopped",
        cause="SIGSTOP of rank 1 of two, while idle",
        act=partial(sent, "sglang::scheduler_TP1", signal.SIGSTOP),
        when="ready",
        ranks=2,
        expected="hang_suspected",
        remedy="rank-stopped",
        stacks="scheduler_TP1 is stopped by a signal",
    ),
    Case(
        id="memory-limit",
        cause="the weights exceed the memory that the process may have (RLIMIT)",
        fault="exceed-limit",
        expected="crashed",
        remedy="host-memory",
    ),
    Case(
        id="oom-kill",
        cause="the weights exceed the container's memory, and the kernel ends the scheduler",
        fault="exceed-cgroup",
        env={"LAYERTAP_FAULT_CGROUP": str(MEMORY_CGROUPS)},
        around=cgroups_removed,
        needs=no_cgroups,
        expected="crashed",
        remedy="host-oom-kill",
    ),
    Case(
        id="dump-folder-full",
        cause="the dump folder has no room for the arena",
        around=small_tmpfs,
        needs=no_mounts,
        expected="crashed",
        remedy="tap-failed",
    ),
    Case(
        id="compiling",
        cause="kernels are compiled for a minute, and nothing is logged",
        fault="compile",
        remedy="jit-compile",
        **SLOW,
    ),
    Case(
        id="slow-disk",
        cause="the weights come slowly, and nothing is logged",
        fault="read-slowly",
        remedy="weights-slow-io",
        **SLOW,
    ),
]
