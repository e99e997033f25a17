"""Tuning on the embedded engine: variants launched, measured and stopped, one after the other."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engines import SGLANG, Engines

from backends import runs, sglang
from backends.jobs import start_job
from backends.tune.job import Tuned, TuneJob, gains
from backends.tune.servers import stop_tuning
from capture import events
from capture.layers import LayerChoice

Tune = Callable[..., runs.Run]


@pytest.fixture
def tune(engines: Engines) -> Iterator[Tune]:
    """Starts a tuning run; it is stopped, with its server, when the test is over."""
    started = []

    def tuning(args: dict[str, Any] | None = None, model: str | None = None, **asked: Any) -> runs.Run:
        overrides = sglang.Overrides(args=args or {})
        merged = sglang.resolve(
            "embedded-llama", sglang.load_profiles(), version=SGLANG, model=model, port=1, overrides=overrides
        )
        job = TuneJob(payload="", launch=merged, layers=LayerChoice(outputs=[1, 3, 4]), round_seconds=0.5, **asked)
        run = start_job(engines.runs, engines.payload, "tune", msgspec.to_builtins(job), None)
        started.append(run)
        return run

    yield tuning
    for run in started:
        assert stop_tuning(engines.runs, run, "the test is over").left == []


def ended(run: runs.Run) -> tuple[int, Tuned]:
    deadline = time.monotonic() + 500
    while run.exit is None:
        assert time.monotonic() < deadline, run.log.read_text()
        time.sleep(0.2)
    assert run.exit.code is not None
    return run.exit.code, msgspec.json.decode((run.folder / "result.json").read_bytes(), type=Tuned)


def servers(engines: Engines, run: runs.Run) -> list[runs.Run]:
    return [server for server in engines.runs.all("server") if server.spec.details.get("tune") == run.id]


def live(engines: Engines, run: runs.Run) -> list[str]:
    return [server.id for server in servers(engines, run) if server.alive()]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_variant_is_measured_beside_the_profile(engines: Engines, tune: Tune) -> None:
    run = tune(args={"max-prefill-tokens": 512}, only=["prefill-1k"])
    code, made = ended(run)
    assert code == 0, run.log.read_text()
    profile, variant = made.trials
    assert (profile.name, profile.base, profile.changes) == ("embedded-llama", None, [])
    assert (variant.name, variant.base, variant.changes) == (
        "prefill-1k",
        "embedded-llama",
        ["max-prefill-tokens=1024"],
    )
    for trial, server in zip(made.trials, reversed(servers(engines, run)), strict=True):
        assert trial.failure is None and trial.server == server.id
        assert trial.tokens_per_second == sorted(trial.rounds)[1] > 0
        assert trial.start_seconds is not None and trial.start_seconds > 1
        assert trial.ceiling is None  # one rank
        history = events.latest(server.folder)
        assert (history[-1]["event"], history[-1]["left"]) == ("stopped", [])
        size = server.private.argv[server.private.argv.index("--max-prefill-tokens") + 1]
        assert size == ("512" if trial is profile else "1024")
    first, second = reversed(servers(engines, run))
    assert first.exit is not None and first.exit.at < second.spec.created
    assert made.load["tokens"] >= 4 * 1024 and made.load["longest"] <= 2048
    assert profile.tokens_per_second is not None
    faster = gains(variant, profile.tokens_per_second)
    assert made.best == ("prefill-1k" if faster else "embedded-llama")
    assert [change.name for change in made.changes] == (["max-prefill-tokens"] if faster else [])
    assert live(engines, run) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_profile_that_does_not_start_is_a_failure_with_its_reason(engines: Engines, tune: Tune) -> None:
    run = tune(args={"attention-backend": "no_such_backend"}, only=["prefill-1k"])
    code, made = ended(run)
    assert code == 6
    assert [(trial.tokens_per_second, trial.rounds, trial.start_seconds) for trial in made.trials] == [
        (None, [], None)
    ] * 2
    assert all("of the arguments" in (trial.failure or "") for trial in made.trials), made.trials
    assert (made.best, made.changes, live(engines, run)) == (None, [], [])


def test_a_stop_leaves_no_server_and_keeps_what_is_known(engines: Engines, tune: Tune) -> None:
    run = tune(only=["prefill-1k"])
    until(lambda: live(engines, run))
    stopped = stop_tuning(engines.runs, run, "the test asks for it")
    assert stopped.left == [] and stopped.how == "asked"
    code, made = ended(run)
    assert (code, made.stopped) == (130, "it was asked to stop")
    assert [(trial.name, trial.failure) for trial in made.trials] == [("embedded-llama", "it was stopped")]
    assert live(engines, run) == []
    assert events.latest(servers(engines, run)[0].folder)[-1]["left"] == []


def test_its_server_is_stopped_with_it_where_it_was_killed(engines: Engines, tune: Tune) -> None:
    run = tune(only=["prefill-1k"])
    until(lambda: [server for server in servers(engines, run) if server.state() == "running"])
    assert run.running is not None
    os.kill(run.running.child.pid, signal.SIGKILL)
    until(lambda: run.exit)
    assert live(engines, run)
    assert stop_tuning(engines.runs, run, "the test asks for it").left == []
    assert live(engines, run) == []


def test_a_variant_that_there_is_not_is_named(engines: Engines, tune: Tune) -> None:
    run = tune(only=["prefill-3k"])
    until(lambda: run.exit)
    assert run.exit is not None and run.exit.code == 2
    assert json.loads((run.folder / "result.json").read_bytes())["error"] == (
        "no variant or stage is called 'prefill-3k'; here there are prefill-1k, prefill-2k, prefill-4k, overlap"
    )


def test_a_model_without_a_tokenizer_is_refused_before_anything_starts(
    engines: Engines, tune: Tune, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    run = tune(model=str(tmp_path))
    until(lambda: run.exit)
    assert run.exit is not None and run.exit.code == 2
    assert str(tmp_path) in json.loads((run.folder / "result.json").read_bytes())["error"]
    assert servers(engines, run) == []


def until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
