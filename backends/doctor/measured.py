"""What the figures of `capture.measure` mean: is it fast enough to draw from?"""

from __future__ import annotations

from backends.doctor.report import Check, amount, judge, unknown
from capture.measure import FIRST_SIZE, SIZES, Copied, Measured, Reduced, Written

GB = 10**9
MB = 10**6
STATE_SPEED = 50 * MB  # logs and what jobs say
OUTPUT_SPEED = 645 * MB  # 1.5 times what Kimi-K2.5 gives at 7,500 tok/s
STATES_SPEED = 2.5 * GB  # what the fastest hosts give: 40,000 tok/s of it
LINK_SPEED = 10 * GB  # a link of generation 4 with 16 lanes gives 25, one with 8 gives 12
NO_BUS, LOW_BUS = 10 * GB, 30 * GB  # eight GPUs on PCIe 5 give 37 to 41 when tuned


def judge_measured(made: Measured) -> list[Check]:
    """A check for each figure."""
    state, *output = made.disks
    checks = [disk("disks.state_speed", state, STATE_SPEED)]
    checks += [disk("disks.output_speed", one, OUTPUT_SPEED) for one in output]
    checks += [copies(made.copies, made.copy_error, made.gpus), all_reduce(made.all_reduce, made.gpus, made.shape)]
    return checks


def disk(id: str, made: Written, wanted: float) -> Check:
    """How fast a folder takes what is written."""
    if made.error or not made.seconds:
        remedy = "choose a folder that we may write to, with room"
        return judge(id, made.error or f"{made.path} has no room to try", remedy, fail=True)
    speed = made.bytes / made.seconds
    return judge(
        id,
        f"{made.path}: {amount(speed)}/s over {amount(made.bytes)}, synced",
        f"choose a faster disk: {amount(wanted)}/s keeps up with a fast server",
        warn=speed < wanted,
        bytes_per_second=speed,
    )


def copies(made: list[Copied], error: str | None, gpus: int) -> Check:
    """How fast main memory and GPUs reach each other, one GPU at a time."""
    if not gpus:
        return unknown("pcie.speed", "torch sees no GPU")
    if error or not made:
        remedy = "look at the kernel's log (`dmesg`), and whether another process holds that GPU"
        return judge("pcie.speed", error or "no GPU was reached", remedy, fail=True)
    slowest = min(made, key=lambda one: min(one.to_device, one.from_device))
    speed = min(slowest.to_device, slowest.from_device)
    return judge(
        "pcie.speed",
        f"the slowest of {len(made)}, GPU {slowest.gpu}: {amount(slowest.to_device)}/s to it, "
        f"{amount(slowest.from_device)}/s from it",
        "look at width and generation of its link: the states come out of the GPU this way",
        fail=speed < STATES_SPEED,
        warn=speed < LINK_SPEED,
        to_device_bytes_per_second=slowest.to_device,
        from_device_bytes_per_second=slowest.from_device,
    )


def all_reduce(made: Reduced | None, gpus: int, shape: tuple[int, int] | None) -> Check:
    """Whether the GPUs can talk to each other, and how fast."""
    if made is None:
        return unknown("network.all_reduce", "fewer than two GPUs" if gpus < 2 else "it was not tried")
    if made.error:
        remedy = (
            "NCCL_P2P_DISABLE=1 avoids most hangs; else turn ACS off or boot with iommu=pt (root)"
            if made.first_seconds is None
            else "NCCL_DEBUG=INFO says what it does; look for a GPU or a link that was lost"
        )
        return judge("network.all_reduce", f"{made.ranks} GPUs: {made.error}", remedy, fail=True)
    slowest = min(made.bus[size] for size in SIZES)
    told = ", ".join(f"{amount(made.bus[size])}/s at {size >> 20} MiB" for size in SIZES)
    first = f"the first one, of {FIRST_SIZE >> 20} MiB, took {made.first_seconds:.1f} s"
    seen = f"{made.ranks} GPUs: bus bandwidth {told}; {first}"
    if shape:
        seen += f"; at most {ceiling(slowest, made.ranks, *shape):,.0f} tok/s of prefill"
    return judge(
        "network.all_reduce",
        seen,
        "see which path NCCL takes (NCCL_DEBUG=INFO); try NCCL_P2P_LEVEL=SYS and NCCL_MIN_NCHANNELS=8",
        fail=slowest < NO_BUS,
        warn=slowest < LOW_BUS,
        bus_bytes_per_second=slowest,
    )


def ceiling(bus: float, ranks: int, layers: int, hidden: int) -> float:
    """Tokens a second that all-reduces alone let through: two of 2 * hidden bytes a token in every layer."""
    return bus / (layers * 2 * 2 * hidden * 2 * (ranks - 1) / ranks)
