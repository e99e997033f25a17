"""SpecForge 0.1 and 0.2: what its offline EAGLE-3 trainer loads.

specforge/rows_<g>-<g + 2000>/data_<i>.ckpt    torch.save of
    input_ids, loss_mask   int64 [N]
    hidden_state           bf16 [1, N, hidden], after the final norm
    aux_hidden_state       bf16 [1, N, 3 * hidden], boundaries ascending
specforge/vocab_mapping/vocab_mapping.pt       torch.save of d2t, t2d, where a drafter's vocabulary was asked for; else
                                               SpecForge makes one itself, from these files
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from capture.dataset.formats.base import Format, grouped, joined, load_record, require_tensors, save_record, split
from capture.dataset.formats.files import put
from capture.layers import Layers

LAYERS = 3
DIMS = {"input_ids": 1, "loss_mask": 1, "hidden_state": 3, "aux_hidden_state": 3}


class SpecForge(Format):
    """Three layers and the state after the final norm."""

    name = "specforge"
    final = "final"
    takes_vocabulary = True

    def path(self, number: int) -> str:
        """Path of a sample's file, relative to the dataset."""
        return f"specforge/{grouped(number)}/data_{number}.ckpt"

    def refuse(self, dtype: str, layers: int) -> str | None:
        """Why states of that dtype and number of layers do not fit, None where they do."""
        if layers != LAYERS:
            return f"specforge takes exactly {LAYERS} layers, {layers} are drawn"
        return super().refuse(dtype, layers)

    def encode(self, states: dict[str, Any], ids: Any, mask: Any) -> list[bytes | memoryview]:
        """The file of a sample."""
        return save_record(
            {
                "input_ids": ids,
                "loss_mask": mask,
                "hidden_state": states["final"].unsqueeze(0),
                "aux_hidden_state": joined(states).unsqueeze(0),
            }
        )

    def decode(self, data: Any, layers: int) -> tuple[Any, Any | None, dict[str, Any]]:
        """Ids, mask and states out of a file. Raises ValueError for one that is damaged or lacks a tensor."""
        ids, mask, final, aux = require_tensors(load_record(data), DIMS)
        if (final.shape[0], aux.shape[0]) != (1, 1):
            shapes = f"{list(final.shape)} and {list(aux.shape)}"
            raise ValueError(f"states have shapes {shapes}, expected [1, tokens, width]")
        return ids, mask, split(aux[0], layers) | {"final": final[0]}

    def write_vocabulary(self, folder: Path, d2t: Any, t2d: Any) -> list[Path]:
        """Both maps in one file."""
        path = folder / "vocab_mapping" / "vocab_mapping.pt"
        put(path, save_record({"d2t": d2t, "t2d": t2d}))
        return [path]

    def hint(self, layers: Layers) -> str | None:
        """Which ids its drafter's config has to have."""
        ids = ", ".join(map(str, layers.serve_ids))
        return f"hidden_states_path = this folder; eagle_aux_hidden_state_layer_ids [{ids}] in the drafter's config"
