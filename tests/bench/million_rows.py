"""A million rows: the plan, the start of an extraction (tokenise, ledger), and a resume of one that is finished.

usage: PYTHONPATH=. python tests/bench/million_rows.py FILE [ROWS [KIND [STEP ...]]]
In SGLang's environment; no server is started. KIND is chat, which is tokenised, or ids, which were before. The steps
are plan, start, finish and resume.

Each step is a process of its own, with the code that the jobs run. FILE gets, for each, its seconds, those of all cores
together, and the peak of the memory that it and its workers took: `pss_mb` counts what they share once, `rss_mb` once
for each of them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil

from backends.embedded import models
from capture import job
from capture.dataset import ledger, manifest
from capture.dataset.ledger import Change, Ledger, WrittenFile
from capture.extraction import ExtractJob
from capture.prepare import Preparation
from capture.rows import parallel
from capture.rows.tokenise import RowOptions, load_tokenizer
from capture.server import Process, Server

SAMPLE_SECONDS = 0.5
FORMATS = ["native", "specforge"]
BATCH = 1000  # samples that are settled at once
WORDS = [f"{a}{b}" for a in ("ba", "de", "fi", "go", "lu", "mer", "tion") for b in ("la", "n", "rest", "s", "ck", "y")]


def make_ids(path: Path, count: int) -> None:
    """Rows of 40 to 80 token ids with their mask; one in a hundred is repeated."""
    chance = random.Random(0)
    with path.open("w") as file:
        line = ""
        for number in range(count):
            if number % 100 or not line:
                half = chance.randint(20, 40)
                ids = [*(260 + int(digit) for digit in str(number)), *range(100, 100 + 2 * half)]
                line = json.dumps({"input_ids": ids, "loss_mask": [0] * (len(ids) - half) + [1] * half}) + "\n"
            file.write(line)


def make_chats(path: Path, count: int) -> None:
    """Chats of a system's, a user's and an assistant's message, 10 to 60 words long; one in a hundred is repeated."""
    chance = random.Random(0)
    texts = [" ".join(chance.choices(WORDS, k=chance.randint(5, 30))) for _ in range(1000)]
    with path.open("w") as file:
        line = ""
        for number in range(count):
            if number % 100 or not line:
                question, answer = chance.choices(texts, k=2)
                chat = [
                    {"role": "system", "content": "You are a helpful assistant."},
                    {"role": "user", "content": f"{number} {question}?"},
                    {"role": "assistant", "content": f"{answer}."},
                ]
                line = json.dumps({"id": number, "messages": chat}) + "\n"
            file.write(line)


def plan(path: Path, model: str, _output: Path) -> dict[str, Any]:
    asked = job.PlanJob(
        rows=str(path),
        model=model,
        trust_remote_code=False,
        options=RowOptions(),
        formats=FORMATS,
        output=None,
        layers=3,
    )
    _, made = job.run_plan(asked)
    return {"samples": made.samples, "tokens": made.tokens, "alarms": {one.id: one.count for one in made.alarms}}


def start(path: Path, model: str, output: Path) -> dict[str, Any]:
    return _prepare(path, model, output, "")


def resume(path: Path, model: str, output: Path) -> dict[str, Any]:
    return _prepare(path, model, output, (output / "hash").read_text())


def finish(_path: Path, _model: str, output: Path) -> dict[str, Any]:
    """Say of every sample but the last ten that it is written, as the driver does."""
    with Ledger(output) as made:
        numbers = [sample.number for sample in made.samples()][:-10]
        for first in range(0, len(numbers), BATCH):
            made.settle(Change(n, "written", 1, None, _files(n)) for n in numbers[first : first + BATCH])
    return {"written": len(numbers)}


def _files(number: int) -> list[WrittenFile]:
    place = f"rows_{number // 2000 * 2000}-{number // 2000 * 2000 + 2000}"
    return [
        WrittenFile("native", f"native/{place}/{number}.safetensors", 117_000_000, f"{number:016x}"),
        WrittenFile("specforge", f"specforge/{place}/data_{number}.ckpt", 94_000_000, f"{number:016x}"),
    ]


def _prepare(path: Path, model: str, output: Path, known: str) -> dict[str, Any]:
    """What an extraction does before its first prompt, but for what it asks the server."""
    server = Server(
        run="none", url="", dump_dir="", secret="", process=Process(0, 0), model=model, profile="embedded-llama"
    )
    asked = ExtractJob(
        server=server, lock="", rows=str(path), output=str(output), formats=FORMATS, options=RowOptions(), layertap=""
    )
    begun = Preparation(asked, output, lambda _: None, lambda _: None, lambda *_a, **_k: None)
    begun.manifest = _manifest(asked, known)
    tokenizer = load_tokenizer(model)
    loaded = time.monotonic()
    begun.ledger = ledger.Ledger(output)
    begun._tokenise(tokenizer, None)
    begun.ledger.longest()
    begun.ledger.reopen()
    begun.progress.count(begun.ledger)
    first = next(begun.ledger.samples("pending"))
    ids, _ = begun.ledger.tokens(first)
    (output / "hash").write_text(begun.manifest.input_hash)
    size = sum(file.stat().st_size for file in output.rglob("*"))
    return {
        "without_imports_and_tokenizer_s": round(time.monotonic() - loaded, 2),
        "first_pending": first.number,
        "its_tokens": len(ids),
        "written": begun.progress.written,
        "ledger_and_tokens_mb": round(size / 1e6),
    }


def _manifest(asked: ExtractJob, known: str) -> manifest.Manifest:
    return manifest.Manifest(
        settings=None, norms={}, input=asked.rows, input_hash=known, sglang="", layertap="", profile="",
        server={}, created=0.0, updated=0.0,
    )  # fmt: skip


STEPS: list[Callable[[Path, str, Path], dict[str, Any]]] = [plan, start, finish, resume]


def measure(step: Callable[[Path, str, Path], dict[str, Any]], *given: Any) -> dict[str, Any]:
    """Run a step in a fresh process and watch it and its children."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_run, args=(step, there, *given))
    begun, used = time.monotonic(), _children_cpu()
    process.start()
    there.close()
    peak_rss = peak_pss = 0
    while process.is_alive():
        tree = _tree(process.pid)
        peak_rss = max(peak_rss, sum(rss for rss, _ in tree))
        peak_pss = max(peak_pss, sum(pss for _, pss in tree))
        process.join(SAMPLE_SECONDS)
    if process.exitcode:
        raise SystemExit(f"{step.__name__} ended with {process.exitcode}")
    seconds = round(time.monotonic() - begun, 1)
    cpu = round(_children_cpu() - used, 1)
    found = {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "pss_mb": round(peak_pss / 1e6),
        "rss_mb": round(peak_rss / 1e6),
        **here.recv(),
    }
    sys.stderr.write(f"{step.__name__}: {found}\n")
    return found


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _run(step: Callable[..., dict[str, Any]], pipe: Any, *given: Any) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    pipe.send(step(*given))


def _tree(pid: int | None) -> list[tuple[int, int]]:
    found = []
    try:
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            memory = process.memory_full_info()
            found.append((memory.rss, memory.pss))
    except psutil.Error:
        pass
    return found


def main(target: Path, count: int, kind: str, steps: list[str]) -> None:
    work = Path(tempfile.mkdtemp(prefix="layertap-million-", dir=target.resolve().parent))
    try:
        os.chdir(work)
        path, output = work / "rows.jsonl", work / "out"
        output.mkdir()
        model = str(models.build("llama", work / "llama"))
        {"chat": make_chats, "ids": make_ids}[kind](path, count)
        made = {
            "schema": 1,
            "what": f"tests/bench/million_rows.py, {count:,} rows of {kind}, {path.stat().st_size / 1e6:.0f} MB of JSON lines",
            "machine": f"{parallel.default_workers()} cores, load {os.getloadavg()[0]:.1f} before, Python {platform.python_version()}",
            **{step.__name__: measure(step, path, model, output) for step in STEPS if step.__name__ in steps},
        }
    finally:
        shutil.rmtree(work)
    target.write_bytes(msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n")


if __name__ == "__main__":
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 1_000_000
    kind = sys.argv[3] if len(sys.argv) > 3 else "chat"
    main(Path(sys.argv[1]), count, kind, sys.argv[4:] or [step.__name__ for step in STEPS])
