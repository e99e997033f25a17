"""Measuring in SGLang's own environment: a real all-reduce of two ranks, on the CPU, and a whole job without GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from capture import measure
from capture.measure import MiB

ROOT = Path(__file__).parents[2]


def test_two_ranks_reduce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = measure.all_reduce(2, "gloo", {**os.environ, "PYTHONPATH": str(ROOT)})
    assert (made.error, sorted(made.bus)) == (None, [32 * MiB, 128 * MiB])
    assert made.first_seconds is not None
    assert min(made.bus.values()) > 0
    assert list(tmp_path.iterdir()) == []


def test_a_job_on_a_host_without_gpus(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "state").mkdir()
    (tmp_path / "run" / "job.json").write_text(json.dumps({"state": str(tmp_path / "state"), "output": None}))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    argv = [sys.executable, "-P", "-m", "capture.job", "doctor"]
    subprocess.run(argv, cwd=tmp_path / "run", env=env, check=True)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["gpus"], result["copies"], result["all_reduce"]) == (0, [], None)
    assert result["disks"][0]["bytes"] > 0
    assert list((tmp_path / "state").iterdir()) == []
