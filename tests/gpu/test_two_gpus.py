"""Tensor parallel on two GPUs: every rank's bits, a rank that dies in mid-run, one that keeps the others waiting."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from engines import Engine, Engines
from shapes import BACKENDS, deepseek
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM
from tuning import tune

from backends import jobs, runs
from backends.embedded import models
from backends.gpus import Gpus
from backends.verdict.diagnose import Limits
from backends.verdict.watch import ServerWatch
from capture import probe
from capture.layers import LayerChoice
from capture.rows.tokenise import load_tokenizer

ARGS = BACKENDS | {"tp_size": 2, "context_length": 8200, "max_prefill_tokens": 16384, "max_total_tokens": 65536}
MEMORY = 8 << 30
POSITIONS = 16384
SHAPE = {"hidden": 1024, "max_position_embeddings": POSITIONS}
LENGTHS = [3, 64, 1500, 2500, 8192]  # on both sides of what all-reduce fusion takes


@pytest.fixture(scope="module", autouse=True)
def two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"there are {torch.cuda.device_count()} CUDA devices; two are needed")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deepseek(tmp_path_factory.mktemp("models") / "deepseek-v3", **SHAPE)


@pytest.fixture
def engine(engines: Engines, model: Path) -> Engine:
    return engines.get("base", model=model, layers=LayerChoice(boundaries=[2, 4, 5]), **ARGS, memory=MEMORY)


def probed(engine: Engine) -> probe.Probed:
    tokenizer = load_tokenizer(str(engine.model), False)
    return probe.probe(engine.server, engine.tap, engine.server.info(), tokenizer, print, most=LENGTHS[-1])


def test_both_ranks_have_the_same_bits(engine: Engine) -> None:
    found = probed(engine)
    print(found)
    assert found.failures == []
    assert (found.ranks, found.lengths) == (2, LENGTHS)


GLM = {
    "vocab_size": models.VOCABULARY, "hidden_size": 1024, "intermediate_size": 2048, "moe_intermediate_size": 256,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "max_position_embeddings": POSITIONS, "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GLM-4 MoE shape. Weights that SGLang makes up would be the same on both ranks, and so would partial sums."""
    folder = tmp_path_factory.mktemp("models") / "glm4-moe"
    models._save(folder, Glm4MoeForCausalLM, Glm4MoeConfig(**GLM))
    return folder


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DeepSeek-V3 shape without experts: fusion rounds otherwise, and a router would take another expert for that."""
    return deepseek(tmp_path_factory.mktemp("models") / "dense", **SHAPE, first_k_dense_replace=8)


@pytest.mark.parametrize(
    ("name", "fused", "partial"), [("glm", False, False), ("glm", True, True), ("dense", True, False)]
)
def test_the_probe_catches_partial_sums_where_fusion_leaves_them(
    engines: Engines, request: pytest.FixtureRequest, name: str, fused: bool, partial: bool
) -> None:
    """GLM-4 MoE appends what a layer returned before its all-reduce up to SGLang 0.5.20; DeepSeek does so no more."""
    on = {"enforce_disable_flashinfer_allreduce_fusion": None, "flashinfer_allreduce_fusion_backend": "trtllm"}
    engine = engines.get(
        "base",
        model=request.getfixturevalue(name),
        layers=LayerChoice(boundaries=[2, 4, 5]),
        **ARGS,
        memory=MEMORY,
        **(on if fused else {}),
    )
    found = probed(engine)
    print(name, fused, *found.failures, sep="\n")
    if fused:
        assert "FlashInfer AllReduce Fusion enabled and workspace initialized" in engine.log()
    if not partial:
        assert found.failures == []
        return
    assert found.failures
    assert {failure.split(" tokens ")[0].split(" tokens:")[0] for failure in found.failures} <= {"3", "64", "1,500"}
    assert any("differs between rank 0 and rank 1" in failure for failure in found.failures)


def rank_process(engine: Engine, rank: int) -> psutil.Process:
    assert engine.run.running is not None
    for process in psutil.Process(engine.run.running.child.pid).children(recursive=True):
        if f"TP{rank}" in " ".join([process.name(), *process.cmdline()]):
            return process
    raise AssertionError(f"rank {rank} is not there")


@pytest.fixture
def traffic(engine: Engine) -> Iterator[None]:
    """Strangers' prompts, one after another, whose answers nobody waits for."""
    over = threading.Event()

    def send(number: int) -> None:
        body = {"sampling_params": {"max_new_tokens": 0}, "input_ids": [9 + i % 900 for i in range(4000)]}
        while not over.is_set():
            try:
                engine.post("/generate", body | {"rid": f"stranger.{number}.{time.monotonic_ns()}"})
            except OSError:
                return

    threads = [threading.Thread(target=send, args=(number,), daemon=True) for number in range(8)]
    for thread in threads:
        thread.start()
    yield
    over.set()


def test_a_rank_that_keeps_the_other_waiting_is_seen_by_power(engine: Engine, traffic: None) -> None:
    gpus = Gpus()
    watch = ServerWatch(engine.run, gpus=lambda pids: gpus.sample(pids).gpus, limits=Limits().scaled(0.25))
    while watch.look()["verdict"]["verdict"] != "healthy":
        time.sleep(0.5)
    rank = rank_process(engine, 1)
    rank.send_signal(signal.SIGSTOP)
    begun, seen = time.monotonic(), []
    try:
        while time.monotonic() < begun + 90:
            now = watch.look()["verdict"]
            sample = [
                (gpu.index, gpu.utilisation_percent, gpu.power_watts, gpu.power_limit_watts)
                for gpu in gpus.sample().gpus
            ]
            seen.append({"seconds": round(time.monotonic() - begun, 1), "gpus": sample} | now)
            if now["verdict"] == "hang_suspected" and any(" W)" in sentence for sentence in now["evidence"]):
                break
            time.sleep(1.0)
    finally:
        rank.send_signal(signal.SIGCONT)
    print(json.dumps(seen, indent=1))
    assert seen[-1]["verdict"] == "hang_suspected"
    assert any("GPU 1 idle while the others are at 100 %" in sentence for sentence in seen[-1]["evidence"])
    assert "healthy" not in [look["verdict"] for look in seen[-3:]]


def test_a_rank_that_is_killed_in_mid_run_ends_the_run_and_leaves_nothing(
    engines: Engines, engine: Engine, tmp_path: Path
) -> None:
    source = tmp_path / "rows.jsonl"
    with source.open("w") as file:
        for n in range(2000):
            ids = [(31 * n + 17 * i) % 1000 + 9 for i in range(100 + n % 200)]
            file.write(json.dumps({"input_ids": ids, "loss_mask": [1] * len(ids)}) + "\n")
    job = {
        "rows": str(source), "output": str(tmp_path / "out"), "formats": ["native"], "options": {}, "layertap": "test",
        "allow_volatile": True,
    }  # fmt: skip
    run = jobs.start_job(engines.runs, engines.payload, "extract", job, engine.run.spec.port)
    while written(run) < 100:
        assert run.exit is None, run.log.read_text()[-2000:]
        time.sleep(0.05)
    assert engine.run.running is not None
    server = psutil.Process(engine.run.running.child.pid)
    held = on_gpus() & {server.pid, *(process.pid for process in server.children(recursive=True))}
    os.kill(rank_process(engine, 1).pid, signal.SIGKILL)
    deadline = time.monotonic() + 120
    while run.exit is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    print(run.log.read_text()[-1500:])
    assert run.exit.code == 9
    engines.alive = {key: alive for key, alive in engines.alive.items() if alive is not engine}
    engines.stop_all()
    stopped = runs.stop(engine.run, "a rank was killed")
    print(stopped)
    assert stopped.left == []
    assert not on_gpus() & held

    again = engines.get("base", model=engine.model, layers=LayerChoice(boundaries=[2, 4, 5]), **ARGS, memory=MEMORY)
    run = jobs.start_job(engines.runs, engines.payload, "extract", job, again.run.spec.port)
    while run.exit is None:
        time.sleep(0.1)
    assert run.exit.code == 0, run.log.read_text()[-2000:]
    assert written(run) == 2000
    made = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert [one["probe"]["run"] for one in (*made["earlier"], made)] == [engine.run.id, again.run.id]
    assert made["gpus"] == [torch.cuda.get_device_name(0)]
    assert len(held) == 2  # else NVML names processes by other numbers, and nothing was shown above


def test_tuning_knows_what_the_bus_lets_through(engines: Engines, model: Path) -> None:
    """Settings of NCCL are tried on servers, and each with the bandwidth of an all-reduce under it."""
    tuned = tune(engines, model, ARGS, only=["nccl-16-channels"])
    profile, variant = tuned.trials
    print(*map(msgspec.json.encode, tuned.trials), sep="\n")
    assert (variant.name, variant.base, variant.failure) == ("nccl-16-channels", profile.name, None)
    for trial in tuned.trials:
        assert trial.tokens_per_second is not None and trial.ceiling is not None
        assert 1000 < trial.tokens_per_second < trial.ceiling


def on_gpus() -> set[int]:
    return {process.pid for gpu in Gpus().sample().gpus for process in gpu.processes or []}


def written(run: Any) -> int:
    try:
        return int(json.loads((run.folder / "progress.json").read_text())["written"])
    except (OSError, ValueError, KeyError):
        return 0
