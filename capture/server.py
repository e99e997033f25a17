"""A running server as a job sees it: where it is, how to ask it, whether it lives."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import msgspec

DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy of the environment's is not asked


class ServerGone(Exception):
    """The server's process is dead; the sentence says how that was seen."""


class Process(msgspec.Struct, frozen=True):
    """A process that cannot be mistaken for a later one of the same number: `start` in clock ticks after boot."""

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> Process:
        """That process as it is now. Raises OSError where there is none."""
        return cls(pid, int(_stat(pid)[19]))

    def alive(self) -> bool:
        """Whether that very process runs and is no zombie."""
        try:
            fields = _stat(self.pid)
        except OSError:
            return False
        return int(fields[19]) == self.start and fields[0] != "Z"


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """What a job needs to draw from a server run, or from one of its replicas, whose dump folder it then names."""

    run: str
    url: str
    dump_dir: str
    secret: str
    process: Process
    model: str
    profile: str
    trust_remote_code: bool = False
    api_key: str | None = None
    replica: int | None = None

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers for every request."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    @property
    def name(self) -> str:
        """The run's id, with the replica's number where it has several."""
        return self.run if self.replica is None else f"{self.run} replica {self.replica}"

    def info(self, seconds: float = 30.0) -> dict[str, Any]:
        """`/server_info`: the resolved arguments. Raises ServerGone where nobody answers, or not to the end."""
        request = urllib.request.Request(f"{self.url}/server_info", headers=self.headers)
        try:
            with DIRECTLY.open(request, timeout=seconds) as answer:
                return dict(json.load(answer))
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ServerGone(f"{self.url}/server_info does not answer: {error}") from error


def _stat(pid: int) -> list[str]:
    """Fields 3 … of /proc/<pid>/stat: field 3 is the state, 22 the start."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
