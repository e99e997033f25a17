"""What the benchmarks of the tap share: a model that strains it, a server with it, prompts, and what they cost."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "engine")]

import psutil  # noqa: E402
import ways  # noqa: E402
from engines import Engine, Engines, running  # noqa: E402, F401

from backends import jobs  # noqa: E402
from backends.embedded import models  # noqa: E402
from capture.draw import Drawer, DrawError  # noqa: E402
from capture.dumps import dump  # noqa: E402
from capture.layers import LayerChoice  # noqa: E402
from capture.tap.writers import default_count  # noqa: E402

HIDDEN, STATES, TOKENS, FORWARD = 7168, 5, 2048, 32768
TOKEN_BYTES = STATES * HIDDEN * 2
MEMORY = 48 << 30  # four slots of a forward of 2.3 GB each, dumps and spare files of twice that each
BOUNDARIES = [2, 4, 5]
BACKENDS = {"attention_backend": "triton", "sampling_backend": "pytorch", "load_format": "dummy"}
LIMITS = {"context_length": 4104, "max_prefill_tokens": FORWARD, "max_total_tokens": 8 * FORWARD}
WIDTHS = {
    "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "intermediate_size": 4096, "moe_intermediate_size": 256,
}  # fmt: skip


def gigabytes_per_second(count: float, seconds: float) -> float:
    return round(count / seconds / 1e9, 2)


def machine() -> dict[str, Any]:
    """What was measured on, and with what."""
    import sglang
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return {
        "machine": f"{name}, {len(os.sched_getaffinity(0))} cores",
        "versions": {"sglang": sglang.__version__, "torch": torch.__version__, "kernel": platform.release()},
        "bytes_per_token": TOKEN_BYTES,
        "default_writers": default_count(1),
    }


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


async def prefill(engine: Engine, asked: list[list[int]], *, tapped: bool, dropped: bool = False) -> float:
    """Tokens/s of `asked`; where `tapped`, until every dump has come and is deleted, or where `dropped` is refused."""
    tap = engine.tap
    room = asyncio.Semaphore(tap.dump_bytes // tap.bytes_per_token // TOKENS)
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(4) as pool:
        async with Drawer(engine.server, tap) as drawer:

            async def one(row: int, ids: list[int]) -> None:
                async with room:
                    if not tapped:
                        await drawer._generate(f"stranger.{drawer.name}.{row}", ids)
                        return
                    try:
                        _, folder = await drawer.draw(row, 0, ids)
                    except DrawError as error:
                        if not (dropped and str(error) == ways.DROPPED):
                            raise
                    else:
                        await loop.run_in_executor(pool, dump.remove, folder)

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
    engine = engines.get("base", model=model, layers=LayerChoice(boundaries=BOUNDARIES), **BACKENDS, **args)
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
