"""Everything that was observed of a server, and the same in sentences."""

from __future__ import annotations

import signal

import msgspec

from backends.verdict.activity import Activity
from backends.verdict.reading import Batch, Hit


class Rank(msgspec.Struct):
    """One process of the server. `state` is psutil's word ("running", "sleeping", "zombie")."""

    name: str
    pid: int
    cpu_percent: float | None = None
    state: str | None = None


class Evidence(msgspec.Struct, kw_only=True):
    """Everything observed of one server; None stands for not known. Durations are in seconds.

    `health` is the HTTP status of /health, `health_s` how long it took and `health_failing_s` since when it fails.
    `exit_code` is negative or above 128 where a signal ended the process. `crashed` (from line `crashed_line`),
    `stopping`, `weights_loaded` and `ready_seen` come from the log (`startup.py`), `hits` are signatures found in it,
    those in `last_lines` at its end; `tap_in` and `tap_error` from the tap's own file. `listener_is_ours`: whether the
    process that listens on `port` belongs to this run. `missing` names ranks that were there and are gone.
    `starved` is how many times as long as on an idle host the time took for which the log is silent, and `stacks` where
    the ranks stood since, which `ranks_apart` says was not the same place. `earlier_s` is how long this phase took at
    the last start, `detail` its progress, which moved `detail_s` ago. `kernel` holds lines of the kernel's log since
    this run began.
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
    health_failing_s: float | None = None
    log_silent_s: float | None = None
    starved: float = 1.0
    log_lines: int | None = None
    phase: str | None = None
    phase_s: float | None = None
    earlier_s: float | None = None
    detail: str = ""
    detail_s: float | None = None
    crashed: str | None = None
    crashed_line: int | None = None
    stopping: bool = False
    weights_loaded: bool = False
    hits: list[Hit] = []
    last_lines: list[str] = []
    ready_seen: bool | None = None
    tap_in: bool | None = None
    tap_error: str | None = None
    ranks: list[Rank] = []
    launcher: Rank | None = None
    missing: list[str] = []
    laggard: str | None = None
    stacks: list[str] = []
    ranks_apart: bool = False
    activity: Activity | None = None
    batch: Batch | None = None
    batch_s: float | None = None
    throttled: dict[int, list[str]] = {}
    narrow: dict[int, str] = {}
    xids: dict[int, list[int]] = {}
    kernel: list[str] = []


def sentences(e: Evidence, *, idle: bool = False) -> list[str]:
    """The evidence that is known, one sentence each, with its numbers.

    A server that may stand `idle` need not move.
    """
    return [
        *_process_sentences(e),
        *_log_sentences(e),
        *_network_sentences(e),
        *_tap_sentences(e),
        *(e.activity.sentences() if e.activity and not idle else []),
        *_gpu_sentences(e),
        *(f"kernel: {line}" for line in e.kernel),
        *(_rank_sentence("rank ", rank) for rank in e.ranks),
        *(f"rank {name} gone" for name in e.missing),
        *(f"stacks: {line}" for line in e.stacks),
        *([_rank_sentence("", e.launcher)] if e.launcher and e.launcher.state == "stopped" else []),
    ]


def _process_sentences(e: Evidence) -> list[str]:
    said = []
    if e.process_alive is not None:
        said.append("process alive" if e.process_alive else "process gone")
    number = signal_number(e)
    if number is not None:
        said.append(f"ended by {signal_name(number)}")
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
        before = "" if e.earlier_s is None or e.ready_seen else f", last time {e.earlier_s:.0f} s"
        detail = f": {e.detail}" if e.detail and not e.ready_seen else ""
        said.append(f"in phase {e.phase}{since}{before}{detail}")
    if e.log_silent_s is not None:
        at = "" if e.log_lines is None else f" at line {e.log_lines}"
        said.append(f"log silent for {e.log_silent_s:.0f} s{at}")
    if e.laggard and not e.ready_seen:
        said.append(f"rank {e.laggard} is behind the others in the log")
    if e.batch is not None and e.batch_s is not None and e.batch.queue:
        said.append(f"{e.batch.queue} requests wait and {e.batch.running} run, as of {e.batch_s:.0f} s ago")
    return said


def _network_sentences(e: Evidence) -> list[str]:
    said = []
    if e.port_open is not None:
        listener = {True: ", listener is this run", False: ", listener is another process", None: ""}
        said.append(f"{port_words(e)} open{listener[e.listener_is_ours]}" if e.port_open else f"{port_words(e)} closed")
    if e.health is not None:
        after = "" if e.health_s is None else f" after {e.health_s:.1f} s"
        said.append(f"/health {e.health}{after}")
    elif e.health_failing_s is not None:
        said.append(f"/health without an answer for {e.health_failing_s:.0f} s")
    return said


def _tap_sentences(e: Evidence) -> list[str]:
    if e.tap_error is not None:
        return [f"tap: {e.tap_error}"]
    if e.tap_in is None:
        return []
    return ["tap in" if e.tap_in else "tap not in"]


def _gpu_sentences(e: Evidence) -> list[str]:
    return [
        *(f"GPU {index} throttled: {', '.join(why)}" for index, why in e.throttled.items()),
        *(f"GPU {index} has a PCIe link of {width}" for index, width in e.narrow.items()),
        *(f"GPU {index} reported XID {', '.join(map(str, codes))}" for index, codes in e.xids.items()),
    ]


def _rank_sentence(what: str, rank: Rank) -> str:
    cpu = "" if rank.cpu_percent is None else f" {rank.cpu_percent:.0f} % CPU,"
    return f"{what}{rank.name}{cpu} {rank.state or 'state not known'}"


def port_words(e: Evidence) -> str:
    """The port by its number."""
    return "port" if e.port is None else f"port {e.port}"


def signal_number(e: Evidence) -> int | None:
    """The signal that ended the process; shells and containers report it as exit code 128 and more."""
    if e.signal is not None:
        return e.signal
    code = e.exit_code or 0
    if code < 0:
        return -code
    return code - 128 if code - 128 in set(signal.Signals) else None


def signal_name(number: int) -> str:
    """`SIGKILL` for 9."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
