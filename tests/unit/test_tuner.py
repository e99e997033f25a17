"""How tuning goes from stage to stage, what it keeps, and what bounds a variant; no server is launched here."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backends.errors import LeftBehind, UsageError
from backends.runs import Run, Runs
from backends.sglang import Launch, Overrides, load_profiles, resolve
from backends.situation import Situation
from backends.tune import job, variants
from backends.tune.job import Failed, Trial, Tried, TuneJob, Tuner, uninterrupted
from backends.tune.load import make_prompts
from backends.tune.variants import Variant
from capture.layers import LayerChoice
from capture.measure import SIZES, Reduced

PRO_6000 = Situation(
    gpus=8, cc="12.0", vram_gib=95.6, nvlink=False, layers=61, hidden=7168, mla=True, moe=True, quantization="none"
)


class Scripted(Tuner):
    """Knows how fast each variant is; what it knows nothing of fails."""

    speeds: dict[str, float | BaseException] = {}  # noqa: RUF012
    slowest: dict[str, float] = {}  # noqa: RUF012

    def _try(self, trial: Trial, merged: Launch, variant: Variant | None = None) -> Tried:
        self.made.trials.append(trial)
        self.launched = merged
        speed = self.speeds.get(trial.name)
        if isinstance(speed, BaseException):
            raise speed
        trial.tokens_per_second, trial.failure = speed, None if speed else "it crashed"
        trial.rounds = [speed, speed, self.slowest.get(trial.name, speed)] if speed else []
        return Tried(trial, merged, {}, variant)


Tuning = Callable[..., Scripted]


@pytest.fixture
def tuning(all_runs: Runs, home: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Tuning:
    monkeypatch.chdir(home)
    monkeypatch.setattr(job, "read_situation", lambda _: PRO_6000)
    monkeypatch.setattr(job.load, "vocabulary", lambda _model, _trusted: [1, 2, 3])
    monkeypatch.setattr(variants.importlib.util, "find_spec", lambda _: object())  # type: ignore[attr-defined]

    def made(speeds: dict[str, Any], *only: str, **args: Any) -> Scripted:
        overrides = Overrides(args={"tp-size": 8, "attention-backend": "triton", **args})
        merged = resolve("base", load_profiles(), version="0.5.23", model=str(model), port=1, overrides=overrides)
        asked = TuneJob(payload="", launch=merged, layers=LayerChoice(outputs=[2]), only=list(only))
        tuner = Scripted(asked, Run(all_runs.folder / "tune-1"))
        tuner.speeds = speeds
        return tuner

    return made


def test_each_stage_starts_from_the_fastest_of_the_one_before(tuning: Tuning) -> None:
    tuner = tuning(
        {"base": 100.0, "attention-flashinfer": 120.0, "prefill-4k": 90.0, "prefill-16k": 130.0, "nccl-no-p2p": 150.0},
        "attention", "prefill", "nccl-no-p2p",
    )  # fmt: skip
    code, made = tuner.tune()
    assert code == 0
    assert [(trial.name, trial.base) for trial in made.trials] == [
        ("base", None),
        ("attention-flashinfer", "base"),
        ("prefill-4k", "attention-flashinfer"),
        ("prefill-16k", "attention-flashinfer"),  # 8k is the profile's own
        ("nccl-no-p2p", "prefill-16k"),
    ]
    assert made.best == "nccl-no-p2p"
    assert [(one.name, one.value, one.before, one.after) for one in made.changes[:3]] == [
        ("attention-backend", "flashinfer", 100.0, 120.0),
        ("max-prefill-tokens", 16384, 120.0, 130.0),
        ("NCCL_P2P_DISABLE", "1", 130.0, 150.0),
    ]
    argv, env = tuner.launched.argv("python"), tuner.launched.environ()
    assert argv[argv.index("--attention-backend") + 1] == "flashinfer"
    assert argv[argv.index("--max-prefill-tokens") + 1] == "16384"
    assert (env["NCCL_P2P_DISABLE"], env["NCCL_MAX_NCHANNELS"]) == ("1", "32")


def test_a_gain_that_may_be_noise_changes_nothing(tuning: Tuning) -> None:
    code, made = tuning({"base": 100.0, "prefill-4k": 100.9}, "prefill-4k").tune()
    assert (code, made.best, made.changes) == (0, "base", [])
    unsteady = tuning({"base": 100.0, "prefill-4k": 120.0}, "prefill-4k")
    unsteady.slowest = {"prefill-4k": 99.0}
    code, made = unsteady.tune()
    assert (code, made.best, made.changes) == (0, "base", [])
    unsteady = tuning({"base": 100.0, "prefill-4k": 120.0, "prefill-16k": 110.0}, "prefill")
    unsteady.slowest = {"prefill-4k": 99.0}
    assert unsteady.tune()[1].best == "prefill-16k"


def test_what_is_risky_is_measured_and_left_out(tuning: Tuning) -> None:
    code, made = tuning({"base": 100.0, "overlap": 200.0, "nccl-8-channels": 99.0}, "overlap", "nccl-8-channels").tune()
    assert (code, made.best, made.changes) == (0, "base", [])
    assert [(trial.name, trial.base, bool(trial.risk)) for trial in made.trials] == [
        ("base", None, False), ("overlap", "base", True), ("nccl-8-channels", "base", False),
    ]  # fmt: skip


def test_a_profile_that_fails_may_have_a_variant_that_does_not(tuning: Tuning) -> None:
    code, made = tuning({"attention-flashinfer": 50.0}, "attention", "prefill-4k").tune()
    assert (code, made.best) == (0, "attention-flashinfer")
    assert [(one.name, one.before, one.after) for one in made.changes] == [("attention-backend", None, 50.0)]
    assert [trial.failure for trial in made.trials] == ["it crashed", None, "it crashed"]
    code, made = tuning({}, "attention").tune()
    assert (code, made.best, made.changes) == (6, None, [])


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "it was asked to stop"),
        (LeftBehind("GPU memory of server-1"), 8, "GPU memory of server-1"),
    ],
)
def test_what_is_known_is_kept_where_it_ends_early(tuning: Tuning, end: BaseException, code: int, said: str) -> None:
    speeds = {"base": 100.0, "prefill-4k": 120.0, "prefill-16k": end}
    found, made = tuning(speeds, "prefill", "overlap").tune()
    assert (found, made.stopped, made.best) == (code, said, "prefill-4k")
    assert [one.value for one in made.changes] == [4096]
    assert [trial.name for trial in made.trials] == ["base", "prefill-4k", "prefill-16k"]


def test_a_variant_that_there_is_not(tuning: Tuning) -> None:
    with pytest.raises(UsageError, match="no variant or stage is called 'fast'"):
        tuning({}, "fast")


# --- The ceiling ---


def test_the_ceiling_is_measured_once_for_each_setting_of_nccl(tuning: Tuning, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, str]] = []

    def reduce(ranks: int, backend: str, env: dict[str, str]) -> Reduced:
        assert (ranks, backend) == (8, "nccl")
        asked.append(env)
        if env.get("NCCL_P2P_LEVEL") == "SYS":
            return Reduced(ranks, backend, error="the first all-reduce did not end within 30 s")
        return Reduced(ranks, backend, 1.0, dict.fromkeys(SIZES, 37.6e9))

    monkeypatch.setattr(job, "all_reduce", reduce)
    tuner = tuning({}, "nccl")
    trial, merged = Trial(name="base", stage="profile"), tuner.asked.launch
    assert tuner._ceiling(trial, merged) == pytest.approx(12_300, rel=0.01)  # 37.6 GB/s for Kimi's shape
    assert tuner._ceiling(trial, merged) == tuner._ceiling(trial, merged)
    assert len(asked) == 1 and asked[0]["NCCL_NVLS_ENABLE"] == "0"
    hung = next(variant for variant in tuner.variants if variant.name == "nccl-p2p-everywhere").applied(merged)
    for _ in range(2):
        with pytest.raises(Failed, match="an all-reduce over 8 GPUs: the first all-reduce did not end within 30 s"):
            tuner._ceiling(trial, hung)
    assert len(asked) == 2


def test_one_rank_has_no_ceiling(tuning: Tuning) -> None:
    tuner = tuning({}, **{"tp-size": 1})
    assert tuner._ceiling(Trial(name="base", stage="profile"), tuner.asked.launch) is None


# --- The load ---


def test_the_load_is_always_the_same_and_holds_what_was_asked_for() -> None:
    known = list(range(100, 1100))
    prompts = make_prompts(known, 4096, 65_536)
    assert prompts == make_prompts(known, 4096, 65_536)
    lengths = [len(prompt) for prompt in prompts]
    assert 65_536 <= sum(lengths) < 65_536 + 4096
    assert min(lengths) >= 4096 // 32 and max(lengths) <= 4096
    assert sum(length < 724 for length in lengths) == pytest.approx(len(lengths) / 2, rel=0.3)  # even by logarithm
    assert {token for prompt in prompts for token in prompt} <= set(known)


# --- Ctrl+C ---


def test_ctrl_c_waits_for_what_must_not_be_interrupted() -> None:
    done = []
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        done.append(True)
    assert done == [True] and signal.getsignal(signal.SIGINT) is before
    with pytest.raises(LeftBehind), uninterrupted():  # which weighs more
        signal.raise_signal(signal.SIGINT)
        raise LeftBehind("GPU memory")
    assert signal.getsignal(signal.SIGINT) is before


def test_progress_says_what_is_tried(tuning: Tuning, home: Path) -> None:
    tuner = tuning({"base": 1.0})
    trial = Trial(name="base", stage="profile")
    tuner.made.trials.append(trial)
    tuner._show(trial, "warming up")
    assert json.loads((home / "progress.json").read_text()) == {
        "schema": 1, "trial": "base", "number": 1, "phase": "warming up",
    }  # fmt: skip
