"""`layertap probe`, and the probe that an extraction asks for itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from command import Layertap, write_rows


def test_a_probe_in_words_and_what_the_manifest_keeps_of_it(
    layertap: Layertap, server: dict[str, Any], work: Path
) -> None:
    said = layertap("probe")
    assert "+ probe passed: prompts of 3, 64, 1,500 and 2,049 tokens on one rank" in said
    assert "tensors: outputs of layers 1, 3, 4, which are Hugging Face's hidden_states[2, 4, 5]" in said
    assert "drafter's config: eagle_aux_hidden_state_layer_ids = [1, 3, 4] under this SGLang" in said
    rows, output = write_rows(work / "rows.jsonl", 3), work / "out"
    layertap("extract", rows, "--output", output)
    kept = json.loads((output / "manifest.json").read_text())["probe"]
    assert (kept["passed"], kept["lengths"], kept["run"]) == (True, [3, 64, 1500, 2049], server["id"])
    (event,) = [one for one in _history(layertap) if one["event"] == "probed"]
    assert (event["passed"], event["earlier"]) == (True, True)  # it was not asked twice
    assert list(Path(server["dump_dir"]).glob("rank_*")) == []


def test_a_probe_during_an_extraction_is_refused(layertap: Layertap, server: dict[str, Any], work: Path) -> None:
    rows, output = write_rows(work / "rows.jsonl", 250), work / "out"
    console = layertap.start("extract", rows, "--output", output)
    layertap.until_under_way(output)
    layertap("probe", code=7)
    assert f"another job draws from the server {server['id']}" in layertap.narration
    assert console.wait(200) == 0


def _history(layertap: Layertap) -> list[dict[str, Any]]:
    return list(layertap.json("runs", layertap.run_of("extract")["id"])["events"])
