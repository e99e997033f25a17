"""Every export, read back by the code of the trainer that it is for, and compared with native bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from drawn import SAMPLES, Drawn
from environments import python_of

SCRIPTS = Path(__file__).parent / "scripts"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # a server and four installations before the first


def run(python: Path, script: str, *words: str | Path) -> dict[str, Any]:
    """What a script found out, in a Python that has the trainer."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        [python, "-W", "ignore", SCRIPTS / f"{script}.py", *words], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("trainer", "script", "name"),
    [
        ("specforge", "read_specforge", "specforge"),
        ("speculators", "read_speculators", "speculators"),
        ("speculators", "read_speculators", "speculators-fp8"),
        ("speculators-legacy", "read_speculators_legacy", "speculators-legacy/data"),
        ("modelopt", "read_modelopt", "modelopt"),
    ],
    ids=["specforge", "speculators", "speculators-fp8", "speculators-legacy", "modelopt"],
)
def test_its_own_loader_reads_the_same_tensors(
    environments: Path, drawn: Drawn, trainer: str, script: str, name: str
) -> None:
    seen = run(python_of(trainer, environments), script, drawn.native, drawn.exports / name)
    assert seen["samples"] == SAMPLES
    assert seen["values"] > 100_000


def test_a_drafter_learns_from_it(environments: Path, drawn: Drawn) -> None:
    """A few EAGLE-3 steps of speculators' own model. SpecForge's loss is a Triton kernel and needs a GPU."""
    losses = run(python_of("speculators", environments), "train_speculators", drawn.exports / "speculators", drawn.model)["losses"]  # fmt: skip
    assert losses[-1] < 0.9 * losses[0], losses


def test_the_target_that_speculators_derives_is_that_of_sglang(environments: Path, drawn: Drawn) -> None:
    """It norms the exported last state itself: that must give what SGLang's final norm gave."""
    seen = run(python_of("speculators", environments), "norm_speculators", drawn.native, drawn.exports / "speculators", drawn.model)  # fmt: skip
    assert seen["samples"] == SAMPLES
    assert seen["largest"] < 0.02
