"""The command itself on the embedded engine: `layertap` in a subprocess, with a home of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
ENGINE = ROOT / ".venv-engine" / "bin" / "python"


class Layertap:
    """Runs verbs. What they write, and their servers, live in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {
            **os.environ,
            "XDG_STATE_HOME": str(folder / "state"),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "XDG_CONFIG_HOME": str(folder / "config"),
            "LAYERTAP_PYTHON": str(ENGINE),
        }
        self.command = [str(Path(sys.executable).parent / "layertap")]

    def __call__(self, *words: str | Path | int, code: int | None = 0, seconds: float = 500) -> str:
        """Run a verb to its end; returns its stdout. `code` is the exit code that it must have."""
        done = subprocess.run(
            [*self.command, *map(str, words)],
            env=self.env,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert code is None or done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        self.narration = done.stderr
        return done.stdout

    def json(self, *words: str | Path | int, code: int | None = 0) -> Any:
        return json.loads(self(*words, "--json", code=code))

    def start(self, *words: str | Path | int) -> subprocess.Popen[str]:
        """Start a verb and leave it running."""
        return subprocess.Popen(
            [*self.command, *map(str, words)],
            env=self.env,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def runs(self) -> list[dict[str, Any]]:
        """All runs, the newest first."""
        return list(self.json("runs")["runs"])

    def progress(self, output: Path) -> dict[str, Any] | None:
        """progress.json of the newest extraction into `output`."""
        for path in sorted((self.folder / "state").glob("layertap/runs/extract-*/progress.json"), reverse=True):
            progress: dict[str, Any] = json.loads(path.read_text())
            if progress["output"] == str(output):
                return progress
        return None

    def until_under_way(self, output: Path) -> None:
        """Wait until the first samples of an extraction into `output` are written; it must not be over by then."""
        now = until(lambda: (now := self.progress(output)) and now["written"] > 0 and now, 300)
        assert now["phase"] == "extracting", now

    def run_of(self, kind: str) -> dict[str, Any]:
        """The newest run of a kind, with its run.json."""
        run: dict[str, Any] = next(run for run in self.runs() if run["kind"] == kind)
        return run | {"running": json.loads((Path(run["folder"]) / "run.json").read_text())}


def until(true: Callable[[], Any], seconds: float = 120) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := true()):
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.05)
    return value


def shared_data(name: str) -> Path:
    """A file of real rows; skips aloud where this checkout has none beside it."""
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{path} is not there: real rows are not part of the project")
    return path


def write_rows(path: Path, count: int, words: int = 60) -> Path:
    """`count` conversations, each its own."""
    with path.open("w") as file:
        for i in range(count):
            question = " ".join(f"word{(i * 31 + j * 7) % 997}" for j in range(words))
            chat = [{"role": "user", "content": question}, {"role": "assistant", "content": f"Answer number {i}."}]
            file.write(json.dumps({"messages": chat}) + "\n")
    return path
