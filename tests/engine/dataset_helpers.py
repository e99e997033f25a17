"""Datasets with real files, made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from test_manifest import MANIFEST, SETTINGS

from capture.dataset import formats, manifest
from capture.dataset.ledger import Change, Ledger
from capture.layers import Layers
from capture.rows.tokenise import Row

HIDDEN = 8
LENGTHS = [4, 9, 4, 1, 30, 7]


def row_of(number: int, length: int) -> Row:
    return Row(
        "rows.jsonl", number + 1, [100 * number + i for i in range(length)], [i % 2 for i in range(length)], False
    )


def states_of(
    number: int, lengths: Sequence[int] = LENGTHS, hidden: int = HIDDEN, layers: int = 3
) -> dict[str, torch.Tensor]:
    """The states of a sample, the same every time."""
    generator = torch.Generator().manual_seed(number)
    names = [*(f"aux_{i}" for i in range(layers)), "final", "last"]
    return {name: torch.randn(lengths[number], hidden, generator=generator).to(torch.bfloat16) for name in names}


def make_native(
    output: Path, lengths: Sequence[int] = LENGTHS, hidden: int = HIDDEN, layers: Layers = SETTINGS.layers
) -> Path:
    """A dataset in native alone, all of it written."""
    output.mkdir()
    settings = msgspec.structs.replace(SETTINGS, hidden=hidden, layers=layers, formats=["native"])
    manifest.write_manifest(
        output,
        msgspec.structs.replace(MANIFEST, settings=settings, norms=manifest.NORMS, exported=[], finished={}),
    )
    with Ledger(output) as ledger:
        ledger.add(row_of(number, length) for number, length in enumerate(lengths))
        for sample in ledger.samples():
            row = row_of(sample.number, sample.tokens)
            states = states_of(sample.number, lengths, hidden, len(layers.boundaries))
            file = formats.write("native", output, sample.number, states, torch.tensor(row.ids), torch.tensor(row.mask))
            ledger.settle([Change(sample.number, "written", 1, None, [file])])
    return output
