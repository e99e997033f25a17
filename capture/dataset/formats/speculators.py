"""speculators 0.5 to 0.9: a Hugging Face dataset with a file of states a row, the row's number in its name.

speculators/
    data-….arrow, dataset_info.json, state.json   input_ids, loss_mask, seq_len of every sample, in order of numbers
    token_freq.pt                                 {token id: how often it is in the loss}
    d2t-<size>.npy, t2d-<size>.npy                where a drafter's vocabulary of that size was asked for
    hidden_states/hs_<i>.safetensors              token_ids int64 [N]
                                                  hidden_states bf16 [N, K + 1, hidden], boundaries ascending, then the
                                                  state before the final norm

`speculators-fp8` is the same with hidden_states in float8_e4m3fn and hidden_states_scales float32 [N, 1, 1], as its
`--hidden-states-backend fp8` reads them: one scale a token, over all its states.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from capture.dataset.formats import tensors
from capture.dataset.formats.base import Format, count, save_record
from capture.dataset.formats.files import put, sync
from capture.dataset.ledger import Tokens
from capture.layers import Layers

FP8_LARGEST = 448.0  # of float8_e4m3fn
LEAST_SCALE = 1e-12
STRETCH = 16  # tokens at a time: what is made of them on the way stays in the core's own cache, six times as fast
ROWS_AT_ONCE = 1000


class Speculators(Format):
    """Any layers, and the state before the final norm."""

    name = "speculators"
    final = "last"
    finishes = True
    takes_vocabulary = True

    def path(self, number: int) -> str:
        """Path of a sample's file, relative to the dataset."""
        return f"{self.name}/hidden_states/hs_{number}.safetensors"

    def bytes_per_token(self, hidden: int, layers: int, itemsize: int) -> int:
        """K aux states and the last one, and three int64, two of which are in the Hugging Face dataset."""
        return super().bytes_per_token(hidden, layers, itemsize) + 8

    def encode(self, states: dict[str, Any], ids: Any, mask: Any) -> list[bytes | memoryview]:
        """The file of a sample; its mask is kept in the Hugging Face dataset."""
        return tensors.encode({"token_ids": ids, "hidden_states": self._stacked(states)})

    def decode(self, data: Any, layers: int) -> tuple[Any, Any | None, dict[str, Any]]:
        """Ids and states out of a file. Raises ValueError for one that is damaged or lacks a tensor."""
        found = tensors.decode(data, "token_ids", "hidden_states")
        return found["token_ids"], None, self._apart(found["hidden_states"], layers)

    def finish(self, folder: Path, rows: Callable[[], Iterator[Tokens]]) -> list[Path]:
        """The Hugging Face dataset and the token frequencies."""
        seen = Counter[int]()
        written = _save_rows(folder, rows, seen)
        frequencies = folder / "token_freq.pt"
        put(frequencies, save_record(dict(sorted(seen.items()))))
        return [*written, frequencies]

    def hint(self, layers: Layers) -> str | None:
        """Which layers to name: speculators counts what enters a layer. A sample that failed is missing for it."""
        ids = " ".join(map(str, layers.boundaries))
        return f"--data-path = this folder, --target-layer-ids {ids}, --on-missing warn"

    def _stacked(self, states: dict[str, Any]) -> Any:
        import torch

        return torch.stack([states[name] for name in self.holds(count(states))], dim=1)

    def _apart(self, stacked: Any, layers: int) -> dict[str, Any]:
        if stacked.ndim != 3 or stacked.shape[1] != layers + 1:
            raise ValueError(f"hidden_states has shape {list(stacked.shape)}, expected [tokens, {layers + 1}, hidden]")
        return {name: stacked[:, i] for i, name in enumerate(self.holds(layers))}


class SpeculatorsFp8(Speculators):
    """The same in half the bytes, and not bit for bit."""

    name = "speculators-fp8"
    lossy = True

    def bytes_per_token(self, hidden: int, layers: int, itemsize: int) -> int:
        """One byte a value, a scale, and three int64."""
        return hidden * (layers + 1) + 28

    def encode(self, states: dict[str, Any], ids: Any, mask: Any) -> list[bytes | memoryview]:
        """The file of a sample; its mask is kept in the Hugging Face dataset."""
        values, scales = quantized(self._stacked(states))
        return tensors.encode({"token_ids": ids, "hidden_states_scales": scales, "hidden_states": values})

    def decode(self, data: Any, layers: int) -> tuple[Any, Any | None, dict[str, Any]]:
        """Ids and states, in bfloat16 as its trainer makes them. Raises ValueError for a damaged file."""
        found = tensors.decode(data, "token_ids", "hidden_states", "hidden_states_scales")
        values, scales = found["hidden_states"], found["hidden_states_scales"]
        if list(scales.shape) != [len(values), 1, 1]:
            raise ValueError(f"hidden_states_scales has shape {list(scales.shape)}, expected [{len(values)}, 1, 1]")
        return found["token_ids"], None, self._apart(dequantized(values, scales), layers)

    def rounded(self, states: dict[str, Any]) -> dict[str, Any]:
        """Through fp8 and back."""
        return self._apart(dequantized(*quantized(self._stacked(states))), count(states))

    def hint(self, layers: Layers) -> str | None:
        """It must be told of fp8."""
        return f"{super().hint(layers)}, --hidden-states-backend fp8"


def quantized(states: Any) -> tuple[Any, Any]:
    """`[tokens, states, hidden]` in float8_e4m3fn, and a float32 scale `[tokens, 1, 1]`; as hs-connectors does it."""
    import torch

    values = torch.empty(states.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty((len(states), 1, 1), dtype=torch.float32)
    for at in range(0, len(states), STRETCH):
        part = states[at : at + STRETCH].float()
        scale = (part.abs().amax(dim=(1, 2), keepdim=True) / FP8_LARGEST).clamp(min=LEAST_SCALE)
        values[at : at + STRETCH], scales[at : at + STRETCH] = (part / scale).to(torch.float8_e4m3fn), scale
    return values, scales


def dequantized(values: Any, scales: Any) -> Any:
    """Back in bfloat16, as hs-connectors does it."""
    import torch

    states = torch.empty(values.shape, dtype=torch.bfloat16)
    for at in range(0, len(values), STRETCH):
        part = slice(at, at + STRETCH)
        torch.mul(values[part].to(torch.bfloat16), scales[part].to(torch.bfloat16), out=states[part])
    return states


def _save_rows(folder: Path, rows: Callable[[], Iterator[Tokens]], seen: Counter[int]) -> list[Path]:
    """Write the Hugging Face dataset into `folder`, counting in `seen` what is in the loss.

    Its parts are put in their places one by one, state.json last: it names the others.
    """
    import datasets
    import torch
    from datasets.arrow_writer import ArrowWriter

    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / ".rows.part"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    numbers = datasets.Sequence(datasets.Value("int64"))
    features = datasets.Features(
        {"input_ids": numbers, "loss_mask": numbers, "seq_len": datasets.Value("int64")},
    )
    shown = datasets.utils.logging.is_progress_bar_enabled()
    datasets.utils.logging.disable_progress_bar()
    try:
        with ArrowWriter(features=features, path=str(scratch / "all.arrow"), writer_batch_size=ROWS_AT_ONCE) as writer:
            for row in rows():
                in_loss = torch.tensor(row.ids)[torch.tensor(row.mask, dtype=torch.bool)]
                ids, counts = in_loss.unique(return_counts=True)
                seen.update(dict(zip(ids.tolist(), counts.tolist(), strict=True)))
                writer.write({"input_ids": row.ids, "loss_mask": row.mask, "seq_len": len(row.ids)})
            writer.finalize()
        made = datasets.Dataset.from_file(str(scratch / "all.arrow")).with_format("torch")
        made.save_to_disk(str(scratch / "saved"))
    finally:
        if shown:
            datasets.utils.logging.enable_progress_bar()
    saved = sorted((scratch / "saved").iterdir(), key=lambda path: (path.name == "state.json", path.name))
    placed = []
    for path in saved:
        sync(path)
        placed.append(path.replace(folder / path.name))
    sync(folder)
    for left in set(folder.glob("data-*.arrow")) - set(placed):
        os.unlink(left)  # of a dataset that had another number of parts
    shutil.rmtree(scratch)
    return placed
