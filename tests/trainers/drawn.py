"""What the trainers read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FORMATS = ("specforge", "speculators", "speculators-fp8", "speculators-legacy", "modelopt")
SAMPLES = 24
DRAFT = 64  # tokens of the drafter's vocabulary


@dataclass(frozen=True)
class Drawn:
    """The dataset that was drawn, the one that was exported from it, and the model's folder."""

    native: Path
    exports: Path
    model: Path
