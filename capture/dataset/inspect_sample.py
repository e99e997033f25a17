"""One sample of a dataset, token by token: its loss mask, and what its states look like."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import msgspec

from capture.dataset import formats
from capture.dataset.ledger import Ledger, Sample, WrittenFile
from capture.dataset.manifest import Manifest, read_manifest
from capture.dataset.verify import check_sample
from capture.dumps import dump
from capture.dumps.verify import Failure
from capture.rows.chat import InputError, decode
from capture.rows.tokenise import load_tokenizer

MOST_TOKENS = 4096
FAR = 10.0
"""How many times above or below the median a norm is to be far off it."""
RULE = f"norm more than {FAR:g} times off the median; first tokens often are, as attention sinks"
WORST = {"not finite": 0, "all zero": 1, "one value": 2, "far off": 3}


class Token(msgspec.Struct):
    """A token; `text` is None where there is no tokenizer to tell it."""

    id: int
    text: str | None
    in_loss: bool


class OddRow(msgspec.Struct):
    """A row of a state that a look should go to: "not finite", "all zero", "one value" (throughout) or "far off"."""

    row: int
    why: str


class State(msgspec.Struct):
    """One state, over all its tokens; `norms` only of those that are shown. None is a value that is not finite."""

    shape: list[int]
    dtype: str
    mean: float | None
    std: float | None
    median_norm: float | None
    norms: list[float | None]
    odd: list[OddRow]
    odd_rows: int
    norm: str | None


class Seen(msgspec.Struct, kw_only=True):
    """A sample.

    `tokens` are the first MOST_TOKENS, `left_out` counts the others; `no_text` says why texts are None. `states` are
    those of the file in format `read`; with both empty, `failures` says why. `odd` lists no more rows than tokens are
    shown; `odd_rows` counts them all.
    """

    schema: int = 1
    dataset: str
    model: str
    sample: Sample
    tokens: list[Token]
    left_out: int
    no_text: str | None
    read: str | None
    layers_words: str
    states: dict[str, State]
    rule: str = RULE
    files: list[WrittenFile]
    failures: list[Failure]


def inspect_sample(output: Path, number: int, trusted_model: str | None = None) -> Seen:
    """What there is to see of sample `number`, written or not.

    The tokenizer's own code may run where the dataset's model is `trusted_model`. Raises ManifestError or LedgerError
    where there is no such sample.
    """
    manifest = read_manifest(output)
    with Ledger(output, read_only=True) as ledger:
        sample = ledger.sample(number)
        ids, mask = ledger.tokens(sample)
        files = ledger.files(number)
    failures = check_sample(output, manifest, sample, files, ids, mask)
    read, states = _read_states(output, manifest, files)
    texts, no_text = _texts(manifest.settings.model, trusted_model, ids[:MOST_TOKENS])
    return Seen(
        dataset=str(output),
        model=manifest.settings.model,
        sample=sample,
        tokens=[Token(number, text, bool(in_loss)) for number, text, in_loss in zip(ids, texts, mask, strict=False)],
        left_out=max(0, len(ids) - MOST_TOKENS),
        no_text=no_text,
        read=read,
        layers_words=manifest.settings.layers.words(),
        states={name: describe(state, manifest.norms.get(name)) for name, state in states.items()},
        files=files,
        failures=failures,
    )


def _read_states(output: Path, manifest: Manifest, files: list[WrittenFile]) -> tuple[str | None, dict[str, Any]]:
    """The states in whichever format holds most of them and can be read; why one cannot be is verification's to say."""
    layers = len(manifest.settings.layers.boundaries)
    for file in sorted(files, key=lambda file: file.format != "native"):
        try:
            _, _, states = formats.find(file.format).decode((output / file.path).read_bytes(), layers)
        except (OSError, ValueError, formats.UnknownFormat):
            continue
        found = {name: states[name] for name in dump.state_names(layers) if name in states}
        return file.format, {name: state for name, state in found.items() if state.ndim == 2 and state.numel()}
    return None, {}


def stats(tensor: Any) -> dict[str, Any]:
    """Shape, dtype, mean, standard deviation and the norm of each row of a state `[tokens, hidden]`."""
    wide = tensor.float()
    return {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "mean": float(wide.mean()),
        "std": float(wide.std(correction=0)),
        "norms": [float(norm) for norm in wide.norm(dim=-1)],
    }


def describe(state: Any, norm: str | None = None) -> State:
    """A state `[tokens, hidden]` in figures; `norm` says whether the final norm was applied."""
    told = stats(state)
    finite = state.isfinite().all(dim=1).tolist()
    flat = (state.amax(dim=1) == state.amin(dim=1)).tolist()
    norms = told["norms"]
    sound = [value for value, fine in zip(norms, finite, strict=True) if fine]
    median = statistics.median(sound) if sound else None
    odd = []
    for row, value in enumerate(norms):
        why = None
        if not finite[row]:
            why = "not finite"
        elif value == 0:
            why = "all zero"
        elif flat[row]:
            why = "one value"
        elif median and not median / FAR <= value <= median * FAR:
            why = "far off"
        if why:
            odd.append(OddRow(row, why))
    odd.sort(key=lambda one: (WORST[one.why], one.row))
    return State(
        shape=told["shape"],
        dtype=told["dtype"],
        mean=told["mean"],
        std=told["std"],
        median_norm=median,
        norms=norms[:MOST_TOKENS],
        odd=odd[:MOST_TOKENS],
        odd_rows=len(odd),
        norm=norm,
    )


def _texts(model: str, trusted_model: str | None, ids: list[int]) -> tuple[list[str] | list[None], str | None]:
    """Each token's text, or why there is none."""
    try:
        tokenizer = load_tokenizer(model, trust_remote_code=model == trusted_model)
    except InputError as error:
        return [None] * len(ids), str(error)
    return [decode(tokenizer, [number]) for number in ids], None
