"""SpecForge 0.1 and 0.2: what its offline EAGLE-3 trainer loads.

specforge/rows_<g>-<g + 2000>/data_<i>.ckpt    torch.save of
    input_ids, loss_mask   int64 [N]
    hidden_state           bf16 [1, N, hidden], after the final norm
    aux_hidden_state       bf16 [1, N, 3 * hidden], boundaries ascending
"""

from __future__ import annotations

import io
from typing import Any

GROUP = 2000
LAYERS = 3
KEYS = ("input_ids", "loss_mask", "hidden_state", "aux_hidden_state")


def path(number: int) -> str:
    """Path of a sample's file, relative to the dataset."""
    first = number // GROUP * GROUP
    return f"specforge/rows_{first}-{first + GROUP}/data_{number}.ckpt"


def bytes_per_token(hidden: int, layers: int, itemsize: int) -> int:
    """K aux states and `final`, and two int64."""
    return itemsize * hidden * (layers + 1) + 16


def refuse(dtype: str, layers: int) -> str | None:
    """Why states of that dtype and number of layers do not fit, None where they do."""
    if dtype != "bfloat16":
        return f"specforge takes bfloat16 states, the server computes in {dtype}"
    if layers != LAYERS:
        return f"specforge takes exactly {LAYERS} layers, {layers} are drawn"
    return None


def encode(states: dict[str, Any], ids: Any, mask: Any) -> list[bytes | memoryview]:
    """The file of a sample."""
    import torch

    record = {
        "input_ids": ids,
        "loss_mask": mask,
        "hidden_state": states["final"].unsqueeze(0),
        "aux_hidden_state": torch.cat([states[f"aux_{i}"] for i in range(LAYERS)], dim=-1).unsqueeze(0),
    }
    stream = io.BytesIO()
    torch.save(record, stream)
    return [stream.getbuffer()]


def decode(data: bytes, layers: int) -> tuple[Any, Any, dict[str, Any]]:
    """Ids, mask and states out of a file. Raises ValueError for one that is damaged or lacks a tensor."""
    import torch

    try:
        record = torch.load(io.BytesIO(data), weights_only=True)
        ids, mask, final, aux = (record[key] for key in KEYS)
        shapes = [list(tensor.shape) for tensor in (ids, mask, final, aux)]
    except Exception as error:  # whatever damaged bytes lead torch's unpickler to
        raise ValueError(f"no sample of this format ({type(error).__name__})") from error
    if any(len(shape) != 3 or shape[0] != 1 for shape in shapes[2:]):
        raise ValueError(f"states have shapes {shapes[2]} and {shapes[3]}, expected [1, tokens, width]")
    states = {f"aux_{i}": part for i, part in enumerate(aux[0].chunk(layers, dim=-1))}
    return ids, mask, states | {"final": final[0]}
