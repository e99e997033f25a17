"""What was observed of a server, into a verdict with its cause, a remedy and the evidence in sentences.

A hang is not told from a slow start here: a silent server that starts stays "starting", with the silence in evidence.
"""

from __future__ import annotations

import re
import signal
from typing import Literal, NamedTuple

import msgspec


class Rank(msgspec.Struct):
    """One process of the server. `state` is psutil's word ("running", "sleeping", "zombie")."""

    name: str
    pid: int
    cpu_percent: float | None = None
    state: str | None = None


class Evidence(msgspec.Struct, kw_only=True):
    """Everything observed of one server; None stands for not known. Durations are in seconds.

    `health` is the HTTP status of /health and `health_s` how long it took. `exit_code` is negative or above 128 where
    a signal ended the process. `crashed` and `ready_seen` come from the log (backends.startup), `tap_in` and
    `tap_error` from the tap's own file. `listener_is_ours`: whether the process that listens on `port` belongs to
    this run.
    """

    process_alive: bool | None = None
    exit_code: int | None = None
    signal: int | None = None
    stop_requested: bool = False
    port: int | None = None
    port_open: bool | None = None
    listener_is_ours: bool | None = None
    health: int | None = None
    health_s: float | None = None
    log_silent_s: float | None = None
    log_lines: int | None = None
    phase: str | None = None
    phase_s: float | None = None
    crashed: str | None = None
    ready_seen: bool | None = None
    tap_in: bool | None = None
    tap_error: str | None = None
    ranks: list[Rank] = []


State = Literal["starting", "healthy", "crashed", "stopped", "unknown"]


class Verdict(msgspec.Struct):
    """How a server is, why, and what to do about it; `cause` and `remedy` are None where there is nothing to say."""

    verdict: State
    cause: str | None = None
    remedy: str | None = None
    evidence: list[str] = []


READ_THE_LOG = "read the log around the first traceback (layertap logs)"
STOP_NOW = "stop the server and launch it again once that is put right; nothing can be drawn from it"
FREE_THE_PORT = "stop what holds the port, or launch on another one"


class Known(NamedTuple):
    """A crash that is known: what its line looks like, in which phases, what it means and what to do."""

    pattern: str
    cause: str
    remedy: str
    phases: tuple[str, ...] = ()


# Specific before general; the first that matches holds.
KNOWN = (
    Known(
        r"try to increase --mem-fraction-static|leave no GPU memory for the KV cache|larger than the profiled value -",
        "the weights leave no GPU memory for the KV cache",
        "raise mem-fraction-static, or spread the weights: a larger tp-size or a smaller quantisation",
    ),
    Known(
        r"out of memory",
        "GPU memory ran out while the weights were loading",
        "free the GPUs of other processes (layertap doctor names them), or spread the weights: a larger tp-size or a "
        "smaller quantisation",
        ("args", "dist", "weights"),
    ),
    Known(
        r"CUDA out of memory|OutOfMemoryError|(?:Prefill|Decode) out of memory",
        "GPU memory ran out",
        "lower mem-fraction-static, or max-prefill-tokens",
    ),
    Known(
        r"memory capacity is unbalanced",
        "the GPUs do not have the same amount of memory free",
        "stop what uses some of them (layertap doctor names it), or leave those GPUs out",
    ),
    Known(
        r"[Ee]xit code:? -9\b",
        "a process was killed by SIGKILL, most often by the kernel's OOM killer",
        "see dmesg for 'Out of memory'; free host memory (dumps in /dev/shm count), raise the container's limit, or "
        "load with fewer threads",
    ),
    Known(
        r"[Ee]xit code:? -7\b|/dev/shm/nccl-|posix_fallocate failed",
        "/dev/shm is too small",
        "give the container more (docker run --shm-size 32g, or --ipc=host), or remove stale dumps (layertap doctor)",
    ),
    Known(
        r"No space left on device",
        "a disk of the host is full",
        "free space where the message says, or move the cache there (HF_HOME, XDG_CACHE_HOME)",
    ),
    Known(
        r"failed to map segment from shared object",
        "compiled code lies on a file system that is mounted noexec, most often the home",
        "move the caches of compilers to another one (XDG_CACHE_HOME, TRITON_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR)",
    ),
    Known(
        r"Errno 98|[Aa]ddress already in use|EADDRINUSE|port \d+ is in use|used by a process already",
        "a port that the server needs is taken",
        FREE_THE_PORT,
    ),
    Known(
        r"unrecognized arguments|ambiguous option|error: argument |invalid choice",
        "this SGLang does not take one of the arguments",
        "compare layertap launch --dry-run with that SGLang's --help, and unset the argument in the profile",
    ),
    Known(
        r"trust_remote_code",
        "the model brings its own code, which SGLang runs only when told to",
        "if you trust the checkpoint, set trust-remote-code = true in the profile's args",
    ),
    Known(
        r"GatedRepo|gated repo|401 Client Error|RepositoryNotFound|LocalEntryNotFound|Repo id must be|HFValidationError"
        r"|couldn.t connect to|not a local folder|file named config\.json|No such file or directory: .*config\.json",
        "the model is not there: the path is wrong, or the hub refuses it",
        "give --model a folder on the host with a config.json, or a hub name, HF_TOKEN and the accepted licence",
    ),
    Known(
        r"SafetensorError|HeaderTooLarge|MetadataIncompleteBuffer|annot find any model weights|Corrupted safetensors",
        "the checkpoint is incomplete",
        "download it again, and compare the files' sizes with model.safetensors.index.json",
    ),
    Known(
        r"does not recognize this architecture|Model architectures .* are not supported",
        "this SGLang or its transformers does not know the model",
        "use a newer SGLang, or the transformers version that it pins",
    ),
    Known(
        r"No module named '?sglang",
        "this Python has no SGLang",
        "name the interpreter that has it: --python, LAYERTAP_PYTHON or python under [host.NAME]",
    ),
    Known(
        r"No CUDA GPUs|driver version is insufficient|driver on your system is too old|Error 80[234]:",
        "CUDA cannot be initialised",
        "run layertap doctor: driver, fabric manager or the container's GPU access is at fault",
    ),
    Known(
        r"atchdog timeout",
        "a forward took longer than the watchdog allows",
        "raise watchdog-timeout if a compiler was running; else read the stacks in the log above that line",
    ),
)


def diagnose(evidence: Evidence) -> Verdict:
    """Judge a server. Healthy takes all of: ready in the log, /health 200, our own listener, and the tap seen."""
    verdict = _judge(evidence)
    verdict.evidence = _sentences(evidence)
    return verdict


def _judge(e: Evidence) -> Verdict:
    # SGLang logs its own stop like a crash (exit codes, SIGQUIT), so a stop that was asked for comes first.
    if e.stop_requested:
        return Verdict("stopped", "stop was asked for" + ("; the process is still ending" if e.process_alive else ""))
    if e.crashed is not None:
        return _crash(e.crashed, e.phase)
    if e.process_alive is False:
        return _ended(e)
    if e.process_alive is None:
        return Verdict("unknown", "whether the process is alive is not known", "check the link to the host")
    dead = [rank.name for rank in e.ranks if rank.state in ("zombie", "dead")]
    if dead:
        # SGLang before 0.5.11 does not watch its children, and the port stays open without them.
        return Verdict("crashed", f"{', '.join(dead)} is dead while the launcher still runs", READ_THE_LOG)
    return _up(e) if e.ready_seen else _starting(e)


def _ended(e: Evidence) -> Verdict:
    number = _signal_number(e)
    if number in (signal.SIGTERM, signal.SIGINT):
        return Verdict(
            "stopped",
            f"ended by {_signal_name(number)}, which was not sent from here",
            "look for what stops processes on that host: a job scheduler, a container, another session",
        )
    if number is not None:
        return _crash(f"the server was ended by {_signal_name(number)} (exit code -{number})", e.phase)
    if e.exit_code == 0:
        return Verdict("stopped", "the server ended by itself, with exit code 0")
    if e.exit_code is None:
        return Verdict("crashed", "the process is gone, and its exit code is not known", READ_THE_LOG)
    return Verdict("crashed", f"the server ended with exit code {e.exit_code}", READ_THE_LOG)


def _starting(e: Evidence) -> Verdict:
    if e.tap_error is not None:
        return Verdict("starting", f"the tap failed ({e.tap_error}), and the server will come up without it", STOP_NOW)
    if e.port_open and e.listener_is_ours is False:
        return Verdict("starting", f"{_port(e)} belongs to another process, so this start will fail", FREE_THE_PORT)
    return Verdict("starting")


def _up(e: Evidence) -> Verdict:
    """The log says ready; that alone is not enough."""
    if e.listener_is_ours is False:
        return Verdict("crashed", f"{_port(e)} belongs to another process; this server never got it", FREE_THE_PORT)
    if e.port_open is False:
        return Verdict("unknown", f"the log says ready, but {_port(e)} is closed", READ_THE_LOG)
    if e.health is not None and e.health != 200:
        return Verdict(
            "unknown",
            f"the log says ready, but /health answers {e.health}",
            "wait if a long prefill runs; if it stays, stop the server and launch it again",
        )
    if e.tap_error is not None:
        return Verdict("unknown", f"the tap failed: {e.tap_error}", STOP_NOW)
    if e.tap_in is False:
        return Verdict(
            "unknown",
            "the server is up without the tap",
            "look in the log for why SGLang skipped the plugin layertap, stop the server and launch it again",
        )
    missing = [
        name
        for name, value in (("/health", e.health), ("who listens", e.listener_is_ours), ("the tap", e.tap_in))
        if value is None
    ]
    if missing:
        return Verdict("unknown", f"the log says ready; not known yet: {', '.join(missing)}")
    return Verdict("healthy")


def _crash(line: str, phase: str | None) -> Verdict:
    for known in KNOWN:
        if re.search(known.pattern, line) and (not known.phases or phase in known.phases):
            return Verdict("crashed", known.cause, known.remedy)
    return Verdict("crashed", line, READ_THE_LOG)


# --- Sentences ---


def _sentences(e: Evidence) -> list[str]:
    """The evidence that is known, one sentence each, with its numbers."""
    return [
        *_process_sentences(e),
        *_log_sentences(e),
        *_network_sentences(e),
        *_tap_sentences(e),
        *(_rank_sentence(rank) for rank in e.ranks),
    ]


def _process_sentences(e: Evidence) -> list[str]:
    said = []
    if e.process_alive is not None:
        said.append("process alive" if e.process_alive else "process gone")
    number = _signal_number(e)
    if number is not None:
        said.append(f"ended by {_signal_name(number)}")
    elif e.exit_code is not None:
        said.append(f"exit code {e.exit_code}")
    if e.crashed is not None and e.process_alive:
        said.append("SGLang can take 75 s to end after a crash, with its port open")
    return said


def _log_sentences(e: Evidence) -> list[str]:
    said = []
    if e.crashed is not None:
        said.append(f"log says: {e.crashed}")
    if e.phase is not None:
        since = "" if e.phase_s is None else f" for {e.phase_s:.0f} s"
        said.append(f"in phase {e.phase}{since}")
    if e.log_silent_s is not None:
        at = "" if e.log_lines is None else f" at line {e.log_lines}"
        said.append(f"log silent for {e.log_silent_s:.0f} s{at}")
    return said


def _network_sentences(e: Evidence) -> list[str]:
    said = []
    if e.port_open is not None:
        listener = {True: ", listener is this run", False: ", listener is another process", None: ""}
        said.append(f"{_port(e)} open{listener[e.listener_is_ours]}" if e.port_open else f"{_port(e)} closed")
    if e.health is not None:
        after = "" if e.health_s is None else f" after {e.health_s:.1f} s"
        said.append(f"/health {e.health}{after}")
    return said


def _tap_sentences(e: Evidence) -> list[str]:
    if e.tap_error is not None:
        return [f"tap: {e.tap_error}"]
    if e.tap_in is None:
        return []
    return ["tap in" if e.tap_in else "tap not in"]


def _rank_sentence(rank: Rank) -> str:
    cpu = "" if rank.cpu_percent is None else f" {rank.cpu_percent:.0f} % CPU,"
    return f"rank {rank.name}{cpu} {rank.state or 'state not known'}"


def _port(e: Evidence) -> str:
    return "port" if e.port is None else f"port {e.port}"


def _signal_number(e: Evidence) -> int | None:
    """The signal that ended the process; shells and containers report it as exit code 128 and more."""
    if e.signal is not None:
        return e.signal
    code = e.exit_code or 0
    if code < 0:
        return -code
    return code - 128 if code - 128 in set(signal.Signals) else None


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
