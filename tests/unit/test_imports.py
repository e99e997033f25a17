"""What is imported where: `--help` is quick, the host's side knows no terminal, and imports run one way."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from helpers import ROOT

HEAVY = [
    "textual",
    "paramiko",
    "torch",
    "sglang",
    "numpy",
    "transformers",
    "safetensors",
    "xxhash",
    "aiohttp",
    "datasets",
    "pynvml",
]
CONSOLE_ONLY = ["textual", "paramiko", "cyclopts", "rich", "platformdirs"]


def imported(code: str, names: list[str]) -> list[str]:
    """Which of `names` a fresh interpreter has imported after `code`."""
    program = f"import sys\n{code}\nprint(*[name for name in {names!r} if sys.modules.get(name)])"
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    return made.stdout.split()


def test_the_probe_sees_what_is_imported() -> None:
    assert imported("import rich", CONSOLE_ONLY) == ["rich"]


def test_the_command_line_imports_nothing_heavy() -> None:
    wanted = [*HEAVY, "backends.host", "backends.runs", "backends.sglang", "console.session", "psutil", "tomllib"]
    assert imported("import console.cli", wanted) == []


def test_help_imports_nothing_heavy() -> None:
    code = "import io, contextlib, console.cli\nwith contextlib.redirect_stdout(io.StringIO()): console.cli.app(['--help'], result_action='return_value')"
    assert imported(code, [*HEAVY, "backends.host", "console.session"]) == []


def test_the_payloads_code_runs_without_the_consoles_packages(payload_folder: Path) -> None:
    """On a host there is only the payload and SGLang's Python."""
    for module, part in (("backends.agent", "host"), ("capture.job", "engine")):
        hide = f"sys.path[:0] = [{str(payload_folder / 'host')!r}, {str(payload_folder / 'engine')!r}]\n"
        hide += f"for name in {CONSOLE_ONLY!r}: sys.modules[name] = None\n"
        hide += f"import {module}\nassert {module}.__file__.startswith({str(payload_folder / part)!r})"
        assert imported(hide, HEAVY) == []


def test_the_contracts_of_the_import_linter_hold() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    if not linter.exists():
        pytest.skip("lint-imports is not installed beside this Python")
    made = subprocess.run([linter, "--no-cache"], capture_output=True, text=True, cwd=ROOT, check=False)
    assert made.returncode == 0, made.stdout
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert len(contracts) >= 2
    assert f"Contracts: {len(contracts)} kept, 0 broken." in made.stdout
