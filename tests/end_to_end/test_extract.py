"""Rows in, a verified dataset out."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from checks import check, history
from command import ENGINE, Layertap, shared_data, write_rows

GSM8K = ("--prompt-column", "question", "--response-column", "answer")
CUT = ("--max-length", "2048", "--overlong", "truncate")


def take(source: Path, target: Path, rows: int) -> Path:
    """The first rows of a JSONL or JSON array file."""
    if source.suffix == ".json":
        target.write_text(json.dumps(json.loads(source.read_text())[:rows]))
    else:
        target.write_text("".join(source.read_text().splitlines(keepends=True)[:rows]))
    return target


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
