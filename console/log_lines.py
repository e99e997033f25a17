"""One log line: its stamp and rank, what is unfit for a screen in it, and whether it is an error or a warning.

SGLang names a level only now and then, so most errors are known by what they say. Lines that only sound bad are asked
first: whatever is printed on every good start must not look like an error.
"""

from __future__ import annotations

import contextlib
import re
from datetime import datetime
from typing import Literal

Level = Literal["error", "warning", ""]

PREFIX = re.compile(
    r"\[?(?P<date>\d{4}-\d\d-\d\d) (?P<clock>\d\d:\d\d:\d\d)(?:[.,]\d+)?"
    r"(?P<rank>(?: (?:DP|PP|ATTN_CP|MOE_DP|TP|EP)\d+)*)(?:\] ?| )"
)
"""The stamp of SGLang's lines (`[2026-11-29 17:40:05 TP0] …`) and of the jobs' (`2026-11-29 17:40:05 …`)."""

_STAMPED_AGAIN = re.compile(r"(?=\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # colours, cursor movements
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)"  # titles, hyperlinks and other strings
    r"|\x1b[ -/]*[0-~]?"
)


def clean(text: str) -> str:
    """The line without escape sequences; tabs are spaces, other control characters show as U+FFFD."""
    if text.isprintable():
        return text
    text = _ESCAPES.sub("", text).expandtabs()
    return "".join(char if char.isprintable() else " " if char.isspace() and char > "\x7f" else "�" for char in text)


def redrawn(text: str) -> list[str]:
    """The lines that are left of one with carriage returns in it: each drawing of a bar replaces the one before.

    What another process logged while the bar stood there comes with a stamp, and is a line of its own.
    """
    kept: list[str] = []
    drawing = False
    for drawn in text.split("\r"):
        for part in _STAMPED_AGAIN.split(drawn):
            if not part:
                continue
            stamped = PREFIX.match(part) is not None
            if drawing and not stamped:
                kept[-1] = part
            else:
                kept.append(part)
            drawing = not stamped
    return kept or [""]


class Clock:
    """Stamps to epoch seconds, as local time. Most lines have the same second as the one before."""

    def __init__(self) -> None:
        self._text = ""
        self._time: float | None = None

    def read(self, text: str) -> float | None:
        """The time of a stamp such as `2026-11-29 17:40:05`; None where it is no date after all."""
        if text != self._text:
            self._text, self._time = text, None
            with contextlib.suppress(ValueError):
                self._time = datetime.fromisoformat(text).timestamp()
        return self._time


# --- Levels ---

_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Failure)(?::|$)")

# By far the most lines of a server at work; a response that is no success is looked at below.
_COMMON = ("Prefill batch", "Decode batch")
_REQUEST = re.compile(r'INFO: +\S+ - "(?P<request>[^"]*)" (?P<code>\d{3})')

# A line without any of these is neither an error nor a warning.
_SUSPECT = (
    *("rror", "RROR", "xception", "arning", "WARN", "atal", "FATAL", "CRITICAL", "Traceback", "imeout", "timed out"),
    *("ailed", "Fail", "died", "dead", "sigquit", "SIGQUIT", "xit code", "terminate", "Segmentation", "Killed"),
    *("emory", "annot ", "Unable", "ould not", "No module", "Retract", "rank", "NCCL", "what()", "Errno"),
)
_BENIGN = re.compile(
    r"Ignore import error when loading |NVLink detection failed\. This is normal|Setup Custom allreduce failed with"
    r"|\[Auto[Tt]uner\]: Skipping tactic|Failed to initialize cutlass .*Skipping|Fail to set RLIMIT_NOFILE"
    r"|Performance might be sub-optimal|Config file not found at .*(?:Fallback|\.json)"
    r"|(?:is|are) deprecated|(?:Deprecation|Future|User|Runtime)Warning"
    r"|Failed to import (?:pynvml|amdsmi|pymtml|from custom_ar)|Cannot detect CUDA architecture"
    r"|No CUDA runtime is found|Failed to load NCCL library from .*It is expected if"
    r"|post-warmup freeze_gc failed|Ignoring mcp import error|The current process just got forked"
    r"|resource_tracker: There appear to be |TokenizerManager watchdog timeout \(.*soft=True"
    r"|CUDA coredump pipe not found for PID|Pyspy failed|Request is disconnected from the client side"
    r"|Health check request received during shutdown|NCCL INFO |is unavailable; video|[Ee]xit code:? -15\b"
)
_ERROR = re.compile(
    r"(?:ERROR|CRITICAL|FATAL)\b|.{0,80}?(?:\]|:| -) (?:ERROR|CRITICAL|FATAL)\b|\[rank\d+\]:E"
    r"|.*(?:hit an exception: |Fatal Python error: |terminate called|Segmentation fault|what\(\): "
    r"|CUDA (?:driver )?error|[Oo]ut of memory|OutOfMemoryError|NCCL (?:error|failure)|nccl[A-Z]\w*Error"
    r"|scheduler (?:died|is dead)|crashed with exit code|[Ee]xit code: -?[1-9]"
    r"|(?:watchdog|Watchdog) timeout \((?!.*soft=True)"
    r"|Watchdog caught collective operation timeout|Initialization failed\.|\[Errno \d+\] |Killed$)"
    r"|\S+(?:\.py| serve): error: |\S*python\S*: No module named "
)
_WARNING = re.compile(
    r"(?:WARNING|WARN)\b|.{0,80}?(?:\]|:| -) WARN(?:ING)?\b|\[rank\d+\]:W"
    r"|.*(?:NCCL WARN|Health check failed|KV cache pool is full|timed out|[Mm]em(?:ory)? [Ll]eak)"
    r"|.*watchdog timeout \("
    r"|(?:Fail(?:ed)?|Error|Cannot|Could not|Unable)\b"
)
# Harmless, and the traceback that follows them is so too.
_WITH_TRACEBACK = ("NVLink detection failed", "post-warmup freeze_gc failed")
_SIGQUIT = re.compile(r"Received sigquit from a child|SIGQUIT received\.")
_STOPPING = ("SIGTERM received.", "Gracefully exiting", "INFO:     Shutting down")
_STARTING = "server_args="


class Levels:
    """Tells the level of each line of one log, in order: a traceback is one error from its first line to its last."""

    def __init__(self) -> None:
        self._before: Level | None = None  # of the line that the traceback follows; None outside of tracebacks
        self._in_frames = False
        self._stopping = False
        self._benign = False

    def of(self, message: str, *, stamped: bool) -> Level:
        """The level of a line, given without its prefix; `stamped` says whether it had one."""
        if not stamped and (self._before is not None or message == _TRACEBACK):
            inside = self._in_traceback(message)
            if inside is not None:
                return inside
        elif stamped and not self._in_frames:
            self._before = None
        if message.startswith(_COMMON):
            self._benign = False
            return ""
        level = self._alone(message, stamped)
        if message.endswith(_TRACEBACK):
            self._before, self._in_frames = level, True
        return level

    def _alone(self, message: str, stamped: bool) -> Level:
        self._benign = False
        if message.startswith(_STOPPING):
            self._stopping = True
            return ""
        if message.startswith(_STARTING):
            self._stopping = False
            return ""
        if message.startswith("INFO:"):
            return _of_request(message)
        if not any(word in message for word in _SUSPECT):
            return ""
        if _BENIGN.search(message):
            self._benign = message.startswith(_WITH_TRACEBACK)
            return ""
        if _SIGQUIT.match(message):
            return "" if self._stopping else "error"
        if _ERROR.match(message) or (not stamped and _EXCEPTION.match(message)):
            return "error"
        return "warning" if _WARNING.match(message) else ""

    def _in_traceback(self, line: str) -> Level | None:
        """The level of a line without a stamp that may belong to a traceback; None where it does not."""
        if line == _TRACEBACK:
            if self._before is None:
                self._before = "" if self._benign else "error"
            self._in_frames = True
            return self._before
        if self._in_frames:
            if line[:1] not in ("", " ") and _EXCEPTION.match(line):
                self._in_frames = False
            return self._before
        if not line:
            return ""
        if line.startswith(_CHAINED):
            return self._before
        self._before = None
        return None


def _of_request(message: str) -> Level:
    found = _REQUEST.match(message)
    if found is None or found["code"] < "400" or "GET /health" in found["request"]:
        return ""
    return "error" if found["code"] >= "500" else "warning"
