"""The main job in one command, and what verification says when its result is tampered with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import Layertap


@pytest.fixture(scope="module")
def demo(layertap: Layertap) -> Path:
    output = layertap.folder / "layertap-demo"
    (output / "native").mkdir(parents=True)
    rows = "/elsewhere/host/backends/embedded/conversations.jsonl"
    earlier = {"profile": "embedded-llama", "input": rows, "settings": {"formats": ["native"]}}
    (output / "manifest.json").write_text(json.dumps(earlier))  # an earlier demo, to be replaced
    (output / "native" / "stale").touch()
    said = layertap("demo").splitlines()
    assert said[-1].startswith("demo: 24 samples written, 24 verified, 0 failed; native and specforge in ")
    assert not (output / "native" / "stale").exists()
    return output


def test_both_formats_hold_every_sample(layertap: Layertap, demo: Path) -> None:
    assert len(list(demo.glob("native/rows_0-2000/*.safetensors"))) == 24
    assert len(list(demo.glob("specforge/rows_0-2000/data_*.ckpt"))) == 24
    manifest = json.loads((demo / "manifest.json").read_text())
    assert manifest["settings"]["layers"]["boundaries"] == [3, 31, 59]
    assert manifest["settings"]["layers"]["outputs"] == [2, 30, 58]
    assert manifest["settings"]["layers"]["serve_ids"] == [3, 31, 59]
    assert manifest["norms"]["final"] == "after the final norm"
    assert manifest["norms"]["last"] == "before the final norm"
    assert manifest["counts"]["written"] == 24
    assert (manifest["probe"]["passed"], manifest["probe"]["failures"]) == (True, [])
    assert manifest["probe"]["layers"] == manifest["settings"]["layers"]
    assert "api_key" not in manifest["server"]


def test_the_server_is_gone(layertap: Layertap, demo: Path) -> None:
    server = next(run for run in layertap.runs() if run["kind"] == "server")
    assert server["state"] == "exited"
    assert not Path(server["dump_dir"]).exists()


def test_verify_names_just_the_damaged_samples(layertap: Layertap, demo: Path) -> None:
    report = layertap.json("verify", demo)
    assert (report["samples"], report["verified"], report["failed"], report["failures"]) == (24, 24, 0, [])
    kept = {}

    def keep(path: Path) -> Path:
        kept[path] = path.read_bytes()
        return path

    flipped = keep(demo / "native/rows_0-2000/3.safetensors")
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 1
    flipped.write_bytes(data)
    cut = keep(demo / "specforge/rows_0-2000/data_5.ckpt")
    cut.write_bytes(cut.read_bytes()[:-100])
    keep(demo / "native/rows_0-2000/7.safetensors").unlink()
    keep(demo / "specforge/rows_0-2000/data_7.ckpt").unlink()
    report = layertap.json("verify", demo, code=1)
    assert (report["samples"], report["verified"], report["failed"]) == (24, 21, 3)
    assert [(failure["sample"], failure["format"]) for failure in report["failures"]] == [
        (3, "native"),
        (5, "specforge"),
        (7, "native"),
        (7, "specforge"),
    ]
    assert "checksum differs" in report["failures"][0]["reason"]
    assert "were written" in report["failures"][1]["reason"]
    assert "is missing" in report["failures"][2]["reason"]
    for path, content in kept.items():
        path.write_bytes(content)
    assert layertap.json("verify", demo)["verified"] == 24
