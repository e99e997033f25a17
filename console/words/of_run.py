"""Runs in words: how far one is, what happened in it, what a tuning run came to."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from console.session import going_on
from console.words import figures, of_server

EVENTS = {
    "started": "started as process {child}, supervised by process {supervisor}",
    "stop_asked": "asked to stop: {why}",
    "prepared": "prepared: {samples:,} samples, {written:,} of them written already",
    "gate": "gate: {what}; {remedy}",
    "alarm": "odd rows: {text}",
    "retry": "sample {sample} is drawn again: {reason}",
    "failed": "sample {sample} ({file}:{line}) failed: {reason}",
    "log_only": "further retries and failures are only in the log",
    "server_lost": "server lost: {reason}",
    "error": "ended early: {reason}",
    "tried": "{variant}: {outcome}",
    "relaunch": "the server {server} died ({cause}) and is launched again, {attempt} of {most}",
    "relaunched": "the server {server} is ready instead of {instead_of}, after {seconds} s",
    "relaunch_failed": "launched again, {attempt} of {most}, it did not come up: {reason}",
    "trouble": "{severity}: {cause} ({evidence}); {remedy}",
    "trouble_over": "over after {seconds} s: {id}",
}
SIGNS = {"starting": "~", "running": "~", "died": "!"}  # before the state of a run of which no end is known
# Events that are told while one follows a run.
NARRATED = ("tried", "relaunch", "relaunched", "relaunch_failed", "trouble", "trouble_over")
BEFORE_DRAWING = ("preparing", "tokenising", "probing")  # phases of an extraction
CHANGES_SHOWN = 48  # characters


def extraction(run: dict[str, Any]) -> Iterator[str]:
    """An extraction's state in lines: how far it is, and where it has ended how, and what to do."""
    yield f"extraction {run['id']}: {how(run)} -> {run['details']['output']}"
    if run["progress"]:
        # What has ended has no rate, and nothing is left to it.
        over = {} if going_on(run) else {"tokens_per_second": None, "eta_seconds": None}
        yield f"  {progress(run['progress'] | over)}"
        for failure in run["progress"]["failures"][:3]:
            yield f"  failed: sample {failure['sample']}: {failure['reason']}"
    result = run["result"] or {}
    if "error" in result:
        yield f"  {result['error']}"
    if _cut_short(run):
        yield "  give the same command again: it goes on where this one ended"


def how(run: dict[str, Any]) -> str:
    """How a job that writes a dataset is, or how it has ended."""
    ended = run["exit"]
    if going_on(run) or not ended:
        return str(run["state"])
    if ended["code"] == 0:
        return "finished"
    if ended["code"] == 1 and run["result"]:
        return "finished, not all of it good"
    if run["stop_asked"]:
        return "stopped"
    return f"failed with {ended['code']}" if ended["signal"] is None else f"killed by signal {ended['signal']}"


def _cut_short(run: dict[str, Any]) -> bool:
    """Whether the same command would go on: not where an error says what to do first."""
    ended = run["exit"]
    if ended and ended["code"] in (0, 1) and run["result"]:  # to its end
        return False
    if run["stop_asked"] or run["state"] == "died":
        return True
    return bool(ended) and (ended["signal"] is not None or not run["result"])


def runs(found: list[dict[str, Any]], at: float) -> Iterator[str]:
    """Runs as a table, `at` epoch seconds."""
    rows = [row(one, at) for one in found]
    wide = {name: max(len(cells[name]) for cells in rows) for name in (rows[0] if rows else ())}
    for cells in rows:
        yield "  ".join(f"{cells[name]:<{width}}" for name, width in wide.items()).rstrip()


def row(run: dict[str, Any], at: float) -> dict[str, str]:
    """A run's cells in a table: its id, how it is or has ended, when it began, how long it lasted, of what it is."""
    what = run["details"].get("profile") or run["details"].get("output") or run["details"].get("rows") or ""
    port = f"port {run['port']}  " if run["port"] else ""
    return {
        "run": run["id"],
        "state": signed_state(run),
        "began": _began(run["created"], at),
        "lasted": lasted(run, at),
        "what": f"{port}{what}",
    }


def signed_state(run: dict[str, Any]) -> str:
    """How a run is, or has ended, behind a sign of how bad that is."""
    ended = run["exit"]
    if ended is None:
        state = str(run["state"])
        return f"{SIGNS[state]} {state}" if state in SIGNS else state
    if run["stop_asked"] and (run["kind"] == "server" or ended["code"] != 0):
        return "- stopped"
    if ended["signal"] is not None:
        return f"! signal {ended['signal']}"
    return "+ ended" if ended["code"] == 0 else f"! exit {ended['code']}"


def lasted(run: dict[str, Any], at: float) -> str:
    """How long a run lasted, or has lasted by now; "?" where nobody saw its end."""
    ended = run["exit"]
    known = ended is not None or going_on(run)
    return figures.duration((ended["at"] if ended else at) - run["created"]) if known else "?"


def _began(created: float, at: float) -> str:
    day = "%H:%M:%S" if time.localtime(created)[:3] == time.localtime(at)[:3] else "%d %b %H:%M"
    return time.strftime(day, time.localtime(created))


def run(shown: dict[str, Any]) -> Iterator[str]:
    """A run in one line, and its events in a line each."""
    long = f", lasted {lasted(shown, shown['exit']['at'])}" if shown["exit"] else ""
    yield f"{shown['id']}  {signed_state(shown)}, began {figures.when(shown['created'])}{long}"
    yield from (f"  {line}" for line in events(shown["events"]))


def events(found: list[dict[str, Any]]) -> Iterator[str]:
    """Events of a run's history, a line each with its time."""
    for one in found:
        yield f"{figures.when(one['at'])}  {event(one)}"


def event(one: dict[str, Any]) -> str:
    """An event of a run's history in one line; one that another version wrote is shown as it is."""
    facts = {name: fact for name, fact in one.items() if name not in ("at", "event")}
    try:
        if one["event"] == "ended":
            text = f"ended with code {one['code']}" if one["signal"] is None else f"ended by signal {one['signal']}"
        elif one["event"] == "stopped":
            left = "; ".join(one["left"]) or "nothing"
            text = f"stopped in {one['seconds']} s ({one['how']}), left behind: {left}"
        elif one["event"] == "probed":
            text = f"{of_server.probe_head(one)}{', as it was asked before' if one['earlier'] else ''}"
        else:
            text = EVENTS[one["event"]].format(**facts)
    except (KeyError, TypeError, ValueError):
        text = ": ".join([one["event"], ", ".join(f"{name.replace('_', ' ')} {facts[name]}" for name in facts)])
    return " ".join(text.split())


def progress(now: dict[str, Any]) -> str:
    """An extraction's progress in one line."""
    if now["phase"] in BEFORE_DRAWING:
        return f"{now['phase']} … {figures.counted(now['rows'], 'row')}" if now.get("rows") else f"{now['phase']} …"
    if now["phase"] == "relaunching":
        return "the server died and is launched again …"
    rate = now["tokens_per_second"]
    parts = [
        f"{now['written']:,} / {now['samples']:,} samples",
        f"{rate:,.0f} tok/s" if rate else "",
        figures.size(now["bytes_written"]),
        f"{now['failed']} failed" if now["failed"] else "",
        f"{figures.duration(now['eta_seconds'])} left" if now["eta_seconds"] else "",
    ]
    return " · ".join(part for part in parts if part)


def verifying(now: dict[str, Any]) -> str:
    """A verification's progress in one line."""
    parts = [
        figures.bar(now["done"], now["total"]),
        f"{now['done']:,} / {now['total']:,} samples",
        figures.size(now["bytes"]),
        f"{figures.size(now['bytes_per_second'])}/s" if now["bytes_per_second"] else "",
    ]
    return " · ".join(part for part in parts if part)


def comparing(now: dict[str, Any]) -> str:
    """How far a comparison is, in one line."""
    return f"{figures.bar(now['done'], now['total'])} · {now['done']:,} / {now['total']:,} samples"


def exporting(now: dict[str, Any]) -> str:
    """An export's progress in one line."""
    if now["phase"] == "finishing":
        return "writing what belongs beside the samples …"
    done = now["here"] + now["written"]
    parts = [
        figures.bar(done, now["samples"]),
        f"{done:,} / {now['samples']:,} samples",
        figures.size(now["bytes_written"]),
        f"{figures.size(now['bytes_per_second'])}/s" if now["bytes_per_second"] else "",
        f"{now['failed']} failed" if now["failed"] else "",
        f"{figures.duration(now['eta_seconds'])} left" if now["eta_seconds"] else "",
    ]
    return " · ".join(part for part in parts if part)


def pulling(now: dict[str, Any]) -> str:
    """A pull's progress in one line."""
    link = f" · link {now['link']}" if now["link"] else ""
    if now["phase"] in ("listing", "tokens"):
        return f"{now['phase']} …{link}"
    rate = now["bytes_per_second"]
    left = figures.duration((now["bytes"] - now["bytes_done"]) / rate) if rate else None
    parts = [
        "checking what is here" if now["phase"] == "checking" else "",
        f"{now['files_done']:,} / {now['files']:,} files",
        f"{figures.size(now['bytes_done'])} / {figures.size(now['bytes'])}",
        f"{figures.size(rate)}/s" if rate else "",
        f"{left} left" if left else "",
    ]
    return " · ".join(part for part in parts if part) + link


def tuning(now: dict[str, Any]) -> str:
    """What a tuning run does now, in one line."""
    return f"{now['number']}. {now['trial']}: {figures.dashed(now['phase'])} …"


def tuned(made: dict[str, Any]) -> Iterator[str]:
    """What a tuning run came to: its trials as a table, the best first, and the profile that they make."""
    load, trials = made["load"], made["trials"]
    if load:
        yield f"one round: {load['prompts']:,} prompts, {load['tokens']:,} tokens, the longest {load['longest']:,}"
    profile = next((one["tokens_per_second"] for one in trials if one["base"] is None), None)
    bounded = any(one["ceiling"] for one in trials)
    width = max([7, *(len(one["name"]) for one in trials)])
    changes = max([7, *(len(_changed(one)) for one in trials)])
    bound = f"{'of the bus':>12}" if bounded else ""
    yield f"  {'variant':<{width}}  {'changes':<{changes}}{'tok/s':>10}{bound}{'gain':>8}{'start':>9}"
    for one in trials:
        speed, start = one["tokens_per_second"], figures.duration(one["start_seconds"]) if one["start_seconds"] else "-"
        gain = f"{speed / profile - 1:+.0%}" if speed and profile and one["base"] else "-"
        share = "-" if one["share_of_ceiling"] is None else f"{one['share_of_ceiling']:.0%}"
        sign = "*" if one["name"] == made["best"] else " " if speed else "!"
        shown = f"{speed:,.0f}" if speed else "-"
        yield (
            f"{sign} {one['name']:<{width}}  {_changed(one):<{changes}}{shown:>10}"
            f"{f'{share:>12}' if bounded else ''}{gain:>8}{start:>9}"
        )
        if one["failure"]:
            see = f" (`layertap logs {one['server']}`)" if one["server"] else ""
            yield f"    {one['failure']}{see}"
        if one["risk"]:
            yield f"    not taken into the profile: {one['risk']}"
    if made["stopped"]:
        yield f"ended early: {made['stopped']}"
    if made["profile_toml"]:
        yield f"# written to {made['written']}" if made["written"] else "# for layertap.toml:"
        yield from made["profile_toml"].splitlines()
    elif made["best"]:
        yield f"nothing is faster than {made['profile']} as it is"


def _changed(trial: dict[str, Any]) -> str:
    """What a variant changes, in as much room as a table has."""
    text = " ".join(trial["changes"]) or "-"
    return text if len(text) <= CHANGES_SHOWN else f"{text[: CHANGES_SHOWN - 2]} …"
