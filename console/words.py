"""What both doors say in words: a snapshot, a plan, a try, a launch, as lines of text."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

BLOCKS = "▁▂▃▄▅▆▇█"
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
# Events that are told while one follows a run.
NARRATED = ("tried", "relaunch", "relaunched", "relaunch_failed", "trouble", "trouble_over")
SAMPLE_SIGNS = {"pending": "·", "sent": "~", "written": "+", "failed": "!"}
CHECK_SIGNS = {"pass": "+", "warn": "?", "fail": "!", "unknown": "-"}
TOKENS_SHOWN = 40
CHANGES_SHOWN = 48  # characters
ODD_SHOWN = 5
SIGNS = {
    "healthy": "+",
    "starting": "~",
    "slow_but_fine": "~",
    "hang_suspected": "?",
    "degraded": "?",
    "crashed": "!",
    "stopped": "-",
    "unknown": "?",
}

GOING_ON = ("starting", "slow_but_fine", "hang_suspected")  # verdicts of a server that may not have been up yet


def size(count: float | None) -> str:
    """Bytes in words: `1.42 GB`."""
    if count is None:
        return "?"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.0f} TB" if count >= 99.95 else f"{count:.3g} TB"


def duration(seconds: float | None) -> str:
    """Seconds in words: `2 h 14 m`, `95 s`."""
    if seconds is None:
        return "?"
    whole = math.ceil(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} m {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} m"


def when(at: float) -> str:
    """A moment in epoch seconds as date and time here."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def clock(at: float) -> str:
    """A moment in epoch seconds as the time of day here."""
    return time.strftime("%H:%M", time.localtime(at))


def phase_bar(status: dict[str, Any]) -> str:
    """The start-up phases with their times: `args 1 s > weights 312 s > kv …`."""
    parts = []
    for phase in status["phases"]:
        started, ended = phase["started"], phase["ended"]
        took = duration(max(0.0, ended - started)) if started is not None and ended is not None else "…"
        detail = f" ({phase['detail']})" if phase["detail"] and ended is None else ""
        name = dashed(phase["id"])
        parts.append(name if phase["id"] == "ready" else f"{name} {took}{detail}")
    return " > ".join(parts) or "nothing logged yet"


def server(status: dict[str, Any]) -> Iterator[str]:
    """A server's state in lines."""
    verdict = status["verdict"]
    in_phase = ""
    if verdict["verdict"] in GOING_ON and status["phase"]:
        in_phase = f", in {dashed(status['phase'])} for {duration(status['phase_seconds'])}"
    yield f"{SIGNS[verdict['verdict']]} server {status['id']}: {verdict['verdict']}{in_phase}"
    yield f"  profile {status['details']['profile']} · SGLang {status['sglang']} · port {status['port']}"
    yield f"  {phase_bar(status)}"
    yield f"  tensors: {status['layers'] or status['details']['layers_words'] + ', not resolved yet'}"
    if verdict["cause"]:
        yield f"  cause: {verdict['cause']}"
    if verdict["remedy"]:
        yield f"  remedy: {verdict['remedy']}"
    for line in verdict["evidence"]:
        yield f"  - {line}"
    if status["stacks"]:
        yield f"  stacks: {status['stacks']}"


def probed(made: dict[str, Any]) -> Iterator[str]:
    """What a probe came to in lines."""
    sign = "+" if made["passed"] else "!"
    yield f"{sign} {probe_head(made)}, in {duration(made['seconds'])}"
    yield f"  {made['model_class']} in {made['dtype']}, SGLang {made['sglang']}"
    yield from (f"  {text}" for text in layers(made["layers"]))
    yield from (f"  {text}" for text in probe_findings(made))


def probe_head(made: dict[str, Any]) -> str:
    """How a probe went and what it sent: `probe passed: prompts of 3, 64 and 1,500 tokens on 2 ranks`."""
    ranks = "one rank" if made["ranks"] == 1 else f"{made['ranks']} ranks"
    *first, last = [f"{length:,}" for length in made["lengths"]]
    sent = f"{', '.join(first)} and {last}" if first else last
    return f"probe {'passed' if made['passed'] else 'FAILED'}: prompts of {sent} tokens on {ranks}"


def probe_findings(made: dict[str, Any]) -> Iterator[str]:
    """What a probe found, in lines; what is wrong begins with `!`."""
    for failure in made["failures"]:
        yield f"! {failure}"
    if made["passed"]:
        yield "each gave one dump, sound and with the ids that were sent"
        if made["ranks"] > 1:
            yield f"all {made['ranks']} ranks saw the same bits of every state"
    if made["compared"]:
        worst = min(made["compared"], key=lambda one: one["least"])
        limit = made["tolerance"]
        strays = sum(one["strays"] for one in made["compared"])
        shared = made["shared_forwards"]
        yield (
            f"alone against together: least cosine {worst['least']:.7g} ({worst['tokens']:,} tokens, "
            f"{worst['state']}), {strays:,} at {limit['near']} or less ({limit['why']})"
        )
        if not shared:
            yield "? SGLang never took two of the prompts into one forward, so batching was not shown"
    for one in made["against_hf"] or []:
        yield (
            f"against Hugging Face, {one['tokens']:,} tokens: {one['state']} least cosine {one['least']:.5f}, median "
            f"{one['median']:.7g}, size {one['scale']:.3f}, nearest to hidden_states[{one['nearest']}]"
        )


def layers(resolved: dict[str, Any]) -> Iterator[str]:
    """Layers as the loaded model resolved them, in lines: which tensors, and the ids that a drafter's config needs."""
    outputs, boundaries = (", ".join(map(str, resolved[name])) for name in ("outputs", "boundaries"))
    yield f"tensors: outputs of layers {outputs}, which are Hugging Face's hidden_states[{boundaries}]"
    yield f"drafter's config: eagle_aux_hidden_state_layer_ids = {resolved['serve_ids']} under this SGLang"
    for other in resolved["serve_ids_elsewhere"]:
        yield f"  {other['ids']} under SGLang {other['sglang']}"


def stacks(report: dict[str, Any]) -> Iterator[str]:
    """Where a server's processes stand, in lines."""
    yield f"stacks of {report['run']} at {when(report['at'])}"
    yield from (f"  {line}" for line in report["summary"])
    yield f"  all of them: {report['path']}"


def diagnosis(made: dict[str, Any]) -> Iterator[str]:
    """What a log shows, in lines: the verdict, the start-up, and each finding with its evidence and what to do."""
    yield f"{SIGNS[made['verdict']]} {made['verdict'].replace('_', ' ')}"
    yield f"  {phase_bar(made)}"
    for finding in made["findings"]:
        since = "" if finding["since"] is None else f" since {when(finding['since'])}"
        yield f"{finding['id']}{since}"
        yield f"  cause: {finding['cause']}"
        yield f"  remedy: {finding['remedy']}"
        for line in finding["evidence"]:
            yield f"  - {line}"


def dumps(dump: dict[str, Any]) -> str:
    """The dumps in one line."""
    seen = dump["seen"] or {}
    states = dump["states"]
    parts = [
        " · ".join(f"{dashed(name)} {count}" for name, count in seen.items()),
        f"done {states['done']['requests']} · failed {states['failed']['requests']}",
        f"{size(dump['bytes_per_second'])}/s" if dump["bytes_per_second"] else "",
        f"arena {dump['slots_free']} of {dump['slots']} slots free" if dump["slots"] is not None else "",
        f"{duration(dump['slot_wait_seconds'])} waited for slots" if dump["slot_wait_seconds"] else "",
        f"{size(dump['free_bytes'])} free",
        f"full in {duration(dump['seconds_to_full'])}" if dump["seconds_to_full"] is not None else "",
        dump["error"] or "",
    ]
    return "  dumps: " + " · ".join(part for part in parts if part)


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
            f"{number(gpu['utilisation_percent'])} %",
            f"{size(gpu['memory_used_bytes'])} of {size(gpu['memory_total_bytes'])}",
            f"{number(gpu['power_watts'])} of {number(gpu['power_limit_watts'])} W",
            f"{number(gpu['temperature_c'])} °C",
            *troubles,
        ]
        yield f"{'!' if troubles else ' '} GPU {gpu['index']}: " + " · ".join(parts)


def link(state: dict[str, Any], at: float) -> Iterator[str]:
    """How the link is at the moment `at`, where it is not simply live."""
    if state["state"] == "live":
        return
    since = f" for {duration(at - state['since'])}"
    attempt = f", attempt {state['attempt']}" if state["attempt"] else ""
    following = f", next in {duration(state['next_in'])}" if state["next_in"] is not None else ""
    yield f"! link {state['state']}{since}{attempt}{following}{': ' + state['why'] if state['why'] else ''}"


def stream(state: dict[str, Any]) -> str:
    """How one stream is: `live`, `stale for 12 s`, with the bytes that are gone."""
    lost = "" if state["lost_bytes"] == 0 else ", bytes of it are gone"
    if state["lost_bytes"]:
        lost = f", {state['lost_bytes']:,} bytes of it are gone"
    age = f" for {duration(state['heard_age'])}" if state["state"] == "stale" else ""
    return f"{state['state']}{age}{lost}"


def log_gap(kind: str, lost: int | None) -> str:
    """What became of a log that was rotated or cut, and how many of its bytes are gone."""
    return f"the log was {kind}, {'an unknown number of' if lost is None else f'{lost:,}'} bytes of it are gone"


def dashed(name: str) -> str:
    """A name out of JSON as it is shown: `warm-up`."""
    return name.replace("_", "-")


def number(value: float | None) -> str:
    """A whole number, `?` where it is not known."""
    return "?" if value is None else f"{value:.0f}"


def extraction(run: dict[str, Any]) -> Iterator[str]:
    """An extraction's state in lines."""
    yield f"extraction {run['id']}: {run['state']} -> {run['details']['output']}"
    if run["progress"]:
        yield f"  {progress(run['progress'])}"
        for failure in run["progress"]["failures"][:3]:
            yield f"  failed: sample {failure['sample']}: {failure['reason']}"
    result = run["result"] or {}
    if "error" in result:
        yield f"  {result['error']}"


def run(shown: dict[str, Any]) -> Iterator[str]:
    """A run in one line, and its events in a line each."""
    yield run_line(shown)
    yield from (f"  {line}" for line in events(shown["events"]))


def events(found: list[dict[str, Any]]) -> Iterator[str]:
    """Events of a run's history, a line each with its time."""
    for one in found:
        yield f"{when(one['at'])}  {event(one)}"


def run_line(shown: dict[str, Any]) -> str:
    """A run's id, its state and how it ended."""
    ended = shown["exit"]
    how = "" if not ended else f" {ended['code']}" if ended["signal"] is None else f" signal {ended['signal']}"
    return f"{shown['id']:<32} {shown['state']}{how}"


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
            text = f"{probe_head(one)}{', as it was asked before' if one['earlier'] else ''}"
        else:
            text = EVENTS[one["event"]].format(**facts)
    except (KeyError, TypeError, ValueError):
        text = ": ".join([one["event"], ", ".join(f"{name.replace('_', ' ')} {facts[name]}" for name in facts)])
    return " ".join(text.split())


def progress(now: dict[str, Any]) -> str:
    """An extraction's progress in one line."""
    if now["phase"] in ("preparing", "tokenising", "probing"):
        return f"{now['phase']} … {now['rows']:,} rows" if now.get("rows") else f"{now['phase']} …"
    if now["phase"] == "relaunching":
        return "the server died and is launched again …"
    rate = now["tokens_per_second"]
    parts = [
        f"{now['written']:,} / {now['samples']:,} samples",
        f"{rate:,.0f} tok/s" if rate else "",
        size(now["bytes_written"]),
        f"{now['failed']} failed" if now["failed"] else "",
        f"{duration(now['eta_seconds'])} left" if now["eta_seconds"] else "",
    ]
    return " · ".join(part for part in parts if part)


def verifying(now: dict[str, Any]) -> str:
    """A verification's progress in one line."""
    parts = [
        bar(now["done"], now["total"]),
        f"{now['done']:,} / {now['total']:,} samples",
        size(now["bytes"]),
        f"{size(now['bytes_per_second'])}/s" if now["bytes_per_second"] else "",
    ]
    return " · ".join(part for part in parts if part)


def verified(report: dict[str, Any]) -> Iterator[str]:
    """What a verification came to in lines."""
    of_all = f" of {report['total']:,}" if report["total"] != report["samples"] else ""
    yield f"{report['samples']:,}{of_all} samples · {report['verified']:,} verified · {report['failed']:,} failed"
    yield from deviations(report["deviations"])
    yield from failures(report["failures"])


def comparing(now: dict[str, Any]) -> str:
    """How far a comparison is, in one line."""
    return f"{bar(now['done'], now['total'])} · {now['done']:,} / {now['total']:,} samples"


def compared(made: dict[str, Any]) -> Iterator[str]:
    """What two datasets differ in, in lines."""
    alone = f"{made['only_a']:,} only in {made['a']} · {made['only_b']:,} only in {made['b']}"
    same = "the same" if made["same"] else "not the same"
    yield f"{same}: {made['equal']:,} samples equal · {made['different']:,} different · {alone}"
    yield f"read in {' and '.join(dict.fromkeys(made['read']))}"
    yield from (f"! {words}" for words in made["settings"])
    for name, state in sorted(made["states"].items()):
        off = state["deviation"]
        how = (
            f"off by {off['mean']:.2%} of a row's norm, at most {off['largest']:.2%}" if state["different"] else "equal"
        )
        yield f"  {name}: {state['different']:,} of {state['samples']:,} samples differ · {how}"
    if made["not_compared"]:
        yield f"  not in both: {', '.join(made['not_compared'])}"
    for one in made["differences"]:
        numbers = [number for number in (one["a"], one["b"]) if number is not None]
        yield f"  sample {' = '.join(map(str, dict.fromkeys(numbers)))}: {one['what']}"
    more = made["different"] + made["only_a"] + made["only_b"] - len(made["differences"])
    if more:
        yield f"  and {more:,} more"


def exporting(now: dict[str, Any]) -> str:
    """An export's progress in one line."""
    if now["phase"] == "finishing":
        return "writing what belongs beside the samples …"
    done = now["here"] + now["written"]
    parts = [
        bar(done, now["samples"]),
        f"{done:,} / {now['samples']:,} samples",
        size(now["bytes_written"]),
        f"{size(now['bytes_per_second'])}/s" if now["bytes_per_second"] else "",
        f"{now['failed']} failed" if now["failed"] else "",
        f"{duration(now['eta_seconds'])} left" if now["eta_seconds"] else "",
    ]
    return " · ".join(part for part in parts if part)


def exported(made: dict[str, Any]) -> Iterator[str]:
    """What an export came to in lines."""
    yield (
        f"{made['written']:,} samples written, {made['here']:,} were here, {made['failed']:,} failed · "
        f"{size(made['bytes_written'])} in {made['seconds']} s · {', '.join(made['formats'])} in {made['output']}"
    )
    if made["missing"]:
        yield f"! {made['missing']:,} samples of {made['dataset']} are not extracted, so they are not here either"
    yield from deviations(made["deviations"])
    yield from failures(made["failures"])
    yield from (f"{name}: {hint}" for name, hint in made["hints"].items())


def deviations(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """How far states are off that did not come back bit for bit, a line a format."""
    for name, states in found.items():
        seen = " · ".join(
            f"{state} {one['mean']:.2%} (at most {one['largest']:.2%})" for state, one in sorted(states.items())
        )
        yield f"{name}: a row is off by, relative to its norm: {seen}"


def failures(found: list[dict[str, Any]]) -> Iterator[str]:
    """What failed, a line each."""
    for failure in found:
        words = [
            "" if failure["sample"] is None else f"sample {failure['sample']}",
            failure["format"] or "",
        ]
        yield f"  {' '.join(word for word in words if word)}: {failure['reason']}"


def bar(done: int, total: int, width: int = 20) -> str:
    """How much is done, as a bar; nothing where there is nothing to do."""
    filled = done * width // total if total else 0
    return f"[{'#' * filled}{'-' * (width - filled)}]" if total else ""


def pulling(now: dict[str, Any]) -> str:
    """A pull's progress in one line."""
    link = f" · link {now['link']}" if now["link"] else ""
    if now["phase"] in ("listing", "tokens"):
        return f"{now['phase']} …{link}"
    rate = now["bytes_per_second"]
    left = duration((now["bytes"] - now["bytes_done"]) / rate) if rate else None
    parts = [
        "checking what is here" if now["phase"] == "checking" else "",
        f"{now['files_done']:,} / {now['files']:,} files",
        f"{size(now['bytes_done'])} / {size(now['bytes'])}",
        f"{size(rate)}/s" if rate else "",
        f"{left} left" if left else "",
    ]
    return " · ".join(part for part in parts if part) + link


def pulled(made: dict[str, Any]) -> Iterator[str]:
    """What a pull came to in lines."""
    yield (
        f"{made['samples']:,} samples · {made['files']:,} files · {size(made['bytes'])} in {made['target']} · "
        f"{size(made['fetched_bytes'])} fetched · {made['skipped_files']:,} files were here"
    )
    for failure in made["failed"]:
        whose = "" if failure["sample"] is None else f"sample {failure['sample']} "
        yield f"  {whose}{failure['path']}: {failure['reason']}"


def snapshot(now: dict[str, Any]) -> Iterator[str]:
    """A snapshot in lines."""
    host = now["host"]
    yield f"{host['user']}@{host['host']} · {time.strftime('%H:%M:%S', time.localtime(now['at']))}"
    yield from link(now["link"], now["at"])
    if now["link"]["state"] == "live":
        yield from (f"! {one['name']} {stream(one)}" for one in now["streams"] if one["state"] != "live")
    for alarm in now["alarms"]:
        yield from alarmed(alarm)
    yield from gpus(now["gpus"])
    if now["server"] is None:
        yield "no server of ours ever ran here"
    else:
        yield from server(now["server"])
    if now["dumps"]:
        yield dumps(now["dumps"])
    if now["extraction"]:
        yield from extraction(now["extraction"])


def alarmed(alarm: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a run, and what to do, in two lines."""
    sign = "!" if alarm["severity"] == "critical" else "?"
    yield f"{sign} {alarm['severity']} since {when(alarm['since'])}: {alarm['cause']} ({alarm['evidence']})"
    yield f"  -> {alarm['remedy']}"


def plan(made: dict[str, Any]) -> Iterator[str]:
    """A plan in lines."""
    yield (
        f"{made['rows']:,} rows · {made['samples']:,} good · {made['skipped']:,} overlong, skipped · "
        f"{made['truncated']:,} truncated · {made['bad']:,} bad"
    )
    if made["samples"]:
        yield f"{made['tokens']:,} tokens · {made['masked_share']:.0%} in the loss"
        yield (
            f"lengths  {histogram(made['histogram'])}  median {made['median']:,} · p99 {made['p99']:,} · "
            f"longest {made['longest']:,}"
        )
    for name, total in made["total_bytes"].items():
        yield f"{name}: {size(made['bytes_per_token'][name])} a token -> {size(total)}"
    if made["free_bytes"] is not None:
        fits = "fits" if made["fits"] else "DOES NOT FIT"
        yield f"{made['output']} has {size(made['free_bytes'])} free: {fits}"
    for alarm in made["alarms"]:
        yield from alarm_lines(alarm)
    for bad in made["bad_rows"]:
        yield f"{bad['file']}:{bad['line']}: {bad['reason']}"
    if made["preview"]:
        yield f"line {made['preview']['line']}, [ ] = in the loss:"
        yield f"  {made['preview']['text']}"


def alarm_lines(alarm: dict[str, Any]) -> Iterator[str]:
    """An alarm, and the first rows that have it."""
    yield f"{'!!' if alarm['fatal'] else '!'} {alarm['count']:,} rows: {alarm['what']}; {alarm['remedy']}"
    for odd in alarm["rows"][:ODD_SHOWN]:
        yield f"    {odd['file']}:{odd['line']}: {odd['seen']}"


def chosen_rows(made: dict[str, Any]) -> Iterator[str]:
    """Rows that were asked for, each with its loss mask."""
    for row in made["shown"]:
        where = f"{row['file']}:{row['line']}"
        if row["reason"]:
            yield f"{where}: {row['reason']}"
            continue
        cut = ", truncated" if row["truncated"] else ""
        yield f"{where}: {row['tokens']:,} tokens{cut}, {row['masked_tokens']:,} in the loss, [ ]:"
        yield f"  {row['text']}"
        for name, seen in row["alarms"].items():
            yield f"  ! {dashed(name)}: {seen}"


def histogram(buckets: list[list[int]]) -> str:
    """Counts as blocks, with the bounds of the first and the last bucket."""
    if not buckets:
        return ""
    most = max(count for _, count in buckets)
    blocks = "".join(BLOCKS[math.ceil(count / most * (len(BLOCKS) - 1))] if count else " " for _, count in buckets)
    return f"<= {buckets[0][0]:,} {blocks} {buckets[-1][0]:,}"


def tried(made: dict[str, Any]) -> Iterator[str]:
    """The outcome of one prompt in lines."""
    sent = len(made["tokens"])
    yield f"{sent} tokens sent · {made['rows']} rows in every tensor · {made['seconds']} s"
    names = list(made["states"])
    yield f"{'id':>8}  {'text':<16}" + "".join(f"{'|' + name + '|':>12}" for name in names)
    for row, token in enumerate(made["tokens"][:40]):
        norms = "".join(f"{made['states'][name]['norms'][row]:>12.4g}" for name in names)
        yield f"{token['id']:>8}  {token['text']!r:<16}{norms}"
    if sent > 40:
        yield f"          … and {sent - 40} more"
    outputs = made["layers"]["outputs"]
    for name, state in made["states"].items():
        if name.startswith("aux_"):
            what = f"output of layer {outputs[int(name[4:])]}"
        else:
            what = "last layer, after the final norm" if name == "final" else "last layer, before the final norm"
        yield f"{name:<6} {state['shape']} {state['dtype']} mean {state['mean']:.4g} std {state['std']:.4g} · {what}"
    for finding in made["findings"]:
        yield f"{'!!' if finding['fatal'] else '!'} {finding['what']}; {finding['remedy']}"


def sample(seen: dict[str, Any]) -> Iterator[str]:
    """A sample of a dataset in lines: its tokens with the loss mask and the norms, its states, what is wrong."""
    yield sample_head(seen)
    if seen["no_text"]:
        yield f"no texts: {seen['no_text']}"
    tokens, states = seen["tokens"], seen["states"]
    odd = {(name, one["row"]): odd_sign(one["why"]) for name, state in states.items() for one in state["odd"]}
    yield f"{'row':>6}{'id':>9}  {'text':<20}{'loss':<4}" + "".join(f"{'|' + name + '|':>12}" for name in states)
    for row, token in enumerate(tokens[:TOKENS_SHOWN]):
        norms = "".join(
            f"{odd.get((name, row), '')} {norm(state['norms'][row])}".rjust(12) for name, state in states.items()
        )
        text = "" if token["text"] is None else repr(token["text"])
        yield f"{row:>6}{token['id']:>9}  {text:<20}{'yes' if token['in_loss'] else '-':<4}{norms}"
    more = max(0, len(tokens) - TOKENS_SHOWN) + seen["left_out"]
    if more:
        yield f"{'…':>6} and {more:,} more"
    for name, state in states.items():
        yield f"{name:<6} {sample_state(state)}"
        if state["odd"]:
            yield f"       {odd_rows(state)}"
    if any(state["odd"] for state in states.values()):
        yield f"! wrong, ? {seen['rule']}"
    for file in seen["files"]:
        yield f"{file['path']}: {size(file['bytes'])}"
    for failure in seen["failures"]:
        yield f"! {failure['format'] + ': ' if failure['format'] else ''}{failure['reason']}"
    if not seen["failures"]:
        yield "+ verified: ids, mask, shapes, dtype, values, size and checksum are as they should be"


def sample_head(seen: dict[str, Any]) -> str:
    """A sample in one line."""
    one = seen["sample"]
    in_loss = sum(token["in_loss"] for token in seen["tokens"])
    of_first = f" of the first {len(seen['tokens']):,}" if seen["left_out"] else ""
    attempts = f"{one['attempts']} attempt{'' if one['attempts'] == 1 else 's'}"
    return (
        f"{SAMPLE_SIGNS[one['state']]} sample {one['number']:,} {one['state']} · {one['file'].rpartition('/')[2]}:"
        f"{one['line']} · {one['tokens']:,} tokens, {in_loss:,}{of_first} in the loss · {attempts}"
    )


def sample_state(state: dict[str, Any]) -> str:
    """A state of a sample in figures."""
    known = [value for value in state["norms"] if value is not None]
    around = f"{norm(min(known))} to {norm(max(known))}" if known else "?"
    return (
        f"{state['shape']} {state['dtype']} · mean {norm(state['mean'])} · std {norm(state['std'])} · "
        f"norm {around}, median {norm(state['median_norm'])}"
    )


def odd_rows(state: dict[str, Any]) -> str:
    """Which rows of a state are odd, and in what: `! row 3 all zero · ? row 0 far off · 2 more`."""
    parts = [f"{odd_sign(one['why'])} row {one['row']:,} {one['why']}" for one in state["odd"][:ODD_SHOWN]]
    more = state["odd_rows"] - len(parts)
    return " · ".join([*parts, *([f"{more:,} more"] if more > 0 else [])])


def odd_sign(why: str) -> str:
    """`?` for a row that may be as it should, `!` for one that cannot."""
    return "?" if why == "far off" else "!"


def norm(value: float | None) -> str:
    """A figure of a state; `?` for one that is not finite."""
    return "?" if value is None else f"{value:.4g}"


def launch(merged: dict[str, Any]) -> Iterator[str]:
    """A merged profile, a line a setting with its reason."""
    yield f"# profile {merged['profile']} for SGLang {merged['sglang']}; layers: {merged['layers']}"
    yield from suits(merged["differs"])
    lines = [(f"tap {name} {'auto' if value is None else value}", why) for name, value, why in merged["tap"]]
    lines += [(f"{name}={value}", why) for name, value, why in merged["env"]]
    lines += [(f"--{name}" if value is True else f"--{name} {value}", why) for name, value, why in merged["args"]]
    width = min(60, max(len(text) for text, _ in lines))
    for text, why in lines:
        yield f"{text:<{width}}  # {why}"


def suits(differs: list[str] | None) -> Iterator[str]:
    """Whether host and model are what a profile is for; nothing where nobody looked, or where it is for any."""
    yield from (f"! {one}" for one in differs or [])
    if differs == []:
        yield "# host and model are what the profile is for"


def candidates(found: dict[str, Any]) -> Iterator[str]:
    """Profiles for a host, those that suit it first, each with what it is for or in what it differs."""
    here = found["situation"]
    cards = list(dict.fromkeys(here["gpu_names"]))
    yield f"here: {here['gpus']} x {', '.join(cards)}" if here["gpus"] else "here: no GPU"
    for one in found["profiles"]:
        yield f"{'-' if one['differs'] else '+'} {one['name']:<34} {'; '.join(one['differs']) or one['summary']}"


def tuning(now: dict[str, Any]) -> str:
    """What a tuning run does now, in one line."""
    return f"{now['number']}. {now['trial']}: {dashed(now['phase'])} …"


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
        speed, start = one["tokens_per_second"], duration(one["start_seconds"]) if one["start_seconds"] else "-"
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
    return dashed(str(check["id"]).partition(".")[2])


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
