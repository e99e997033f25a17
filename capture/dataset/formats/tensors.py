"""safetensors straight from and to memory: no tensor is copied."""

from __future__ import annotations

import math
from typing import Any

import msgspec

# safetensors' names of the dtypes that ids and states can have
DTYPES = {
    "torch.int64": "I64",
    "torch.bfloat16": "BF16",
    "torch.float16": "F16",
    "torch.float32": "F32",
    "torch.float8_e4m3fn": "F8_E4M3",
}
TORCH = {name: dtype.removeprefix("torch.") for dtype, name in DTYPES.items()}


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def encode(tensors: dict[str, Any]) -> list[bytes | memoryview]:
    """The file of contiguous tensors: the header, then every tensor's own memory."""
    import torch

    header: dict[str, Any] = {}
    parts: list[bytes | memoryview] = []
    end = 0
    for name, tensor in tensors.items():
        parts.append(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[str(tensor.dtype)], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    words = msgspec.json.encode(header)
    words += b" " * (-len(words) % 8)  # the tensors begin at a multiple of eight
    return [len(words).to_bytes(8, "little") + words, *parts]


def decode(data: Any, *names: str) -> dict[str, Any]:
    """The tensors of a file, as views of `data` where that can be written to; `names` must be among them.

    Raises ValueError for a damaged file.
    """
    import torch

    if memoryview(data).readonly:
        data = bytearray(data)  # torch takes no other
    start = 8 + int.from_bytes(data[:8], "little")
    if len(data) < start or start == 8:
        raise ValueError("no sample of this format: it ends within its header")
    try:
        header = msgspec.json.decode(data[8:start], type=dict[str, Any])
        header.pop("__metadata__", None)
        entries = msgspec.convert(header, dict[str, _Entry])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"no sample of this format: {error}") from error
    tensors: dict[str, Any] = {}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, until = entry.data_offsets
        dtype = getattr(torch, TORCH.get(entry.dtype, ""), None)
        if dtype is None:
            raise ValueError(f"no sample of this format: {name} is of dtype {entry.dtype}")
        values = math.prod(entry.shape)
        if begin != end or min(entry.shape, default=1) < 0 or until - begin != values * dtype.itemsize:
            raise ValueError(f"no sample of this format: {name} does not lie where its header says")
        end = until
        if start + end > len(data):
            raise ValueError(f"no sample of this format: {name} is cut")
        flat = torch.frombuffer(data, dtype=torch.uint8, count=until - begin, offset=start + begin) if values else None
        made = torch.empty(0, dtype=dtype) if flat is None else _aligned(flat, dtype).view(dtype)
        tensors[name] = made.view(entry.shape)
    if start + end != len(data):
        raise ValueError(f"no sample of this format: it goes on behind its tensors, {len(data) - start - end} bytes")
    if missing := [name for name in names if name not in tensors]:
        raise ValueError(f"no sample of this format: it has no tensor {missing[0]!r}")
    return tensors


def _aligned(flat: Any, dtype: Any) -> Any:
    return flat if flat.data_ptr() % dtype.itemsize == 0 else flat.clone()
