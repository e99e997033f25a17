"""SGLang's log, line by line, into start-up phases, what the server says about itself, and why it crashed.

Knows the wording of SGLang 0.5.9 to 0.5.23. Time stamps in the log are the host's local time without an offset; they
are read as local time here, so durations are right anywhere and absolute times where host and reader share a zone.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import NamedTuple

import msgspec

PHASES = ("args", "dist", "weights", "kv", "tune", "graphs", "draft", "limits", "http", "warm_up", "ready")
"""Phase ids in the order in which SGLang goes through them; a launch may skip `tune`, `graphs` and `draft`.

`draft` is all that is done for the draft model of speculative decoding: its weights, its cache, its graphs.
"""


class Phase(msgspec.Struct):
    """One start-up phase that was reached.

    `started` and `ended` are epoch seconds; None where the log had no time stamp yet, and `ended` is None for the
    phase that is going on. `detail` is progress or result in words, such as "shard 43 of 64".
    """

    id: str
    started: float | None = None
    ended: float | None = None
    detail: str = ""


class Marker(NamedTuple):
    """A log line that belongs to a phase.

    `pattern` matches from the line's start, behind its prefix; `needle` is part of every such line, for speed. Named
    groups go into `effective`, but `n` and `m` only into `detail`. Lines that `every_rank` prints tell how far each is.
    """

    phase: str
    needle: str
    pattern: re.Pattern[str]
    detail: str = ""
    every_rank: bool = False


def _marker(phase: str, needle: str, pattern: str, detail: str = "", *, every_rank: bool = False) -> Marker:
    return Marker(phase, needle, re.compile(pattern), detail, every_rank)


_BAR = r":\s*\d+%.*?(?P<n>\d+)/(?P<m>\d+) \["
_PROGRESS = frozenset({"n", "m"})
_OF_A_MODEL = frozenset({"weights", "kv", "tune", "graphs"})  # phases that a draft model goes through again
_LOADS, _LOADED = "Load weight begin", "Load weight end"

# In the order in which a rank prints them.
MARKERS = (
    _marker("args", "server_args=", r"server_args=(?:ServerArgs\(|\{)"),
    _marker("dist", " begin.", r"Init (?:torch distributed|parallel) begin\.", every_rank=True),
    _marker("dist", "nccl==", r"sglang is using nccl==(?P<nccl>[\d.]+)"),
    _marker("dist", " ends. elapsed=", r"Init (?:torch distributed|parallel) ends\.", every_rank=True),
    _marker("weights", _LOADS, r"Load weight begin\.", every_rank=True),
    _marker(
        "weights",
        "% Completed |",
        r"(?:Loading (?:safetensors|pt|PT|model)[\w /-]*|Multi-thread loading[\w ]*shards)" + _BAR,
        "shard {n} of {m}",
    ),
    _marker(
        "weights",
        _LOADED,
        r"Load weight end\. elapsed=(?P<weights_s>[\d.]+) s, type=(?P<architecture>\w+),"
        r".*?avail mem=(?P<free_gb>-?[\d.]+) GB, mem usage=(?P<weights_gb>-?[\d.]+) GB",
        "{weights_gb} GB a rank",
        every_rank=True,
    ),
    _marker(
        "kv",
        "#tokens: ",
        r"(?:\w+ )*Cache (?:is allocated|VA upper bound)\..*?#tokens: (?P<kv_tokens>\d+), "
        r"(?:KV size: (?P<kv_gb>[\d.]+) GB|K size: (?P<k_gb>[\d.]+) GB, V size: (?P<v_gb>[\d.]+) GB)",
        "{kv_tokens} tokens",
        every_rank=True,
    ),
    _marker("kv", "Memory pool end", r"Memory pool end\. avail mem=(?P<free_gb>-?[\d.]+) GB", every_rank=True),
    _marker("tune", "Running FlashInfer autotune", r"Running FlashInfer autotune", every_rank=True),
    _marker("tune", "[AutoTuner]: Tuning", r"\[AutoTuner\]: Tuning \S+?" + _BAR, "profile {n} of {m}"),
    _marker("tune", "autotune completed", r"FlashInfer autotune completed\.", every_rank=True),
    _marker("tune", "DeepGEMM JIT Pre-Comp", r"Entering DeepGEMM JIT Pre-Comp(?:ile|lie) session"),
    _marker("tune", "DeepGEMM warmup", r"DeepGEMM warmup" + _BAR, "kernel {n} of {m}"),
    _marker("graphs", " begin", r"Capture .{0,80}?[gG]raph begin", every_rank=True),
    _marker("graphs", "Captur", r"Capturing (?:batches|num tokens)[^:]*?" + _BAR, "{n} of {m} graphs"),
    _marker("graphs", "Compiling num tokens", r"Compiling num tokens[^:]*?" + _BAR, "{n} of {m} compiled"),
    _marker("graphs", " end.", r"Capture .{0,80}?[gG]raph end\.", every_rank=True),
    _marker(
        "kv",
        "Post-capture KV sizing",
        r"Post-capture KV sizing: KV cache allocated\..*?#tokens: (?P<kv_tokens>\d+), KV size: (?P<kv_gb>[\d.]+) GB",
        "{kv_tokens} tokens",
    ),
    _marker(
        "limits",
        "max_total_num_tokens=",
        r"max_total_num_tokens=(?P<max_total_num_tokens>\d+), "
        r"chunked_prefill_size=(?P<chunked_prefill_size>-?\d+|None), max_prefill_tokens=(?P<max_prefill_tokens>\d+), "
        r"max_running_requests=(?P<max_running_requests>\d+), context_len=(?P<context_len>\d+), "
        r"available_[gc]pu_mem=(?P<free_gb>-?[\d.]+) GB",
        "{max_total_num_tokens} tokens",
    ),
    _marker("http", "Started server process", r"Started server process \[\d+\]"),
    _marker("http", "Uvicorn running on", r"Uvicorn running on (?P<url>https?://\S+)", "{url}"),
    _marker("warm_up", "model_info HTTP", r'\S+ - "GET /(?:get_)?model_info HTTP/1\.[01]" 200'),
    _marker("warm_up", '"POST /', r'\S+ - "POST /(?:generate|encode|v1/chat/completions|freeze_gc) HTTP/1\.[01]" \d+'),
    _marker("ready", "The server is fired up", r"The server is fired up and ready to roll!"),
)

ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
PREFIX = re.compile(
    r"\[(?P<stamp>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:[.,]\d+)?"
    r"(?P<rank>(?: (?:DP|PP|ATTN_CP|MOE_DP|TP|EP)\d+)*)\] (?:(?:INFO|WARNING|ERROR|CRITICAL):\s+)?"
)
# `ServerArgs(model_path='x', …)` up to 0.5.18, `{'model_path': 'x', …}` from 0.5.20.
_ARGUMENT = re.compile(r"\b(model_path|tp_size|port|watchdog_timeout)'?[=:] ?(?:'([^']*)'|([\w.]+))")


def moment(stamp: str) -> float | None:
    """A time stamp of SGLang's in epoch seconds; None where it is no date after all."""
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except ValueError:
        return None


class Startup:
    """Follows the log of one server run; feed() it the log from its first line on.

    `lines` counts newlines and `last_stamp` is the newest time stamp in epoch seconds. `ready` says that SGLang
    logged that it is up, which is not proof: with its port taken by another SGLang it logs that too. `effective` holds
    what the server said of itself, by name with the unit at its end (`weights_gb`, `max_total_num_tokens`, `tp_size`).
    `crashed_line` is the number of the line that `crashed` comes from, and `crashed_at` its time in epoch seconds.
    """

    def __init__(self) -> None:
        self.lines = 0
        self.last_stamp: float | None = None
        self.ready = False
        self.crashed_line: int | None = None
        self.crashed_at: float | None = None
        self.effective: dict[str, int | float | str] = {}
        self._phases: dict[str, Phase] = {}
        self._rank_steps: dict[str, int] = {}  # the farthest marker of each, also of "", the only rank of its server
        self._loaded: set[str] = set()  # ranks whose weights are loaded
        self._drafting: set[str] = set()  # ranks that went on to the draft model
        self._stamp_text = ""
        self._crash = _Crash()

    def feed(self, text: str) -> None:
        """Take the next part of the log, cut behind a newline or, to see a bar move, a `\\r`; colours are ignored."""
        if "\x1b" in text:
            text = ANSI.sub("", text)
        *whole, rest = text.split("\n")
        for line in whole:
            self.lines += 1
            self._parts(line, self.lines)
        self._parts(rest, self.lines + 1)

    @property
    def phases(self) -> list[Phase]:
        """The phases reached, in order."""
        return [self._phases[name] for name in PHASES if name in self._phases]

    @property
    def current(self) -> Phase | None:
        """The farthest phase that any process has reached."""
        reached = self.phases
        return reached[-1] if reached else None

    @property
    def per_rank(self) -> dict[str, str]:
        """The phase each rank is in, by its tag ("TP0"), while ranks start; one-rank servers have no tags."""
        return {rank: self._phase_of(rank) for rank in self._rank_steps if rank}

    @property
    def laggard(self) -> str | None:
        """The rank that is behind the others: the suspect of a stalled start. None when none is, or all are done."""
        steps = {rank: (rank in self._drafting, step) for rank, step in self._rank_steps.items() if rank}
        if not steps or "http" in self._phases or min(steps.values()) == max(steps.values()):
            return None
        return min(steps, key=steps.__getitem__)

    @property
    def crashed(self) -> str | None:
        """The cause of a crash in the log's own words: that of the first rank to fail, not its echoes on others.

        None after a normal stop, however much SGLang then logs about dead children.
        """
        return self._crash.cause

    @property
    def stopping(self) -> bool:
        """Whether the log says that the server was told to stop."""
        return self._crash.stopping

    def _parts(self, line: str, number: int) -> None:
        """A line, which a bar's carriage returns may divide."""
        for part in line.split("\r") if "\r" in line else (line,):
            if part:
                self._line(part, number)

    def _line(self, line: str, number: int) -> None:
        rank, message = "", line
        prefix = PREFIX.match(line)
        if prefix is not None:
            rank, message = prefix["rank"].strip(), line[prefix.end() :]
            self._stamp(prefix["stamp"])
        before = self._crash.cause
        self._crash.line(message, stamped=prefix is not None, starting=not self._phases)
        if self._crash.cause is not before:
            self.crashed_line, self.crashed_at = number, self.last_stamp
        if not self.ready:
            self._mark(rank, message)

    def _stamp(self, text: str) -> None:
        if text != self._stamp_text:
            self._stamp_text = text
            self.last_stamp = moment(text) or self.last_stamp

    def _mark(self, rank: str, message: str) -> None:
        for step, marker in enumerate(MARKERS):
            if marker.needle not in message:
                continue
            found = marker.pattern.match(message)
            if found is None:
                continue
            phase = self._reach(rank, marker)
            values = {name: text for name, text in found.groupdict().items() if text not in (None, "None")}
            if marker.detail:
                phase.detail = marker.detail.format_map(values)
            if phase.id != "draft":
                self.effective.update({name: _number(text) for name, text in values.items() if name not in _PROGRESS})
            if marker.every_rank:
                self._rank_steps[rank] = max(step, self._rank_steps.get(rank, step))
            if marker.phase == "args":
                self._read_args(message)
            self.ready = marker.phase == "ready"
            return

    def _reach(self, rank: str, marker: Marker) -> Phase:
        """The phase of a rank's line, reached now if it was not before.

        A slower rank's line extends a phase that is over; what a rank says again of one that it has left does not.
        """
        if marker.needle == _LOADS and rank in self._loaded:
            self._drafting.add(rank)
            self._rank_steps.pop(rank, None)
        if marker.needle == _LOADED:
            self._loaded.add(rank)
        # Bars are of the first rank, and have no tag.
        drafting = rank in self._drafting or (not rank and bool(self._drafting))
        name = "draft" if drafting and marker.phase in _OF_A_MODEL else marker.phase
        before = self.current
        phase = self._phases.setdefault(name, Phase(name, started=self.last_stamp))
        current = self.current
        if before is not None and before is not current:
            before.ended = self.last_stamp
        left = rank in self._rank_steps and PHASES.index(self._phase_of(rank)) > PHASES.index(name)
        if phase is not current and not left:
            phase.ended = self.last_stamp
        return phase

    def _phase_of(self, rank: str) -> str:
        phase = MARKERS[self._rank_steps[rank]].phase
        return "draft" if rank in self._drafting and phase in _OF_A_MODEL else phase

    def _read_args(self, message: str) -> None:
        for name, quoted, plain in _ARGUMENT.findall(message):
            if plain != "None":
                self.effective.setdefault(name, quoted or _number(plain))


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


# --- Crashes ---

_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?::|$)")

# What fails says so itself. A traceback after it is read to its end; else the line is the cause.
_FAILED = re.compile(
    r"(?:\w+ hit an exception|Initialization failed\. warmup error): (?P<rest>.*)"
    r"|(?:launch_server\.py|sglang serve): error: "  # argparse; the second from 0.5.20 on
    r"|\S*python\S*: No module named "
    r"|\[Errno 98\] error while attempting to bind"
    r"|(?:\w+ w|W)atchdog timeout \(self\.watchdog_timeout=[\d.]+(?:, self\.soft=False)?\)"
    r"|Fatal Python error: |\s+what\(\): "
)
# A process of the tree is gone; why, if anything said so, stands above.
_DIED = re.compile(
    r"Rank \d+ scheduler (?:died during initialization|is dead)|Exit code: -?\d+"
    r"|Subprocess \S+ \(pid=\d+\) crashed with exit code"
    r"|Received sigquit from a child process|SIGQUIT received\."
)
_NEEDLES = (
    *("hit an exception", "rror: ", "No module named", "[Errno 98]", "timeout (self", "what(): "),
    *("scheduler", "xit code", "igquit", "SIGQUIT"),
)
# Worth less than any other cause, whichever came first: what other ranks and the launcher say when one rank fails.
_ECHO = re.compile(
    r"Connection (?:closed|reset) by peer|TCPStore|Broken pipe|ncclRemoteError|^EOFError"
    r"|Initialization failed\. Please see|Received sigquit|SIGQUIT received|is dead|[Ee]xit code:? \d"
)
_STOPPING = ("SIGTERM received.", "Gracefully exiting", "Shutting down")
_BY_SIGTERM = re.compile(r"[Ee]xit code:? -15\b")
_BY_SIGNAL = re.compile(r"[Ee]xit code:? -\d")
_INTERRUPTED = ("KeyboardInterrupt", "SystemExit")


class _Traceback:
    """A traceback as far as it was read."""

    def __init__(self, *, fatal: bool) -> None:
        self.fatal = fatal  # it ended the server
        self.uncaught = False  # it ended a child process
        self.in_frames = True
        self.chained = False


class _Crash:
    """Finds the cause of a crash in the lines of a log."""

    def __init__(self) -> None:
        self.cause: str | None = None
        self._cause_from: _Traceback | None = None
        self._open: _Traceback | None = None
        self._suspect: str | None = None
        self.stopping = False

    def line(self, message: str, *, stamped: bool, starting: bool) -> None:
        """Take one line without its prefix. `starting`: the launcher has not come as far as its arguments."""
        if stamped:
            # Another rank's line may fall between a traceback's frames, but not behind its exception.
            if self._open is not None and not self._open.in_frames:
                self._open = None
            self.stopping = self.stopping or message.startswith(_STOPPING)
        elif self._in_traceback(message, starting):
            return
        if any(needle in message for needle in _NEEDLES):
            self._failure(message)

    def _failure(self, message: str) -> None:
        failed = _FAILED.match(message)
        if failed is not None and failed["rest"] == _TRACEBACK:
            self._open = _Traceback(fatal=True)
        elif failed is not None:
            self._blame(failed["rest"] or message.strip())
        elif _DIED.match(message):
            self._blame(message if self._suspect is None or _BY_SIGNAL.search(message) else self._suspect)

    def _in_traceback(self, line: str, starting: bool) -> bool:
        """Whether the line is part of a traceback; takes up its exception when it comes."""
        trace = self._open
        if line == _TRACEBACK:
            if trace is not None and trace.chained:
                trace.in_frames, trace.chained = True, False
            else:
                self._open = _Traceback(fatal=False)
            return True
        if trace is None:
            return False
        if not trace.in_frames:
            trace.chained = trace.chained or line.startswith(_CHAINED)
            return False
        if line[0].isspace():
            trace.fatal = trace.fatal or _ends_launcher(line, starting)
            trace.uncaught = trace.uncaught or _ends_child(line)
        elif _EXCEPTION.match(line):
            trace.in_frames = False
            self._exception(line, trace)
        return True

    def _exception(self, line: str, trace: _Traceback) -> None:
        if line.startswith(_INTERRUPTED):
            return
        if trace.fatal:
            self._blame(line, trace)
        elif trace.uncaught:
            self._suspect = line

    def _blame(self, cause: str, trace: _Traceback | None = None) -> None:
        """Take `cause` unless a better one stands; the last exception of a chained traceback replaces its first."""
        self.stopping = self.stopping or bool(_BY_SIGTERM.search(cause))
        if self.stopping:
            return
        same_chain = trace is not None and trace is self._cause_from
        if self.cause is None or same_chain or (_ECHO.search(self.cause) and not _ECHO.search(cause)):
            self.cause = cause
            self._cause_from = trace


def _ends_launcher(frame: str, starting: bool) -> bool:
    """Whether a frame shows that the launcher itself ended, as nothing caught the exception."""
    if 'launch_server.py"' in frame and frame.endswith("in <module>"):
        return True
    return starting and frame.endswith("in _run_module_as_main")


def _ends_child(frame: str) -> bool:
    """Whether a frame is the outermost of a child process started by multiprocessing."""
    return frame.endswith("in _bootstrap") or frame.startswith('  File "<string>", line 1, in <module>')
