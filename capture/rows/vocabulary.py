"""How many token ids a model has: the rows of its embedding, which its tokenizer need not have a token for each of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from capture.model_config import known_of


def vocabulary_size(model: str | Path, tokenizer: Any) -> int:
    """Above every id that a model takes, by its config.json; where that says nothing, by its tokenizer."""
    size = known_of(Path(model)).vocabulary
    return tokens_end(tokenizer) if size is None else size


def tokens_end(tokenizer: Any) -> int:
    """Above every id that a tokenizer has; its length is less where ids are left out between them."""
    return int(max(tokenizer.get_vocab().values())) + 1
