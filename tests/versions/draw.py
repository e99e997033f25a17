"""What one SGLang makes of the tap, in that version's environment: launch, draw, probe; a JSON line says how it went.

usage: python tests/versions/draw.py STATES        (the states of fixed prompts go to the file STATES)
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent / "engine")]

import engines  # noqa: E402
import msgspec  # noqa: E402
import torch  # noqa: E402

PROMPTS = [[(17 * i * i + n) % 1000 + 9 for i in range(n)] for n in (1, 3, 64, 300)]
NEWEST = "0.5.23"  # the one that the embedded engine is made for
ENTRY_POINTS = "[sglang.srt.platforms]\nolder_cpu = older_cpu:activate\n"


def main(states: Path) -> None:
    """Draw with whatever SGLang this interpreter has."""
    loaded = engines.sglang.load_profiles()
    anywhere = {name: msgspec.structs.replace(profile, requires_sglang=None) for name, profile in loaded.items()}
    engines.sglang.load_profiles = lambda: anywhere
    with tempfile.TemporaryDirectory(prefix="layertap-version-") as folder, engines.running() as made:
        engine = made.get("embedded-llama", **(older(Path(folder)) if engines.SGLANG != NEWEST else {}))
        torch.save(engine.draw(PROMPTS, together=False), states)
        code, probed = engine.probe(Path(folder))
        told = {"sglang": engines.SGLANG, "exit": code, "failures": probed.failures, "lengths": probed.lengths}
        print(json.dumps(told | {"serve_ids": probed.layers.serve_ids, "boundaries": probed.layers.boundaries}))


def older(folder: Path) -> dict[str, Any]:
    """How the embedded Llama starts in an SGLang before 0.5.23."""
    (folder / "older_cpu.py").write_text((HERE / "older_cpu.py").read_text())
    info = folder / "older_cpu-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: older_cpu\nVersion: 0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return {
        "ENV_PYTHONPATH": str(folder),
        "ENV_SGLANG_PLATFORM": "older_cpu",
        "ENV_SGLANG_PLUGINS": "layertap",
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
