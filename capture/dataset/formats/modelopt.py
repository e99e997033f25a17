"""NVIDIA Model Optimizer: what its offline speculative-decoding example loads.

modelopt/rows_<g>-<g + 2000>/<i>.pt    torch.save of
    input_ids, loss_mask     int64 [N]
    hidden_states            bf16 [N, hidden], after the final norm
    hidden_states_prenorm    False, which says so
    aux_hidden_states        bf16 [N, K * hidden], boundaries ascending
"""

from __future__ import annotations

from typing import Any

from capture.dataset.formats.base import Format, grouped, joined, load_record, require_tensors, save_record, split
from capture.layers import Layers

DIMS = {"input_ids": 1, "loss_mask": 1, "hidden_states": 2, "aux_hidden_states": 2}


class ModelOpt(Format):
    """Any layers, and the state after the final norm."""

    name = "modelopt"
    final = "final"

    def path(self, number: int) -> str:
        """Path of a sample's file, relative to the dataset."""
        return f"modelopt/{grouped(number)}/{number}.pt"

    def encode(self, states: dict[str, Any], ids: Any, mask: Any) -> list[bytes | memoryview]:
        """The file of a sample."""
        return save_record(
            {
                "input_ids": ids,
                "loss_mask": mask,
                "hidden_states": states["final"],
                "hidden_states_prenorm": False,
                "aux_hidden_states": joined(states),
            }
        )

    def decode(self, data: Any, layers: int) -> tuple[Any, Any | None, dict[str, Any]]:
        """Ids, mask and states out of a file. Raises ValueError for one that is damaged or lacks a tensor."""
        record = load_record(data)
        ids, mask, final, aux = require_tensors(record, DIMS)
        if record.get("hidden_states_prenorm") is not False:
            raise ValueError("hidden_states_prenorm is not False, though the states are those after the final norm")
        return ids, mask, split(aux, layers) | {"final": final}

    def hint(self, layers: Layers) -> str | None:
        """Which ids its drafter's config has to have: layers whose output is meant."""
        ids = ", ".join(map(str, layers.outputs))
        return f"offline data path = this folder; eagle_aux_hidden_state_layer_ids [{ids}] in eagle_config"
