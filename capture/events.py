"""events.jsonl: the history of a run in its folder, a line an event, appended by whoever saw it happen.

{"at": seconds since the epoch, "event": "started", …}

started       child, supervisor: their pids      stop_asked  why
ended         code or, where killed, signal      stopped     how, seconds, left: what a stop came to
gate          id, fatal, what, remedy            prepared    resumed, samples, written, bad_rows, overlong_rows
alarm         id, count, text: odd rows
probed        passed, earlier, lengths, ranks: what the probe came to, now or when it was asked before
retry         sample, reason                     failed      sample, file, line, reason
server_lost   reason; and where others go on server, samples, left
error         reason: why a job came to no result
relaunch      server, attempt, most, cause: its server died of it, and is launched again
relaunched    server, instead_of, seconds        relaunch_failed  attempt, most, reason
trouble       id, severity, cause, evidence, remedy: an alarm that the watch of the run raised
trouble_over  id, seconds: it is not so any more
log_only      most: further retries and failures are only in the log
finished      the counts of a job's result
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import msgspec

NAME = "events.jsonl"
SHOWN = 50
TAIL = 64 << 10  # bytes that are read from the end
LONGEST = 1000  # characters of a text in an event; the whole of it is in the log


def append(folder: Path, event: str, **facts: Any) -> None:
    """Add an event to the run of `folder`. One that cannot be written is left out: a history ends no run."""
    shown = {name: fact[:LONGEST] if isinstance(fact, str) else fact for name, fact in facts.items()}
    line = msgspec.json.encode({"at": round(time.time(), 3), "event": event, **shown}) + b"\n"
    with contextlib.suppress(OSError):
        handle = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            if _half_written(handle):
                line = b"\n" + line
            os.write(handle, line)
        finally:
            os.close(handle)


def latest(folder: Path, most: int = SHOWN) -> list[dict[str, Any]]:
    """The last `most` events of the run of `folder`, the newest last; a line that is damaged or cut is left out."""
    try:
        with (folder / NAME).open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - TAIL)
            file.seek(start)
            lines = file.read(TAIL).split(b"\n")
    except OSError:
        return []
    found = [_event(line) for line in (lines[1:] if start else lines)]
    return [event for event in found if event is not None][-most:]


def _half_written(handle: int) -> bool:
    """Whether the last line has no end, as after a full disk; the next one must not be glued to it."""
    size = os.fstat(handle).st_size
    return size > 0 and os.pread(handle, 1, size - 1) != b"\n"


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        event = msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if not isinstance(event, dict):
        return None
    whole = isinstance(event.get("event"), str) and isinstance(event.get("at"), int | float)
    return event if whole else None
