"""Rows and samples in words: a plan, one prompt, one sample, what became of a whole dataset."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from console.words import figures

SAMPLE_SIGNS = {"pending": "·", "sent": "~", "written": "+", "failed": "!"}
TOKENS_SHOWN = 40
ODD_SHOWN = 5


def plan(made: dict[str, Any]) -> Iterator[str]:
    """A plan in lines."""
    yield (
        f"{figures.counted(made['rows'], 'row')} · {made['samples']:,} good · {made['skipped']:,} overlong, skipped · "
        f"{made['truncated']:,} truncated · {made['bad']:,} bad"
    )
    if made["samples"]:
        yield f"{made['tokens']:,} tokens · {made['masked_share']:.0%} in the loss"
        yield (
            f"lengths  {figures.histogram(made['histogram'])}  median {made['median']:,} · p99 {made['p99']:,} · "
            f"longest {made['longest']:,}"
        )
    for name, total in made["total_bytes"].items():
        yield f"{name}: {figures.size(made['bytes_per_token'][name])} a token -> {figures.size(total)}"
    if made["free_bytes"] is not None:
        fits = "fits" if made["fits"] else "DOES NOT FIT"
        yield f"{made['output']} has {figures.size(made['free_bytes'])} free: {fits}"
    for alarm in made["alarms"]:
        yield from alarm_lines(alarm)
    for long in made["skipped_rows"]:
        where, length = f"{long['file']}:{long['line']}", long["tokens"]
        yield f"{where}: {length:,} tokens, and no sample may have more than {made['limit']:,}"
    for bad in made["bad_rows"]:
        yield f"{bad['file']}:{bad['line']}: {bad['reason']}"
    if made["preview"]:
        yield f"line {made['preview']['line']}, [ ] = in the loss:"
        yield f"  {made['preview']['text']}"


def alarm_lines(alarm: dict[str, Any]) -> Iterator[str]:
    """An alarm, and the first rows that have it."""
    rows = figures.counted(alarm["count"], "row")
    yield f"{figures.sign(alarm['fatal'])} {rows}: {alarm['what']}; {alarm['remedy']}"
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
            yield f"  ? {figures.dashed(name)}: {seen}"


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
        yield f"{figures.sign(finding['fatal'])} {finding['what']}; {finding['remedy']}"


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
            f"{odd.get((name, row), '')} {figures.norm(state['norms'][row])}".rjust(12)
            for name, state in states.items()
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
        yield f"{file['path']}: {figures.size(file['bytes'])}"
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
    around = f"{figures.norm(min(known))} to {figures.norm(max(known))}" if known else "?"
    return (
        f"{state['shape']} {state['dtype']} · mean {figures.norm(state['mean'])} · std {figures.norm(state['std'])} · "
        f"norm {around}, median {figures.norm(state['median_norm'])}"
    )


def odd_rows(state: dict[str, Any]) -> str:
    """Which rows of a state are odd, and in what: `! row 3 all zero · ? row 0 far off · 2 more`."""
    parts = [f"{odd_sign(one['why'])} row {one['row']:,} {one['why']}" for one in state["odd"][:ODD_SHOWN]]
    more = state["odd_rows"] - len(parts)
    return " · ".join([*parts, *([f"{more:,} more"] if more > 0 else [])])


def odd_sign(why: str) -> str:
    """`?` for a row that may be as it should, `!` for one that cannot."""
    return "?" if why == "far off" else "!"


def verified(report: dict[str, Any]) -> Iterator[str]:
    """What a verification came to in lines."""
    of_all = f" of {report['total']:,}" if report["total"] != report["samples"] else ""
    yield f"{report['samples']:,}{of_all} samples · {report['verified']:,} verified · {report['failed']:,} failed"
    yield from deviations(report["deviations"])
    yield from failures(report["failures"])


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
    yield from _differences(made)
    more = made["different"] + made["only_a"] + made["only_b"] - len(made["differences"])
    if more:
        yield f"  and {more:,} more"


def _differences(made: dict[str, Any]) -> Iterator[str]:
    """The samples that differ; those of consecutive numbers of which the same is said share a line."""
    places = {"only in the first": f"only in {made['a']}", "only in the second": f"only in {made['b']}"}
    found = [
        (list(dict.fromkeys(n for n in (one["a"], one["b"]) if n is not None)), places.get(one["what"], one["what"]))
        for one in made["differences"]
    ]
    # Alike, in a row, and of one number each: then number minus place is the same.
    keys = [(what, numbers[0] - place if len(numbers) == 1 else numbers) for place, (numbers, what) in enumerate(found)]
    for _, group in groupby(zip(keys, found, strict=True), key=lambda pair: pair[0]):
        same = [one for _, one in group]
        numbers, what = same[0]
        if len(same) > 1:
            yield f"  samples {numbers[0]}-{same[-1][0][0]}: {what}"
        else:
            yield f"  sample {' = '.join(map(str, numbers))}: {what}"


def exported(made: dict[str, Any]) -> Iterator[str]:
    """What an export came to in lines."""
    yield (
        f"{made['written']:,} samples written, {made['here']:,} were here, {made['failed']:,} failed · "
        f"{figures.size(made['bytes_written'])} in {made['seconds']} s · "
        f"{', '.join(made['formats'])} in {made['output']}"
    )
    if made["missing"]:
        yield f"! {made['missing']:,} samples of {made['dataset']} are not extracted, so they are not here either"
    yield from deviations(made["deviations"])
    yield from failures(made["failures"])
    yield from (f"{name}: {hint}" for name, hint in made["hints"].items())


def pulled(made: dict[str, Any]) -> Iterator[str]:
    """What a pull came to in lines."""
    yield (
        f"{made['samples']:,} samples · {made['files']:,} files · {figures.size(made['bytes'])} in {made['target']} · "
        f"{figures.size(made['fetched_bytes'])} fetched · {made['skipped_files']:,} files were here"
    )
    for failure in made["failed"]:
        whose = "" if failure["sample"] is None else f"sample {failure['sample']} "
        yield f"  {whose}{failure['path']}: {failure['reason']}"


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
