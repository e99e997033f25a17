"""The job that tunes: launches a profile and variants of it one after another, measures and stops each, with proof.

Every server is a run of its own, started and stopped as any other one. What is fastest in one stage is what the next
one starts from. Being stopped, it stops its server, and its result is what is known so far.

usage: python -m backends.tune.job tune      (in its run folder)
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from backends.doctor.measured import ceiling
from backends.errors import ExitCode, LayertapError, LeftBehind
from backends.jobs import describe, draw_lock
from backends.launch import as_launching, launch, model_folder
from backends.ports import free_port
from backends.runs import Run, Runs
from backends.sample import Sampler
from backends.sglang import Launch, Value
from backends.situation import Situation, read_situation
from backends.tune import load
from backends.tune.servers import stop_servers
from backends.tune.variants import STAGES, Variant, argument, choose, device, ranks
from backends.verdict import patience
from backends.verdict.diagnose import Limits
from backends.verdict.watch import ServerWatch, earlier_start, settled
from capture import draw, gate, job
from capture.dumps import dump
from capture.layers import LayerChoice
from capture.locks import Busy, lock
from capture.measure import LIKE_SGLANG, SIZES, Reduced, all_reduce
from capture.server import Server, ServerGone
from capture.stop import ASKED

ROUNDS = 3
FORWARDS = 4  # that a round fills at least, with the largest max-prefill-tokens among the variants
LEAST_GAIN = 1.01  # less is noise
LOOK_SECONDS = 0.5
HANG_SECONDS = 60.0  # for which a start has to seem to hang
DEATH_SECONDS = 30.0  # in which a server that gave no dump is seen to be dead
FIRST_SECONDS = 1800.0  # for the first load, which compiles kernels
ROUND_SECONDS = 600.0
PREFILL = "max-prefill-tokens"


class TuneJob(msgspec.Struct, kw_only=True):
    """What to tune: a merged profile. `only` names variants or stages, all without one.

    `ready_seconds` is what a start may take, `round_seconds` what one round of the load should. `given` is what was
    said beside the profile, for whoever makes a profile of the result.
    """

    payload: str
    launch: Launch
    layers: LayerChoice
    dump_root: str | None = None
    only: list[str] = []
    ready_seconds: float = 3600.0
    round_seconds: float = 5.0
    given: dict[str, Any] = {}


class Trial(msgspec.Struct, kw_only=True):
    """One variant, tried on top of the trial `base`; the profile itself has none. Speeds are tokens/s.

    `tokens_per_second` is the median of `rounds`, `start_seconds` from the launch until the server was ready; both are
    None where that did not come about, and `failure` says why. `ceiling` is what all-reduces let through at most, by
    the bus bandwidth that was measured with this variant's settings of NCCL.
    """

    name: str
    stage: str
    base: str | None = None
    changes: list[str] = []
    risk: str | None = None
    server: str | None = None
    tokens_per_second: float | None = None
    rounds: list[float] = []
    start_seconds: float | None = None
    ceiling: float | None = None
    failure: str | None = None


class Change(msgspec.Struct, kw_only=True):
    """A setting that the fastest server has and the profile has not: "args" or "env", "unset" where it is taken away.

    `after` and `before`: tokens/s with it and without it, None where there was no server without it.
    """

    kind: str
    name: str
    value: Value
    after: float
    before: float | None


class Tuned(msgspec.Struct, kw_only=True):
    """What came of it. `trials` stand in the order in which they were made, `best` names one of them.

    `changes` make the profile the best one. `load` tells of the prompts of one round: prompts, tokens, longest.
    `stopped` is why it ended early.
    """

    profile: str
    model: str
    sglang: str
    at: float
    given: dict[str, Any]
    situation: Situation
    load: dict[str, int] = {}
    trials: list[Trial] = []
    best: str | None = None
    changes: list[Change] = []
    stopped: str | None = None
    schema: int = 1


class Failed(Exception):
    """A variant that cannot be measured; the sentence says why."""


class Tried(NamedTuple):
    """A trial, its launch, and the arguments as its server resolved them."""

    trial: Trial
    launch: Launch
    effective: Mapping[str, Any]
    variant: Variant | None = None

    @property
    def speed(self) -> float:
        """Tokens/s, 0 where it failed."""
        return self.trial.tokens_per_second or 0.0


class Tuner:
    """One run of it."""

    def __init__(self, asked: TuneJob, run: Run) -> None:
        self.asked = asked
        self.run = run
        self.runs = Runs(run.folder.parents[1])
        self.sampler = Sampler(self.runs)
        self.model = model_folder(asked.launch.model)
        self.situation = read_situation(Path(self.model))
        self.variants = choose(asked.only, self.situation, asked.launch)
        self.vocabulary = load.vocabulary(self.model, bool(argument(asked.launch, "trust-remote-code")))
        self.prompts: list[list[int]] = []
        self.reduced: dict[tuple[tuple[str, str], ...], Reduced] = {}  # by settings of NCCL
        self.made = Tuned(
            profile=asked.launch.profile,
            model=self.model,
            sglang=asked.launch.version,
            at=time.time(),
            given=asked.given,
            situation=self.situation,
        )

    def tune(self) -> tuple[int, Tuned]:
        """Try all of it; returns the exit code and the result."""
        code = ExitCode.OK
        try:
            best = self._try(Trial(name=self.asked.launch.profile, stage="profile"), self.asked.launch)
            self._keep(best, [])
            for stage in STAGES:
                best = self._try_stage(best, [variant for variant in self.variants if variant.stage == stage])
            if not best.speed:
                code = ExitCode.NOT_READY
        except KeyboardInterrupt:
            code, self.made.stopped = ExitCode.INTERRUPTED, ASKED
        except LayertapError as error:
            code, self.made.stopped = error.exit_code, str(error)
        return code, self.made

    def _try_stage(self, base: Tried, variants: list[Variant]) -> Tried:
        """Try variants on top of `base`; returns the fastest of them where it gains enough, else `base`."""
        faster: list[Tried] = []
        best = base
        try:
            for variant in variants:
                if variant.changes_nothing(base.launch, base.effective):
                    continue
                trial = Trial(
                    name=variant.name,
                    stage=variant.stage,
                    base=base.trial.name,
                    changes=variant.words(),
                    risk=variant.risk,
                )
                tried = self._try(trial, variant.applied(base.launch), variant)
                if gains(trial, base.speed) and not variant.risk:
                    faster.append(tried)
        finally:
            if faster:
                best = max(faster, key=lambda one: one.speed)
                assert best.variant is not None
                self._keep(best, changes(best.variant, best.speed, base.speed or None))
        return best

    def _keep(self, best: Tried, more: list[Change]) -> None:
        """Make it what the profile becomes."""
        if best.speed:
            self.made.best = best.trial.name
            self.made.changes = [one for one in self.made.changes if one.name not in {new.name for new in more}] + more

    def _try(self, trial: Trial, merged: Launch, variant: Variant | None = None) -> Tried:
        """Launch, measure and stop one. Raises LayertapError where no further one could be tried."""
        self.made.trials.append(trial)
        effective: Mapping[str, Any] = {}
        try:
            trial.ceiling = self._ceiling(trial, merged)
            with self._served(trial, merged) as server:
                self._wait_ready(trial, server)
                effective = self._measure(trial, server)
        except Failed as error:
            trial.failure = str(error)
        except KeyboardInterrupt:
            if trial.tokens_per_second is None:
                trial.failure = "it was stopped"
            raise
        outcome = f"{trial.tokens_per_second:,.0f} tokens/s" if trial.tokens_per_second else trial.failure
        job.tell("tried", variant=trial.name, outcome=outcome)
        job.say(f"{trial.name} ({' '.join(trial.changes) or 'as it is'}): {outcome}")
        return Tried(trial, merged, effective, variant)

    # --- A server ---

    @contextmanager
    def _served(self, trial: Trial, merged: Launch) -> Iterator[Run]:
        """A server while it is measured. Raises LayertapError where it cannot be launched, or leaves something."""
        self._show(trial, "launching")
        launching = as_launching(merged.on_port(free_port()), self.asked.layers, self.asked.dump_root)
        launching.details = {"tune": self.run.id, "variant": trial.name}
        try:
            with uninterrupted():  # a run that is half started cannot be told from one that is coming up
                server = launch(self.runs, Path(self.asked.payload), launching, merged.version)
                trial.server = server.id
            yield server
        finally:
            with uninterrupted():  # an impatient second Ctrl+C must leave no server behind
                self._show(trial, "stopping")
                left = stop_servers(self.runs, self.run, f"the trial {trial.name} is over")
                if left:
                    raise LeftBehind("; ".join(left))

    def _wait_ready(self, trial: Trial, server: Run) -> None:
        """Wait until a server can be drawn from. Raises Failed."""
        watch = self._watch(server)
        deadline, hangs_since = time.monotonic() + self.asked.ready_seconds, None
        while True:
            seen = watch.look()
            verdict = seen["verdict"]["verdict"]
            if settled(seen):
                break
            self._show(trial, seen["phase"] or "starting")
            now = time.monotonic()
            hangs_since = (hangs_since or now) if verdict == "hang_suspected" else None
            if hangs_since and now - hangs_since > HANG_SECONDS:
                raise Failed(f"it seems to hang: {why(seen)}")
            if now > deadline:
                raise Failed(f"it was not ready after {self.asked.ready_seconds:g} s, in {seen['phase']}")
            time.sleep(LOOK_SECONDS)
        if verdict not in ("healthy", "degraded"):
            raise Failed(why(seen))
        trial.start_seconds = round(time.time() - server.spec.created, 1)

    def _measure(self, trial: Trial, server: Run) -> Mapping[str, Any]:
        """Put the load on a server; returns its resolved arguments. Raises Failed."""
        handle = None
        try:
            described = describe(server)
            handle = lock(draw_lock(self.runs, server), f"another job draws from {server.id}")
            info, tap, findings = gate.look(described)
            refusal = gate.refusal(findings)
            if refusal or tap is None:
                raise Failed(refusal or "the tap is not in")
            if not self.prompts:
                self._size_load(trial, described, tap, info)
            self._show(trial, "warming up")
            load.prefill(described, tap, self.prompts, FIRST_SECONDS)
            for number in range(ROUNDS):
                self._show(trial, f"round {number + 1} of {ROUNDS}")
                trial.rounds.append(round(load.prefill(described, tap, self.prompts, ROUND_SECONDS), 1))
            trial.tokens_per_second = statistics.median(trial.rounds)
            return info
        except (draw.DrawError, Busy, ServerGone, dump.DumpError, LayertapError, TimeoutError) as error:
            said = str(error) or "the load was not through in time"
            raise Failed(self._death(server) or said) from error
        finally:
            if handle is not None:
                os.close(handle)

    def _death(self, server: Run) -> str | None:
        """Of what a server died; None where it did not."""
        watch = self._watch(server)
        deadline = time.monotonic() + DEATH_SECONDS
        while time.monotonic() < deadline:
            seen = watch.look()
            if seen["verdict"]["verdict"] in ("crashed", "stopped"):
                return f"under the load: {why(seen)}"
            time.sleep(LOOK_SECONDS)
        return None

    def _watch(self, server: Run) -> ServerWatch:
        return ServerWatch(server, self.sampler.gpus, earlier_start(self.runs, server), patience.scaled(Limits()))

    # --- The load, and what bounds it ---

    def _size_load(self, trial: Trial, server: Server, tap: dump.TapState, info: Mapping[str, Any]) -> None:
        """Choose the prompts of all rounds: enough to fill the largest forwards, and for as long as was asked for."""
        self._show(trial, "sizing the load")
        sizes = [info.get("max_prefill_tokens"), *(variant.args.get(PREFILL) for variant in self.variants)]
        largest = max(int(str(size)) for size in sizes if size)
        room = tap.dump_bytes // tap.bytes_per_token
        limits = [load.LONGEST, gate.longest_prompt(dict(info)), info.get("max_total_num_tokens"), room]
        longest = min(int(limit) for limit in limits if limit)
        first = load.make_prompts(self.vocabulary, longest, 2 * largest)
        load.prefill(server, tap, first, FIRST_SECONDS)
        rate = load.prefill(server, tap, first, ROUND_SECONDS)
        tokens = max(FORWARDS * largest, round(rate * self.asked.round_seconds))
        self.prompts = load.make_prompts(self.vocabulary, longest, tokens)
        self.made.load = {
            "prompts": len(self.prompts),
            "tokens": sum(map(len, self.prompts)),
            "longest": max(map(len, self.prompts)),
        }

    def _ceiling(self, trial: Trial, merged: Launch) -> float | None:
        """Tokens/s that all-reduces let through at most, None for a single rank. Raises Failed where they hang."""
        count, layers, hidden = ranks(merged), self.situation.layers, self.situation.hidden
        if count < 2 or device(merged) != "cuda" or layers is None or hidden is None:
            return None
        settings = {name: value for name, value in merged.environ().items() if name.startswith("NCCL_")}
        key = tuple(sorted(settings.items()))
        if key not in self.reduced:
            self._show(trial, "measuring an all-reduce")
            self.reduced[key] = all_reduce(count, "nccl", {**LIKE_SGLANG, **os.environ, **settings})
        made = self.reduced[key]
        if made.error:
            raise Failed(f"an all-reduce over {count} GPUs: {made.error}")
        return round(ceiling(made.bus[SIZES[-1]], count, layers, hidden), 1)

    def _show(self, trial: Trial, phase: str) -> None:
        """Renew progress.json."""
        job.report({"schema": 1, "trial": trial.name, "number": len(self.made.trials), "phase": phase})


def gains(trial: Trial, before: float) -> bool:
    """Whether a trial is faster than `before` tokens/s, in every round and by more than noise."""
    return (trial.tokens_per_second or 0.0) >= before * LEAST_GAIN and min(trial.rounds, default=0.0) > before


def changes(variant: Variant, after: float, before: float | None) -> list[Change]:
    """What a variant changes, with what it gains."""
    settings = [("args", name, value) for name, value in variant.args.items()]
    settings += [("env", name, value) for name, value in variant.env.items()]
    return [Change(kind=kind, name=name, value=value, after=after, before=before) for kind, name, value in settings]


def why(seen: Mapping[str, Any]) -> str:
    """Why a server is not up, by what a look at it saw."""
    verdict = seen["verdict"]
    return "; ".join(filter(None, (verdict["cause"] or verdict["verdict"], verdict["remedy"])))


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl+C waits until this is over. Raises KeyboardInterrupt then."""
    asked: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: asked.append(number))  # a mask would go on to the servers
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        raise KeyboardInterrupt


def run_tune(asked: TuneJob) -> tuple[int, Any]:
    """Tune, in the run folder that this process stands in."""
    try:
        tuner = Tuner(asked, Run(Path.cwd()))
    except LayertapError as error:
        return error.exit_code, {"error": str(error)}
    return tuner.tune()


if __name__ == "__main__":
    sys.exit(job.main("tune", {"tune": (TuneJob, run_tune)}))
