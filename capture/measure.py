"""Measuring what only use can tell: how fast folders are written, GPUs are reached, and GPUs talk to each other.

Whatever touches a GPU runs in processes of its own, which are ended when they do not come forward: the hang of an
all-reduce is an answer. Nothing that is written stays.

usage: python -m capture.measure copy | all_reduce RANK RANKS BACKEND STORE      (the processes; results are JSON lines)
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from capture.model_config import known_of

WRITE_BYTES = 10**9
WRITE_SECONDS = 10.0
BLOCK = 8 << 20
MiB = 1 << 20
COPY_BYTES = 256 * MiB
COPIES = 8
SIZES = (32 * MiB, 128 * MiB)  # of prefill's messages
FIRST_SIZE = 4 * MiB
ROUNDS = 8
START_SECONDS = 180.0  # to import torch, on every rank at once
FIRST_SECONDS = 30.0  # for the first all-reduce with all that NCCL sets up; a working host takes a few
MORE_SECONDS = 60.0
COPY_SECONDS = 120.0
LIKE_SGLANG = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}  # what it sets where nobody has


class MeasureJob(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure: the state folder, a dataset's if one is meant, and the GPUs with the NCCL settings of `env`."""

    state: str
    output: str | None = None
    model: str | None = None
    env: dict[str, str] = {}


class Written(msgspec.Struct):
    """How a folder took `bytes` in `seconds`, to the disk and not into a cache; `error` where it could not be tried."""

    path: str
    bytes: int = 0
    seconds: float | None = None
    error: str | None = None


class Copied(msgspec.Struct):
    """Bytes a second between pinned memory and a GPU, each way."""

    gpu: int
    to_device: float
    from_device: float


class Reduced(msgspec.Struct):
    """An all-reduce over `ranks`. `first_seconds`: the first one's, with all that is set up for it; None: it hung.

    `bus` maps message bytes to bus bandwidth in bytes a second, as nccl-tests count it. `error` says what went wrong.
    """

    ranks: int
    backend: str
    first_seconds: float | None = None
    bus: dict[int, float] = {}
    error: str | None = None


class Measured(msgspec.Struct, kw_only=True):
    """All of it. `gpus` is what torch sees; `shape` (layers, hidden) of the model, where one is meant."""

    disks: list[Written]
    gpus: int
    copies: list[Copied]
    copy_error: str | None
    all_reduce: Reduced | None
    shape: tuple[int, int] | None
    schema: int = 1


def measure(job: MeasureJob, say: Callable[[str], None], report: Callable[[Any], None]) -> Measured:
    """Measure everything, one thing after the other, telling what is being done."""

    def now(what: str) -> None:
        say(what)
        report({"schema": 1, "what": what})

    disks = []
    for folder in filter(None, [job.state, job.output]):
        now(f"writing to {folder}")
        disks.append(write(Path(folder), WRITE_BYTES))
    gpus = visible_gpus()
    env = {**LIKE_SGLANG, **os.environ, **job.env}
    copies: list[Copied] = []
    copy_error = reduced = None
    if gpus:
        now("copying to and from every GPU")
        copies, copy_error = copy(env)
    if gpus > 1:
        now(f"an all-reduce over {gpus} GPUs")
        reduced = all_reduce(gpus, "nccl", env)
    return Measured(
        disks=disks,
        gpus=gpus,
        copies=copies,
        copy_error=copy_error,
        all_reduce=reduced,
        shape=model_shape(job.model) if job.model else None,
    )


def write(folder: Path, most: int) -> Written:
    """Write up to `most` bytes into `folder`, or the nearest folder above it that is there; they are gone afterwards.

    Takes at most a quarter of what is free, and stops after 10 s.
    """
    place = folder
    while not place.is_dir() and place != place.parent:
        place = place.parent
    made = Written(str(place))
    block = os.urandom(BLOCK)  # what compresses would be written faster than states are
    try:
        space = os.statvfs(place)
        size = min(most, space.f_bavail * space.f_frsize // 4)
        with tempfile.TemporaryFile(dir=place, buffering=0) as file:  # it has no name: nothing is left of it
            begun = time.monotonic()
            while made.bytes < size and time.monotonic() - begun < WRITE_SECONDS:
                made.bytes += file.write(block[: size - made.bytes])
                os.fdatasync(file.fileno())
            made.seconds = time.monotonic() - begun
    except OSError as error:
        made.error = f"{place}: {error.strerror}"
    return made


def visible_gpus() -> int:
    """How many GPUs torch can use; none where there is no torch."""
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def copy(env: dict[str, str]) -> tuple[list[Copied], str | None]:
    """Copy to and from every GPU, and what went wrong with that."""
    try:
        ran = subprocess.run(_argv("copy"), capture_output=True, env=env, timeout=COPY_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        return _decoded(error.stdout or b"", Copied), f"the copies did not end within {COPY_SECONDS:g} s"
    return _decoded(ran.stdout, Copied), _last_line(ran.stderr) if ran.returncode else None


def all_reduce(ranks: int, backend: str, env: dict[str, str], first_seconds: float = FIRST_SECONDS) -> Reduced:
    """An all-reduce of `ranks` processes, which are ended where they do not come forward.

    `backend` is torch's: nccl takes a GPU a rank, gloo none.
    """
    made = Reduced(ranks, backend)
    with tempfile.TemporaryDirectory(prefix="ranks-", dir=".") as folder:
        logs = [Path(folder) / f"{rank}.log" for rank in range(ranks)]
        lines = Path(folder) / "lines"
        store = str(Path(folder).resolve() / "store")
        processes = []
        try:
            for rank, path in enumerate(logs):
                argv = _argv("all_reduce", str(rank), str(ranks), backend, store)
                with lines.open("ab") as out, path.open("wb") as log:
                    processes.append(subprocess.Popen(argv, stdout=out, stderr=log, env=env))
            _follow(made, processes, lines, first_seconds)
            failed = next((rank for rank, process in enumerate(processes) if process.poll()), None)
            if failed is not None and made.error is None:
                made.error = f"rank {failed}: {_last_line(logs[failed].read_bytes())}"
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()
    return made


def _follow(made: Reduced, processes: list[subprocess.Popen[bytes]], lines: Path, first_seconds: float) -> None:
    """Take in what the ranks say until they are through, one of them fails, or none comes forward."""
    deadline, stage = time.monotonic() + START_SECONDS, "started"
    while True:
        ended = [process.poll() for process in processes]
        said = [json.loads(line) for line in lines.read_bytes().split(b"\n")[:-1]]
        up = sum("up" in line for line in said)
        first = next((line["first"] for line in said if "first" in line), None)
        made.bus = {line["bytes"]: line["bus"] for line in said if "bytes" in line}
        if stage == "started" and up == len(processes):
            deadline, stage = time.monotonic() + first_seconds, "first"
        if stage == "first" and first is not None:
            deadline, stage = time.monotonic() + MORE_SECONDS, "more"
            made.first_seconds = first
        if any(ended) or all(code == 0 for code in ended):
            return
        if time.monotonic() > deadline:
            made.error = {
                "started": f"only {up} of {len(processes)} ranks came up within {START_SECONDS:g} s",
                "first": f"the first all-reduce did not end within {first_seconds:g} s",
                "more": f"the first all-reduce ended, later ones did not within {MORE_SECONDS:g} s",
            }[stage]
            return
        time.sleep(0.1)


def model_shape(model: str) -> tuple[int, int] | None:
    """Layers and hidden size of a model, from its config.json; None where that does not say."""
    config = known_of(Path(model))
    return (config.layers, config.hidden) if config.layers and config.hidden else None


def _argv(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "capture.measure", *words]


def _decoded(out: bytes, kind: type[Any]) -> list[Any]:
    return [msgspec.json.decode(line, type=kind) for line in out.split(b"\n")[:-1]]  # the last one may be cut


def _last_line(log: bytes) -> str:
    lines = log.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


# --- The processes ---


def _results() -> Callable[[Any], object]:
    """What writes results to stdout; all else printed there from now on (NCCL's version, say) goes to stderr."""
    out = os.dup(1)
    os.dup2(2, 1)
    return lambda value: os.write(out, msgspec.json.encode(value) + b"\n")


def _copy_every_gpu(tell: Callable[[Any], object]) -> None:
    import torch

    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    for gpu in range(torch.cuda.device_count()):
        device = torch.empty(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{gpu}")

        def speed(target: Any, source: Any, gpu: int = gpu) -> float:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(gpu)
            begun = time.monotonic()
            for _ in range(COPIES):
                target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(gpu)
            return COPIES * COPY_BYTES / (time.monotonic() - begun)

        tell(Copied(gpu, speed(device, host), speed(host, device)))


def _reduce_as(tell: Callable[[Any], object], rank: int, ranks: int, backend: str, store: str) -> None:
    import torch
    from torch import distributed

    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    distributed.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    tell({"up": rank})

    def wait() -> None:
        if backend == "nccl":
            torch.cuda.synchronize()

    begun = time.monotonic()
    values = torch.full((FIRST_SIZE // 2,), rank + 1, dtype=torch.bfloat16, device=device)
    distributed.all_reduce(values)
    wait()
    right = ranks * (ranks + 1) / 2
    if not bool((values == right).all()):
        raise SystemExit(f"the sum over {ranks} ranks is wrong: {values[0].item()} instead of {right}")
    if rank == 0:
        tell({"first": time.monotonic() - begun})
    for size in SIZES:
        values = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
        distributed.all_reduce(values)
        wait()
        begun = time.monotonic()
        for _ in range(ROUNDS):
            distributed.all_reduce(values)
        wait()
        seconds = (time.monotonic() - begun) / ROUNDS
        if rank == 0:
            tell({"bytes": size, "bus": size / seconds * 2 * (ranks - 1) / ranks})
    distributed.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "copy":
        _copy_every_gpu(_results())
    else:
        _reduce_as(_results(), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
