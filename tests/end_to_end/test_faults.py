"""Faults in the data and on the disks: nothing lost, nothing twice, nothing bad written. Minutes long."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checks import check, history
from command import Layertap, shared_data, until, write_rows
from test_extract import CUT, GSM8K, take
from tmpfs import small_tmpfs

from backends.ports import free_port

pytestmark = pytest.mark.slow


def damage_truncate(folder: Path) -> None:
    path = folder / "aux_1.pt"
    path.write_bytes(path.read_bytes()[:-8])


def damage_flip(folder: Path) -> None:
    data = bytearray((folder / "final.pt").read_bytes())
    data[len(data) // 2] ^= 0xFF
    (folder / "final.pt").write_bytes(data)


def damage_unmark(folder: Path) -> None:
    (folder / "done").unlink()


def damage_swap(folder: Path) -> None:
    other = next(path for path in folder.parent.glob("req_*") if path != folder and (path / "meta.json").exists())
    shutil.copy(other / "meta.json", folder / "meta.json")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damage_truncate, "bytes, "),
        (damage_flip, "was changed after it was written"),
        (damage_unmark, "has no done mark"),
        (damage_swap, "belongs to request"),
    ],
)
def test_a_damaged_dump_is_drawn_again(
    layertap: Layertap, server: dict[str, Any], work: Path, damage: Callable[[Path], None], reason: str
) -> None:
    rows, output = write_rows(work / "rows.jsonl", 300), work / "out"
    console = layertap.start("extract", rows, "--output", output)
    until(lambda: (now := layertap.progress(output)) and now["written"] > 0)
    driver = layertap.run_of("extract")["running"]["child"]["pid"]
    os.kill(driver, signal.SIGSTOP)
    dumps = Path(server["dump_dir"])
    whole = until(lambda: [path.parent for path in dumps.glob("req_*/done")][1:])
    damage(whole[0])
    os.kill(driver, signal.SIGCONT)
    assert console.wait(300) == 0
    again = [
        line for line in layertap("logs", layertap.run_of("extract")["id"]).splitlines() if " is drawn again: " in line
    ]
    assert len(again) == 1 and reason in again[0], again
    (retry,) = [event for event in history(layertap) if event["event"] == "retry"]
    assert reason in retry["reason"]
    check(layertap, output, 300)


def test_rows_whose_states_are_not_finite_fail_and_the_rest_is_written(
    layertap: Layertap, server: dict[str, Any], work: Path
) -> None:
    source = next((layertap.folder / "cache" / "layertap" / "models").glob("llama-*"))
    model = shutil.copytree(source, work / "model")
    token = poison(model)
    rows, output = work / "rows.jsonl", work / "out"
    good = {"input_ids": [20, 30, 40], "loss_mask": [0, 1, 1]}
    bad = {"input_ids": [20, token, 40], "loss_mask": [0, 1, 1]}
    rows.write_text("".join(json.dumps(row) + "\n" for row in (good, bad, {**good, "input_ids": [21, 31, 41]})))
    port = free_port()
    run = layertap.json("launch", "embedded-llama", "--model", model, "--port", port)
    try:
        made = layertap.json("extract", rows, "--output", output, "--port", port, code=1)
        assert (made["written"], made["failed"]) == (2, 1)
        (failure,) = made["failures"]
        assert failure["sample"] == 1
        assert "holds values that are not finite, first in row" in failure["reason"]
        (failed,) = [event for event in history(layertap) if event["event"] == "failed"]
        assert (failed["sample"], failed["reason"]) == (1, failure["reason"])
        report = layertap.json("verify", output, code=1)
        assert (report["verified"], [failed["sample"] for failed in report["failures"]]) == (2, [1])
        assert len(list((output / "native").rglob("*.safetensors"))) == 2
        first = layertap.json("sample", output, 1, code=1)["sample"]
        assert (first["state"], first["reason"]) == ("failed", failure["reason"])
        # The same command draws what failed again, and leaves alone what is written.
        made = layertap.json("extract", rows, "--output", output, "--port", port, code=1)
        assert (made["written"], made["failed"]) == (2, 1)
        again = layertap.json("sample", output, 1, code=1)["sample"]
        assert again["attempts"] == 2 * first["attempts"]
    finally:
        layertap("stop", run["id"])


def poison(model: Path) -> int:
    """Make the embedding of one token NaN; returns the token."""
    token, path = 500, model / "model.safetensors"
    data = bytearray(path.read_bytes())
    (head,) = struct.unpack("<Q", data[:8])
    entry = json.loads(data[8 : 8 + head])["model.embed_tokens.weight"]
    width = entry["shape"][1]
    at = 8 + head + entry["data_offsets"][0] + token * width * 2
    data[at : at + 2 * width] = b"\xc0\x7f" * width
    path.write_bytes(data)
    return token


def test_a_full_output_disk_stops_the_run_and_loses_nothing(
    layertap: Layertap, server: dict[str, Any], work: Path
) -> None:
    rows = write_rows(work / "rows.jsonl", 200)
    with small_tmpfs(work / "disk", "6m") as disk:
        output = disk / "out"
        layertap("extract", rows, "--output", output, "--allow-volatile", code=1)
        assert f"{output} is full; nothing is lost: make room and give the same command again" in layertap.narration
        assert not list(output.rglob("*.part"))
        subprocess.run(["mount", "-o", "remount,size=200m", str(disk)], check=True)
        layertap("extract", rows, "--output", output, "--allow-volatile")
        check(layertap, output, 200)


def test_a_full_dump_folder_slows_or_fails_requests_and_never_the_server(layertap: Layertap, work: Path) -> None:
    rows, output = write_rows(work / "rows.jsonl", 12), work / "out"
    with small_tmpfs(work / "shm", "120m") as shm:
        config = work / "layertap.toml"
        config.write_text(f'[host.local]\ndump_dir = "{shm}"\n')
        port = free_port()
        run = layertap.json("launch", "embedded-llama", "--port", port, "--config", config)
        dumps = Path(run["dump_dir"])
        filler = dumps / "filler"
        try:
            layertap("probe", "--port", port)  # the extraction need not, and so comes to its own samples
            free = shutil.disk_usage(dumps).free
            with filler.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, free - (16 << 20) - 100_000)
            layertap("extract", rows, "--output", output, "--port", port, code=1)
            reasons = [failure["reason"] for failure in layertap.json("verify", output, code=1)["failures"]]
            assert len(reasons) == 12
            assert all("bytes are needed, " in reason and f" are free on {dumps}" in reason for reason in reasons)
            assert layertap.json("status", "--port", port)["server"]["verdict"]["verdict"] == "healthy"
            filler.unlink()
            layertap("extract", rows, "--output", output, "--port", port)
            check(layertap, output, 12)
        finally:
            layertap("stop", run["id"])


def test_a_prefix_from_the_cache_is_refused_by_the_gate_and_said_by_try(layertap: Layertap, work: Path) -> None:
    port = free_port()
    run = layertap.json("launch", "embedded-llama", "--port", port, "--set", "disable-radix-cache=false")
    try:
        layertap("extract", write_rows(work / "rows.jsonl", 2), "--output", work / "out", "--port", port, code=6)
        assert "the prefix cache is on, so shared prefixes would not be computed" in layertap.narration
        assert [event["id"] for event in history(layertap) if event["event"] == "gate"] == ["radix"]
        layertap("try", "Some words, twice.", "--port", port)
        layertap("try", "Some words, twice.", "--port", port, code=1)
        assert "tokens were not computed but came from a prefix cache" in layertap.narration
    finally:
        layertap("stop", run["id"])


@pytest.mark.parametrize(
    ("name", "options", "rows"),
    [("gsm8k_test.jsonl", GSM8K, 200), ("mtbench_messages.jsonl", (), 30), ("sharegpt_dummy.json", (), 50)],
)
def test_real_rows_in_number(
    layertap: Layertap, server: dict[str, Any], work: Path, name: str, options: tuple[str, ...], rows: int
) -> None:
    source, output = take(shared_data(name), work / name, rows), work / "out"
    made = layertap.json("extract", source, "--output", output, "--format", "native,specforge", *options, *CUT)
    assert (made["samples"], made["written"], made["failed"], made["bad_rows"]) == (rows, rows, 0, 0)
    check(layertap, output, rows, ("native", "specforge"))
