"""An SGLang plugin that goes wrong on purpose, as `LAYERTAP_FAULT` says; the functions below are its words.

What a fault does begins when `LAYERTAP_FAULT_MARK` appears, a file that it makes.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECONDS = float(os.environ.get("LAYERTAP_FAULT_SECONDS", "60"))  # for which what is slow but fine goes on
FOR_EVER = 24 * 3600.0
LOAD_WEIGHTS = "sglang.srt.model_loader.loader.DefaultModelLoader.load_model"
LOAD_MODEL = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"


def register() -> None:
    """SGLang's entry point."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    fault = os.environ.get("LAYERTAP_FAULT", "")
    if fault in WHILE_LOADING:
        HookRegistry.register(LOAD_WEIGHTS, lambda *_, **__: WHILE_LOADING[fault](), HookType.BEFORE)
    elif fault in WHEN_LOADED:
        HookRegistry.register(LOAD_MODEL, lambda _, runner, *__, **___: WHEN_LOADED[fault](runner), HookType.AFTER)
    else:
        raise ValueError(f"LAYERTAP_FAULT is {fault!r}")


def begun() -> None:
    Path(os.environ["LAYERTAP_FAULT_MARK"]).touch()


def rank() -> int:
    from sglang.srt.distributed.parallel_state import get_tp_group

    return int(get_tp_group().rank_in_group)


def sleep() -> None:
    begun()
    time.sleep(FOR_EVER)


def spin() -> None:
    begun()
    while True:
        pass


def compile_kernels() -> None:
    """A compiler below the scheduler uses CPU, and nothing is logged."""
    begun()
    with tempfile.TemporaryDirectory() as folder:
        compiler = Path(folder) / "cicc"
        compiler.symlink_to(os.path.realpath(sys.executable))
        loop = f"import time; end = time.monotonic() + {SECONDS}\nwhile time.monotonic() < end: pass"
        subprocess.run([compiler, "-S", "-c", loop], check=True)


def read_slowly() -> None:
    """Bytes come from the disk, a few MB a second, and nothing is logged."""
    begun()
    chunk = 1 << 20
    end = time.monotonic() + SECONDS
    with tempfile.NamedTemporaryFile(dir=os.environ["LAYERTAP_FAULT_DISK"]) as file:
        file.write(os.urandom(8 * chunk))
        file.flush()
        os.fsync(file.fileno())
        while time.monotonic() < end:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # else it comes from memory
            for offset in range(0, 8 * chunk, chunk):
                os.pread(file.fileno(), chunk, offset)
                time.sleep(0.2)


def exceed_limit() -> None:
    """Weights that do not fit into the memory that the process may have."""
    import torch

    begun()
    resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, resource.RLIM_INFINITY))
    torch.zeros(16 << 30, dtype=torch.uint8)


def exceed_cgroup() -> None:
    """Weights that do not fit into the container's memory: the kernel ends the process."""
    group = Path(os.environ["LAYERTAP_FAULT_CGROUP"]) / f"layertap-fault-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(2 << 30))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    begun()
    held = []
    while True:
        held.append(b"x" * (16 << 20))


def switch_capture_on(runner: Any) -> None:
    """What the first patch did: SGLang's capture is on, and its caller expects no pair."""
    begun()
    runner.model.capture_aux_hidden_states = True


def switch_capture_on_and_wedge(runner: Any) -> None:
    """The same on one rank, whose error nobody sees: on the way out it waits for the others, as a custom all-reduce does."""
    import torch.distributed as dist

    ranks = dist.new_group(backend="gloo")
    if rank() != 0:
        return
    runner.model.capture_aux_hidden_states = True
    forward = runner.model.forward

    def wedged(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        finally:
            begun()
            dist.barrier(group=ranks)

    runner.model.forward = wedged


def deadlock(_: Any) -> None:
    """Rank 1 waits in a collective to which nobody comes, and the others soon wait for rank 1."""
    import torch
    import torch.distributed as dist

    ranks = dist.new_group(backend="gloo")
    if rank() == 1:
        begun()
        dist.all_reduce(torch.zeros(1), group=ranks)


WHILE_LOADING: dict[str, Callable[[], None]] = {
    "sleep": sleep,
    "spin": spin,
    "compile": compile_kernels,
    "read-slowly": read_slowly,
    "exceed-limit": exceed_limit,
    "exceed-cgroup": exceed_cgroup,
}
WHEN_LOADED: dict[str, Callable[[Any], None]] = {
    "capture": switch_capture_on,
    "capture-and-wedge": switch_capture_on_and_wedge,
    "deadlock": deadlock,
}
