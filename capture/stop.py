"""How a job ends before it is through, as where its output cannot be written."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path

ASKED = "it was asked to stop"


class Stop(Exception):
    """The run ends early; `exit_code` says how, the sentence why."""

    def __init__(self, exit_code: int, why: str) -> None:
        super().__init__(why)
        self.exit_code = exit_code


def cannot_write(output: Path, error: BaseException) -> Stop:
    """How a run ends whose output cannot be written."""
    if is_busy(error):
        return Stop(1, f"another program holds the ledger of {output}; nothing is lost: give the same command again")
    what = "is full" if is_full(error) else f"cannot be written: {getattr(error, 'strerror', error)}"
    return Stop(1, f"{output} {what}; nothing is lost: make room and give the same command again")


def is_full(error: BaseException) -> bool:
    """Whether an error says that a disk has no room."""
    if isinstance(error, sqlite3.OperationalError):
        return error.sqlite_errorcode == sqlite3.SQLITE_FULL
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_busy(error: BaseException) -> bool:
    """Whether an error says that somebody else had the ledger for as long as SQLite waits; it may be free by now."""
    return isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode == sqlite3.SQLITE_BUSY
