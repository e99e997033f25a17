"""How many token ids a model has: the rows of its embedding, which its tokenizer need not have a token for each of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec


def model_vocabulary(model: Path) -> int | None:
    """The `vocab_size` of a model's config.json, None where it says none. Raises OSError, msgspec.MsgspecError."""
    config = msgspec.json.decode((model / "config.json").read_bytes(), type=dict[str, Any])
    found = [one.get("vocab_size") for one in (config.get("text_config"), config) if isinstance(one, dict)]
    return next((size for size in found if isinstance(size, int)), None)


def vocabulary_size(model: str | Path, tokenizer: Any) -> int:
    """Above every id that a model takes, by its config.json; where that says nothing, by its tokenizer."""
    try:
        size = model_vocabulary(Path(model))
    except (OSError, msgspec.MsgspecError):
        size = None
    return tokens_end(tokenizer) if size is None else size


def tokens_end(tokenizer: Any) -> int:
    """Above every id that a tokenizer has; its length is less where ids are left out between them."""
    return int(max(tokenizer.get_vocab().values())) + 1
