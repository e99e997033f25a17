"""What a training format is, and what all of them share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from capture.dataset.formats.vocabulary import save_as_numpy
from capture.dataset.ledger import Tokens
from capture.layers import Layers

GROUP = 2000  # samples in one folder, where a trainer does not mind


class Format:
    """One training format; `states` maps a state's name to a tensor `[tokens, hidden]`.

    `name` is its folder in a dataset too. `final` is the last state that it takes: "final", after the final norm, or
    "last", before it. `lossy` says that states do not come back bit for bit, `finishes` that there is more than the
    samples' files, `takes_vocabulary` that a drafter's vocabulary can be among it.
    """

    name: ClassVar[str]
    final: ClassVar[str]
    lossy: ClassVar[bool] = False
    finishes: ClassVar[bool] = False
    takes_vocabulary: ClassVar[bool] = False

    def path(self, number: int) -> str:
        """Path of a sample's file, relative to the dataset."""
        raise NotImplementedError

    def holds(self, layers: int) -> list[str]:
        """Names of the states that a file holds."""
        return [*(f"aux_{i}" for i in range(layers)), self.final]

    def bytes_per_token(self, hidden: int, layers: int, itemsize: int) -> int:
        """Bytes that one token takes on disk: K aux states and the last one, and two int64."""
        return itemsize * hidden * (layers + 1) + 16

    def refuse(self, dtype: str, layers: int) -> str | None:
        """Why states of that dtype and number of layers do not fit, None where they do."""
        return None if dtype == "bfloat16" else f"{self.name} takes bfloat16 states, the server computes in {dtype}"

    def encode(self, states: dict[str, Any], ids: Any, mask: Any) -> list[bytes | memoryview]:
        """The file of a sample, in the parts that follow one another; `ids` and `mask` are int64 `[tokens]`."""
        raise NotImplementedError

    def decode(self, data: Any, layers: int) -> tuple[Any, Any | None, dict[str, Any]]:
        """Ids, mask and states out of a file's bytes; None for a mask that is not kept there.

        The states may be views of `data`. Raises ValueError naming what is not as it should be.
        """
        raise NotImplementedError

    def rounded(self, states: dict[str, Any]) -> dict[str, Any]:
        """The states as they come back out of a file that was made of these; the same ones unless it is lossy."""
        return states

    def finish(self, folder: Path, rows: Callable[[], Iterator[Tokens]]) -> list[Path]:
        """Write what a trainer wants beside the samples' files, into the format's folder; returns those files.

        `rows` gives every sample of the dataset by number, 0 first and none left out, written or not.
        """
        return []

    def write_vocabulary(self, folder: Path, d2t: Any, t2d: Any) -> list[Path]:
        """Write a drafter's vocabulary (see `vocabulary.maps`) into the format's folder; returns those files.

        As speculators wants it for `--d2t-path` and `--t2d-path`, unless a format has a way of its own.
        """
        return save_as_numpy(folder, d2t, t2d)

    def hint(self, layers: Layers) -> str | None:
        """What to tell the trainer about these files, in one phrase."""
        return None


def grouped(number: int) -> str:
    """The folder of a sample where they lie GROUP to a folder."""
    first = number // GROUP * GROUP
    return f"rows_{first}-{first + GROUP}"


def load_record(data: Any) -> dict[str, Any]:
    """What `torch.save` made of a dict. Raises ValueError for damaged bytes and for anything else."""
    import io

    import torch

    try:
        record = torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:  # whatever damaged bytes lead torch's unpickler to
        raise ValueError(f"no sample of this format ({type(error).__name__})") from error
    if not isinstance(record, dict):
        raise ValueError(f"no sample of this format ({type(record).__name__})")
    return record


def save_record(record: dict[Any, Any]) -> list[bytes | memoryview]:
    """The file that `torch.save` makes of a dict; a tensor that is a view is saved without the rest."""
    import io

    import torch

    stream = io.BytesIO()
    torch.save({name: _alone(value) for name, value in record.items()}, stream)
    return [stream.getbuffer()]


def _alone(value: Any) -> Any:
    import torch

    if isinstance(value, list):
        return [_alone(one) for one in value]
    if isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() != value.nbytes:
        return value.clone(memory_format=torch.contiguous_format)
    return value


def require_tensors(record: dict[str, Any], dims: dict[str, int]) -> list[Any]:
    """The tensors of a record by name, each with so many dimensions. Raises ValueError."""
    import torch

    for name, dim in dims.items():
        if not isinstance(record.get(name), torch.Tensor):
            raise ValueError(f"no sample of this format: it has no tensor {name!r}")
        if record[name].ndim != dim:
            raise ValueError(f"{name} has shape {list(record[name].shape)}, expected {dim} dimensions")
    return [record[name] for name in dims]


def split(aux: Any, layers: int) -> dict[str, Any]:
    """`[tokens, layers * hidden]` as one state a layer. Raises ValueError where it cannot be divided so."""
    if aux.shape[-1] % layers:
        raise ValueError(f"aux states have width {aux.shape[-1]}, which is no multiple of {layers} layers")
    return {f"aux_{i}": part for i, part in enumerate(aux.chunk(layers, dim=-1))}


def joined(states: dict[str, Any]) -> Any:
    """The aux states, ascending, side by side: `[tokens, layers * hidden]`."""
    import torch

    return torch.cat([states[f"aux_{i}"] for i in range(count(states))], dim=-1)


def count(states: dict[str, Any]) -> int:
    """How many aux states there are."""
    return sum(name.startswith("aux_") for name in states)
