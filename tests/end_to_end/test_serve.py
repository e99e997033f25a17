"""A server's life: launched, seen from another console, tried, refused a second time, stopped with proof."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from command import Layertap, shared_data, until

from backends.ports import free_port


def test_status_says_where_the_start_went_and_why_it_is_healthy(layertap: Layertap, server: dict[str, Any]) -> None:
    now = layertap.json("status")
    assert now["schema"] == 1
    assert now["server"]["verdict"]["verdict"] == "healthy"
    assert now["server"]["layers"] == "outputs of layers 1, 3, 4 (boundaries 2, 4, 5)"
    reached = [phase["id"] for phase in now["server"]["phases"]]
    assert reached[0] == "args" and reached[-1] == "ready" and {"weights", "kv", "http", "warm_up"} <= set(reached)
    evidence = now["server"]["verdict"]["evidence"]
    assert f"port {server['port']} open, listener is this run" in evidence
    assert any(line.startswith("/health 200") for line in evidence)
    assert any(line.startswith("rank scheduler") for line in evidence)


def test_a_second_launch_on_the_port_is_refused(layertap: Layertap, server: dict[str, Any]) -> None:
    layertap("launch", "embedded-llama", "--port", server["port"], code=7)
    assert f"a server of ours runs on port {server['port']} already: {server['id']}" in layertap.narration


def test_try_shows_every_token_with_its_states(layertap: Layertap, server: dict[str, Any]) -> None:
    made = layertap.json("try", "Hello world")
    assert "".join(token["text"] for token in made["tokens"]) == "Hello world"
    assert made["rows"] == len(made["tokens"])
    assert made["findings"] == []
    assert list(made["states"]) == ["aux_0", "aux_1", "aux_2", "final", "last"]
    for state in made["states"].values():
        assert state["shape"] == [made["rows"], 128]
        assert state["dtype"] == "bfloat16"
        assert len(state["norms"]) == made["rows"] and min(state["norms"]) > 0
    text = layertap("try", "Hello world")
    assert f"{made['rows']} tokens sent · {made['rows']} rows in every tensor" in text
    assert "output of layer 1" in text and "last layer, after the final norm" in text


def test_plan_shows_the_mask_before_any_gpu_time(layertap: Layertap, server: dict[str, Any], work: Path) -> None:
    rows = shared_data("gsm8k_test.jsonl")
    columns = ("--prompt-column", "question", "--response-column", "answer")
    made = layertap.json("plan", rows, "--output", work / "out", "--format", "native,specforge", *columns)
    assert (made["rows"], made["samples"], made["bad"]) == (1319, 1319, 0)
    assert made["bytes_per_token"] == {"native": 2 * 128 * 5 + 16, "specforge": 2 * 128 * 4 + 16}
    assert made["total_bytes"]["native"] == made["tokens"] * (2 * 128 * 5 + 16)
    assert made["fits"] is True
    assert "<|im_assistant|>assistant<|im_middle|>[Janet sells 16 - 3 - 4" in made["preview"]["text"]
    assert made["preview"]["text"].endswith("#### 18<|im_end|>]")


def test_the_log_hides_the_key_of_the_server(layertap: Layertap, server: dict[str, Any]) -> None:
    log = layertap("logs")
    assert "The server is fired up and ready to roll!" in log
    assert "layertap: the tap is in, drawing outputs of layers 1, 3, 4 (boundaries 2, 4, 5)" in log


def test_only_our_user_sees_a_run(layertap: Layertap, server: dict[str, Any]) -> None:
    folder = Path(server["folder"])
    for path in [folder, *folder.iterdir(), Path(server["dump_dir"])]:
        assert os.stat(path).st_mode & 0o077 == 0, path


def test_a_start_that_fails_says_the_cause(layertap: Layertap) -> None:
    made = layertap.json("launch", "embedded-llama", "--port", free_port(), "--set", "no-such-flag=1", code=6)
    assert made["verdict"]["verdict"] == "crashed"
    assert any("unrecognized arguments: --no-such-flag 1" in line for line in made["verdict"]["evidence"])
    assert until(lambda: layertap.runs()[0]["exit"])["code"] == 2


def test_a_strangers_port_is_refused_before_anything_starts(layertap: Layertap) -> None:
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        before = len(layertap.runs())
        layertap("launch", "embedded-llama", "--port", port, code=7)
        assert f"port {port} is taken by a process that is not ours" in layertap.narration
        assert len(layertap.runs()) == before
