"""The GPUs: are they all there, free, healthy, and as fast as they could be? And does the driver suit torch?"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from typing import Any

from backends.doctor.pcie import bar1, link_generation, link_width, peers
from backends.doctor.report import CONTROL, Asked, Check, Place, Question, amount, judge, numbered, unknown
from backends.doctor.software import torch_cuda
from backends.gpus import Examined, Gpu, Reading, examine_gpus
from backends.sglang import parse_version

USED_BYTES = 500 << 20  # a driver keeps less than that for itself
FRACTION = 0.85  # of a GPU's memory that SGLang takes where the profile does not say
HOT_C = 88
LEAST_POWER = 0.8  # of the default limit: prefill loses about as much as is taken away
SLOWED = frozenset({"hw_slowdown", "hw_thermal", "hw_power_brake"})
WARM = "sw_thermal"
CAP = "sw_power_cap"  # as under any full load; a limit that was lowered is seen by `power_limit`
EXCLUSIVE = 3  # NVML's compute mode: one process a GPU
RECOVERY_ACTION = 230  # an NVML field
RECOVERIES = {1: "reset the GPU", 2: "reboot the host", 3: "drain its P2P users", 4: "drain its users and reset it"}
BAD_XIDS = frozenset({48, 63, 64, 79, 94, 95})  # memory, and a GPU that fell off the bus
SM100_ONLY = frozenset({"trtllm_mla", "flashinfer_trtllm"})
BACKENDS = ("attention-backend", "prefill-attention-backend", "moe-runner-backend")
EDITIONS = re.compile(r"\s*(Server|Workstation|Max-Q)\b.*")

MORE = {
    "persistence": Reading(("nvmlDeviceGetPersistenceMode",), of=bool),
    "compute_mode": Reading(("nvmlDeviceGetComputeMode",)),
    "mig_pending": Reading(("nvmlDeviceGetMigMode",), of=lambda modes: modes[1] == 1),
    "default_power_watts": Reading(("nvmlDeviceGetPowerManagementDefaultLimit",), of=lambda power: power / 1000),
    "bar1_bytes": Reading(("nvmlDeviceGetBAR1MemoryInfo",), of=lambda memory: memory.bar1Total),
    "capability": Reading(("nvmlDeviceGetCudaComputeCapability",), of=lambda pair: f"{pair[0]}.{pair[1]}"),
    "recovery": Reading(
        ("nvmlDeviceGetFieldValues",),
        ([RECOVERY_ACTION],),
        lambda values: values[0].value.uiVal if values[0].nvmlReturn == 0 else None,
    ),
}


def look(place: Place, asked: Asked) -> list[Check]:
    """Everything that one reading of NVML tells."""
    live = place.runs.live("server")
    ours = {process.pid for run in live for process in run.processes()}
    return judge_gpus(examine_gpus(MORE, ours), asked)


def judge_gpus(seen: Examined, asked: Asked) -> list[Check]:
    """The checks of what was read."""
    sample, more = seen.sample, seen.more
    checks = [present(seen), fits_profile(seen, asked), cuda_suits_torch(sample.cuda, torch_cuda())]
    usable = [(gpu, extra) for gpu, extra in zip(sample.gpus, more, strict=True) if not gpu.error]
    if usable:
        gpus = [gpu for gpu, _ in usable]
        checks += [
            kinds(gpus),
            memory(gpus, float(asked.args.get("mem-fraction-static", FRACTION))),
            modes(usable),
            persistence(usable),
            memory_health(usable),
            heat(gpus),
            throttling(gpus),
            power_limit(usable),
            link_width(gpus),
            link_generation(gpus),
            bar1(usable),
        ]
    if len(sample.gpus) > 1:
        checks.append(peers(seen.peers))
    return [check for check in checks if check]


def present(seen: Examined) -> Check:
    """Are there GPUs, and does each answer?"""
    sample = seen.sample
    if sample.state in ("no_gpu", "no_nvml"):
        return unknown("gpu.present", f"no GPU is seen here ({sample.why})", "only embedded profiles run without one")
    lost = [f"GPU {gpu.index}: {gpu.error}" for gpu in sample.gpus if gpu.error]
    names = [gpu.name or "?" for gpu in sample.gpus]
    kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    if sample.state == "error" or lost:
        why = "; ".join(lost) or str(sample.why)
        return judge("gpu.present", why, "reset the GPU (`nvidia-smi -r`), or reboot the host", fail=True)
    return judge("gpu.present", f"{kinds}, driver {sample.driver}", "", gpus=len(names))


def fits_profile(seen: Examined, asked: Asked) -> Check | None:
    """Do the GPUs suit the profile? Only asked where one is meant that wants GPUs."""
    if asked.profile is None or asked.embedded:
        return None
    args, count = asked.args, len([gpu for gpu in seen.sample.gpus if not gpu.error])
    wanted = int(args.get("tp-size", 1)) * int(args.get("pp-size", 1)) * int(args.get("dp-size", 1))
    if count < wanted:
        return judge(
            "gpu.profile",
            f"{asked.profile} wants {wanted} GPUs, {count} are usable",
            "choose another profile, or launch with --set tp-size=N",
            fail=True,
            wanted=wanted,
            usable=count,
        )
    foreign = sorted(SM100_ONLY & {str(args.get(name)) for name in BACKENDS})
    capabilities = {extra["capability"] for extra in seen.more if extra["capability"]}
    if foreign and any(not capability.startswith("10.") for capability in capabilities):
        return judge(
            "gpu.profile",
            f"{asked.profile} sets {', '.join(foreign)}, which needs compute capability 10.x; here is "
            f"{', '.join(sorted(capabilities))}",
            "choose a profile for these GPUs",
            fail=True,
        )
    return judge("gpu.profile", f"{count} GPUs, {asked.profile} wants {wanted}", "", wanted=wanted, usable=count)


def cuda_suits_torch(driver: str | None, torch: str | None) -> Check | None:
    """Can this driver run what torch was built with? None without a driver.

    Within a major version of CUDA an older driver runs newer code, but not all of it.
    """
    if driver is None:
        return None
    if torch is None:
        return unknown("driver.cuda", f"the driver takes CUDA {driver}; which one torch wants is not known")
    has, wants = parse_version(driver), parse_version(torch)
    return judge(
        "driver.cuda",
        f"the driver takes CUDA {driver}, torch was built for {torch}",
        f"update the driver to one for CUDA {torch}, or use a torch built for {driver}",
        fail=has[0] < wants[0],
        warn=has < wants,
    )


def kinds(gpus: list[Gpu]) -> Check:
    """Are they of one kind? The slowest or smallest sets the pace."""
    names = {gpu.name or "?" for gpu in gpus}
    models = {EDITIONS.sub("", name) for name in names}
    return judge(
        "gpu.kinds",
        f"of one kind: {', '.join(names)}" if len(names) == 1 else f"of {len(names)} kinds: {', '.join(sorted(names))}",
        "choose those of one kind with CUDA_VISIBLE_DEVICES; the weakest sets the pace",
        fail=len(models) > 1,
        warn=len(names) > 1,
        kinds=len(names),
    )


def memory(gpus: list[Gpu], fraction: float) -> Check:
    """Is there room for a server, and who takes it?"""
    known = [(gpu, gpu.memory_used_bytes, gpu.memory_total_bytes) for gpu in gpus]
    sizes = [(gpu, used, total) for gpu, used, total in known if used is not None and total is not None]
    if not sizes:
        return unknown("gpu.memory", "NVML does not tell how much memory is used")
    holders = [process for gpu in gpus for process in gpu.processes or []]
    least = min(total - used for _, used, total in sizes)
    most = max(used for _, used, _ in sizes)
    if any(process.ours for process in holders):
        return judge("gpu.memory", f"a server of ours holds up to {amount(most)} of a GPU", "", most_used_bytes=most)
    tight = [gpu.index for gpu, used, total in sizes if total - used < fraction * total]
    taken = [gpu.index for gpu, used, _ in sizes if used > USED_BYTES]
    who = "; ".join(dict.fromkeys(_holder(gpu) for gpu in gpus if gpu.index in taken))
    seen = f"at least {amount(least)} free on each of {len(sizes)}"
    return judge(
        "gpu.memory",
        f"{seen}; {amount(most)} used on {numbered(taken)}: {who}" if taken else seen,
        f"end what holds it, or lower mem-fraction-static ({fraction:g}): SGLang refuses to start with less",
        fail=bool(tight),
        warn=bool(taken),
        least_free_bytes=least,
        most_used_bytes=most,
    )


def _holder(gpu: Gpu) -> str:
    if not gpu.processes:
        return "no process is visible (another container, or a process that was lost)"
    known = [f"{one.name} (process {one.pid} of {one.owner})" for one in gpu.processes if one.visible]
    hidden = [str(one.pid) for one in gpu.processes if not one.visible]
    return ", ".join(known + ([f"process {', '.join(hidden)} of the host, not visible here"] if hidden else []))


def modes(gpus: Iterable[tuple[Gpu, dict[str, Any]]]) -> Check:
    """MIG and exclusive mode hide a GPU, or a part of it, from a server."""
    mig = [gpu.index for gpu, more in gpus if gpu.mig or more["mig_pending"]]
    taken = [gpu.index for gpu, more in gpus if more["compute_mode"] == EXCLUSIVE and gpu.processes]
    if mig:
        return judge(
            "gpu.modes",
            f"MIG is on or pending on {numbered(mig)}",
            "turn MIG off (`nvidia-smi -mig 0`, root)",
            fail=True,
        )
    return judge(
        "gpu.modes",
        f"{numbered(taken)} let one process in, and have one" if taken else "no MIG, and no GPU that is taken whole",
        "end the process that has it, or `nvidia-smi -c DEFAULT` (root)",
        fail=bool(taken),
    )


def persistence(gpus: Iterable[tuple[Gpu, dict[str, Any]]]) -> Check:
    """Without it the driver loads and unloads around every process."""
    known = [(gpu.index, more["persistence"]) for gpu, more in gpus if more["persistence"] is not None]
    if not known:
        return unknown("gpu.persistence", "NVML does not tell whether persistence mode is on")
    off = [index for index, on in known if not on]
    return judge(
        "gpu.persistence",
        f"persistence mode is off on {numbered(off)}" if off else "persistence mode is on",
        "`nvidia-smi -pm 1`, or nvidia-persistenced (root)",
        warn=bool(off),
    )


def memory_health(gpus: Iterable[tuple[Gpu, dict[str, Any]]]) -> Check:
    """Errors of a GPU's memory, and what the driver says has to be done."""
    bad, pending, untold = [], [], True
    for gpu, more in gpus:
        told = (gpu.ecc_uncorrected, gpu.remapped_failed, gpu.remapped_pending, more["recovery"])
        untold = untold and all(one is None for one in told)
        if gpu.ecc_uncorrected:
            bad.append(f"GPU {gpu.index}: {gpu.ecc_uncorrected} uncorrected memory errors")
        if gpu.remapped_failed:
            bad.append(f"GPU {gpu.index}: a bad row could not be replaced")
        if more["recovery"]:
            bad.append(f"GPU {gpu.index}: the driver says: {RECOVERIES.get(more['recovery'], more['recovery'])}")
        if gpu.remapped_pending:
            pending.append(f"GPU {gpu.index}: a bad row will be replaced at the next reset")
    if untold:
        return unknown("gpu.health", "NVML tells nothing of memory errors here")
    return judge(
        "gpu.health",
        "; ".join(bad + pending) or "no uncorrected memory error, no row to be replaced",
        "take that GPU out of use" if bad else "reset the GPU while nothing uses it, and watch whether it comes back",
        fail=bool(bad),
        warn=bool(pending),
    )


def heat(gpus: list[Gpu]) -> Check:
    """Too hot for its full clock?"""
    known = [(gpu.temperature_c, gpu.index) for gpu in gpus if gpu.temperature_c is not None]
    if not known:
        return unknown("gpu.heat", "NVML does not tell temperatures")
    hottest, index = max(known)
    return judge(
        "gpu.heat",
        f"the hottest, GPU {index}, has {hottest} °C",
        "look at fans, air and neighbours; above this it slows down",
        fail=hottest > HOT_C,
        hottest_c=hottest,
    )


def throttling(gpus: list[Gpu]) -> Check:
    """Is one slowed down now?"""
    known = [gpu for gpu in gpus if gpu.throttle is not None]
    if not known:
        return unknown("gpu.throttling", "NVML does not tell why clocks are low")
    slowed = [gpu.index for gpu in known if SLOWED & set(gpu.throttle or [])]
    warm = [gpu.index for gpu in known if WARM in (gpu.throttle or [])]
    capped = [gpu.index for gpu in known if CAP in (gpu.throttle or [])]
    reasons = sorted({reason for gpu in known for reason in gpu.throttle or [] if reason in {*SLOWED, WARM}})
    seen = f"{numbered(sorted({*slowed, *warm}))}: {', '.join(reasons)}" if reasons else "none is slowed down now"
    if capped:
        seen += f"; {numbered(capped)} at the power limit, as under full load"
    return judge(
        "gpu.throttling",
        seen,
        "look at cooling, at the neighbours' heat, and at power cables (brake)",
        fail=bool(slowed),
        warn=bool(warm),
    )


def power_limit(gpus: Iterable[tuple[Gpu, dict[str, Any]]]) -> Check:
    """Has somebody lowered the limit?"""
    pairs = [(gpu.index, gpu.power_limit_watts, more["default_power_watts"]) for gpu, more in gpus]
    known = [(index, limit, default) for index, limit, default in pairs if limit and default]
    if not known:
        return unknown("gpu.power", "NVML does not tell power limits")
    low = [index for index, limit, default in known if limit < LEAST_POWER * default]
    _, limit, default = min(known, key=lambda one: one[1] / one[2])
    return judge(
        "gpu.power",
        f"the limit is {limit:.0f} W of {default:.0f} W" + (f" on {numbered(low)}" if low else ""),
        f"`nvidia-smi -pl {default:.0f}` (root), unless it is low on purpose: prefill gets slower by about as much",
        warn=bool(low),
        limit_watts=limit,
        default_watts=default,
    )


def xids(place: Place, asked: Asked) -> list[Check]:
    """Errors that the kernel wrote down since it booted; nothing where no driver is."""
    return [judge_xids(place)] if place.path(CONTROL).exists() else []


def judge_xids(place: Place) -> Check:
    """See `xids`."""
    try:
        found = [int(code) for code in re.findall(r"NVRM: Xid \([^)]*\): (\d+)", _kernel_log(place))]
    except OSError as error:
        why = f"the kernel's log cannot be read here ({error.strerror})"
        return unknown("gpu.xid", why, "`dmesg | grep Xid` on the host (root)")
    counts = {code: found.count(code) for code in sorted(set(found))}
    return judge(
        "gpu.xid",
        ", ".join(f"XID {code}: {count} times since boot" for code, count in counts.items()) or "no XID since boot",
        "look it up in NVIDIA's XID catalogue; 48, 63, 64, 94 and 95 are memory, 79 a GPU that fell off the bus",
        fail=bool(BAD_XIDS & counts.keys()),
        warn=bool(counts),
        xids=len(found),
    )


def _kernel_log(place: Place) -> str:
    """What /dev/kmsg holds now. Raises OSError where it is not for us."""
    handle = os.open(place.path("/dev/kmsg"), os.O_RDONLY | os.O_NONBLOCK)
    lines = []
    try:
        while True:
            with contextlib.suppress(BrokenPipeError):  # that record was overwritten meanwhile
                data = os.read(handle, 1 << 16)  # a record a read
                if not data:
                    break
                lines.append(data.decode(errors="replace"))
    except BlockingIOError:
        pass  # that was all
    finally:
        os.close(handle)
    return "".join(lines)


QUESTIONS: dict[str, Question] = {"gpu.nvml": look, "gpu.xid": xids}
