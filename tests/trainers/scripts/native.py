"""The native set, read with safetensors' own loader."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file


def read_native(folder: str) -> list[dict[str, torch.Tensor]]:
    """Every sample by number: input_ids, loss_mask, aux_0 …, final, last."""
    paths = sorted(Path(folder).glob("native/rows_*/*.safetensors"), key=lambda path: int(path.stem))
    assert [int(path.stem) for path in paths] == list(range(len(paths)))
    return [load_file(path) for path in paths]


def aux(sample: dict[str, torch.Tensor]) -> torch.Tensor:
    """Its aux states side by side."""
    return torch.cat([sample[f"aux_{i}"] for i in range(3)], dim=-1)


def require_same(found: torch.Tensor, expected: torch.Tensor, what: str) -> int:
    """Fail unless they are equal bit for bit; returns how many values were compared."""
    assert found.dtype == expected.dtype and found.shape == expected.shape, (what, found.dtype, found.shape)
    same = found.contiguous().view(torch.uint8).equal(expected.contiguous().view(torch.uint8))
    assert same, f"{what} differs"
    return found.numel()


def tell(**found: object) -> None:
    """The script's result, its last line."""
    print(json.dumps(found))
