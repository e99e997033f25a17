"""Layertap's own format: safetensors with every state by its name, from which the others can be written.

native/rows_<a>-<b>/<i>.safetensors    input_ids, loss_mask int64 [N]; aux_0 …, final, last [N, hidden]
"""

from __future__ import annotations

from typing import Any

from capture.dataset.formats import tensors
from capture.dataset.formats.base import Format, grouped


class Native(Format):
    """Takes whatever the server computes, and both last states."""

    name = "native"
    final = "final"

    def path(self, number: int) -> str:
        """Path of a sample's file, relative to the dataset."""
        return f"native/{grouped(number)}/{number}.safetensors"

    def holds(self, layers: int) -> list[str]:
        """All of them."""
        return [*super().holds(layers), "last"]

    def bytes_per_token(self, hidden: int, layers: int, itemsize: int) -> int:
        """K aux states, `final` and `last`, and two int64."""
        return itemsize * hidden * (layers + 2) + 16

    def refuse(self, dtype: str, layers: int) -> str | None:
        """Never."""
        return None

    def encode(self, states: dict[str, Any], ids: Any, mask: Any) -> list[bytes | memoryview]:
        """The file of a sample."""
        return tensors.encode({"input_ids": ids, "loss_mask": mask, **states})

    def decode(self, data: Any, layers: int) -> tuple[Any, Any | None, dict[str, Any]]:
        """Ids, mask and states out of a file. Raises ValueError for one that is damaged or lacks a tensor."""
        found = tensors.decode(data, "input_ids", "loss_mask")
        return found.pop("input_ids"), found.pop("loss_mask"), found
