"""What the tap costs, against no tap and against the other ways to a model's states, in one run on one GPU.

usage: python tests/bench/tap.py FILE [RANKS [ROWS [LAYERS]]]  in SGLang's environment; prints a table, writes FILE (JSON)

no tap            prompts of a stranger, which the tap lets pass: the ceiling
captured          the states collected in the forward, and dropped
copied            ... and copied into pinned memory
tap               ... and written as dumps, which the client deletes: the whole tap
in the forward    each state by `.cpu()` and `torch.save` before the forward goes on, as a first patch would
JSON              SGLang's own `return_hidden_states`, which gives the last layer only
transformers      a loop of Hugging Face forwards, one prompt at a time, without and with saving the states

The model has 11 layers, 7168 wide (DeepSeek-V3's shape, weights made up): on an H200 it makes 15 GB/s of states, far more
than any real one of that width, and so what does not show here shows nowhere; with 8 it makes 20. Ratios are those of medians over rounds in which the
ways follow one another. With several RANKS, other ROWS a round or LAYERS than usual, only no tap and tap are compared, on
the server as it is launched. Beside them is how large the forwards were, so that a way that keeps prompts from the server
shows, and their milliseconds: of the layers on the GPU, and between one forward's and the next one's, where SGLang's
thread works and the GPU waits.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import ways
from stress import (
    BOUNDARIES,
    FORWARD,
    LIMITS,
    MEMORY,
    TOKEN_BYTES,
    TOKENS,
    WIDTHS,
    Cores,
    Engine,
    Watched,
    build,
    gigabytes_per_second,
    machine,
    prefill,
    prompts,
    running,
    served,
    write_rows,
)  # fmt: skip

ROUNDS = 3
ROWS = 768  # so many that the first forward and what follows the last one, 0.3 s, are 4 % of a round
LAYERS = 11
EXTRACT_ROWS = 384
SLOW_ROWS = 48  # for a way of a twentieth of the pace
JSON_ROWS = 1  # whose answer has 160 MB
DISK_ROWS = 64
USUAL = {"ranks": 1, "rows": ROWS, "layers": LAYERS}
SERVERS: dict[str, dict[str, Any]] = {  # what is different from the base profile
    "as launched": {"enable_return_hidden_states": True},  # for the way by JSON
    "overlap schedule": {"disable_overlap_schedule": None},
}
WAYS = {"no tap": None, "captured": ways.CAPTURED, "copied": ways.COPIED, "tap": ""}


class Compared:
    """Tokens/s by way, every round's."""

    def __init__(self, engine: Engine, way: Path) -> None:
        self.engine, self.way = engine, way
        self.rounds: dict[str, list[int]] = {}
        self.cores: dict[str, dict[str, float]] = {}
        self.forwards: dict[str, list[float]] = {}
        self.milliseconds: dict[str, list[dict[str, Any]]] = {}

    def go(self, name: str, asked: list[list[int]]) -> None:
        way = WAYS.get(name, ways.IN_THE_FORWARD)
        self.way.write_text(way or "")
        steps = self.way.with_name("forwards.jsonl")
        steps.unlink(missing_ok=True)
        cores, place = Cores(self.engine), self.engine.run.log.stat().st_size
        rate = asyncio.run(prefill(self.engine, asked, tapped=way is not None, dropped=bool(way)))
        self.rounds.setdefault(name, []).append(round(rate))
        self.cores[name] = cores.used()
        self.way.write_text("")
        forwards = forward_tokens(self.engine.run.log, place)
        self.forwards.setdefault(name, []).append(forwards)
        self.milliseconds.setdefault(name, []).append(medians_of(steps))
        print(f"{name}: {rate:,.0f} tokens/s, {forwards:,} a forward, cores {self.cores[name]}, "
              f"milliseconds {self.milliseconds[name][-1]}", flush=True)  # fmt: skip

    def figures(self) -> dict[str, Any]:
        medians = {name: statistics.median(rates) for name, rates in self.rounds.items()}
        return {
            "tokens_per_second": medians,
            "gb_per_second": {name: gigabytes_per_second(rate * TOKEN_BYTES, 1) for name, rate in medians.items()},
            "ratios": {name: round(rate / medians["no tap"], 4) for name, rate in medians.items()},
            "rounds": self.rounds,
            "tokens_per_forward": self.forwards,
            "milliseconds": self.milliseconds,
            "cores": self.cores,
        }


def forward_tokens(log: Path, place: int) -> float:
    """How many tokens a forward had, by what the server logged from byte `place` on; its mean."""
    with log.open("rb") as file:
        file.seek(place)
        lines = [line for line in file if b"Prefill batch" in line and b"#new-token: " in line]
    counts = [int(line.split(b"#new-token: ")[1].split(b",")[0]) for line in lines]
    return round(statistics.fmean(counts), 1) if counts else 0.0


def medians_of(steps: Path) -> dict[str, float]:
    """The median milliseconds of whole forwards, as the plugin wrote them."""
    lines = [json.loads(line) for line in steps.read_text().splitlines()] if steps.exists() else []
    whole = [line for line in lines if line["tokens"] > FORWARD // 2]
    return {key: round(statistics.median(line[key] for line in whole), 2) for key in ("gpu", "between") if whole}


def in_json(engine: Engine, asked: list[list[int]]) -> float:
    """Tokens/s where SGLang answers with the last layer's states."""
    body = {"sampling_params": {"max_new_tokens": 1, "temperature": 0}, "return_hidden_states": True}
    begun = time.perf_counter()
    for row, ids in enumerate(asked):
        answer = engine.post("/generate", body | {"input_ids": ids, "rid": f"stranger.json.{begun}.{row}"})
        assert len(answer["meta_info"]["hidden_states"][0]) == len(ids)
    return len(asked) * TOKENS / (time.perf_counter() - begun)


def with_transformers(model: Path, asked: list[list[int]]) -> dict[str, float]:
    """Tokens/s of a Hugging Face forward after another, without and with saving the states to tmpfs."""
    from transformers import AutoConfig, DeepseekV3ForCausalLM

    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        loaded = DeepseekV3ForCausalLM(AutoConfig.from_pretrained(model)).eval()
    torch.set_default_dtype(torch.float32)
    found = {}
    for name, save in (("transformers", False), ("transformers, saved", True)):
        for part in (asked[:2], asked):  # the first compiles kernels
            begun = time.perf_counter()
            with torch.no_grad(), tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                for ids in part:
                    hidden = loaded.model(torch.tensor([ids], device="cuda"), output_hidden_states=True).hidden_states
                    if save:
                        for number, state in enumerate([*(hidden[b] for b in BOUNDARIES), hidden[-1], hidden[-2]]):
                            torch.save(state[0].cpu(), Path(folder) / f"{number}.pt")
                torch.cuda.synchronize()
            found[name] = len(part) * TOKENS / (time.perf_counter() - begun)
        print(f"{name}: {found[name]:,.0f} tokens/s", flush=True)
    del loaded
    torch.cuda.empty_cache()  # the servers come after
    return found


def measure(model: Path, folder: Path, ranks: int, rows: int, usual: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each server and its figures, as they are known."""
    asked = prompts(rows)
    names = [*WAYS] if usual else ["no tap", "tap"]
    plugin = folder / "plugin"
    plugin.mkdir()
    environment = {f"ENV_{name}": value for name, value in ways.environment(plugin).items()}
    with running() as engines:
        for server, other in SERVERS.items() if usual else [("as launched", {})]:
            args = LIMITS | environment | {"mem_fraction_static": 0.6, "tp_size": ranks} | other
            with served(engines, model, memory=MEMORY, **args) as engine:
                compared = Compared(engine, plugin / "way")
                for name in names:  # compiles kernels, touches pages
                    compared.go(name, asked[:128])
                for warm in (compared.rounds, compared.forwards, compared.milliseconds):
                    warm.clear()
                print(f"--- {server}", flush=True)
                for _ in range(ROUNDS):
                    waited = engine.tap.slot_wait_seconds
                    for name in names:
                        compared.go(name, asked)
                    time.sleep(0.5)  # tap.json is renewed a few times a second
                    print(f"waited for slots: {engine.tap.slot_wait_seconds - waited:.2f} s", flush=True)
                if usual and args.get("enable_return_hidden_states"):
                    compared.go("in the forward", asked[:SLOW_ROWS])
                    compared.rounds["JSON"] = [round(in_json(engine, asked[:JSON_ROWS]))]
                    print(f"JSON: {compared.rounds['JSON'][0]:,} tokens/s", flush=True)
                figures = compared.figures() | {"writers": len(engine.tap.writer_pids), "slots": engine.tap.slots}
                if usual and server == "as launched":
                    figures["extract"] = extracted(engines, engine, folder, asked, figures)
                yield server, figures


def extracted(engines: Any, engine: Engine, folder: Path, asked: list[list[int]], figures: Any) -> dict[str, Any]:
    """Whole extractions, to tmpfs and to disk."""
    found = {}
    for where, count, parent in (("tmpfs", EXTRACT_ROWS, "/dev/shm"), ("disk", DISK_ROWS, None)):
        source = write_rows(folder / "rows.jsonl", asked[:count])
        with tempfile.TemporaryDirectory(prefix="layertap-bench-", dir=parent) as output:
            found[where] = Watched(engines, engine, source, Path(output) / "out").figures
        found[where]["ratio"] = round(found[where]["tokens_per_second"] / figures["tokens_per_second"]["no tap"], 4)
        print(f"extract to {where}: {found[where]}", flush=True)
    return found


def table(found: dict[str, Any]) -> str:
    lines = []
    for server, figures in found.items():
        lines.append(f"{server:<32}{'tokens/s':>12}{'GB/s':>8}{'ratio':>9}")
        for name, rate in figures["tokens_per_second"].items():
            lines.append(
                f"  {name:<30}{rate:>12,.0f}{figures['gb_per_second'][name]:>8}{figures['ratios'][name]:>9.1%}"
            )
    return "\n".join(lines)


def main(path: Path, ranks: int = 1, rows: int = ROWS, layers: int = LAYERS) -> None:
    folder = Path(tempfile.mkdtemp(prefix="layertap-bench-"))
    servers: dict[str, Any] = {}
    asked = {"ranks": ranks, "rows": rows, "layers": layers}
    result = {"schema": 1, "what": "tests/bench/tap.py"} | asked | {"widths": WIDTHS} | machine()
    usual = asked == USUAL
    try:
        model = build(folder / "model", layers)
        transformers = with_transformers(model, prompts(16)) if usual else {}
        for name, figures in measure(model, folder, ranks, rows, usual):
            if name == "as launched":
                for way, rate in transformers.items():
                    figures["tokens_per_second"][way] = round(rate)
                    figures["gb_per_second"][way] = gigabytes_per_second(rate * TOKEN_BYTES, 1)
                    figures["ratios"][way] = round(rate / figures["tokens_per_second"]["no tap"], 4)
            servers[name] = figures
            keep(path, result, servers)
    finally:
        shutil.rmtree(folder)


def keep(path: Path, result: dict[str, Any], servers: dict[str, Any]) -> None:
    """Write what is known by now, and show it."""
    whole = result | {"ratios": servers["as launched"]["ratios"], "servers": servers}
    path.write_text(json.dumps(whole, indent=1) + "\n")
    print(table(servers), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
