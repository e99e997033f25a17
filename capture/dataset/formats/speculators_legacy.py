"""speculators 0.4, and 0.5 to 0.7 with `--legacy-data`: a file a sample, all in one folder.

speculators-legacy/
    data/data_<i>.pt            torch.save of input_ids, loss_mask int64 [N], and hidden_states, a list of
                                bf16 [N, hidden], boundaries ascending, then the state before the final norm
    data/sample_lengths.json    {"<i>": N}
    token_freq.pt               {token id: how often it is in the loss}; in data/ it would be read as a sample
    d2t-<size>.npy, t2d-<size>.npy   where a drafter's vocabulary of that size was asked for
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from capture.dataset.formats.base import Format, count, load_record, require_tensors, save_record
from capture.dataset.formats.files import put
from capture.dataset.ledger import Tokens
from capture.layers import Layers


class SpeculatorsLegacy(Format):
    """Any layers, and the state before the final norm."""

    name = "speculators-legacy"
    final = "last"
    finishes = True
    takes_vocabulary = True

    def path(self, number: int) -> str:
        """Path of a sample's file, relative to the dataset."""
        return f"speculators-legacy/data/data_{number}.pt"

    def encode(self, states: dict[str, Any], ids: Any, mask: Any) -> list[bytes | memoryview]:
        """The file of a sample."""
        kept = [states[name] for name in self.holds(count(states))]
        return save_record({"input_ids": ids, "loss_mask": mask, "hidden_states": kept})

    def decode(self, data: Any, layers: int) -> tuple[Any, Any | None, dict[str, Any]]:
        """Ids, mask and states out of a file. Raises ValueError for one that is damaged or lacks a tensor."""
        record = load_record(data)
        kept, names = record.pop("hidden_states", None), self.holds(layers)
        if not isinstance(kept, list) or len(kept) != len(names):
            found = len(kept) if isinstance(kept, list) else "no"
            raise ValueError(f"hidden_states lists {found} states, expected {len(names)}")
        record.update(zip(names, kept, strict=True))
        ids, mask, *states = require_tensors(record, {"input_ids": 1, "loss_mask": 1, **dict.fromkeys(names, 2)})
        return ids, mask, dict(zip(names, states, strict=True))

    def finish(self, folder: Path, rows: Callable[[], Iterator[Tokens]]) -> list[Path]:
        """The samples' lengths and the token frequencies."""
        lengths: dict[str, int] = {}
        seen = Counter[int]()
        for row in rows():
            lengths[str(row.number)] = len(row.ids)
            seen.update(row.in_loss)
        written = [folder / "data" / "sample_lengths.json", folder / "token_freq.pt"]
        put(written[0], [msgspec.json.encode(lengths)])
        put(written[1], save_record(dict(sorted(seen.items()))))
        return written

    def hint(self, layers: Layers) -> str | None:
        """Which layers to name: in 0.4 ids are layers whose output is meant."""
        ids = " ".join(map(str, layers.outputs))
        return f"--data-path = data/ in this folder (outputs of layers {ids}, then the last)"
