"""The tap in older SGLangs, on a CPU: each launches, is probed, and gives the states that the newest gives.

Each version gets an environment of its own: SGLang and the transformers that it asks for, in front of what
`.venv-engine` has. Torch and all else are that environment's, so this says what SGLang's code does, not its wheels.

usage: .venv-engine/bin/python tests/versions [VERSION ...]
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
from draw import NEWEST, PROMPTS

ROOT = Path(__file__).resolve().parents[2]
TRANSFORMERS = {"0.5.14": "5.8.1", "0.5.16": "5.12.1", "0.5.20": "5.12.1"}  # as each version pins it
TOKENIZERS = "0.22.2"
SECONDS = 900


def environment(version: str) -> Path:
    """The interpreter of that version's environment, made where it is not there."""
    if version == NEWEST:
        return Path(sys.executable)
    folder = ROOT / ".venv-versions" / version
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
        (packages / "engine.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        wanted = [f"sglang=={version}", f"transformers=={TRANSFORMERS[version]}", f"tokenizers=={TOKENIZERS}"]
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--only-binary", ":all:", "--target", packages, *wanted], check=True)
        (folder / "ready").touch()
    return folder / "bin" / "python"


def draw(version: str, states: Path) -> dict[str, Any]:
    """What `draw.py` says in that version's environment; `error` where it says nothing."""
    ran = subprocess.run(
        [environment(version), Path(__file__).with_name("draw.py"), states],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if ran.returncode:
        return {"error": (ran.stderr.strip().splitlines() or ["it said nothing"])[-1]}
    return dict(json.loads(ran.stdout.strip().splitlines()[-1]))


def compared(one: Path, other: Path) -> str:
    """How far two drawings of the same prompts are from each other."""
    least, equal = 1.0, True
    for ids, mine, theirs in zip(PROMPTS, torch.load(one), torch.load(other), strict=True):
        for name in theirs:
            assert mine[name].shape == theirs[name].shape == (len(ids), theirs[name].shape[1])
            equal = equal and torch.equal(mine[name], theirs[name])
            cosine = torch.nn.functional.cosine_similarity(mine[name].double(), theirs[name].double(), dim=-1)
            least = min(least, float(cosine.min()))
    return "the same bits" if equal else f"least cosine {least:.6f}"


def main(versions: list[str]) -> int:
    """Go through the versions; 0 where each was probed and gives the newest one's states."""
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        newest = Path(folder) / f"{NEWEST}.pt"
        for version in [NEWEST, *versions]:
            states = Path(folder) / f"{version}.pt"
            told = draw(version, states)
            wrong = told.get("error") or "; ".join(told["failures"])
            failed = failed or bool(wrong)
            said = wrong or f"probed with {told['lengths']}, ids {told['serve_ids']}, {compared(states, newest)}"
            print(f"{version:8} {said}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or sorted(TRANSFORMERS)))
