"""What a model's config.json says of its language model, wherever in it that stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

# Of a model that sees or hears as well, the language model has a table of its own.
OF_TEXT = ("text_config", "language_config", "llm_config", "thinker_config")
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")  # as configs name their number


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Of the language model; None where the file does not say.

    `vocabulary`: rows of the embedding. `experts`: how many a token is routed among, 0 where it is not routed.
    `mla`: whether its attention is latent. `quantization`: the checkpoint's method.
    """

    architecture: str | None = None
    layers: int | None = None
    hidden: int | None = None
    vocabulary: int | None = None
    dtype: str | None = None
    experts: int = 0
    mla: bool = False
    quantization: str | None = None


def read_model_config(folder: Path) -> ModelConfig:
    """The config.json in `folder`. Raises OSError, or msgspec.MsgspecError where it is no JSON object."""
    whole = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
    text = _of_text(whole)
    # What the table of its own leaves out holds for the whole model.
    both = [text] if text is whole else [text, whole]
    quantization = next((found for config in both if (found := config.get("quantization_config"))), None)
    return ModelConfig(
        # The name at the top is the class that SGLang makes, one with eyes and ears.
        architecture=_first_name(whole) or _first_name(text),
        layers=_count(text, "num_hidden_layers"),
        hidden=_count(text, "hidden_size"),
        vocabulary=next((size for config in both if (size := _count(config, "vocab_size"))), None),
        dtype=next((name for config in both if (name := _dtype(config))), None),
        experts=max((number for name in EXPERTS if (number := _count(text, name) or 0) > 1), default=0),
        mla=bool(text.get("kv_lora_rank")),
        quantization=_method(quantization) if quantization else None,
    )


def known_of(folder: Path) -> ModelConfig:
    """The same, of which nothing is known where no config.json can be read."""
    try:
        return read_model_config(folder)
    except (OSError, msgspec.MsgspecError):
        return ModelConfig()


def _of_text(config: dict[str, Any]) -> dict[str, Any]:
    nested = next((config[name] for name in OF_TEXT if isinstance(config.get(name), dict)), None)
    return config if nested is None else _of_text(nested)


def _count(config: dict[str, Any], name: str) -> int | None:
    found = config.get(name)
    return found if type(found) is int and found > 0 else None


def _dtype(config: dict[str, Any]) -> str | None:
    found = config.get("dtype") or config.get("torch_dtype")  # the second is its name before transformers 5
    return found if isinstance(found, str) else None


def _first_name(config: dict[str, Any]) -> str | None:
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def _method(quantization: Any) -> str:
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    return method if isinstance(method, str) else "unknown"
