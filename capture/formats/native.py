"""Layertap's own format: safetensors with every state by its name, from which the others can be written.

native/rows_<a>-<b>/<i>.safetensors    input_ids, loss_mask int64 [N]; aux_0 …, final, last [N, hidden]
"""

from __future__ import annotations

from typing import Any

import msgspec

GROUP = 2000
# safetensors' names of the dtypes that ids and states can have
DTYPES = {"torch.int64": "I64", "torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float32": "F32"}


def path(number: int) -> str:
    """Path of a sample's file, relative to the dataset."""
    first = number // GROUP * GROUP
    return f"native/rows_{first}-{first + GROUP}/{number}.safetensors"


def bytes_per_token(hidden: int, layers: int, itemsize: int) -> int:
    """K aux states, `final` and `last`, and two int64."""
    return itemsize * hidden * (layers + 2) + 16


def refuse(dtype: str, layers: int) -> str | None:
    """Takes whatever the server computes."""
    return None


def encode(states: dict[str, Any], ids: Any, mask: Any) -> list[bytes | memoryview]:
    """The file of a sample: safetensors' header, then every tensor's own memory, so that no state is copied."""
    import torch

    header: dict[str, Any] = {}
    parts: list[bytes | memoryview] = []
    end = 0
    for name, tensor in {"input_ids": ids, "loss_mask": mask, **states}.items():
        parts.append(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[str(tensor.dtype)], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    words = msgspec.json.encode(header)
    words += b" " * (-len(words) % 8)  # the tensors begin at a multiple of eight
    return [len(words).to_bytes(8, "little") + words, *parts]


def decode(data: bytes, layers: int) -> tuple[Any, Any, dict[str, Any]]:
    """Ids, mask and states out of a file. Raises ValueError for one that is damaged or lacks a tensor."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(data)
        ids, mask = tensors.pop("input_ids"), tensors.pop("loss_mask")
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"no sample of this format: {error}") from error
    return ids, mask, tensors
