"""What the host gives to a support bundle: everything that a stranger needs to judge a run, without its secrets."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from backends.errors import LayertapError, UsageError
from backends.jobs import read_job
from backends.masking import Masked, Masker, environment, secrets_of_argv, secrets_of_env
from backends.runs import Run
from backends.verdict.stacks import newest_report
from capture.tap.settings import SETTINGS_VARIABLE

LOG_BYTES = 1 << 20  # of a log's end
LOG_HEAD = 256 << 10  # of its beginning: the arguments and the start-up
STACK_BYTES = 2 << 20
KEPT = ("spec.json", "run.json", "stop.json", "exit.json", "job.json", "progress.json", "result.json", "alarms.json")
SHOWN = (
    "CUDA", "NCCL_", "SGLANG_", "SGL_", "TORCH", "HF_", "TRANSFORMERS_", "FLASHINFER_", "TRITON_", "OMP_", "PYTHON",
    "LAYERTAP_RUN", "LD_LIBRARY_PATH", "PATH",
)  # fmt: skip
PACKAGES = (
    "sglang", "torch", "transformers", "safetensors", "flashinfer-python", "sgl-kernel", "triton", "nvidia-nccl-cu12",
    "nvidia-ml-py", "py-spy", "aiohttp", "msgspec", "psutil", "datasets", "numpy",
)  # fmt: skip


class Bundle(msgspec.Struct):
    """Texts by their names in the bundle, and what was masked in them."""

    files: dict[str, str]
    masked: list[Masked]


def make(runs: list[Run], asked: Mapping[str, Any], extra: Mapping[str, str]) -> Bundle:
    """Gather what there is of `runs`, with answers that the agent gave (`asked`) and texts of the console (`extra`)."""
    masker = Masker(_secrets(runs))
    files = {f"{name}.json": _json(answer) for name, answer in asked.items()}
    files["versions.json"] = _json(versions())
    for run in runs:
        files |= dict(_of_run(run, masker))
    files |= extra
    return Bundle({name: masker.text(name, text) for name, text in files.items()}, masker.report())


def versions() -> dict[str, Any]:
    """Python, kernel and packages of this host; None for a package that is not there."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
        found.setdefault(name, None)
    return {
        "python": sys.version,
        "platform": platform.platform(),
        "libc": " ".join(platform.libc_ver()),
        "packages": found,
    }


def _of_run(run: Run, masker: Masker) -> Iterator[tuple[str, str]]:
    for name in KEPT:
        if text := _read(run.folder / name):
            yield f"{run.id}/{name}", text
    yield f"{run.id}/events.jsonl", _end(run.folder / "events.jsonl", LOG_BYTES)
    yield f"{run.id}/{run.log.name}", _log(run.log)
    if stacks := newest_report(run):
        yield f"{run.id}/{stacks.name}", _end(stacks, STACK_BYTES)
    with contextlib.suppress(LayertapError):
        name = f"{run.id}/environment.json"
        yield name, _json(environment(run.private.env, SHOWN, masker, name))


def _secrets(runs: list[Run]) -> dict[str, str]:
    """Every value that these runs and this host hold secret, with its kind."""
    found: dict[str, str] = {}

    def add(values: Mapping[str, str]) -> None:
        for value, kind in values.items():
            found.setdefault(value, kind)  # the first one says best where it comes from

    for run in runs:
        with contextlib.suppress(LayertapError, msgspec.MsgspecError):
            private = run.private
            add(secrets_of_argv(private.argv))
            add(secrets_of_env(private.env))
            if settings := private.env.get(SETTINGS_VARIABLE):
                add({str(msgspec.json.decode(settings)["secret"]): "the tap's secret"})
        with contextlib.suppress(UsageError):
            server = read_job(run).get("server") or {}
            add({str(server[name]): f"server {name}" for name in ("api_key", "secret") if server.get(name)})
    add(secrets_of_env(os.environ))
    return found


def _log(path: Path) -> str:
    """A log's beginning and its end, with a line that says what is left out between."""
    try:
        size = path.stat().st_size
    except OSError as error:
        return f"{path}: {error.strerror}\n"
    if size <= LOG_HEAD + LOG_BYTES:
        return _end(path, size)
    with path.open("rb") as file:
        head = file.read(LOG_HEAD).decode(errors="replace")
    return f"{head}\n[… {size - LOG_HEAD - LOG_BYTES:,} bytes are left out here …]\n{_end(path, LOG_BYTES)}"


def _end(path: Path, most: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - most))
            return file.read(most).decode(errors="replace")
    except OSError as error:
        return f"{path}: {error.strerror}\n"


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _json(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode() + "\n"
