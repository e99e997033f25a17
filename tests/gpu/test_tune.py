"""Tuning on a GPU: attention backends that are installed, and the prefill size on top of the fastest."""

from __future__ import annotations

import msgspec
import pytest
from engines import Engines
from shapes import BACKENDS, LIMITS
from tuning import tune

from backends.embedded import models
from backends.tune.job import Tuned, gains


@pytest.fixture(scope="module")
def tuned(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    model = tmp_path_factory.mktemp("models") / "llama"
    models.build("llama", model)
    return tune(engines, model, BACKENDS | LIMITS, only=["attention", "prefill-16k"])


def test_the_gpus_of_this_host_are_known(tuned: Tuned) -> None:
    import torch

    found = tuned.situation
    assert found.gpus == torch.cuda.device_count()
    assert found.cc == ".".join(map(str, torch.cuda.get_device_capability()))
    total = torch.cuda.get_device_properties(0).total_memory / (1 << 30)
    assert found.vram_gib == pytest.approx(total, rel=0.05)
    assert (found.architecture, found.mla, found.moe, found.quantization) == ("LlamaForCausalLM", False, False, "none")


def test_every_variant_was_measured_or_says_why_not(tuned: Tuned) -> None:
    for trial in tuned.trials:
        print(msgspec.json.encode(trial).decode())
    names = [trial.name for trial in tuned.trials]
    assert names[0] == "base" and names[-1] == "prefill-16k"
    assert "attention-triton" not in names  # the profile has it
    for trial in tuned.trials:
        assert (trial.tokens_per_second is None) == (trial.failure is not None)
        assert trial.ceiling is None
    profile, last = tuned.trials[0], tuned.trials[-1]
    assert profile.failure is None and last.failure is None
    assert profile.tokens_per_second is not None and profile.tokens_per_second > 1000


def test_each_stage_starts_from_what_gained(tuned: Tuned) -> None:
    profile, *variants = tuned.trials
    assert profile.tokens_per_second is not None
    attention = [trial for trial in variants if trial.stage == "attention"]
    fastest = max(attention, key=lambda trial: trial.tokens_per_second or 0.0, default=profile)
    base = fastest if gains(fastest, profile.tokens_per_second) else profile
    last = variants[-1]
    assert [trial.base for trial in variants] == [profile.name] * len(attention) + [base.name]
    assert base.tokens_per_second is not None
    assert tuned.best == (last.name if gains(last, base.tokens_per_second) else base.name)
