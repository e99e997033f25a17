"""Ports of the loopback address: which numbers are some, and which are free."""

from __future__ import annotations

import socket

from backends.errors import UsageError

LOOPBACK = "127.0.0.1"
LAST = 65535
ABOVE = 10_000  # SGLang 0.5.14 keeps another port that far above its own, and refuses to start where there is none


def require_port(number: int) -> int:
    """The same number. Raises UsageError where it is no port."""
    if not 1 <= number <= LAST:
        raise UsageError(f"port {number}: there are ports 1 to {LAST}, choose one of them")
    return number


def port_free(port: int) -> bool:
    """Whether a server could listen on `port` of the loopback address."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A port of the loopback address that nobody listens on now, and that every SGLang takes."""
    while True:
        with socket.socket() as probe:
            probe.bind((LOOPBACK, 0))
            port = int(probe.getsockname()[1])
        if port <= LAST - ABOVE:
            return port
