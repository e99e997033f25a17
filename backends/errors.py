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


class HostKeyRefused(LayertapError):
    """The host's key is new, changed, revoked, or not the one that was said to be right."""

    exit_code = ExitCode.HOST_KEY


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


class Interrupted(LayertapError):
    """Somebody asked it to stop."""

    exit_code = ExitCode.INTERRUPTED


class OurBug(LayertapError):
    """Something that nobody foresaw; the text is a traceback or a log."""

    exit_code = ExitCode.OUR_BUG


def by_code(code: int, message: str) -> LayertapError:
    """The error that an agent or a job met, made of its exit code and its sentence."""
    kinds = (UsageError, ConnectionFailed, NotReady, Locked, LeftBehind, RunDied, NotVerified, Interrupted)
    return next((kind for kind in kinds if kind.exit_code == code), OurBug)(message)
