"""A tuning run from start to end, its servers stopped."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
from engines import SGLANG, Engines

from backends import sglang
from backends.jobs import start_job
from backends.tune.job import Tuned, TuneJob
from backends.tune.servers import stop_tuning
from capture.layers import LayerChoice

SECONDS = 500


def tune(engines: Engines, model: Path, args: dict[str, sglang.Value], only: list[str]) -> Tuned:
    """Tune the base profile with `args`, named as for `Engines.get`; `only` as in `TuneJob`."""
    words = {name.replace("_", "-"): value for name, value in args.items()}
    engines.stop_all()  # nothing may use the GPUs beside it
    merged = sglang.resolve(
        "base",
        sglang.load_profiles(),
        version=SGLANG,
        model=str(model),
        port=1,
        overrides=sglang.Overrides(args=words, tap={"memory": "2 GiB", "writers": 2}),
    )
    job = TuneJob(payload="", launch=merged, layers=LayerChoice(boundaries=[2, 4, 5]), only=only, round_seconds=1.0)
    run = start_job(engines.runs, engines.payload, "tune", msgspec.to_builtins(job), None)
    try:
        deadline = time.monotonic() + SECONDS
        while run.exit is None:
            assert time.monotonic() < deadline, run.log.read_text()
            time.sleep(0.2)
    finally:
        assert stop_tuning(engines.runs, run, "the test is over").left == []
    print(run.log.read_text())
    assert run.exit.code == 0, run.log.read_text()
    return msgspec.json.decode((run.folder / "result.json").read_bytes(), type=Tuned)
