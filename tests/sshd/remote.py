"""`layertap --host gpu`: the command itself, on a machine of its own, against a host behind a private sshd."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from sshd import Sshd


class Console:
    """A console with a home of its own; `tables` are more of its layertap.toml."""

    def __init__(
        self, folder: Path, sshd: Sshd, python: Path | str, *, port: int | None = None, tables: str = ""
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.config = folder / "layertap.toml"
        self.config.write_text(
            f'[host.gpu]\nssh_config = "{sshd.config(port=port)}"\npython = "{python}"\n'
            f'dump_dir = "{sshd.folder}/dumps"\n{tables}'
        )
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("LAYERTAP_")}
        self.environment |= {"HOME": str(folder), "LAYERTAP_CONFIG": str(self.config), "LAYERTAP_HOST": "gpu"}
        for name in ("STATE", "CACHE", "CONFIG"):
            self.environment[f"XDG_{name}_HOME"] = str(folder / name.lower())

    def start(self, *words: str | Path | int) -> subprocess.Popen[str]:
        """Start a verb and leave it running."""
        return subprocess.Popen(
            [str(Path(sys.executable).with_name("layertap")), *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
            cwd=self.folder,
        )

    def __call__(self, *words: str | Path | int, code: int = 0) -> str:
        """Run a verb to its end, which must have this exit code; returns its stdout. `narration` is its stderr."""
        console = self.start(*words)
        said, self.narration = console.communicate(timeout=300)
        assert console.returncode == code, f"exit code {console.returncode}\n{said}\n{self.narration}"
        return said

    def json(self, *words: str | Path | int, code: int = 0) -> Any:
        return json.loads(self(*words, "--json", code=code))


def write_rows(path: Path, count: int) -> Path:
    """Rows of 40 token ids, each its own."""
    rows = ({"input_ids": [9 + (7 * i + j) % 1000 for j in range(40)], "loss_mask": [1] * 40} for i in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
