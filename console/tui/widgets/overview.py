"""The dashboard's panels: server, extraction, GPUs, dumps and the time line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from textual.content import Content

from backends.verdict.startup import PHASES
from console.feed import Feed, Point
from console.session import going_on
from console.tui.widgets.panel import SIGN_STYLES, Panel, joined, line, wrapped
from console.words import figures, of_run, of_server

EVIDENCE_SHOWN = 5
SPANS = (1, 2, 5, 15)  # minutes that the time line is long
HOLDS = 3.0  # seconds for which a sample is taken to hold
SOMETIMES = frozenset({"tune", "graphs", "draft"})  # phases that many launches skip

Now = dict[str, Any]


class ServerPanel(Panel):
    """Is it up, or how far is its start, and are these the right tensors."""

    title = "Server"

    def paint(self, now: Now, width: int) -> list[Content]:
        """See `Panel`."""
        server = now["server"]
        if server is None:
            return [_muted(_unknown(now, "no server of ours ever ran here; s launches one"))]
        return [
            *server_head(server, now["at"]),
            *phase_rows(server, width),
            *self._tensors(server),
            *trouble(server, width),
        ]

    @staticmethod
    def _tensors(server: dict[str, Any]) -> Iterable[Content]:
        tap = server["tap"]
        if not tap or not tap["layers"]:
            yield line(
                ("tensors: ", "$foreground-muted"),
                server["details"]["layers_words"],
                (of_server.unresolved(server), "$foreground-muted"),
            )
            return
        yield line(("tensors: ", "$foreground-muted"), server["layers"])
        ids = tap["layers"]["serve_ids"]
        yield line(("drafter: ", "$foreground-muted"), f"eagle ids {ids} under SGLang {tap['sglang']}")


def server_head(server: dict[str, Any], at: float) -> Iterable[Content]:
    """The server's state in one line."""
    verdict = server["verdict"]["verdict"]
    sign = of_server.SIGNS.get(verdict, "?")
    style = SIGN_STYLES[sign]
    if verdict == "stopped" and going_on(server):
        sign, style, verdict = "~", SIGN_STYLES["~"], "stopping"
    name = "READY" if verdict == "healthy" else verdict.upper().replace("_", " ")
    parts: list[Content | str] = [line((f"{sign} {name}", f"bold {style}"))]
    if verdict == "healthy":
        parts.append(f"up {figures.duration(at - server['created'])}")
    elif verdict in of_server.GOING_ON and server["phase"]:
        before = (server["earlier"] or {}).get("phases", {}).get(server["phase"])
        last = f" (last time {figures.duration(before)})" if before is not None else ""
        parts.append(f"{figures.dashed(server['phase'])} for {figures.duration(server['phase_seconds'])}{last}")
    elif server["exit"]:
        parts.append(f"{figures.duration(at - server['exit']['at'])} ago")
    parts += [f"port {server['port']}", f"/health {server['health']}" if going_on(server) and server["health"] else ""]
    yield joined(parts, "   ")
    earlier = server["earlier"]
    if verdict in of_server.GOING_ON and earlier:
        since = figures.duration(at - server["created"])
        yield _muted(f"launched {since} ago; the start before took {figures.duration(earlier['seconds'])}")


def phase_rows(server: dict[str, Any], width: int) -> list[Content]:
    """The start-up phases with their times below them, in as many rows as the width needs."""
    reached = {phase["id"]: phase for phase in server["phases"]}
    expected = (
        set((server["earlier"] or {}).get("phases", ())) | {"ready"} if server["earlier"] else set(PHASES) - SOMETIMES
    )
    current = server["phase"]
    starting = server["verdict"]["verdict"] in of_server.GOING_ON
    cells: list[tuple[str, str, str]] = []
    for name in PHASES:
        phase = reached.get(name)
        if phase is None and (name not in expected or not starting):
            continue
        if phase is None:
            cells.append((f"· {figures.dashed(name)}", "", "$foreground-muted"))
        elif name == current and starting:
            cells.append((f"> {figures.dashed(name)}", figures.duration(server["phase_seconds"]), "bold $text-accent"))
        else:
            seconds = None if name == "ready" else _seconds(phase)
            cells.append((f"+ {figures.dashed(name)}", "" if seconds is None else figures.duration(seconds), ""))
    rows: list[Content] = []
    for group in _fit([max(len(name), len(took) + 2) + 2 for name, took, _ in cells], width):
        names, times = [], []
        for name, took, style in cells[group.start : group.stop]:
            wide = max(len(name), len(took) + 2) + 2
            names.append(line((name.ljust(wide), style)))
            times.append(line((f"  {took}".ljust(wide), style or "$foreground-muted")))
        rows += [row for row in (Content("").join(names).rstrip(), Content("").join(times).rstrip()) if row]
    detail = reached[current]["detail"] if starting and current in reached else ""
    return [*rows, line(("now: ", "$foreground-muted"), detail)] if detail else rows


def _fit(widths: list[int], width: int) -> list[range]:
    groups, start, used = [], 0, 0
    for index, one in enumerate(widths):
        if used and used + one - 2 > width:  # the last one needs no space behind it
            groups.append(range(start, index))
            start, used = index, 0
        used += one
    return [*groups, range(start, len(widths))] if widths else []


def trouble(server: dict[str, Any], width: int) -> Iterable[Content]:
    """Why it is not healthy, where it is not."""
    verdict = server["verdict"]
    if verdict["verdict"] in ("healthy", "stopped"):
        return
    sign = of_server.SIGNS[verdict["verdict"]]
    if verdict["cause"]:
        yield from wrapped(verdict["cause"], width, f"bold {SIGN_STYLES[sign]}", f"{sign} ", "  ")
    if verdict["remedy"]:
        yield from wrapped(verdict["remedy"], width, "bold", "-> ", "   ")
    for text in verdict["evidence"][:EVIDENCE_SHOWN]:
        yield _muted(f"  {text}")
    if server["stacks"]:
        yield _muted(f"  stacks: {server['stacks']}")


class ExtractionPanel(Panel):
    """How far the extraction is, and what went wrong last."""

    title = "Extraction"

    def paint(self, now: Now, width: int) -> list[Content]:
        """See `Panel`."""
        run = now["extraction"]
        if run is None:
            return [_muted(_unknown(now, "nothing was extracted here yet; x starts"))]
        return [*extraction_lines(run, width)]


def extraction_lines(run: dict[str, Any], width: int) -> Iterable[Content]:
    """An extraction's state."""
    details, progress, result = run["details"], run["progress"], run["result"] or {}
    sign, name = _job_state(run)
    formats = f"  {' + '.join(details['formats'])}" if details.get("formats") else ""
    source = str(details["rows"]).rpartition("/")[2]
    yield line((f"{sign} {name}", f"bold {SIGN_STYLES[sign]}"), f"   {source} -> {details['output']}{formats}")
    if progress and progress["phase"] not in of_run.BEFORE_DRAWING:
        yield from _progress_lines(progress, width, going_on(run))
        if not going_on(run) and run["exit"]:
            yield _muted(f"ended {figures.when(run['exit']['at'])}")
    elif going_on(run):
        yield _muted(f"{progress['phase'] if progress else 'preparing'} …")
    if going_on(run) and progress and progress["phase"] == "relaunching":
        yield line((f"~ {of_run.progress(progress)}", "bold $text-warning"))
    if "error" in result:
        yield from wrapped(result["error"], width, "$text-error", "! ", "  ")


def _progress_lines(progress: dict[str, Any], width: int, runs: bool) -> Iterable[Content]:
    count = f" {progress['written']:,} / {progress['samples']:,}"
    share = progress["written"] / progress["samples"] if progress["samples"] else 0.0
    yield line((bar(share, max(8, width - len(count))), "$text-accent"), count)
    rate = progress["tokens_per_second"] if runs else None  # of one that was killed, its last words
    left = progress["eta_seconds"] if runs else None
    yield joined(
        [
            f"{rate:,.0f} tok/s" if rate else "",
            f"{figures.size(progress['bytes_written'])} written",
            f"{figures.duration(left)} left" if left else f"{figures.duration(progress['seconds'])} in all",
        ]
    )
    failed = line((f"failed {progress['failed']:,}", "$text-error" if progress["failed"] else ""))
    waiting = [f"waiting {progress['pending']:,}", f"sent {progress['sent']:,}"]
    bad = [f"bad rows {progress['bad_rows']:,}"] if progress["bad_rows"] else []
    overlong = [f"overlong {progress['overlong_rows']:,}"] if progress["overlong_rows"] else []
    yield joined([f"verified {progress['written']:,}", failed, *bad, *overlong, *waiting])
    for failure in progress["failures"][:1]:
        yield from wrapped(
            f"sample {failure['sample']}: {failure['reason']}", width, "$text-error", "last failure: ", "  "
        )


def _job_state(run: dict[str, Any]) -> tuple[str, str]:
    if going_on(run):
        return "~", "RUNNING"
    code = run["exit"]["code"] if run["exit"] else None
    if code == 0:
        return "+", "DONE"
    return ("-", "STOPPED") if run["stop_asked"] else ("!", "ENDED" if code == 1 else "FAILED")


class GpuPanel(Panel):
    """A row a GPU, with its history, and one for the host."""

    title = "GPUs"

    def __init__(self, feed: Feed, **known: Any) -> None:
        super().__init__(**known)
        self.feed = feed

    def paint(self, now: Now, width: int) -> list[Content]:
        """See `Panel`."""
        gpus, host = now["gpus"], now["host"]
        if gpus is None or host is None:
            return [_muted(_unknown(now, ""))]
        rows = [self._row(gpu, width) for gpu in gpus["gpus"]]
        if not rows:
            why = {"no_gpu": "no GPU here", "no_nvml": "no GPU here: there is no NVML"}.get(gpus["state"], gpus["why"])
            rows = [_muted(why)]
        return [*rows, _host_row(host)]

    def _row(self, gpu: dict[str, Any], width: int) -> Content:
        if gpu["error"]:
            return line((f"! {gpu['index']}  {gpu['error']}", "$text-error"))
        troubles = [*(gpu["throttle"] or []), *(f"XID {xid['code']}" for xid in gpu["xid"] or [])]
        numbers = (
            f" {_number(gpu['utilisation_percent'], 3)}%"
            f" {_gib(gpu['memory_used_bytes'], 5)}/{_gib(gpu['memory_total_bytes'], 0)}G"
            f" {_number(gpu['power_watts'], 4)}/{_number(gpu['power_limit_watts'], 0)}W"
            f" {_number(gpu['temperature_c'], 3)}°C"
        )
        said = f" ! {', '.join(troubles)}" if troubles else ""
        wide = max(4, min(60, width - len(numbers) - len(said) - 3))
        history = list(self.feed.gpu_history.get(gpu["index"], ()))[-wide:]
        blocks = history_blocks(history, 100.0).rjust(wide)
        return line(f"{gpu['index']:>2} ", (blocks, "$text-accent"), numbers, (said, "bold $text-warning"))


def _host_row(host: dict[str, Any]) -> Content:
    used = host["memory_total_bytes"] - host["memory_available_bytes"]
    cpu = "?" if host["cpu_percent"] is None else f"{host['cpu_percent']:.0f}"
    memory = f"memory {_gib(used, 0)} of {_gib(host['memory_total_bytes'], 0)} G"
    return joined(
        [_muted(f"host  CPU {cpu} % of {host['cores']}"), _muted(f"load {host['load'][0]:.1f}"), _muted(memory)]
    )


class DumpsPanel(Panel):
    """How fast dumps come, and whether there is room for them."""

    title = "Dumps"

    def paint(self, now: Now, width: int) -> list[Content]:
        """See `Panel`."""
        dumps, server = now["dumps"], now["server"]
        if dumps is None or server is None:
            return [_muted(_unknown(now, "none: no server runs, or its tap is not in yet"))]
        seen, states = dumps["seen"] or {}, dumps["states"]
        failed = states["failed"]["requests"]
        rate = dumps["bytes_per_second"]
        tap = server["tap"] or {}
        lines = [
            joined([f"{figures.dashed(name)} {count:,}" for name, count in seen.items()])
            if seen
            else _muted("tap not in"),
            joined(
                [
                    f"done {states['done']['requests']:,}",
                    line((f"failed {failed:,}", "$text-error" if failed else "")),
                    f"{figures.size(states['done']['bytes'])} in all",
                    f"{figures.size(rate)}/s" if rate is not None else "",
                ]
            ),
            joined(
                [f"{figures.size(dumps['free_bytes'])} of {figures.size(dumps['total_bytes'])} free", _to_full(dumps)]
            ),
        ]
        if dumps["slots"] is not None:
            lost, waited, writers = dumps["writers_lost"], dumps["slot_wait_seconds"], len(dumps["writer_pids"] or ())
            parts = [
                f"arena {dumps['slots'] - dumps['slots_free']} of {dumps['slots']} slots",
                f"{writers} writer{'' if writers == 1 else 's'}",
                line((f"{lost} lost", "$text-warning")) if lost else "",
                line((f"waited {figures.duration(waited)} for slots", "$text-warning")) if waited else "",
                f"{figures.size(tap['bytes_per_token'])} a token" if tap.get("bytes_per_token") else "",
            ]
            lines.append(joined(parts))
        if dumps["error"]:
            lines.append(line((f"! {dumps['error']}", "$text-error")))
        return lines


def _to_full(dumps: dict[str, Any]) -> Content | str:
    seconds = dumps["seconds_to_full"]
    if seconds is None:
        return "not filling"
    return line((f"full in {figures.duration(seconds)}", "bold $text-warning"))


class TimelinePanel(Panel):
    """GPU, prefill, dumps and written samples over each other, on one axis."""

    title = "Time line"

    def __init__(self, feed: Feed, **known: Any) -> None:
        super().__init__(**known)
        self.feed = feed

    def paint(self, now: Now, width: int) -> list[Content]:
        """See `Panel`."""
        points = list(self.feed.history)
        if not points:
            return [_muted(_unknown(now, "nothing yet"))]
        wide = max(10, width - 9 - 13)
        end = points[-1].at
        minutes = next((some for some in SPANS if end - points[0].at <= some * 60), SPANS[-1])
        seconds = minutes * 60.0
        self.border_title = f"Last {minutes} min"
        rows = []
        for name, unit in (("gpu", "%"), ("tokens", "tok/s"), ("dump_bytes", "B/s"), ("written", "/s")):
            cells = resample([(point.at, getattr(point, name)) for point in points], end - seconds, end, wide)
            known = [value for value in cells if value is not None]
            if name == "gpu" and not known:
                continue
            most = 100.0 if name == "gpu" else max([*known, 0.0])
            label = {"tokens": "prefill", "dump_bytes": "dumps", "written": "verified"}.get(name, "GPU")
            rows.append(
                line(
                    f"{label:<9}",
                    (history_blocks(cells, most), "$text-accent"),
                    _figure(name, points[-1], unit).rjust(13),
                )
            )
        return rows


def _figure(name: str, point: Point, unit: str) -> str:
    value = getattr(point, name)
    if value is None:
        return "-"
    if name == "dump_bytes":
        return f"{figures.size(value)}/s"
    if name == "written":
        return f"{value:,.1f} {unit}"
    return f"{value:,.0f} {unit}"


def resample(points: Sequence[tuple[float, float | None]], start: float, end: float, cells: int) -> list[float | None]:
    """The mean of each of `cells` equal stretches of time; None where nothing is known.

    A point holds until the next one comes, unless that takes longer than `HOLDS` seconds.
    """
    sums, weights = [0.0] * cells, [0.0] * cells
    step = max(end - start, 1e-9) / cells
    for index, (at, value) in enumerate(points):
        after = points[index + 1][0] if index + 1 < len(points) else at + step
        until = min(after, at + HOLDS, end)
        if value is None or until <= start or at >= end:
            continue
        for cell in range(max(0, int((at - start) / step)), min(cells, int((until - start) / step - 1e-9) + 1)):
            left = start + cell * step
            weight = max(1e-9, min(until, left + step) - max(at, left))
            sums[cell] += value * weight
            weights[cell] += weight
    return [sums[cell] / weights[cell] if weights[cell] else None for cell in range(cells)]


def history_blocks(values: Iterable[float | None], most: float) -> str:
    """Values as blocks of eight heights, a space where one is not known."""
    top = len(figures.BLOCKS) - 1
    return "".join(
        " " if value is None else figures.BLOCKS[min(top, max(0, round(value / most * top)) if most > 0 else 0)]
        for value in values
    )


def bar(share: float, width: int) -> str:
    """A bar of `width` cells, filled to eighths."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, part = divmod(eighths, 8)
    return ("█" * full + (" ▏▎▍▌▋▊▉"[part] if part else "")).ljust(width, "░")


def _unknown(now: Now, text: str) -> str:
    return text if now["host"] is not None else "not connected yet"


def _muted(text: str) -> Content:
    return line((text, "$foreground-muted"))


def _seconds(phase: dict[str, Any]) -> float | None:
    if phase["started"] is None or phase["ended"] is None:
        return None
    return float(max(0.0, phase["ended"] - phase["started"]))


def _number(value: float | None, wide: int) -> str:
    return figures.number(value).rjust(wide)


def _gib(value: float | None, wide: int) -> str:
    return ("?" if value is None else f"{value / (1 << 30):.1f}").rjust(wide)
