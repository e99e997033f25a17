"""Which layers: what the user said, what the installed SGLang makes of it, and both in words.

A *boundary* b is Hugging Face's `hidden_states[b]`: the residual stream that enters layer b, the output of layer
b - 1. SGLang's EAGLE-3 ids mean other boundaries in other versions and models, so ids are never interpreted here:
the loaded model's own setter is asked.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

# SGLang's classes, and theirs that inherit from them, whose ids are boundaries from 0.5.13 on.
BY_BOUNDARY = ("DeepseekV2", "DeepseekV3", "KimiK25", "Glm4MoeLite")
FLAG = "_is_layer_to_capture"  # of a layer; the forward of some models looks at it and not at `layers_to_capture`


class LayerError(ValueError):
    """A layer choice that cannot be drawn from this model; the sentence says why and what to do."""


class LayerChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The layers as the user named them; exactly one field is set.

    `boundaries`: what enters these layers. `outputs`: what these layers put out. `eagle_ids`: ids as a drafter's
    config holds them. `draft`: path of a drafter's config.json on the host.
    """

    boundaries: list[int] | None = None
    outputs: list[int] | None = None
    eagle_ids: list[int] | None = None
    draft: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in self.__struct_fields__ if getattr(self, name) is not None]
        if len(given) != 1:
            said = ", ".join(given) or "none of them"
            raise ValueError(f"name the layers in one way, as boundaries, outputs, eagle_ids or draft; given: {said}")
        numbers = getattr(self, given[0])
        if isinstance(numbers, list) and (not numbers or len(set(numbers)) != len(numbers)):
            raise ValueError(f"{given[0]} = {numbers}: at least one layer, and none twice")

    def words(self) -> str:
        """The choice in one phrase, for screens and errors."""
        if self.boundaries is not None:
            return f"boundaries {_join(self.boundaries)}"
        if self.outputs is not None:
            return f"outputs of layers {_join(self.outputs)}"
        if self.eagle_ids is not None:
            return f"EAGLE-3 ids {_join(self.eagle_ids)}"
        return f"the layers of drafter {self.draft}"


class ServeIds(msgspec.Struct, frozen=True):
    """The ids for a drafter's config that SGLang versions in the range `sglang` map to the drawn boundaries."""

    ids: list[int]
    sglang: str


class Layers(msgspec.Struct, frozen=True):
    """Layers as resolved on a loaded model.

    `serve_ids` was asked of the running SGLang's setter; `serve_ids_elsewhere` follows from the source of other
    versions.
    """

    boundaries: list[int]
    outputs: list[int]
    serve_ids: list[int]
    serve_ids_elsewhere: list[ServeIds]
    asked: str

    def words(self) -> str:
        """The layers in one phrase."""
        return f"outputs of layers {_join(self.outputs)} (boundaries {_join(self.boundaries)})"


def inner_model(model: Any) -> Any:
    """The submodule that runs the decoder layers and collects states, also inside a multimodal wrapper.

    Raises LayerError where the model has none or has no EAGLE-3 setter.
    """
    inner = next((m for m in model.modules() if hasattr(m, "layers_to_capture") and hasattr(m, "layers")), None)
    if inner is None or not hasattr(model, "set_eagle3_layers_to_capture"):
        raise LayerError(f"SGLang's {type(model).__name__} has no EAGLE-3 capture; Layertap cannot draw from it")
    return inner


def set_boundaries(inner: Any, boundaries: Sequence[int]) -> None:
    """Have the inner model collect what enters these layers and no others, whichever way it looks that up."""
    inner.layers_to_capture = list(boundaries)
    for number, layer in enumerate(inner.layers):
        wanted = number in boundaries
        if wanted or layer.__dict__.get(FLAG):  # a module's own look-up is slow for what it lacks
            setattr(layer, FLAG, wanted)


def boundaries_of(model: Any, ids: list[int] | None) -> list[int]:
    """The boundaries that the model's own setter makes of `ids`, ascending; the model is left as it was."""
    inner = inner_model(model)
    flags = [module for module in model.modules() if hasattr(module, "capture_aux_hidden_states")]
    before = inner.layers_to_capture, [module.capture_aux_hidden_states for module in flags]
    flagged = [layer for layer in inner.layers if layer.__dict__.get(FLAG)]
    try:
        model.set_eagle3_layers_to_capture(None if ids is None else list(ids))
        return sorted(inner.layers_to_capture)
    finally:
        set_boundaries(inner, ())
        inner.layers_to_capture = before[0]
        for layer in flagged:
            setattr(layer, FLAG, True)
        for module, flag in zip(flags, before[1], strict=True):
            module.capture_aux_hidden_states = flag


def check(choice: LayerChoice, count: int | None) -> None:
    """Look at what can be told before a model is loaded: the drafter's file, and whether `count` layers have these.

    Raises LayerError. Without a count only the file is looked at; what passes may still be refused by `resolve`.
    """
    ids = choice.eagle_ids if choice.draft is None else draft_ids(choice.draft)
    if count is None:
        return
    if (boundaries := _named(choice)) is not None:
        _check_range(boundaries, count, choice)
    # An id is a boundary or the layer before it, by model and version: both begin and end within the layers.
    elif wrong := [one for one in ids or () if not 0 <= one < count]:
        raise LayerError(
            f"{choice.words()}: id {_join(wrong)} is outside 0 to {count - 1}, the model has {count} layers"
        )


def resolve(model: Any, choice: LayerChoice, sglang_version: str) -> Layers:
    """Resolve `choice` on a loaded SGLang model through the model's own setter.

    Raises LayerError for layers that the model does not have or that its setter cannot name.
    """
    count = len(inner_model(model).layers)
    boundaries = _named(choice)
    if boundaries is None:
        boundaries = boundaries_of(model, choice.eagle_ids if choice.draft is None else draft_ids(choice.draft))
    _check_range(boundaries, count, choice)
    serve_ids = _serve_ids(model, boundaries)
    return Layers(
        boundaries=boundaries,
        outputs=[boundary - 1 for boundary in boundaries],
        serve_ids=serve_ids,
        serve_ids_elsewhere=serve_ids_by_version(type(model), boundaries),
        asked=f"{choice.words()}, resolved by SGLang {sglang_version}",
    )


def draft_ids(path: str) -> list[int] | None:
    """The ids in a drafter's config.json where SGLang reads them; None where it has none, and SGLang's default holds.

    Raises LayerError for a file that cannot be read or is no drafter's config.
    """
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise LayerError(f"drafter config {path}: {error.strerror}; give the file's path on the host") from error
    except ValueError as error:
        raise LayerError(f"drafter config {path} is not JSON: {error}; give the drafter's config.json") from error
    nested = (config.get("eagle_config") or {}) if isinstance(config, dict) else None
    if not isinstance(nested, dict) or not (nested or "draft_vocab_size" in config or _called_eagle3(config)):
        raise LayerError(f"{path} is no EAGLE-3 drafter's config.json; give the drafter's, not the model's")
    if nested.get("use_aux_hidden_state") is False:
        raise LayerError(f"drafter config {path} says use_aux_hidden_state = false, so SGLang feeds it no layers")
    ids = nested.get("eagle_aux_hidden_state_layer_ids")
    if ids is None and "eagle_aux_hidden_state_layer_ids" in config:
        raise LayerError(
            f"drafter config {path} holds eagle_aux_hidden_state_layer_ids at its top level, where SGLang does not "
            "read it; move it into eagle_config, or name the layers as boundaries or outputs"
        )
    if ids is not None and not (
        isinstance(ids, list) and ids and all(type(i) is int for i in ids) and len(set(ids)) == len(ids)
    ):
        raise LayerError(
            f"drafter config {path}: eagle_aux_hidden_state_layer_ids = {ids!r} is no list of layer ids, none twice"
        )
    return ids


def _called_eagle3(config: dict[str, Any]) -> bool:
    return "eagle3" in str(config.get("architectures")).lower()


def serve_ids_by_version(model_class: type, boundaries: list[int]) -> list[ServeIds]:
    """The ids for a drafter's config by SGLang version, for the conventions known from SGLang's source."""
    outputs = [boundary - 1 for boundary in boundaries]
    if not any(base.__name__.startswith(BY_BOUNDARY) for base in model_class.__mro__):
        return [ServeIds(outputs, ">=0.5.9")]
    by_version = [ServeIds(outputs, ">=0.5.9,<0.5.13")]
    if boundaries[0] != 1:  # from 0.5.13 on a first id of 1 means "outputs", so no ids name boundary 1
        by_version.append(ServeIds(outputs if outputs[0] == 1 else boundaries, ">=0.5.13"))
    return by_version


def _serve_ids(model: Any, boundaries: list[int]) -> list[int]:
    # Two conventions exist: the layer whose output is meant, and the boundary itself.
    for ids in ([boundary - 1 for boundary in boundaries], boundaries):
        if boundaries_of(model, ids) == boundaries:
            return ids
    raise LayerError(
        f"no EAGLE-3 ids make SGLang's {type(model).__name__} capture boundaries {_join(boundaries)}, so no drafter "
        "could be served with them; choose other layers"
    )


def _named(choice: LayerChoice) -> list[int] | None:
    """The boundaries that were named as such or as outputs, ascending; None where ids stand for them."""
    if choice.boundaries is not None:
        return sorted(choice.boundaries)
    return None if choice.outputs is None else sorted(output + 1 for output in choice.outputs)


def _check_range(boundaries: list[int], count: int, choice: LayerChoice) -> None:
    wrong = [boundary for boundary in boundaries if not 0 < boundary < count]
    if not wrong:
        return
    hint = ""
    if count in wrong:
        hint = f"; what leaves the last layer, {count - 1}, is always drawn, as `last` and, after the norm, as `final`"
    raise LayerError(
        f"{choice.words()}: boundary {_join(wrong)} is outside 1 to {count - 1}, the model has {count} layers{hint}"
    )


def _join(numbers: list[int]) -> str:
    return ", ".join(str(number) for number in numbers)
