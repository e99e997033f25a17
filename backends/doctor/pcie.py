"""The way to the GPUs: links as wide and as fast as they could be, without errors, and GPUs that reach each other."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from backends.doctor.report import Asked, Check, Place, Question, amount, judge, numbered, unknown
from backends.gpus import Gpu, examine_gpus

REPLAY_SECONDS = 1.5  # between two looks at the counters
NVIDIA = "0x10de"
DISPLAY, BRIDGE = "0x03", "0x0604"  # classes of PCI devices, their beginning
CAPABILITIES_AT = 0x100  # where PCIe's extended capabilities begin in a device's configuration
ACS = 0x000D
REDIRECTS = {0x4: "ReqRedir+", 0x8: "CmpltRedir+"}


def link_width(gpus: list[Gpu]) -> Check:
    """Lanes that are missing halve what passes, also at idle."""
    known = [(gpu.index, gpu.pcie_width, gpu.pcie_max_width) for gpu in gpus]
    told = [(index, width, full) for index, width, full in known if width and full]
    if not told:
        return unknown("pcie.width", "NVML does not tell the width of the links")
    narrow = [f"GPU {index} x{width} of x{full}" for index, width, full in told if width < full]
    few = [f"GPU {index} x{width}" for index, width, full in told if width == full < 16]
    return judge(
        "pcie.width",
        "; ".join(narrow + few) or f"x{told[0][1]} on all {len(told)}",
        "reseat the card or the riser, and look at the slot's lanes in the BIOS",
        fail=bool(narrow),
        warn=bool(few),
        least=min(width for _, width, _ in told),
    )


def link_generation(gpus: list[Gpu]) -> Check:
    """Only under load does it say something: an idle link is slowed down by design."""
    told = [gpu for gpu in gpus if gpu.pcie_generation and gpu.pcie_max_generation]
    if not told:
        return unknown("pcie.generation", "NVML does not tell the generation of the links")
    loaded = [gpu for gpu in told if gpu.utilisation_percent]
    slow = [gpu for gpu in loaded if (gpu.pcie_generation or 0) < (gpu.pcie_max_generation or 0)]
    generations = sorted({gpu.pcie_generation or 0 for gpu in told})
    most = max(gpu.pcie_max_generation or 0 for gpu in told)
    now = f"generation {', '.join(map(str, generations))} of {most}"
    if not loaded and generations[0] < most:
        why = f"{now} at idle, which is by design; under load it can be judged"
        return unknown("pcie.generation", why, "ask again while the GPUs work, or with --active")
    return judge(
        "pcie.generation",
        f"{now} under load" if loaded else now,
        f"look at the slot of {numbered([gpu.index for gpu in slow])}, its riser and the BIOS",
        warn=bool(slow),
        least=generations[0],
    )


def bar1(gpus: Iterable[tuple[Gpu, dict[str, Any]]]) -> Check:
    """A window smaller than the memory cripples transfers between GPUs."""
    pairs = [(gpu.index, more["bar1_bytes"], gpu.memory_total_bytes) for gpu, more in gpus]
    known = [(index, window, total) for index, window, total in pairs if window and total]
    if not known:
        return unknown("pcie.bar1", "NVML does not tell the size of BAR1")
    small = [index for index, window, total in known if window < total]
    least = min(window for _, window, _ in known)
    return judge(
        "pcie.bar1",
        f"BAR1 is {amount(least)}, {f'less than the memory of {numbered(small)}' if small else 'all of the memory'}",
        "turn on Resizable BAR and Above 4G Decoding in the BIOS",
        warn=bool(small),
        least_bytes=least,
    )


def peers(status: dict[tuple[int, int], int]) -> Check:
    """Says the driver that they reach each other? That it works only an all-reduce shows."""
    if not status:
        return unknown("pcie.p2p", "NVML does not tell which GPUs reach each other", "--active tries an all-reduce")
    apart = [f"{one}-{other}" for (one, other), value in status.items() if value]
    seen = f"by the driver's word {len(status) - len(apart)} of {len(status)} pairs reach each other"
    return judge(
        "pcie.p2p",
        f"{seen}, not {', '.join(apart[:8])}" if apart else f"{seen}; only --active shows that it works",
        "expect NCCL to go through host memory; NCCL_P2P_DISABLE=1 avoids a hang",
        warn=bool(apart),
        pairs=len(status),
        apart=len(apart),
    )


def replays(place: Place, asked: Asked) -> list[Check]:
    """Do packets have to be sent again? Nothing where no GPU tells."""
    before = _replays()
    if not before:
        return []
    time.sleep(REPLAY_SECONDS)
    return [judge_replays(before, _replays())]


def judge_replays(before: dict[int, int], after: dict[int, int]) -> Check:
    """Counters by GPU, at two moments."""
    rising = [index for index, count in after.items() if count > before.get(index, count)]
    total = sum(after.values())
    now = f", and now they rise on {numbered(rising)}" if rising else f", none within {REPLAY_SECONDS:g} s"
    return judge(
        "pcie.replays",
        f"{total} packets were sent again since the driver was loaded{now}",
        "reseat the card or its riser; a link with errors gets slower, and may be lost",
        warn=bool(rising),
        replays=total,
    )


def _replays() -> dict[int, int]:
    gpus = examine_gpus({}).sample.gpus
    return {gpu.index: gpu.pcie_replays for gpu in gpus if gpu.pcie_replays is not None}


def iommu(place: Place, asked: Asked) -> list[Check]:
    """An IOMMU that translates makes GPUs of some hosts hang when they talk; nothing with fewer than two."""
    if len(list(_gpu_devices(place))) < 2:
        return []
    groups = place.path("/sys/kernel/iommu_groups")
    words = (place.text("/proc/cmdline") or "").split()
    if not groups.is_dir() or not words:
        return [unknown("pcie.iommu", "whether an IOMMU translates cannot be seen here")]
    count = len(list(groups.iterdir()))
    through = any(word.endswith(("iommu=pt", "iommu=off")) for word in words)
    return [
        judge(
            "pcie.iommu",
            "it is off" if not count else "it passes through" if through else f"it translates, in {count} groups",
            "boot with iommu=pt, if --active shows an all-reduce that hangs or is slow (root)",
            warn=count > 0 and not through,
            groups=count,
        )
    ]


def acs(place: Place, asked: Asked) -> list[Check]:
    """Bridges above the GPUs that send their talk up to the root and back; nothing with fewer than two GPUs."""
    gpus = list(_gpu_devices(place))
    if len(gpus) < 2:
        return []
    above = {parent for gpu in gpus for parent in gpu.resolve().parents if _says(parent / "class", BRIDGE)}
    if not above:
        return [unknown("pcie.acs", "no bridge above the GPUs is visible here (a virtual machine)")]
    try:
        redirecting = {bridge.name: found for bridge in above if (found := _redirects(bridge / "config"))}
    except OSError as error:
        why = f"the bridges' settings cannot be read ({error.strerror})"
        return [unknown("pcie.acs", why, "`lspci -vvv | grep ACSCtl` on the host (root)")]
    shown = ", ".join(f"{name} {' '.join(flags)}" for name, flags in sorted(redirecting.items())[:4])
    return [
        judge(
            "pcie.acs",
            f"{len(redirecting)} of {len(above)} bridges above the GPUs redirect: {shown}"
            if redirecting
            else f"none of the {len(above)} bridges above the GPUs redirects",
            "turn ACS off in the BIOS or with setpci (root), if --active shows a hang or low bandwidth",
            warn=bool(redirecting),
            bridges=len(above),
            redirecting=len(redirecting),
        )
    ]


def _gpu_devices(place: Place) -> Iterator[Path]:
    folder = place.path("/sys/bus/pci/devices")
    for device in sorted(folder.iterdir()) if folder.is_dir() else []:
        if _says(device / "vendor", NVIDIA) and _says(device / "class", DISPLAY):
            yield device


def _says(path: Path, beginning: str) -> bool:
    try:
        return path.read_text().startswith(beginning)
    except OSError:
        return False


def _redirects(config: Path) -> list[str]:
    """Which redirections a bridge's ACS has on. Raises OSError where only root may read that far."""
    data = config.read_bytes()
    if len(data) < CAPABILITIES_AT + 4:
        raise PermissionError(1, "only root sees all of them")
    at = CAPABILITIES_AT
    while CAPABILITIES_AT <= at <= len(data) - 8:
        (head,) = struct.unpack_from("<I", data, at)
        if head & 0xFFFF == ACS:
            (control,) = struct.unpack_from("<H", data, at + 6)
            return [name for bit, name in REDIRECTS.items() if control & bit]
        at = head >> 20
    return []


QUESTIONS: dict[str, Question] = {"pcie.replays": replays, "pcie.iommu": iommu, "pcie.acs": acs}
