"""Files under /dev/shm that SGLang's processes share, and that stay where one of them is killed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path("/dev/shm")
SGLANG = re.compile(r"sglang_loads_.*\.shm|sgl_shm_.*_(?P<pid>\d+)_\w+")


def mapped(pids: Iterable[int]) -> set[Path]:
    """Those of SGLang that these processes have mapped."""
    found = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:  # it is over
            continue
        found |= {Path(place) for place in re.findall(rf"{FOLDER}/.*", maps)}
    return {path for path in found if SGLANG.fullmatch(path.name)}
