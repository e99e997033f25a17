"""Programs that the tests over SSH need."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from sshd import SYSTEM_FOLDERS

ROOT = os.geteuid() == 0


def need(program: str, package: str) -> str:
    """A program's path; installed on a Debian that belongs to us, else the test is skipped."""
    if not (found := shutil.which(program, path=SYSTEM_FOLDERS)) and ROOT and shutil.which("apt-get"):
        if _apt("install", "-y", "-qq", package) != 0:  # a new machine has no lists yet
            _apt("update", "-qq")
            _apt("install", "-y", "-qq", package)
        found = shutil.which(program, path=SYSTEM_FOLDERS)
    return found or pytest.skip(f"there is no {program} here: install {package}")


def _apt(*words: str) -> int:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    return subprocess.run(["apt-get", *words], capture_output=True, check=False, env=environment).returncode
