"""What runs: SGLang, torch, NCCL and py-spy as installed in this Python, and the model's files. Nothing is imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
from pathlib import Path

import msgspec

from backends.doctor.report import CONTROL, Asked, Check, Place, Question, amount, judge
from backends.launch import EMBEDDED
from backends.sglang import OLDEST, matches
from capture.gate import TESTED

PIN = re.compile(r"([\w.-]+)(?:\[[^\]]*\])?\s*==\s*([\w.]+)\s*(?:;(.*))?")
WEIGHTY = (
    "torch",
    "transformers",
    "flashinfer-python",
    "sglang-kernel",
    "sgl-kernel",
    "xgrammar",
)  # what breaks starts
KERNELS = ("sglang-kernel", "sgl-kernel")  # by SGLang's version; it runs on no GPU without
SHOWN = 6
SYS_PTRACE = 1 << 19  # a capability
WORDS = {"0": "processes of the same user", "1": "a process's own children", "2": "root", "3": "nobody"}


def sglang(place: Place, asked: Asked) -> Check:
    """Is there an SGLang, of a version that the tap was tried with?"""
    version = _version("sglang")
    oldest, newest = (".".join(map(str, numbers)) for numbers in TESTED)
    if version is None:
        why = f"{sys.executable} has no sglang"
        return judge("sglang.version", why, "say SGLang's own Python with --python", fail=True)
    return judge(
        "sglang.version",
        f"SGLang {version}, torch {_version('torch') or 'missing'}, Python {platform.python_version()} in "
        f"{sys.executable}; tried are SGLang {oldest} to {newest}",
        f"use one in that range; before {OLDEST} there are no plugins, which the tap needs",
        fail=matches(version, f"<{OLDEST}"),
        warn=not matches(version, f">={oldest},<={newest}"),
    )


def pins(place: Place, asked: Asked) -> list[Check]:
    """Is what SGLang asks for by an exact version there in that version? Nothing where there is no SGLang."""
    if _version("sglang") is None:
        return []
    wanted = _pinned("sglang")
    off = [f"{name} {_version(name) or 'missing'} (wants {want})" for name, want in wanted.items() if _off(name, want)]
    if off and _for_cpu(place, asked):
        seen = f"a CPU engine: {len(off)} of {len(wanted)} pinned packages differ, as SGLang wants them for GPUs"
        return [judge("sglang.packages", seen, "", pinned=len(wanted), differing=len(off))]
    shown = ", ".join(sorted(off, key=lambda text: not text.startswith(WEIGHTY))[:SHOWN])
    return [
        judge(
            "sglang.packages",
            f"{len(off)} of {len(wanted)} pinned packages differ: {shown}"
            if off
            else f"all {len(wanted)} packages that SGLang pins are as it wants them",
            "install what SGLang wants (`pip install sglang==…` anew), unless it is known to work",
            warn=bool(off),
            pinned=len(wanted),
            differing=len(off),
        )
    ]


def _for_cpu(place: Place, asked: Asked) -> bool:
    """Whether SGLang runs on the CPU alone: without its GPU kernels, or with torch's CPU build, and no GPU is meant."""
    without = not any(map(_version, KERNELS)) or (_version("torch") or "").endswith("+cpu")
    return without and (asked.embedded or not place.path(CONTROL).exists())


def nccl(place: Place, asked: Asked) -> list[Check]:
    """Which NCCL is there, and is it the one that torch wants? Nothing where torch has none."""
    wanted = {name: want for name, want in _pinned("torch").items() if name.startswith("nvidia-nccl")}
    checks = []
    for name, want in wanted.items():
        has = _version(name)
        seen = f"NCCL {has or 'is missing'}, torch wants {want}"
        remedy = f"`pip install {name}=={want}`, unless it was replaced on purpose"
        checks.append(judge("driver.nccl", seen, remedy, fail=has is None, warn=has != want))
    return checks


def bytecode(place: Place, asked: Asked) -> list[Check]:
    """Is SGLang's Python code compiled once, or at every start? Nothing where there is no SGLang.

    Many images of containers set PYTHONDONTWRITEBYTECODE; on one host it made starts of 60 s out of 25 s.
    """
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        return []
    file = Path(found.submodule_search_locations[0]) / "srt" / "server_args.py"
    compiled = Path(importlib.util.cache_from_source(str(file)))
    kept = next(folder for folder in compiled.parents if folder.exists())
    if compiled.is_file():
        return [judge("sglang.bytecode", "SGLang's Python code is compiled already", "")]
    if os.environ.get("PYTHONDONTWRITEBYTECODE"):
        why, remedy = "PYTHONDONTWRITEBYTECODE is set", "unset it"
    elif not os.access(kept, os.W_OK):
        why, remedy = f"{kept} may not be written", "have PYTHONPYCACHEPREFIX name a folder that may"
    else:
        return [judge("sglang.bytecode", "SGLang's Python code is compiled at the first start, and kept", "")]
    seen = f"SGLang's Python code is compiled anew at every start: {why}"
    return [judge("sglang.bytecode", seen, f"{remedy}; a start then takes half a minute less", warn=True)]


def py_spy(place: Place, asked: Asked) -> Check:
    """Can a hang be looked into? Stacks of a server that hangs are taken with py-spy."""
    beside = Path(sys.executable).parent
    if not shutil.which("py-spy", path=f"{beside}{os.pathsep}{os.environ.get('PATH', '')}"):
        remedy = "`pip install py-spy` there; without it a hang's report has no stacks"
        return judge("sglang.py_spy", "py-spy is not beside SGLang's Python", remedy, warn=True)
    status = place.text("/proc/self/status") or ""
    held = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    if held and int(held[1], 16) & SYS_PTRACE:
        return judge("sglang.py_spy", "py-spy is there, and may look into every process", "")
    scope = place.text("/proc/sys/kernel/yama/ptrace_scope") or "0"  # without Yama the plain rule holds
    return judge(
        "sglang.py_spy",
        f"py-spy is there; the kernel lets it look into those of {WORDS.get(scope, scope)} (ptrace_scope {scope})",
        "`sysctl kernel.yama.ptrace_scope=0` (root), or run the container with --cap-add SYS_PTRACE",
        warn=scope != "0",
    )


def model_files(place: Place, asked: Asked) -> list[Check]:
    """Are all shards of the model there, and whole? Nothing where no model is meant, or a tiny one that is made."""
    if asked.model is None or asked.model.startswith(EMBEDDED):
        return []
    folder = Path(asked.model).expanduser()
    if not (folder / "config.json").is_file():
        remedy = "give the folder of a downloaded model on the host"
        return [judge("sglang.model", f"{folder} has no config.json", remedy, fail=True)]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        whole = (folder / "model.safetensors").is_file()
        seen = "model.safetensors, in one piece" if whole else f"{folder} has neither model.safetensors nor an index"
        return [judge("sglang.model", seen, "download the model again", fail=not whole)]
    try:
        described = msgspec.json.decode(index.read_bytes())
        shards = sorted(set(described["weight_map"].values()))
        total = int(described.get("metadata", {}).get("total_size", 0))
    except (OSError, msgspec.MsgspecError, KeyError, TypeError, AttributeError) as error:
        return [judge("sglang.model", f"{index}: {error}", "download the model again", fail=True)]
    missing = [name for name in shards if not (folder / name).is_file()]
    size = sum((folder / name).stat().st_size for name in shards if name not in missing)
    short = not missing and size < total
    seen = f"{len(shards)} shards, {amount(size)}"
    if missing:
        seen = f"{len(missing)} of {len(shards)} shards are missing: {', '.join(missing[:3])}"
    elif short:
        seen += f", and the index says {amount(total)}: one is cut"
    remedy = "download the model again; a download that was cut goes on where it stopped"
    return [judge("sglang.model", seen, remedy, fail=bool(missing) or short, shards=len(shards), bytes=size)]


def torch_cuda() -> str | None:
    """The CUDA version that torch was built for, as in "13.0"; None where that is not known."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    try:
        text = (Path(found.origin).parent / "version.py").read_text()
    except OSError:
        return None
    version = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return version[1] if version else None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _pinned(name: str) -> dict[str, str]:
    """What a package asks for by exact version, whatever the machine."""
    try:
        wanted = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found = [match for text in wanted if (match := PIN.fullmatch(text.strip()))]
    # A marker names an extra or another machine, except torch's own, which all say Linux.
    return {match[1]: match[2] for match in found if not match[3] or match[3].strip() == 'platform_system == "Linux"'}


def _off(name: str, want: str) -> bool:
    has = _version(name)
    return has is None or has.partition("+")[0] != want.partition("+")[0]


QUESTIONS: dict[str, Question] = {
    "sglang.version": sglang,
    "sglang.packages": pins,
    "driver.nccl": nccl,
    "sglang.bytecode": bytecode,
    "sglang.py_spy": py_spy,
    "sglang.model": model_files,
}
