"""One host, as both doors see it: what can be asked of it, and `snapshot()`, which is all that they show."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from backends import sglang
from backends.errors import NotReady, OurBug, RunDied, by_code
from backends.host import Host
from backends.launch import EMBEDDED, as_launching
from backends.logs import LogCursor, PartHead, Step
from backends.sglang import mask_text
from backends.situation import Situation
from backends.verdict.watch import settled
from capture.layers import LayerChoice
from console.config import ExtractConfig

SCHEMA = 1
NO_DEFAULTS = ExtractConfig()
POLL_SECONDS = 0.5
LOG_SHOWN = 4000  # bytes of a failed job's log
STOP_SECONDS = 300.0  # what draws from a server is stopped first, one after another, each with patience


def going_on(run: dict[str, Any] | None) -> bool:
    """Whether a run is under way."""
    return run is not None and run["state"] in ("running", "starting")


def empty_snapshot() -> dict[str, Any]:
    """A snapshot of a host of which nothing is known yet."""
    names = ("link", "host", "gpus", "server", "processes", "dumps", "extraction", "runs", "question", "trouble")
    return {"schema": SCHEMA, "at": time.time(), "streams": [], "alarms": []} | dict.fromkeys(names)


class Session:
    """Talks to one host's agent; holds no state of its own that the host does not have."""

    def __init__(
        self,
        host: Host,
        profiles: dict[str, sglang.Profile],
        dump_root: str | None = None,
        defaults: ExtractConfig = NO_DEFAULTS,
    ) -> None:
        self.host = host
        self.profiles = profiles
        self.dump_root = dump_root
        self.defaults = defaults
        self.hello = host.request("hello")

    def plan_launch(
        self,
        profile: str,
        model: str | None,
        port: int,
        overrides: sglang.Overrides,
    ) -> sglang.Launch:
        """Merge a profile for the host's SGLang. Raises NotReady where the host has none, ProfileError."""
        if self.hello["sglang"] is None:
            raise NotReady(f"{self.hello['python']} has no sglang; choose SGLang's own Python with --python")
        return sglang.resolve(
            profile, self.profiles, version=self.hello["sglang"], model=model, port=port, overrides=overrides
        )

    def situation(self, model: str | None) -> Situation:
        """The host's GPUs, and what the model's config says where it is a folder there."""
        folder = None if model is None or model.startswith(EMBEDDED) else model
        return msgspec.convert(self.host.request("situation", model=folder), Situation, strict=False)

    def check_model(self, model: str) -> None:
        """Raises UsageError where the host has no such model; its weights are not looked at."""
        self.host.request("check_model", model=model)

    def check_layers(self, merged: sglang.Launch, layers: LayerChoice) -> None:
        """Raises UsageError where the host sees that a launch could not draw these layers; starts nothing."""
        launching = as_launching(merged, layers, self.dump_root)
        self.host.request("check_layers", launching=msgspec.to_builtins(launching))

    def launch(self, merged: sglang.Launch, layers: LayerChoice) -> dict[str, Any]:
        """Launch a server; returns its run at once, long before it is ready."""
        launching = as_launching(merged, layers, self.dump_root)
        return self._dict(self.host.request("launch", seconds=180, launching=msgspec.to_builtins(launching)))

    def tune(
        self,
        merged: sglang.Launch,
        layers: LayerChoice,
        only: list[str],
        round_seconds: float,
        ready_seconds: float,
        given: dict[str, Any],
    ) -> dict[str, Any]:
        """Start a tuning run of a merged profile; see `backends.tune.job.TuneJob`."""
        job = {
            "launch": msgspec.to_builtins(merged),
            "layers": msgspec.to_builtins(layers),
            "dump_root": self.dump_root,
            "only": only,
            "round_seconds": round_seconds,
            "ready_seconds": ready_seconds,
            "given": given,
        }
        return self.start("tune", job)

    def status(self, run_id: str) -> dict[str, Any]:
        """A server run with its phases, verdict, tap and dumps."""
        return self._dict(self.host.request("status", run_id=run_id))

    def follow_launch(self, run_id: str, seconds: float) -> Iterator[dict[str, Any]]:
        """The server's status, renewed until it is healthy, has ended, is up without the tap, or `seconds` are over."""
        deadline = time.monotonic() + seconds
        while True:
            status = self.status(run_id)
            yield status
            if settled(status) or time.monotonic() > deadline:
                return
            time.sleep(POLL_SECONDS)

    def newest_server(self, port: int | None = None) -> dict[str, Any]:
        """The live server, else the one that ran last. Raises RunDied where none ever ran, UsageError for several."""
        found = self.host.request("newest_server", port=port)
        if found is None:
            where = "" if port is None else f" on port {port}"
            raise RunDied(f"no server of ours ever ran here{where}; `layertap launch` one")
        return self._dict(found)

    def start(self, kind: str, job: dict[str, Any], port: int | None = None) -> dict[str, Any]:
        """Start a job."""
        return self._dict(self.host.request("start", kind=kind, job=job, port=port))

    def follow(self, run_id: str) -> Iterator[dict[str, Any]]:
        """A job, renewed until it has ended; the last one has its exit and result."""
        while True:
            run = self._dict(self.host.request("run", run_id=run_id))
            yield run
            if not going_on(run):
                return
            time.sleep(POLL_SECONDS)

    def finish(self, run: dict[str, Any]) -> tuple[int, Any]:
        """An ended job's exit code and result.

        Raises the LayertapError that it met, RunDied where it was killed before it could say anything.
        """
        ended, result = run["exit"], run["result"]
        code = ended["code"] if ended else None
        if isinstance(result, dict) and "error" in result and code:
            raise by_code(code, result["error"])
        if code is None:
            how = f"by signal {ended['signal']}" if ended else "and could not write down how"
            raise RunDied(f"the run {run['id']} was ended {how}; give the same command again, nothing is lost")
        if result is None:
            raise OurBug(f"the run {run['id']} failed:\n{mask_text(self.log_end(run['log'], LOG_SHOWN).strip())}")
        return code, result

    def extraction(self, output: str | None = None, asked: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """The newest extraction that runs, else the one that ran last, into `output` if given.

        Raises Locked where one runs that draws something else than is `asked`.
        """
        found = self.host.request("extraction", output=output, asked=asked)
        return self._dict(found) if found else None

    def stop(self, run_id: str, why: str) -> dict[str, Any]:
        """Stop a run and what draws from it; the answer names what is left."""
        return self._dict(self.host.request("stop", seconds=STOP_SECONDS, run_id=run_id, why=why))

    def log(self, path: str, cursor: LogCursor, most: int = 1 << 20) -> Step:
        """What stands in a log behind `cursor`, which moves on; the same bytes never twice, and none left out."""
        head, data = self.host.read(path, most=most, **cursor.asks)
        return cursor.advance(msgspec.convert(head, PartHead), data)

    def log_end(self, path: str, most: int) -> str:
        """The last `most` bytes of a log as text."""
        head, _ = self.host.read(path, 0, 0)
        _, data = self.host.read(path, max(0, head["size"] - most), most)
        return data.decode(errors="replace")

    def snapshot(self, port: int | None = None, run_id: str | None = None) -> dict[str, Any]:
        """Everything that there is to show; None where unknown, no units inside strings.

        The server is that of `run_id`; else the live one, of `port` if given; else the one that ran last.
        """
        seen = self.host.request("overview", run_id=run_id, port=port)
        sample = seen["sample"]
        return empty_snapshot() | {
            "link": msgspec.to_builtins(self.host.state),
            "host": {key: self.hello[key] for key in ("host", "user", "python", "sglang")} | sample["host"],
            "gpus": sample["gpus"],
            "server": seen["server"],
            "processes": sample["processes"],
            "dumps": sample["dumps"],
            "extraction": seen["extraction"],
            "alarms": seen["alarms"],
            "runs": sample["runs"],
        }

    @staticmethod
    def _dict(value: Any) -> dict[str, Any]:
        assert isinstance(value, dict)
        return value
