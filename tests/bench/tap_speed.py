"""What the tap and a whole extraction cost a server, and what bounds them, measured in one run on one GPU.

usage: python tests/bench/tap_speed.py FILE [PART ...]      writes FILE (JSON) after every part; all parts without a name

bytes    writing `.pt` files to tmpfs, hashed and deleted again, by several processes: as `torch.save` does it through
         a stream, into fresh files, into files that are kept; and the output's disk
feed     the tap alone: states of 7168 on the GPU, given to it as fast as slots come free, by number of writers
shallow  a server with 8 layers 7168 wide, the stress of about 15 GB/s of states: prompts of ours against the same prompts
         as a stranger's, which the tap lets pass; then `layertap extract` of them to tmpfs and to disk
deep     the same with 61 layers and eight wider experts a token, at the pace of a large model
short    an extraction of very many short prompts: what memory its processes have, in the course of it
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "engine")]

import psutil  # noqa: E402
import torch  # noqa: E402
from engines import Engine, Engines, running  # noqa: E402

from backends import jobs  # noqa: E402
from backends.embedded import models  # noqa: E402
from capture import dump, pt  # noqa: E402
from capture.draw import Drawer  # noqa: E402
from capture.keeper import Keeper  # noqa: E402
from capture.layers import LayerChoice, Layers  # noqa: E402
from capture.settings import TapSettings  # noqa: E402
from capture.spares import Spares  # noqa: E402
from capture.writers import default_count  # noqa: E402

HIDDEN, STATES, TOKENS, FORWARD = 7168, 5, 2048, 32768
TOKEN_BYTES = STATES * HIDDEN * 2
MEMORY = 48 << 30  # four slots of a forward of 2.3 GB each, dumps and spare files of twice that each
ROUNDS = 3
BACKENDS = {"attention_backend": "triton", "sampling_backend": "pytorch", "load_format": "dummy"}
WIDTHS = {
    "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "intermediate_size": 4096, "moe_intermediate_size": 256,
}  # fmt: skip


def gigabytes_per_second(count: float, seconds: float) -> float:
    return round(count / seconds / 1e9, 2)


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
        code = (
            f"import json, tap_speed; print(json.dumps(tap_speed.feed({writers})), flush=True); import os; os._exit(0)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT / "tests" / "bench", capture_output=True, text=True, timeout=120
        )
        found[writers] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else done.stderr[-2000:]
        print(f"feed: {writers} writers: {found[writers]}", flush=True)
    return found


# --- shallow, deep ---


def build(folder: Path, layers: int, **widths: int) -> Path:
    """A DeepSeek-V3 shape of `layers` layers, 7168 wide, whose weights SGLang makes up."""
    config = models._deepseek_shape(layers=layers, hidden=HIDDEN, **WIDTHS | widths)
    config.architectures = ["DeepseekV3ForCausalLM"]
    folder.mkdir()
    config.save_pretrained(folder)
    text = json.loads((folder / "config.json").read_text()) | models.DEEPSEEK_FOR_SGLANG
    (folder / "config.json").write_text(json.dumps(text))
    models._save_tokenizer(folder)
    return folder


def prompts(count: int, tokens: int = TOKENS) -> list[list[int]]:
    return [[(17 * i * i + 31 * n + i * n) % 1000 + 9 for i in range(tokens)] for n in range(count)]


async def prefill(engine: Engine, asked: list[list[int]], *, tapped: bool) -> float:
    """Tokens/s of `asked`; where `tapped`, until every dump has come and is deleted."""
    tap = engine.tap
    room = asyncio.Semaphore(tap.dump_bytes // tap.bytes_per_token // TOKENS)
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(4) as pool:
        async with Drawer(engine.server, tap) as drawer:

            async def one(row: int, ids: list[int]) -> None:
                async with room:
                    if tapped:
                        _, folder = await drawer.draw(row, 0, ids)
                        await loop.run_in_executor(pool, dump.remove, folder)
                    else:
                        await drawer._generate(f"stranger.{drawer.name}.{row}", ids)

            begun = time.perf_counter()
            await asyncio.gather(*(one(row, ids) for row, ids in enumerate(asked)))
            return len(asked) * TOKENS / (time.perf_counter() - begun)


class Watched:
    """An extraction and what its processes took: `private` bytes of memory (not what they map), seen twice a second."""

    def __init__(self, engines: Engines, engine: Engine, rows: Path, output: Path) -> None:
        job = {
            "rows": str(rows), "output": str(output), "formats": ["native"], "options": {}, "layertap": "bench",
            "allow_volatile": True,
        }  # fmt: skip
        self.run = jobs.start_job(engines.runs, engines.payload, "extract", job, engine.run.spec.port)
        self.memory: list[dict[str, Any]] = []
        before, begun, ended = engine.tap, 0.0, 0.0
        next_look = 0.0
        while self.run.exit is None:
            now = self.progress()
            if now.get("phase") == "extracting" and not begun:
                begun = time.perf_counter()
            if now.get("phase") == "finished" and not ended:
                ended = time.perf_counter()
            if time.perf_counter() > next_look and begun:
                self.memory.append({"written": now["written"]} | private_bytes(engine, self.run))
                next_look = time.perf_counter() + 0.5
            time.sleep(0.02)
        ended = ended or time.perf_counter()
        done, tap = self.progress(), engine.tap
        if self.run.exit.code != 0:
            print(self.run.log.read_text()[-3000:], flush=True)
        self.figures = {
            "exit": self.run.exit.code,
            "samples": done["written"],
            "seconds": round(ended - begun, 2),
            "tokens_per_second": round(done["tokens_written"] / (ended - begun)),
            "gb_per_second": gigabytes_per_second(done["bytes_written"], ended - begun),
            "drawn_again": self.run.log.read_text().count("drawn again"),
            "slot_wait_seconds": round(tap.slot_wait_seconds - before.slot_wait_seconds, 2),
            "writers_lost": tap.writers_lost,
        }
        shutil.rmtree(output)

    def progress(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self.run.folder / "progress.json").read_text()))
        except (OSError, ValueError):
            return {}


def private_bytes(engine: Engine, job: Any) -> dict[str, int]:
    """Private memory of scheduler, writers and driver, and bytes on the dumps' file system."""

    def of(pid: int) -> int:
        try:
            memory = psutil.Process(pid).memory_info()
        except psutil.Error:
            return 0
        return int(memory.rss - memory.shared)

    tap, disk = engine.tap, shutil.disk_usage(engine.dump_dir)
    return {
        "scheduler": of(tap.pid),
        "writers": sum(of(pid) for pid in tap.writer_pids),
        "driver": of(job.running.child.pid) if job.running else 0,
        "tmpfs": disk.used,
    }


def write_rows(path: Path, asked: list[list[int]]) -> Path:
    with path.open("w") as file:
        file.writelines(json.dumps({"input_ids": ids, "loss_mask": [1] * len(ids)}) + "\n" for ids in asked)
    return path


@contextmanager
def served(engines: Engines, model: Path, **args: Any) -> Iterator[Engine]:
    begun = time.perf_counter()
    engine = engines.get("base", model=model, layers=LayerChoice(boundaries=[2, 4, 5]), **BACKENDS, **args)
    print(f"ready after {time.perf_counter() - begun:.0f} s; {engine.tap}", flush=True)
    yield engine
    engines.stop(next(key for key, alive in engines.alive.items() if alive is engine))


class Cores:
    """How many cores the scheduler, the writers, this process (the client) and all together were using."""

    def __init__(self, engine: Engine) -> None:
        self.pids = {"scheduler": [engine.tap.pid], "writers": engine.tap.writer_pids, "client": [os.getpid()]}
        self.before, self.begun = self.seconds(), time.perf_counter()
        psutil.cpu_percent()

    def seconds(self) -> dict[str, float]:
        return {who: sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids) for who, pids in self.pids.items()}

    def used(self) -> dict[str, float]:
        wall, total = time.perf_counter() - self.begun, psutil.cpu_percent() / 100 * (os.cpu_count() or 1)
        now = self.seconds()
        return {who: round((now[who] - self.before[who]) / wall, 2) for who in now} | {"all": round(total, 2)}


def measure_server(layers: int, rows: int, disk_rows: int, **widths: int) -> dict[str, Any]:
    """Without and with the tap in turn, then the whole extraction to tmpfs and to disk."""
    found: dict[str, Any] = {"layers": layers, "rounds": []}
    with tempfile.TemporaryDirectory(prefix="layertap-bench-") as name, running() as engines:
        limits = {"context_length": 4104, "max_prefill_tokens": FORWARD, "max_total_tokens": 8 * FORWARD}
        model = build(Path(name) / "model", layers, **widths)
        with served(engines, model, memory=MEMORY, mem_fraction_static=0.6, **limits) as engine:
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
            for where, count, parent in (("tmpfs", rows // 2, "/dev/shm"), ("disk", disk_rows, None)):
                source = write_rows(Path(name) / "rows.jsonl", asked[:count])
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
    "shallow": lambda: measure_server(8, 512, 64),
    "deep": lambda: measure_server(
        61, 64, 48, n_routed_experts=16, num_experts_per_tok=8, moe_intermediate_size=1024, n_group=1, topk_group=1
    ),
    "feed": measure_feed,
    "short": lambda: measure_short(int(os.environ.get("SHORT", "100000"))),
}


def main(path: Path, parts: list[str]) -> None:
    import sglang

    on_gpu = torch.cuda.is_available()
    found: dict[str, Any] = {
        "schema": 1,
        "what": "tests/bench/tap_speed.py",
        "machine": f"{torch.cuda.get_device_name() if on_gpu else 'no GPU'}, {len(os.sched_getaffinity(0))} cores",
        "versions": {"sglang": sglang.__version__, "torch": torch.__version__, "kernel": platform.release()},
        "bytes_per_token": TOKEN_BYTES,
        "default_writers": default_count(1),
    }
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
