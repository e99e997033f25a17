"""Is it what was asked for? The states of a dump, before they are written.

Datasets are verified at any later time by `capture.dataset.verify`, folders of dumps by `verify_folder.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from capture.dumps import dump

SCHEMA = 1
THREADS = min(8, os.cpu_count() or 1)  # that verify a dataset or a folder of dumps
FAILURES_SHOWN = 20  # in progress.json, the last first
STRETCH = 64  # rows that are turned into float32 at a time
FLOATS = ("bfloat16", "float16", "float32", "float64")  # that states may be of; torch sums no smaller ones
FEW = 16  # leading values of a row by which nearly every row shows that it is not one value throughout

Progress = Callable[[int, int, int], None]  # samples done, of how many, bytes read


class VerificationError(Exception):
    """A sample that is not what was asked for; the sentence says in what."""


class NotFiniteError(VerificationError):
    """Its states hold NaN or infinity: the model computes them."""


class Failure(msgspec.Struct, frozen=True):
    """What failed: a sample, None where it is no single one's; and in which format, None where it is in none."""

    sample: int | None
    format: str | None
    reason: str


class Deviation(msgspec.Struct):
    """How far states that came back are off: the norm of a row's difference over the row's norm, over `rows` rows."""

    rows: int = 0
    largest: float = 0.0
    mean: float = 0.0

    def add(self, state: Any, back: Any) -> None:
        """Take in a state `[tokens, hidden]` and what came back of it."""
        for at in range(0, len(state), STRETCH):
            one, other = state[at : at + STRETCH].float(), back[at : at + STRETCH].float()
            errors = (other - one).norm(dim=1) / one.norm(dim=1)
            self.include(Deviation(len(errors), float(errors.max()), float(errors.mean())))

    def include(self, other: Deviation) -> None:
        """Take in what another one has seen."""
        rows = self.rows + other.rows
        if rows:
            self.mean = (self.mean * self.rows + other.mean * other.rows) / rows
        self.rows, self.largest = rows, max(self.largest, other.largest)


class Report(msgspec.Struct, frozen=True):
    """Outcome of verifying a dataset or a folder of dumps.

    Each sample counts once, `samples = verified + failed`; `total` is how many there are, more than `samples` where
    only some were looked at. `failures` may name what is no sample's, too. `bytes` were read. `deviations` goes by
    format and state, of formats that are not bit for bit; empty where there is no native to compare with.
    """

    schema: int
    samples: int
    verified: int
    failed: int
    failures: list[Failure]
    total: int
    bytes: int
    deviations: dict[str, dict[str, Deviation]] = {}


def check_states(states: dict[str, Any], names: Iterable[str], tokens: int, hidden: int, dtype: str) -> None:
    """Check that exactly the states `names` are there, each `[tokens, hidden]` of `dtype` and sound.

    Sound: every value finite, no row that is one value throughout. Raises VerificationError.
    """
    check_kind(tokens, hidden, dtype)
    names = list(names)
    if sorted(states) != sorted(names):
        raise VerificationError(f"it holds the states {', '.join(sorted(states))}, expected {', '.join(names)}")
    for name in names:
        state = states[name]
        if tuple(state.shape) != (tokens, hidden):
            raise VerificationError(f"{name} has shape {list(state.shape)}, expected [{tokens}, {hidden}]")
        if str(state.dtype) != f"torch.{dtype}":
            raise VerificationError(f"{name} is {state.dtype}, expected {dtype}")
        if (row := _first_row_not_finite(state)) is not None:
            raise NotFiniteError(f"{name} holds values that are not finite, first in row {row}")
        if (row := _first_flat_row(state)) is not None:
            raise VerificationError(f"{name} row {row} is {state[row, 0].item()} throughout")


def check_kind(tokens: int, hidden: int, dtype: str) -> None:
    """Check that states `[tokens, hidden]` of `dtype` hold something, and can be checked. Raises VerificationError."""
    if tokens < 1 or hidden < 1:
        raise VerificationError(f"its states are [{tokens}, {hidden}]: they hold nothing")
    if dtype not in FLOATS:
        raise VerificationError(f"its states are {dtype}; {', '.join(FLOATS)} can be verified, convert them to one")


def _first_row_not_finite(state: Any) -> int | None:
    """The first row of a state `[tokens, hidden]` that holds a NaN or an infinity, None where all are finite.

    A row with one of them has no finite sum, and summing is forty times faster than asking each value; only rows whose
    sum is not finite, be it by overflow, are looked at one by one.
    """
    for row in (~state.sum(dim=1).isfinite()).nonzero():
        if not state[row].isfinite().all():
            return int(row)
    return None


def _first_flat_row(state: Any) -> int | None:
    """The first row that is one value throughout, None where there is none; most rows show by their beginning."""
    for row in (state[:, :FEW] == state[:, :1]).all(dim=1).nonzero():
        if (state[row] == state[row, :1]).all():
            return int(row)
    return None


def read_dump(
    folder: Path,
    rid: str,
    ids: list[int],
    boundaries: list[int],
    hidden: int,
    dtype: str,
    buffer: dump.Buffer | None = None,
) -> dict[str, Any]:
    """The states of a dump, verified against the prompt that was sent; they lie in `buffer` until it is used again.

    Raises VerificationError or DumpError.
    """
    meta = dump.read_meta(folder)
    if meta.rid != rid:
        raise VerificationError(f"{folder.name} belongs to request {meta.rid}, expected {rid}")
    if meta.tokens != len(ids) or meta.ids != ids:
        raise VerificationError(
            f"its {meta.tokens} tokens are not the {len(ids)} that were sent{parting(meta.ids, ids)}"
        )
    if meta.boundaries != boundaries:
        raise VerificationError(f"it holds boundaries {meta.boundaries}, expected {boundaries}")
    states = dump.read_states(folder, meta, buffer)
    check_states(states, dump.state_names(len(boundaries)), len(ids), hidden, dtype)
    return states


def parting(found: list[int], expected: list[int]) -> str:
    """Where two lists begin to differ, in words; empty where one only goes on."""
    at = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), None)
    return "" if at is None else f": token {at} is {found[at]}, expected {expected[at]}"
