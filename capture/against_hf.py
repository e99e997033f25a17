"""The states of a few prompts against a forward of the same model in Hugging Face's transformers, on the CPU.

It shares no code with SGLang, so it shows a layer that is off by one, a norm too many, or weights that were loaded
otherwise. It runs in float32: where the server computes in 16 bits, cosines show that rounding and, in models with
routed experts, the tokens for which it chose another expert.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from capture.model_config import read_model_config
from capture.rows.chat import InputError
from capture.tap import memory

MOST_TOKENS = 1500
SPARE = 1.2  # the forward's own states beside the weights
ROWS = 1024  # compared at once


class Against(msgspec.Struct, frozen=True):
    """A state of one prompt against Hugging Face's: cosines over its tokens, and the median ratio of their norms.

    A cosine does not see a norm that was applied or left out where its weights are alike; `scale` does, and is 1.
    `boundary` is the index in its `hidden_states` that it should be, `nearest` the one that it is nearest to on average
    (for `last`, before the final norm, there is no index, and both are the number of layers).
    """

    tokens: int
    state: str
    least: float
    median: float
    scale: float
    boundary: int
    nearest: int


def cosines(one: Any, other: Any) -> Any:
    """Cosine of each row of two states `[tokens, hidden]`, `[tokens]`."""
    import torch

    wide = torch.float64 if one.dtype == torch.float32 else torch.float32
    pairs: Iterable[tuple[Any, Any]] = zip(one.split(ROWS), other.split(ROWS), strict=True)
    return torch.cat([torch.nn.functional.cosine_similarity(a.to(wide), b.to(wide), dim=-1) for a, b in pairs])


def require_room(model: Path) -> None:
    """Raise InputError, before anything is drawn, for a model that a CPU here cannot hold in float32."""
    try:
        quantized = read_model_config(model).quantization is not None
        needed = 4 * sum(_values(path) for path in model.glob("*.safetensors"))
    except (OSError, ValueError, msgspec.MsgspecError, struct.error) as error:
        raise InputError(f"{model}: {error}") from error
    if quantized:
        raise InputError(f"{model} is quantised; a Hugging Face forward on a CPU needs it as it was before that")
    if not needed:
        raise InputError(f"{model} has no safetensors; a Hugging Face forward cannot be made of it")
    free = memory.available()
    if needed * SPARE > free:
        raise InputError(
            f"a Hugging Face forward of {model} takes {needed * SPARE / 1e9:,.1f} GB of memory in float32, "
            f"{free / 1e9:,.1f} GB are free here; probe without --against-hf, or a smaller model of that architecture"
        )


def _values(path: Path) -> int:
    """How many values the tensors of a safetensors file have, by its header."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    tensors = [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
    total = 0
    for shape in tensors:
        count = 1
        for length in shape:
            count *= length
        total += count
    return total


def compare(
    model: Path, drawn: list[tuple[list[int], dict[str, Any]]], boundaries: list[int], trust_remote_code: bool
) -> list[Against]:
    """Each prompt's drawn states against a forward of the model; raises InputError where it does not load."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    loaded = _load(model, trust_remote_code)
    decoder = loaded.get_decoder()
    seen: dict[str, Any] = {}
    if isinstance(norm := getattr(decoder, "norm", None), torch.nn.Module):
        norm.register_forward_pre_hook(lambda _module, given: seen.update(last=given[0][0]))
    found = []
    for ids, states in drawn:
        with torch.no_grad():
            hidden = [
                state[0]
                for state in loaded(
                    input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False
                ).hidden_states
            ]
        layers = len(hidden) - 1
        expected = {f"aux_{i}": boundary for i, boundary in enumerate(boundaries)} | {"final": layers, "last": layers}
        for name, boundary in expected.items():
            if name == "last" and "last" not in seen:
                continue
            right, nearest = (seen["last"] if name == "last" else hidden[boundary]), boundary
            cosine = cosines(states[name], right)
            if name != "last":
                nearest = max(range(layers + 1), key=lambda at: float(cosines(states[name], hidden[at]).mean()))
            scale = (states[name].float().norm(dim=-1) / right.norm(dim=-1)).median()
            found.append(
                Against(len(ids), name, float(cosine.min()), float(cosine.median()), float(scale), boundary, nearest)
            )
    return found


def _load(model: Path, trust_remote_code: bool) -> Any:
    import torch
    import transformers

    options = {"dtype": torch.float32, "trust_remote_code": trust_remote_code, "local_files_only": True}
    reasons = []
    for kind in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText):
        try:
            loaded, found = kind.from_pretrained(model, output_loading_info=True, **options)
        except Exception as error:  # of whatever kind: transformers and a model's own code raise what they like
            reasons.append(str(error).splitlines()[0] if str(error) else type(error).__name__)
            continue
        _require_whole(model, loaded, set(found["missing_keys"]))
        return loaded.eval()
    raise InputError(f"transformers {transformers.__version__} does not load {model}: {reasons[0]}")


def _require_whole(model: Path, loaded: Any, missing: set[str]) -> None:
    """Raise InputError where weights of the decoder were made up, which transformers does for those that it misses."""
    decoder = {id(weight) for weight in loaded.get_decoder().parameters()}
    made_up = [name for name, weight in loaded.named_parameters() if id(weight) in decoder and name in missing]
    if made_up:
        more = f" and {len(made_up) - 1} more" if len(made_up) > 1 else ""
        raise InputError(f"transformers finds no weights for {made_up[0]}{more} in {model}; it cannot be compared with")
