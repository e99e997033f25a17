"""What a profile meets on a host, its GPUs and the model to be served; and what of that a profile is made for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from backends.gpus import Reading, examine_gpus
from capture.model_config import known_of, read_model_config

GIB = 1 << 30
LINKS = 18  # of NVLink, that a GPU has at most
MORE = {
    "capability": Reading(("nvmlDeviceGetCudaComputeCapability",), of=lambda pair: f"{pair[0]}.{pair[1]}"),
    # A card on PCIe alone does not know the question.
    **{f"nvlink_{link}": Reading(("nvmlDeviceGetNvLinkState",), (link,), bool) for link in range(LINKS)},
}


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs of a host, and what a model's config.json says. None stands for not known, or not asked.

    `cc` is the compute capability of all GPUs ("12.0"; None where they differ), `vram_gib` the memory of the smallest,
    `nvlink` whether every one of them has a link. `quantization` is the checkpoint's method, "none" without one.
    """

    gpus: int = 0
    gpu_names: list[str] = []
    cc: str | None = None
    vram_gib: float | None = None
    nvlink: bool | None = None
    architecture: str | None = None
    layers: int | None = None
    hidden: int | None = None
    mla: bool | None = None
    moe: bool | None = None
    quantization: str | None = None


class Match(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`match` of a profile: what it is made for. `gpus` is how many it takes, `vram_gib_min` the memory of each."""

    cc: str | None = None
    gpus: int | None = None
    vram_gib_min: float | None = None
    nvlink: bool | None = None
    architectures: list[str] | None = None

    def differs(self, found: Situation) -> list[str]:
        """In what a host and a model differ from that, a sentence each; what is not known does not differ."""
        wrong = []
        if self.gpus is not None and found.gpus < self.gpus:
            here = f"is {found.gpus}" if found.gpus == 1 else f"are {found.gpus or 'none'}"
            wrong.append(f"it is for {self.gpus} GPUs, and here {here}")
        if found.gpus:
            if self.cc is not None and found.cc != self.cc:
                wrong.append(f"it is for compute capability {self.cc}, and here is {found.cc or 'more than one'}")
            if self.vram_gib_min is not None and found.vram_gib is not None and found.vram_gib < self.vram_gib_min:
                wrong.append(f"it is for {self.vram_gib_min:g} GiB a GPU, and here are {found.vram_gib:.0f}")
            if self.nvlink is not None and found.nvlink is not None and found.nvlink != self.nvlink:
                wrong.append(f"it is for GPUs {'with' if self.nvlink else 'without'} NVLink, and these are not")
        if self.architectures is not None and found.architecture not in (None, *self.architectures):
            wrong.append(f"it is for {' or '.join(self.architectures)}, and the model is {found.architecture}")
        return wrong


def read_situation(model: Path | None = None) -> Situation:
    """This host's GPUs, and what the config.json in `model` says where there is one."""
    seen = examine_gpus(MORE)
    usable = [(gpu, more) for gpu, more in zip(seen.sample.gpus, seen.more, strict=True) if not gpu.error]
    known = _read_model(model) if model else {}
    if not usable:
        return msgspec.convert(known, Situation)
    capabilities = {more["capability"] for _, more in usable}
    sizes = [gpu.memory_total_bytes for gpu, _ in usable]
    return Situation(
        gpus=len(usable),
        gpu_names=[gpu.name or "?" for gpu, _ in usable],
        cc=capabilities.pop() if len(capabilities) == 1 else None,
        vram_gib=min(size for size in sizes if size) / GIB if all(sizes) else None,
        nvlink=all(any(more[f"nvlink_{link}"] for link in range(LINKS)) for _, more in usable),
        **known,
    )


def read_layers(model: Path) -> int | None:
    """How many layers the config.json in `model` says that its language model has; None where it cannot be told."""
    return known_of(model).layers


def _read_model(folder: Path) -> dict[str, Any]:
    try:
        config = read_model_config(folder)
    except (OSError, msgspec.MsgspecError):
        return {}
    return {
        "architecture": config.architecture,
        "layers": config.layers,
        "hidden": config.hidden,
        "mla": config.mla,
        "moe": config.experts > 0,
        "quantization": config.quantization or "none",
    }
