"""Environments with a trainer in each, made once and kept in pytest's cache.

They see SGLang's environment, which has torch and transformers, and have of the trainer only its own packages, so
that nothing is installed into it. What the package index does not give is skipped aloud.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / ".venv-engine" / "bin" / "python"
INSTALL = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]


@dataclass(frozen=True)
class Trainer:
    """What is installed, exactly, and what must then be importable."""

    packages: tuple[str, ...]
    module: str


TRAINERS = {
    "specforge": Trainer(("specforge==0.2.0",), "specforge.runtime.data_plane.offline_reader"),
    "speculators": Trainer(
        ("speculators==0.9.0", "hs-connectors==0.9.0", "pydantic-settings>=2,<3"), "speculators.train.data"
    ),
    # Its own transformers, and what that wants in other versions than the engine's.
    "speculators-legacy": Trainer(
        (
            "speculators==0.4.0.1",
            "pydantic-settings>=2,<3",
            "transformers==4.57.6",
            "tokenizers>=0.22,<0.23",
            "huggingface_hub>=0.34,<1",
            "kernels<0.11",
        ),
        "speculators.train.data",
    ),
    "modelopt": Trainer(
        ("nvidia-modelopt==0.47.0", "omegaconf>=2.3,<3", "antlr4-python3-runtime==4.9.3", "requests", "pulp", "scipy"),
        "modelopt.torch.speculative.eagle.utils",
    ),
}


def python_of(name: str, cache: Path) -> Path:
    """The Python that has a trainer; skips aloud where it cannot be had."""
    trainer, folder = TRAINERS[name], cache / name
    python, ready = folder / "bin" / "python", folder / "ready"
    wanted = "\n".join((str(ENGINE.resolve()), *trainer.packages))
    if not ready.exists() or ready.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([ENGINE, "-m", "venv", folder], check=True)
        (_site(python) / "engine.pth").write_text(f"{_site(ENGINE)}\n")
        made = subprocess.run([python, *INSTALL, *trainer.packages], capture_output=True, text=True, check=False)
        if made.returncode:
            pytest.skip(f"{name}: {' '.join(trainer.packages)} cannot be installed: {_last(made.stderr)}")
        ready.write_text(wanted)
    found = subprocess.run([python, "-c", f"import {trainer.module}"], capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(f"{name}: {trainer.module} cannot be imported: {_last(found.stderr)}")
    return python


def _site(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip())


def _last(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), sys.platform)
