"""A host in words: the link to it, its GPUs, what the doctor finds, the profiles that suit it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from console.words import figures

CHECK_SIGNS = {"pass": "+", "warn": "?", "fail": "!", "unknown": "-"}


def gpus(sample: dict[str, Any]) -> Iterator[str]:
    """A line a GPU; none where there is no GPU, why where it cannot be told."""
    if sample["state"] not in ("ok", "no_gpu", "no_nvml"):
        yield f"GPUs: {sample['why']}"
    for gpu in sample["gpus"]:
        if gpu["error"]:
            yield f"! GPU {gpu['index']}: {gpu['error']}"
            continue
        troubles = [*(gpu["throttle"] or []), *(f"XID {xid['code']}" for xid in gpu["xid"] or [])]
        parts = [
            gpu["name"] or "?",
            f"{figures.number(gpu['utilisation_percent'])} %",
            f"{figures.size(gpu['memory_used_bytes'])} of {figures.size(gpu['memory_total_bytes'])}",
            f"{figures.number(gpu['power_watts'])} of {figures.number(gpu['power_limit_watts'])} W",
            f"{figures.number(gpu['temperature_c'])} °C",
            *troubles,
        ]
        yield f"{'!' if troubles else ' '} GPU {gpu['index']}: " + " · ".join(parts)


def link(state: dict[str, Any], at: float) -> Iterator[str]:
    """How the link is at the moment `at`, where it is not simply live."""
    if state["state"] == "live":
        return
    since = f" for {figures.duration(at - state['since'])}"
    attempt = f", attempt {state['attempt']}" if state["attempt"] else ""
    following = f", next in {figures.duration(state['next_in'])}" if state["next_in"] is not None else ""
    yield f"! link {state['state']}{since}{attempt}{following}{': ' + state['why'] if state['why'] else ''}"


def stream(state: dict[str, Any]) -> str:
    """How one stream is: `live`, `stale for 12 s`, with the bytes that are gone."""
    lost = "" if state["lost_bytes"] == 0 else ", bytes of it are gone"
    if state["lost_bytes"]:
        lost = f", {state['lost_bytes']:,} bytes of it are gone"
    age = f" for {figures.duration(state['heard_age'])}" if state["state"] == "stale" else ""
    return f"{state['state']}{age}{lost}"


def log_gap(kind: str, lost: int | None) -> str:
    """What became of a log that was rotated or cut, and how many of its bytes are gone."""
    return f"the log was {kind}, {'an unknown number of' if lost is None else f'{lost:,}'} bytes of it are gone"


def candidates(found: dict[str, Any]) -> Iterator[str]:
    """Profiles for a host, those that suit it first, each with what it is for or in what it differs."""
    here = found["situation"]
    cards = list(dict.fromkeys(here["gpu_names"]))
    yield f"here: {here['gpus']} x {', '.join(cards)}" if here["gpus"] else "here: no GPU"
    for one in found["profiles"]:
        yield f"{'?' if one['differs'] else '+'} {one['name']:<34} {'; '.join(one['differs']) or one['summary']}"


def doctor(report: dict[str, Any]) -> Iterator[str]:
    """A report of the doctor in lines, by group, with what to do below what needs it."""
    group = None
    for check in report["checks"]:
        if check["group"] != group:
            group = check["group"]
            yield group
        yield f"  {CHECK_SIGNS[check['status']]} {check_name(check):<16} {check['seen']}"
        if check["remedy"]:
            yield f"      -> {check['remedy']}"
    yield doctor_counts(report)


def doctor_counts(report: dict[str, Any]) -> str:
    """How many checks came to what: `1 fail · 2 warn · 3 unknown · 20 pass`."""
    counts = report["counts"]
    return f"{counts['fail']} fail · {counts['warn']} warn · {counts['unknown']} unknown · {counts['pass']} pass"


def check_name(check: dict[str, Any]) -> str:
    """A check's own name, without its group."""
    return figures.dashed(str(check["id"]).partition(".")[2])


def hosts(made: dict[str, Any]) -> Iterator[str]:
    """The known hosts, a line each."""
    for host in made["hosts"]:
        sign, said = host_state(host)
        yield f"{sign} {host['name']:<20} {said}"


def host_state(host: dict[str, Any]) -> tuple[str, str]:
    """A sign, and how a host is: why it is not reached, or its SGLang and GPUs."""
    if host["state"] != "live":
        return "!", host["why"]
    gpus = host["gpus"] or ["no GPU"]
    kinds = ", ".join(f"{gpus.count(name)} x {name}" if host["gpus"] else name for name in dict.fromkeys(gpus))
    return "+", f"SGLang {host['sglang'] or 'not found'} · {kinds}"
