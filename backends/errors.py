"""The few ways in which things fail, each with the exit code that both doors end with."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes are an interface: scripts rely on them."""

    OK = 0
    NOT_VERIFIED = 1
    USAGE = 2
    NO_CONNECTION = 3
    TIMEOUT = 4
    HOST_KEY = 5
    NOT_READY = 6
    LOCKED = 7
    LEFT_BEHIND = 8
    RUN_DIED = 9
    OUR_BUG = 70
    INTERRUPTED = 130


class LayertapError(Exception):
    """Something that the user can act on: one sentence that says what is wrong and what to do."""

    exit_code = ExitCode.USAGE


class UsageError(LayertapError):
    """A wrong option, config key, file or row."""


class ConnectionFailed(LayertapError):
    """The host cannot be reached, or its agent does not start."""

    exit_code = ExitCode.NO_CONNECTION


class NotReady(LayertapError):
    """The server did not become ready, or is not safe to draw from."""

    exit_code = ExitCode.NOT_READY


class Locked(LayertapError):
    """Something of that kind runs already."""

    exit_code = ExitCode.LOCKED


class LeftBehind(LayertapError):
    """A stop that could not prove itself."""

    exit_code = ExitCode.LEFT_BEHIND


class RunDied(LayertapError):
    """A run that was needed is dead."""

    exit_code = ExitCode.RUN_DIED


class NotVerified(LayertapError):
    """Data that is not what it should be."""

    exit_code = ExitCode.NOT_VERIFIED


BY_CODE: dict[int, type[LayertapError]] = {
    error.exit_code: error
    for error in (UsageError, ConnectionFailed, NotReady, Locked, LeftBehind, RunDied, NotVerified)
}
