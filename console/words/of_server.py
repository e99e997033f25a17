"""A server in words: its start and state, its tensors and probe, its dumps, what it is launched with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from console.words import figures

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
OVER = ("stopped", "crashed")
GOING_ON = ("starting", "slow_but_fine", "hang_suspected")  # verdicts of a server that may not have been up yet


def phase_bar(status: dict[str, Any]) -> str:
    """The start-up phases with their times: `args 1 s > weights 312 s > kv …`."""
    parts = []
    for phase in status["phases"]:
        started, ended = phase["started"], phase["ended"]
        took = figures.duration(max(0.0, ended - started)) if started is not None and ended is not None else "…"
        detail = f" ({phase['detail']})" if phase["detail"] and ended is None else ""
        name = figures.dashed(phase["id"])
        parts.append(name if phase["id"] == "ready" else f"{name} {took}{detail}")
    return " > ".join(parts) or "no start-up phase seen"


def server(status: dict[str, Any]) -> Iterator[str]:
    """A server's state in lines."""
    verdict = status["verdict"]
    in_phase = ""
    if verdict["verdict"] in GOING_ON and status["phase"]:
        in_phase = f", in {figures.dashed(status['phase'])} for {figures.duration(status['phase_seconds'])}"
    yield f"{SIGNS[verdict['verdict']]} server {status['id']}: {verdict['verdict']}{in_phase}"
    yield f"  profile {status['details']['profile']} · SGLang {status['sglang']} · port {status['port']}"
    yield f"  {phase_bar(status)}"
    yield f"  tensors: {status['layers'] or status['details']['layers_words'] + unresolved(status)}"
    if verdict["cause"]:
        yield f"  cause: {verdict['cause']}"
    if verdict["remedy"]:
        yield f"  remedy: {verdict['remedy']}"
    for line in verdict["evidence"]:
        yield f"  - {line}"
    if status["stacks"]:
        yield f"  stacks: {status['stacks']}"


def unresolved(status: dict[str, Any]) -> str:
    """What follows layers that no tap has resolved; nothing where the server is over, and its tap with it."""
    return "" if status["verdict"]["verdict"] in OVER else ", not resolved yet"


def probed(made: dict[str, Any]) -> Iterator[str]:
    """What a probe came to in lines."""
    sign = "+" if made["passed"] else "!"
    yield f"{sign} {probe_head(made)}, in {figures.duration(made['seconds'])}"
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
    yield f"stacks of {report['run']} at {figures.when(report['at'])}"
    yield from (f"  {line}" for line in report["summary"])
    yield f"  all of them: {report['path']}"


def diagnosis(made: dict[str, Any]) -> Iterator[str]:
    """What a log shows, in lines: the verdict, the start-up, and each finding with its evidence and what to do."""
    yield f"{SIGNS[made['verdict']]} {made['verdict'].replace('_', ' ')}"
    yield f"  {phase_bar(made)}"
    for finding in made["findings"]:
        since = "" if finding["since"] is None else f" since {figures.when(finding['since'])}"
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
        " · ".join(f"{figures.dashed(name)} {count}" for name, count in seen.items()),
        f"done {states['done']['requests']} · failed {states['failed']['requests']}",
        f"{figures.size(dump['bytes_per_second'])}/s" if dump["bytes_per_second"] else "",
        f"arena {dump['slots_free']} of {dump['slots']} slots free" if dump["slots"] is not None else "",
        f"{figures.duration(dump['slot_wait_seconds'])} waited for slots" if dump["slot_wait_seconds"] else "",
        f"{figures.size(dump['free_bytes'])} free",
        f"full in {figures.duration(dump['seconds_to_full'])}" if dump["seconds_to_full"] is not None else "",
        dump["error"] or "",
    ]
    return "  dumps: " + " · ".join(part for part in parts if part)


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
    yield from (f"? {one}" for one in differs or [])
    if differs == []:
        yield "# host and model are what the profile is for"
