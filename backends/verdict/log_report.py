"""A log by itself into a verdict: what `layertap diagnose` says of a file, without a host and without its server."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from backends.errors import UsageError
from backends.sglang import mask_text
from backends.verdict.catalogue import Need, Signature, catalogue
from backends.verdict.diagnose import READ_THE_LOG, Limits, State, crash
from backends.verdict.reading import Hit, LogReader
from backends.verdict.startup import Phase

BLOCK = 4 << 20
ZONE = 1800.0  # seconds; time zones are so far apart, or a multiple
NEAR = 20.0  # seconds between a log's last line and what is written to it after that without a stamp
AT_THE_END = 200  # lines: an error that so many lines followed was survived
SHOWN = 300  # characters of a quoted line
FINE = ("healthy", "starting", "slow_but_fine", "stopped")
UNLISTED = "unlisted"


class Finding(msgspec.Struct):
    """Something that is wrong. `since` in epoch seconds, by the log's own clock; None where its lines have no time."""

    id: str
    since: float | None
    evidence: list[str]
    cause: str
    remedy: str


class Report(msgspec.Struct, kw_only=True):
    """What a log comes to; `findings` begin with the one that speaks."""

    schema: int = 1
    verdict: State
    phases: list[Phase]
    findings: list[Finding]

    @property
    def fine(self) -> bool:
        """Whether nothing is wrong, as far as a log tells."""
        return self.verdict in FINE


def report(path: Path, now: float, limits: Limits | None = None) -> Report:
    """Read a log to its end and judge it at the moment `now` (epoch seconds).

    Raises UsageError where the file cannot be read or holds no line of SGLang's.
    """
    reader = read(path)
    if reader.startup.last_stamp is None and not reader.hits and reader.startup.crashed is None:
        raise UsageError(f"{path} holds no line of SGLang's; give the server's log")
    return judge(reader, now, limits or Limits(), path.stat().st_mtime)


def read(path: Path) -> LogReader:
    """Read a log. Raises UsageError."""
    reader = LogReader()
    rest = b""
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                whole, newline, rest = (rest + block).rpartition(b"\n")
                reader.feed((whole + newline).decode(errors="replace"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    if rest:
        reader.feed(rest.decode(errors="replace"))
    return reader


def judge(reader: LogReader, now: float, limits: Limits, written: float) -> Report:
    """Judge what was read, at the moment `now`, of a file that was `written` last then (both epoch seconds)."""
    startup = reader.startup
    phase = startup.current.id if startup.current else None
    if startup.crashed is not None:
        return _crashed(reader, startup.crashed, startup.crashed_line, startup.crashed_at)
    if startup.stopping:
        return _report(reader, "stopped", [])
    up = startup.ready or (reader.batch is not None and phase is None)
    ended = [hit for hit in _hits(reader, "crash") if not (up and _survived(reader, hit))]
    if ended:
        last = max(ended, key=lambda hit: hit.last)
        return _crashed(reader, last.text, last.last, last.last_at)
    if up:
        found = [catalogue().by_id[hit.id] for hit in _hits(reader, "degraded")]
        return _report(reader, "degraded" if found else "healthy", found)
    silent = None if startup.last_stamp is None else silence(startup.last_stamp, now, written)
    if silent is not None and silent > limits.silence[phase or "launch"]:
        return _report(reader, "hang_suspected", _at_the_end(reader, "hang", phase)[:1])
    found = _at_the_end(reader, "slow", phase)[:1]
    return _report(reader, "slow_but_fine" if found else "starting", found)


def silence(stamp: float, now: float, written: float) -> float:
    """Seconds for which a log has said nothing; `stamp` is its last line's, read as if it came from this time zone.

    SGLang's stamps name no zone. A file that was written half-hours off its last line is of another one; any other
    distance is that of a copy, which is younger than what it says.
    """
    zones = round((written - stamp) / ZONE)
    of_another = zones and abs(written - stamp - zones * ZONE) < NEAR
    return now - (written if of_another or stamp > now else stamp)


def _crashed(reader: LogReader, line: str, number: int | None, at: float | None) -> Report:
    phase = reader.startup.current.id if reader.startup.current else None
    verdict = crash(line, phase, reader.hits.values(), number)
    quoted = [] if number is None else [_quoted(number, line)]
    if not verdict.findings:
        evidence = [*quoted, *_phases(reader)]
        return _report(reader, "crashed", [], Finding(UNLISTED, at, evidence, mask_text(line), READ_THE_LOG))
    first, *others = [catalogue().by_id[name] for name in verdict.findings]
    hit = reader.hits.get(first.id)
    if hit is not None:
        quoted = [*(quoted if hit.line != number else []), *_seen(reader, first)]
    evidence = [*quoted, *_phases(reader)]
    cause = mask_text(verdict.cause or first.cause)
    finding = Finding(first.id, hit.at if hit else at, evidence, cause, first.remedy)
    return _report(reader, "crashed", others, finding)


def _report(reader: LogReader, verdict: State, found: Iterable[Signature], first: Finding | None = None) -> Report:
    findings = [first] if first else []
    for one in found:
        hit = reader.hits.get(one.id)
        since = hit.at if hit else reader.startup.last_stamp
        findings.append(Finding(one.id, since, [*_seen(reader, one), *_phases(reader)], one.cause, one.remedy))
    return Report(verdict=verdict, phases=reader.startup.phases, findings=findings)


def _survived(reader: LogReader, hit: Hit) -> bool:
    """Whether a server that came up went on after an error: it was ready later, or wrote many lines since."""
    ready = reader.startup.phases[-1].started if reader.startup.ready else None
    before = ready is not None and hit.last_at is not None and hit.last_at < ready
    return before or reader.startup.lines - hit.last > AT_THE_END


def _hits(reader: LogReader, kind: str) -> list[Hit]:
    """Hits of a kind, specific ones first."""
    by_id = catalogue().by_id
    found = [hit for hit in reader.hits.values() if by_id[hit.id].kind == kind]
    return sorted(found, key=lambda hit: (by_id[hit.id].generic, hit.line))


def _at_the_end(reader: LogReader, kind: str, phase: str | None) -> list[Signature]:
    """Signatures of a kind that the log's end may mean; the general one last."""
    seen: set[Need] = {"silent", "log_only"}
    if reader.startup.laggard:
        seen.add("rank_behind")
    found = [
        one
        for one in catalogue().signatures
        if one.kind == kind
        and one.in_phase(phase)
        and (_ends_with(reader, one) if one.lines else seen.issuperset(_readable(one)))
    ]
    return sorted(found, key=lambda one: (one.generic, "log_only" in one.needs))


def _ends_with(reader: LogReader, one: Signature) -> bool:
    """Whether the log holds a signature's lines, as the last ones where they are normal before."""
    return one.id in reader.hits and (not one.last_line or reader.last_line(one))


def _readable(one: Signature) -> set[Need]:
    """What must be seen for a signature, as far as a log could show it.

    A log shows no compilers. Of what holds in a few phases only, they are left out: it says what it may be.
    """
    return {need for need in one.needs if need != "no_compiler" or not one.phases}


def _seen(reader: LogReader, one: Signature) -> list[str]:
    """The lines of a signature, quoted; where it has none, the log's last line by its number."""
    hit = reader.hits.get(one.id)
    if hit is None:
        return [f"the log ends at line {reader.startup.lines:,}"]
    more = [f"{hit.count - 1:,} more such lines, the last one {hit.last:,}"] if hit.count > 1 else []
    return [_quoted(hit.line, hit.text), *more]


def _quoted(number: int, text: str) -> str:
    return f"line {number:,}: {mask_text(text)[:SHOWN]}"


def _phases(reader: LogReader) -> list[str]:
    """How far the start came, and how long each phase took."""
    phases = reader.startup.phases
    if not phases:
        return []
    took = [
        f"{phase.id} {phase.ended - phase.started:.0f} s"
        for phase in phases
        if phase.started is not None and phase.ended is not None
    ]
    last = phases[-1]
    detail = f" ({last.detail})" if last.detail and last.id != "ready" else ""
    before = f"; before it {', '.join(took)}" if took else ""
    return [f"phase reached: {last.id}{detail}{before}"]
