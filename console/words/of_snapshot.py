"""All that is seen at one moment, in words, and what is wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from console.words import figures, of_host, of_run, of_server


def snapshot(now: dict[str, Any]) -> Iterator[str]:
    """A snapshot in lines."""
    host = now["host"]
    yield f"{host['user']}@{host['host']} · {time.strftime('%H:%M:%S', time.localtime(now['at']))}"
    yield from of_host.link(now["link"], now["at"])
    if now["link"]["state"] == "live":
        yield from (f"! {one['name']} {of_host.stream(one)}" for one in now["streams"] if one["state"] != "live")
    for alarm in now["alarms"]:
        yield from alarmed(alarm)
    yield from of_host.gpus(now["gpus"])
    if now["server"] is None:
        yield "no server of ours ever ran here"
    else:
        yield from of_server.server(now["server"])
    if now["dumps"]:
        yield of_server.dumps(now["dumps"])
    if now["extraction"]:
        yield from of_run.extraction(now["extraction"])


def alarmed(alarm: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a run, and what to do, in two lines."""
    sign = "!" if alarm["severity"] == "critical" else "?"
    yield f"{sign} {alarm['severity']} since {figures.when(alarm['since'])}: {alarm['cause']} ({alarm['evidence']})"
    yield f"  -> {alarm['remedy']}"
