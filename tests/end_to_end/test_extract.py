"""Rows in, a verified dataset out; and whatever is killed on the way, nothing is lost and nothing is there twice."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import pytest
from command import ENGINE, Layertap, shared_data, until, write_rows

GSM8K = ("--prompt-column", "question", "--response-column", "answer")
CUT = ("--max-length", "2048", "--overlong", "truncate")


def take(source: Path, target: Path, rows: int) -> Path:
    """The first rows of a JSONL or JSON array file."""
    if source.suffix == ".json":
        target.write_text(json.dumps(json.loads(source.read_text())[:rows]))
    else:
        target.write_text("".join(source.read_text().splitlines(keepends=True)[:rows]))
    return target


def check(layertap: Layertap, output: Path, samples: int, formats: tuple[str, ...] = ("native",)) -> None:
    """The dataset holds exactly `samples` samples, each once a format, and all verify."""
    report = layertap.json("verify", output)
    assert (report["samples"], report["verified"], report["failed"], report["failures"]) == (samples, samples, 0, [])
    assert report["total"] == samples
    for name in formats:
        files = [path for path in (output / name).rglob("*") if path.is_file()]
        assert len(files) == samples
    with sqlite3.connect(output / "ledger.sqlite") as ledger:
        assert ledger.execute("SELECT count(*) FROM files").fetchone() == (samples * len(formats),)
        assert ledger.execute("SELECT DISTINCT state FROM samples").fetchall() == [("written",)]


def history(layertap: Layertap) -> list[dict[str, Any]]:
    """What happened to the newest extraction."""
    return layertap.json("runs", layertap.run_of("extract")["id"])["events"]


@pytest.mark.parametrize(
    ("name", "options"),
    [("gsm8k_test.jsonl", GSM8K), ("mtbench_messages.jsonl", ()), ("sharegpt_dummy.json", ())],
)
def test_real_rows(layertap: Layertap, server: dict[str, Any], work: Path, name: str, options: tuple[str, ...]) -> None:
    rows = take(shared_data(name), work / name, 10)
    output = work / "out"
    made = layertap.json("extract", rows, "--output", output, "--format", "native,specforge", *options, *CUT)
    assert (made["samples"], made["written"], made["failed"], made["bad_rows"]) == (10, 10, 0, 0)
    check(layertap, output, 10, ("native", "specforge"))
    assert list(Path(server["dump_dir"]).glob("req_*")) == []


def test_every_format_by_extract_and_by_export(layertap: Layertap, server: dict[str, Any], work: Path) -> None:
    """What an extraction writes at once and what is exported later from native are the same files."""
    names = ("specforge", "speculators", "speculators-fp8", "speculators-legacy", "modelopt")
    rows, output, other = write_rows(work / "rows.jsonl", 7), work / "out", work / "other"
    layertap("extract", rows, "--output", output, "--format", ",".join(("native", *names)))
    report = layertap.json("verify", output)
    assert (report["verified"], report["failures"]) == (7, [])
    made = layertap.json("export", output, "--format", ",".join(names), "--output", other)
    assert (made["written"], made["failed"], made["missing"]) == (7, 0, 0)
    assert layertap.json("verify", other)["verified"] == 7
    for name in names:
        files = {path.relative_to(output) for path in (output / name).rglob("*") if path.is_file()}
        assert files == {path.relative_to(other) for path in (other / name).rglob("*") if path.is_file()}
        for path in files:
            if path.name != "state.json":  # it holds a number of its own each time
                assert (other / path).read_bytes() == (output / path).read_bytes(), path
    layertap("extract", rows, "--output", other, code=2)
    assert f"{other} was exported from {output}; extract into that" in layertap.narration
    assert "7 samples · 7 verified · 0 failed" in layertap("verify", other)
    assert layertap("diff", output, other).startswith("the same: 7 samples equal · 0 different · 0 only in ")
    assert layertap.json("verify", output / "specforge", "--sample", 3)["samples"] == 3
    layertap("export", output, "--format", "native", code=2)
    assert "was extracted in native already" in layertap.narration


def test_one_sample_token_by_token(layertap: Layertap, server: dict[str, Any], work: Path) -> None:
    rows, output = write_rows(work / "rows.jsonl", 3), work / "out"
    layertap("extract", rows, "--output", output, "--format", "native,specforge")
    seen = layertap.json("sample", output, 1)
    tokens = seen["sample"]["tokens"]
    assert (seen["sample"]["state"], seen["failures"], seen["no_text"], seen["left_out"]) == ("written", [], None, 0)
    assert len(seen["tokens"]) == tokens
    assert all(isinstance(token["text"], str) for token in seen["tokens"])
    assert {token["in_loss"] for token in seen["tokens"]} == {True, False}
    for state in seen["states"].values():
        assert (state["shape"][0], len(state["norms"]), state["dtype"]) == (tokens, tokens, "bfloat16")
        assert all(norm > 0 for norm in state["norms"])
    assert f"+ sample 1 written · rows.jsonl:2 · {tokens} tokens" in layertap("sample", output, 1)
    (output / "native/rows_0-2000/1.safetensors").write_bytes(b"broken")
    broken = layertap.json("sample", output, 1, code=1)
    assert broken["read"] == "specforge"
    assert [failure["format"] for failure in broken["failures"]] == ["native"]


def test_the_driver_is_killed_and_the_same_command_finishes(
    layertap: Layertap, server: dict[str, Any], work: Path
) -> None:
    rows, output = write_rows(work / "rows.jsonl", 250), work / "out"
    console = layertap.start("extract", rows, "--output", output)
    until(lambda: (now := layertap.progress(output)) and 0 < now["written"] < 200)
    os.kill(layertap.run_of("extract")["running"]["child"]["pid"], signal.SIGKILL)
    assert console.wait(60) == 9
    assert [event["event"] for event in history(layertap)] == ["started", "probed", "prepared", "ended"]
    assert history(layertap)[-1]["signal"] == signal.SIGKILL
    layertap("extract", rows, "--output", output)
    _, probed, prepared, finished, _ = history(layertap)
    assert (probed["passed"], probed["earlier"]) == (True, True)  # the killed run had it probed
    assert (prepared["resumed"], prepared["samples"], prepared["written"] > 0) == (True, 250, True)
    assert (finished["event"], finished["samples"], finished["written"]) == ("finished", 250, 250)
    check(layertap, output, 250)
    layertap("extract", rows, "--output", output)  # and once more: there is nothing to do
    check(layertap, output, 250)
    assert list(Path(server["dump_dir"]).glob("req_*")) == []


def test_the_writer_is_killed_and_the_run_goes_on(layertap: Layertap, server: dict[str, Any], work: Path) -> None:
    rows, output = write_rows(work / "rows.jsonl", 250), work / "out"
    console = layertap.start("extract", rows, "--output", output)
    until(lambda: (now := layertap.progress(output)) and 0 < now["written"] < 200)
    before = layertap.json("status")["dumps"]
    os.kill(before["writer_pids"][0], signal.SIGKILL)
    assert console.wait(200) == 0
    assert layertap.json("status")["dumps"]["writers_lost"] == before["writers_lost"] + 1
    check(layertap, output, 250)


def test_ctrl_c_leaves_the_run_and_the_command_attaches_again(
    layertap: Layertap, server: dict[str, Any], work: Path
) -> None:
    rows, output = write_rows(work / "rows.jsonl", 250), work / "out"
    console = layertap.start("extract", rows, "--output", output)
    until(lambda: layertap.progress(output))
    console.send_signal(signal.SIGINT)
    _, narration = console.communicate(timeout=60)
    assert console.returncode == 130
    assert "goes on; the same command attaches to it again" in narration
    layertap("extract", rows, "--output", output)
    assert "attached to extract-" in layertap.narration or "started extract-" in layertap.narration
    check(layertap, output, 250)


def test_other_settings_are_refused_and_named(layertap: Layertap, server: dict[str, Any], work: Path) -> None:
    rows, output = write_rows(work / "rows.jsonl", 3), work / "out"
    layertap("extract", rows, "--output", output)
    layertap("extract", rows, "--output", output, "--max-length", "64", "--format", "specforge", code=2)
    assert f"{output} was made with other settings" in layertap.narration
    assert "--max-length was None, now 64" in layertap.narration
    assert "--format was native, now specforge" in layertap.narration
    check(layertap, output, 3)


def test_a_pulled_copy_is_complete_and_is_not_extracted_into(
    layertap: Layertap, server: dict[str, Any], work: Path
) -> None:
    rows, output, copy = write_rows(work / "rows.jsonl", 6), work / "out", work / "copy"
    layertap("extract", rows, "--output", output, "--format", "native,specforge")
    made = layertap.json("pull", output, copy, "--samples", "1,3-4")
    assert (made["samples"], made["files"], made["failed"]) == (3, 6, [])
    report = layertap.json("verify", copy)
    assert (report["samples"], report["verified"]) == (3, 3)
    layertap("extract", rows, "--output", copy, "--format", "native,specforge", code=2)
    assert f"{copy} is a copy that was pulled; write into the dataset that it came from" in layertap.narration


def test_the_input_may_grow_and_may_not_shrink(layertap: Layertap, server: dict[str, Any], work: Path) -> None:
    rows, output = write_rows(work / "rows.jsonl", 5), work / "out"
    layertap("extract", rows, "--output", output)
    write_rows(rows, 8)
    layertap("extract", rows, "--output", output)
    check(layertap, output, 8)
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[2:]))
    layertap("extract", rows, "--output", output, code=2)
    assert f"2 rows of the earlier input are not there any more or read differently now, the first was {rows}:1" in (
        layertap.narration
    )
    check(layertap, output, 8)


def test_bad_rows_are_named_and_the_rest_is_drawn(layertap: Layertap, server: dict[str, Any], work: Path) -> None:
    rows, output = write_rows(work / "rows.jsonl", 4), work / "out"
    lines = rows.read_text().splitlines()
    rows.write_text("\n".join([lines[0], "{not json", lines[1], '{"text": "no shape"}', *lines[2:]]) + "\n")
    made = layertap.json("extract", rows, "--output", output, code=1)
    assert (made["written"], made["failed"], made["bad_rows"]) == (4, 0, 2)
    log = layertap("logs", layertap.run_of("extract")["id"])
    assert f"{rows}:2: " in log and f"{rows}:4: " in log
    check(layertap, output, 4)


def test_odd_rows_are_told_before_they_are_drawn_and_again_on_resume(
    layertap: Layertap, server: dict[str, Any], work: Path
) -> None:
    rows, output = write_rows(work / "rows.jsonl", 3), work / "out"
    lines = rows.read_text().splitlines()
    rows.write_text("\n".join([*lines, lines[0]]) + "\n")
    for _ in range(2):
        layertap("extract", rows, "--output", output)
        told = [event for event in history(layertap) if event["event"] in ("alarm", "prepared")]
        assert [(event["event"], event.get("id"), event.get("count")) for event in told] == [
            ("alarm", "duplicate", 1), ("prepared", None, None),
        ]  # fmt: skip
        assert f"(first {rows}:4, " in told[0]["text"]
    (alarm,) = json.loads((output / "manifest.json").read_text())["alarms"]
    assert [row["line"] for row in alarm["rows"]] == [4]
    check(layertap, output, 4)


def test_a_table_is_drawn_like_any_input(layertap: Layertap, server: dict[str, Any], work: Path) -> None:
    rows, output = write_rows(work / "rows.jsonl", 6), work / "out"
    to_parquet = "import sys, datasets; datasets.Dataset.from_json(sys.argv[1]).to_parquet(sys.argv[2])"
    (work / "parts").mkdir()
    subprocess.run([ENGINE, "-c", to_parquet, rows, work / "parts" / "a.parquet"], check=True, capture_output=True)
    made = layertap.json("extract", work / "parts", "--output", output)
    assert (made["written"], made["failed"], made["bad_rows"]) == (6, 0, 0)
    check(layertap, output, 6)


def test_the_server_is_killed_launched_again_and_the_run_goes_on(
    layertap: Layertap, server: dict[str, Any], work: Path
) -> None:
    rows, output = write_rows(work / "rows.jsonl", 250), work / "out"
    console = layertap.start("extract", rows, "--output", output)
    until(lambda: (now := layertap.progress(output)) and 0 < now["written"] < 200)
    tap = json.loads((Path(server["dump_dir"]) / "tap.json").read_text())
    os.kill(tap["pid"], signal.SIGKILL)
    _, narration = console.communicate(timeout=200)
    assert console.returncode == 9, narration
    assert "is dead; `layertap launch` it, then give the command again" in narration
    (lost,) = [event for event in history(layertap) if event["event"] == "server_lost"]
    assert "is dead; `layertap launch` it" in lost["reason"]
    layertap("extract", rows, "--output", output, code=None)  # refused in one way or another, and nothing is lost
    layertap("stop", server["id"])
    layertap.json("launch", "embedded-llama", "--port", server["port"])
    layertap("extract", rows, "--output", output)
    check(layertap, output, 250)
