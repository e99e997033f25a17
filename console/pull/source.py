"""The host that a dataset is pulled from: whatever is asked waits for as long as a broken link is dialled again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from backends.errors import ConnectionFailed, UsageError
from backends.host import Host

CHUNK = 4 << 20  # bytes asked for at a time

T = TypeVar("T")


class Refused(Exception):
    """A file that cannot be had as it was recorded; the sentence says why."""


class Source:
    """The host's side; may be asked from any thread."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.fetched = 0  # bytes
        self.stopped = threading.Event()
        self._lock = threading.Lock()

    def request(self, method: str, **parameters: Any) -> Any:
        """Ask the agent. Raises what it met, ConnectionFailed once the link is over for good."""
        return self._patiently(lambda: self.host.request(method, **parameters))

    def read(self, path: str, offset: int, most: int) -> tuple[int, bytes]:
        """The size of a file in bytes, and up to `most` bytes of it, a chunk at a time.

        Raises Refused where it cannot be read.
        """
        try:
            head, data = self._patiently(lambda: self.host.read(path, offset, min(CHUNK, most)))
        except UsageError as error:
            raise Refused(str(error)) from error
        with self._lock:
            self.fetched += len(data)
        return head["size"], data

    def _patiently(self, ask: Callable[[], T]) -> T:
        while True:
            if self.stopped.is_set():
                raise Refused("stopped")
            try:
                return ask()
            except ConnectionFailed:
                if self.host.ended.is_set():
                    raise
