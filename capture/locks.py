"""Locks on files: one job at a time draws from a server, or writes to a folder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class Busy(Exception):
    """Somebody else draws from that server, or writes to that folder."""


def lock(path: Path, what: str) -> int:
    """Take a lock that this process keeps until it ends; returns its handle. Raises Busy where it is held."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except PermissionError:
        raise Busy(f"{path} is another user's: only who made it can lock it") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise Busy(what) from None
    return handle
