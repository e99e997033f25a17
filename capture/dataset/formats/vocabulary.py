"""A drafter's vocabulary: the tokens of the target's that it can propose, those that are most often in the loss."""

from __future__ import annotations

import heapq
import io
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from capture.dataset.formats.files import put
from capture.dataset.ledger import LedgerError, Tokens


class DraftVocabulary(msgspec.Struct, frozen=True):
    """So many tokens, `draft`, of the target's `target`."""

    draft: int
    target: int


def maps(rows: Iterable[Tokens], vocabulary: DraftVocabulary) -> tuple[Any, Any]:
    """`d2t`, int64 `[draft]`: what to add to a drafter's token id; `t2d`, bool `[target]`: whether the drafter has it.

    Of tokens that are as often there, and of those that never are, the lower ids are taken. Raises LedgerError for an
    id beyond the target's vocabulary.
    """
    import torch

    seen = Counter[int]()
    for row in rows:
        seen.update(row.in_loss)
        if max(row.ids, default=0) >= vocabulary.target:
            raise LedgerError(
                f"sample {row.number} has the token id {max(row.ids)}, and the model's vocabulary {vocabulary.target:,}"
            )
    ids = sorted(heapq.nsmallest(vocabulary.draft, range(vocabulary.target), key=lambda token: (-seen[token], token)))
    kept = torch.zeros(vocabulary.target, dtype=torch.bool)
    kept[ids] = True
    return torch.tensor(ids) - torch.arange(vocabulary.draft), kept


def save_as_numpy(folder: Path, d2t: Any, t2d: Any) -> list[Path]:
    """Write both maps as numpy does, with their size in their names; returns the files. Raises OSError."""
    import numpy

    written = []
    for name, tensor in (("d2t", d2t), ("t2d", t2d)):
        stream = io.BytesIO()
        numpy.save(stream, tensor.numpy())
        written.append(folder / f"{name}-{len(d2t)}.npy")
        put(written[-1], [stream.getbuffer()])
    return written
