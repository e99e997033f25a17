"""What bounds the tap and a whole extraction, part by part, on one GPU; `tap.py` says what the tap itself costs.

usage: python tests/bench/tap_limits.py FILE [PART ...]     writes FILE (JSON) after every part; all parts without a name

bytes    writing `.pt` files to tmpfs, hashed and deleted again, by several processes: as `torch.save` does it through
         a stream, into fresh files, into files that are kept; and the output's disk
feed     the tap alone: states of 7168 on the GPU, given to it as fast as slots come free, by number of writers
deep     a server with 61 layers and eight wider experts a token, at the pace of a large model: prompts of ours against the
         same prompts as a stranger's, which the tap lets pass; then `layertap extract` of them to tmpfs and to disk
short    an extraction of very many short prompts: what memory its processes have, in the course of it
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from stress import (
    FORWARD,
    HIDDEN,
    LIMITS,
    MEMORY,
    ROOT,
    STATES,
    TOKEN_BYTES,
    TOKENS,
    Cores,
    Watched,
    build,
    gigabytes_per_second,
    machine,
    prefill,
    prompts,
    running,
    served,
    write_rows,
)

from backends.embedded import models
from capture.dumps import dump, pt
from capture.dumps.spares import Spares
from capture.layers import LayerChoice, Layers
from capture.tap.keeper import Keeper
from capture.tap.settings import TapSettings

ROUNDS = 3


# --- bytes ---


def through_a_stream(path: Path, tensor: torch.Tensor) -> None:
    """As it was done first: `torch.save` into memory, the memory into a file, then its checksum."""
    import io

    import xxhash

    torch.serialization.set_crc32_options(False)
    stream = io.BytesIO()
    torch.save(tensor.clone(), stream)
    path.write_bytes(stream.getbuffer())
    xxhash.xxh3_64_hexdigest(stream.getbuffer())
    path.unlink()


def fresh(path: Path, tensor: torch.Tensor) -> None:
    pt.write(path, tensor)
    path.unlink()


def spare(path: Path, tensor: torch.Tensor) -> None:
    pt.write(path, tensor, SPARES[0])
    path.unlink()


def hash_only(path: Path, tensor: torch.Tensor) -> None:
    import xxhash

    xxhash.xxh3_64_hexdigest(memoryview(tensor.view(-1).view(torch.uint8).numpy()))


def _work(way: str, folder: Path, seconds: float, start: Any, result: Any) -> None:
    torch.set_num_threads(1)
    tensors = [
        torch.randint(-(2**15), 2**15, (TOKENS, HIDDEN), dtype=torch.int16).view(torch.bfloat16) for _ in range(4)
    ]
    path = folder / f"{os.getpid()}.pt"
    SPARES[:] = [Spares(folder, f"spare_{os.getpid()}", 10 * tensors[0].nbytes)]
    WAYS[way](path, tensors[0])
    start.wait()
    begun, count = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        WAYS[way](path, tensors[count % 4])
        count += 1
    result.put(count * tensors[0].nbytes / (time.perf_counter() - begun))


SPARES: list[Spares] = []  # this process's own
WAYS: dict[str, Callable[[Path, torch.Tensor], None]] = {
    "torch.save through a stream": through_a_stream,
    "poured into fresh files": fresh,
    "copied into spare files": spare,
    "hashed only": hash_only,
}


def measure_bytes() -> dict[str, Any]:
    """GB/s of all processes together, by way and number of processes."""
    context = multiprocessing.get_context("fork")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="layertap-bench-", dir="/dev/shm") as name:
        for way, count in itertools.product(WAYS, (1, 4, 8)):
            start, result = context.Event(), context.Queue()
            workers = [context.Process(target=_work, args=(way, Path(name), 1.0, start, result)) for _ in range(count)]
            for worker in workers:
                worker.start()
            time.sleep(0.5)
            start.set()
            total = sum(result.get() for _ in workers)
            for worker in workers:
                worker.join()
            found.setdefault(way, {})[count] = round(total / 1e9, 2)
            print(f"bytes: {way}, {count} processes: {total / 1e9:.2f} GB/s", flush=True)
    return {"tmpfs_gb_per_second": found, "disk_gb_per_second": disk_speed()}


def disk_speed(gigabytes: int = 6) -> dict[str, float]:
    """GB/s of the disk under the temporary folder: files of 144 MB written and fsynced, by number of threads."""
    data, found = os.urandom(TOKENS * 1024) * (TOKEN_BYTES // 1024), {}
    with tempfile.TemporaryDirectory(prefix="layertap-bench-") as name:

        def write(i: int) -> None:
            handle = os.open(f"{name}/{i}", os.O_WRONLY | os.O_CREAT)
            os.write(handle, data)
            os.fsync(handle)
            os.close(handle)
            os.unlink(f"{name}/{i}")

        count = gigabytes * 10**9 // len(data)
        for threads in (1, 8):
            with ThreadPoolExecutor(threads) as pool:
                begun = time.perf_counter()
                list(pool.map(write, range(count)))
                found[str(threads)] = gigabytes_per_second(count * len(data), time.perf_counter() - begun)
    return found


# --- feed ---


def feed(writers: int, seconds: float = 4.0) -> dict[str, float]:
    """The tap without a server: forwards of 16 prompts, one after another, dumps deleted as they come."""
    device = torch.device("cuda")
    folder = Path(tempfile.mkdtemp(prefix="layertap-bench-", dir="/dev/shm"))
    state = dump.TapState(
        code="", pid=os.getpid(), sglang="", model="", model_class="", layers=Layers([2, 4, 5], [1, 3, 4], [], [], ""),
        hidden=HIDDEN, dtype="bfloat16", slot_tokens=FORWARD,
    )  # fmt: skip
    settings = TapSettings(
        dump_dir=str(folder), secret="s", layers=LayerChoice(boundaries=[2, 4, 5]), memory=MEMORY, writers=writers
    )
    keeper = Keeper(settings, state, device)
    states = [torch.randn(FORWARD, HIDDEN, device=device).to(torch.bfloat16) for _ in range(STATES)]
    ids = torch.zeros(FORWARD, dtype=torch.int64, device=device)
    removed, prompts = threading.Semaphore(state.dump_bytes // TOKEN_BYTES // TOKENS), FORWARD // TOKENS
    done: list[int] = []

    def remove() -> None:
        journal, pool = dump.Journal(folder), ThreadPoolExecutor(4)

        def one(number: int) -> None:
            dump.remove(dump.request_folder(folder, number))
            done.append(number)
            removed.release()

        while True:
            for line in journal.read():
                assert line.state == "done", line
                pool.submit(one, line.n)
            time.sleep(0.005)

    threading.Thread(target=remove, daemon=True).start()
    while not all(link.ready for link in keeper.writers.links):
        time.sleep(0.05)
    numbers, begun, warm = itertools.count(), 0.0, 0
    sent = 0
    while not begun or time.perf_counter() - begun < seconds:
        for _ in range(prompts):
            removed.acquire()
        rids = [f"s.x.{next(numbers)}.0.{TOKENS}" for _ in range(prompts)]
        batch = SimpleNamespace(rids=rids, extend_prefix_lens_cpu=[0] * prompts, extend_seq_lens_cpu=[TOKENS] * prompts)
        batch.input_ids = ids
        keeper.take(batch, states)
        sent += 1
        if sent == 12:  # every page of arena and dumps was touched
            begun, warm = time.perf_counter(), len(done)
    rate = (len(done) - warm) * TOKENS * TOKEN_BYTES / (time.perf_counter() - begun)
    while len(done) < sent * prompts:
        time.sleep(0.01)
    shutil.rmtree(folder)
    return {"gb_per_second": round(rate / 1e9, 2), "slot_wait_seconds": round(keeper.writers.waited, 2)}


def measure_feed() -> dict[str, Any]:
    found = {}
    for writers in (1, 4, 7, 10):
        code = f"import json, tap_limits; print(json.dumps(tap_limits.feed({writers})), flush=True); import os; os._exit(0)"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT / "tests" / "bench", capture_output=True, text=True, timeout=120
        )
        found[writers] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else done.stderr[-2000:]
        print(f"feed: {writers} writers: {found[writers]}", flush=True)
    return found


# --- deep ---


def measure_server(layers: int, rows: int, extracted: int, **widths: int) -> dict[str, Any]:
    """Without and with the tap in turn, then whole extractions, so long that beginning and end hardly count."""
    found: dict[str, Any] = {"layers": layers, "rounds": []}
    with tempfile.TemporaryDirectory(prefix="layertap-bench-") as name, running() as engines:
        model = build(Path(name) / "model", layers, **widths)
        with served(engines, model, memory=MEMORY, mem_fraction_static=0.6, **LIMITS) as engine:
            asked = prompts(rows)
            for tapped in (False, True):  # compiles kernels, touches pages
                asyncio.run(prefill(engine, asked[: max(64, rows // 4)], tapped=tapped))
            for _ in range(ROUNDS):
                waited = engine.tap.slot_wait_seconds
                figures: dict[str, Any] = {}
                for key in ("off", "on"):
                    cores = Cores(engine)
                    figures[key] = round(asyncio.run(prefill(engine, asked, tapped=key == "on")))
                    figures[f"cores_{key}"] = cores.used()
                time.sleep(0.5)
                figures["slot_wait_seconds"] = round(engine.tap.slot_wait_seconds - waited, 2)
                found["rounds"].append(figures)
                print(f"{layers} layers: {figures}", flush=True)
            off, on = (statistics.median(figures[key] for figures in found["rounds"]) for key in ("off", "on"))
            found |= {
                "writers": len(engine.tap.writer_pids), "slots": engine.tap.slots, "dump_bytes": engine.tap.dump_bytes,
                "off_tokens_per_second": off, "on_tokens_per_second": on, "ratio": round(on / off, 4),
                "on_gb_per_second": gigabytes_per_second(on * TOKEN_BYTES, 1),
            }  # fmt: skip
            source = write_rows(Path(name) / "rows.jsonl", prompts(extracted))
            for where, parent in (("tmpfs", "/dev/shm"), ("disk", None)):
                with tempfile.TemporaryDirectory(prefix="layertap-bench-", dir=parent) as folder:
                    figures = Watched(engines, engine, source, Path(folder) / "out").figures
                figures["ratio"] = round(figures["tokens_per_second"] / off, 4)
                found[f"extract_to_{where}"] = figures
                print(f"{layers} layers, extract to {where}: {figures}", flush=True)
    return found


# --- short ---


def measure_short(count: int) -> dict[str, Any]:
    """Memory of an extraction of `count` prompts of 1 to 40 tokens, at a tenth of the way, then at every further one."""
    with tempfile.TemporaryDirectory(prefix="layertap-bench-") as name, running() as engines:
        args: dict[str, Any] = {
            "attention_backend": "triton",
            "sampling_backend": "pytorch",
            "mem_fraction_static": 0.3,
        }
        if not torch.cuda.is_available():
            engine = engines.get("embedded-llama", memory=1 << 30)
        else:
            model = models.build("llama", Path(name) / "model")
            args |= {"context_length": 4104, "max_prefill_tokens": 8192, "max_total_tokens": 65536, "memory": 1 << 30}
            engine = engines.get("base", model=model, layers=LayerChoice(boundaries=[2, 4, 5]), **args)
        asked = [[(7 * i + j) % 1000 + 9 for j in range(1 + i % 40)] for i in range(count)]
        source = write_rows(Path(name) / "rows.jsonl", asked)
        with tempfile.TemporaryDirectory(prefix="layertap-bench-", dir="/dev/shm") as folder:
            watched = Watched(engines, engine, source, Path(folder) / "out")
        marks = [next(m for m in watched.memory if m["written"] >= count * tenth / 10) for tenth in range(1, 10)]
        return watched.figures | {"private_bytes": marks, "failed": engine.tap.failed}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "bytes": measure_bytes,
    "deep": lambda: measure_server(
        61, 64, 256, n_routed_experts=16, num_experts_per_tok=8, moe_intermediate_size=1024, n_group=1, topk_group=1
    ),
    "feed": measure_feed,
    "short": lambda: measure_short(int(os.environ.get("SHORT", "100000"))),
}


def main(path: Path, parts: list[str]) -> None:
    found: dict[str, Any] = {"schema": 1, "what": "tests/bench/tap_limits.py"} | machine()
    for part in parts or PARTS:
        begun = time.perf_counter()
        try:
            found[part] = PARTS[part]()
        except Exception as error:  # the other parts are still worth their time
            found[part] = {"error": repr(error)[-3000:]}
            print(f"{part}: {error!r}", flush=True)
        print(f"{part} took {time.perf_counter() - begun:.0f} s", flush=True)
        path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
