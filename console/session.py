"""One host, as both doors see it: what can be asked of it, and `snapshot()`, which is all that they show."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from backends import sglang
from backends.errors import NotReady, RunDied, UsageError
from backends.host import Host
from backends.launch import Launching
from backends.logs import LogCursor, PartHead, Step
from capture.layers import LayerChoice
from console.config import ExtractConfig

SCHEMA = 1
NO_DEFAULTS = ExtractConfig()
POLL_SECONDS = 0.5


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

    def launch(self, merged: sglang.Launch, layers: LayerChoice) -> dict[str, Any]:
        """Launch a server; returns its run at once, long before it is ready."""
        argv = merged.argv("python")[1:]
        launching = Launching(
            profile=merged.profile,
            model=merged.model,
            argv=argv,
            shown_argv=sglang.mask_argv(argv),
            env=merged.environ(),
            port=merged.port,
            layers=layers,
            embedded=merged.embedded,
            dump_root=self.dump_root,
        )
        return self._dict(self.host.request("launch", seconds=180, launching=msgspec.to_builtins(launching)))

    def status(self, run_id: str) -> dict[str, Any]:
        """A server run with its phases, verdict, tap and dumps."""
        return self._dict(self.host.request("status", run_id=run_id))

    def follow_launch(self, run_id: str, seconds: float) -> Iterator[dict[str, Any]]:
        """The server's status, renewed until it is healthy, has ended, is up without the tap, or `seconds` are over."""
        deadline = time.monotonic() + seconds
        while True:
            status = self.status(run_id)
            yield status
            settled = status["verdict"]["verdict"] in ("healthy", "crashed", "stopped")
            without_tap = status["phase"] == "ready" and not (status["tap"] and status["tap"]["inside"])
            if settled or without_tap or time.monotonic() > deadline:
                return
            time.sleep(POLL_SECONDS)

    def newest_server(self, port: int | None = None) -> dict[str, Any]:
        """The live server, else the one that ran last. Raises RunDied where none ever ran."""
        runs = [run for run in self.host.request("all", kind="server") if port in (None, run["port"])]
        live = [run for run in runs if run["state"] in ("running", "starting")]
        if len(live) > 1:
            ports = ", ".join(str(run["port"]) for run in live)
            raise UsageError(f"servers run on ports {ports}; say which with --port")
        if not runs:
            where = "" if port is None else f" on port {port}"
            raise RunDied(f"no server of ours ever ran here{where}; `layertap launch` one")
        return self._dict((live or runs)[0])

    def start(self, kind: str, job: dict[str, Any], port: int | None = None) -> dict[str, Any]:
        """Start a job."""
        return self._dict(self.host.request("start", kind=kind, job=job, port=port))

    def follow(self, run_id: str) -> Iterator[dict[str, Any]]:
        """A job, renewed until it has ended; the last one has its exit and result."""
        while True:
            run = self._dict(self.host.request("run", run_id=run_id))
            yield run
            if run["state"] not in ("running", "starting"):
                return
            time.sleep(POLL_SECONDS)

    def extraction(self, output: str | None = None) -> dict[str, Any] | None:
        """The newest extraction, into `output` if given."""
        found = self.host.request("extraction", output=output)
        return self._dict(found) if found else None

    def stop(self, run_id: str, why: str) -> dict[str, Any]:
        """Stop a run and what draws from it; the answer names what is left."""
        return self._dict(self.host.request("stop", seconds=120, run_id=run_id, why=why))

    def log(self, path: str, cursor: LogCursor, most: int = 1 << 20) -> Step:
        """What stands in a log behind `cursor`, which moves on; the same bytes never twice, and none left out."""
        head, data = self.host.read(path, most=most, **cursor.asks)
        return cursor.advance(msgspec.convert(head, PartHead), data)

    def log_end(self, path: str, most: int) -> str:
        """The last `most` bytes of a log as text."""
        head, _ = self.host.read(path, 0, 0)
        _, data = self.host.read(path, max(0, head["size"] - most), most)
        return data.decode(errors="replace")

    def snapshot(self, port: int | None = None) -> dict[str, Any]:
        """Everything that there is to show; None where unknown, no units inside strings."""
        try:
            server: dict[str, Any] | None = self.status(self.newest_server(port)["id"])
        except RunDied:
            server = None
        sample = self.host.request("sample", run_id=server["id"] if server else None)
        return {
            "schema": SCHEMA,
            "at": time.time(),
            "link": msgspec.to_builtins(self.host.state),
            "host": {key: self.hello[key] for key in ("host", "user", "python", "sglang")} | sample["host"],
            "gpus": sample["gpus"],
            "server": server,
            "processes": sample["processes"],
            "dumps": sample["dumps"],
            "extraction": self.extraction(),
        }

    @staticmethod
    def _dict(value: Any) -> dict[str, Any]:
        assert isinstance(value, dict)
        return value
