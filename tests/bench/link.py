"""How fast bytes come over a link, beside what `ssh` and `scp` make of the same file on the same machine.

usage: python tests/bench/link.py [MEGABYTES]      prints a table, then one JSON object; every figure is the best of three
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "unit"), str(ROOT / "tests" / "sshd")]

from sshd import Keys, Sshd  # noqa: E402

from backends.host import Host, LocalHost  # noqa: E402

RUNS = 3


def megabytes_per_second(size: int, move: Callable[[], None]) -> float:
    best = float("inf")
    for _ in range(RUNS):
        begun = time.perf_counter()
        move()
        best = min(best, time.perf_counter() - begun)
    return round(size / best / 1e6, 1)


def read_all(host: Host, path: Path, part: int) -> None:
    """As a log is followed and a dataset is pulled: part after part, each asked for when the last one has come."""
    offset, size = 0, path.stat().st_size
    while offset < size:
        _, data = host.read(str(path), offset, part)
        offset += len(data)


def main(megabytes: int) -> None:
    with tempfile.TemporaryDirectory(prefix="layertap-bench-") as name:
        folder = Path(name)
        (folder / "keys").mkdir()
        sshd = Sshd(folder / "sshd", Keys(folder / "keys"), {"Subsystem": "sftp internal-sftp"}, {})
        path, size = folder / "data", megabytes << 20
        path.write_bytes(os.urandom(1 << 20) * megabytes)
        config = str(sshd.config())
        local, remote = LocalHost(sys.executable), sshd.connect()
        try:
            figures = {
                "ssh cat": lambda: subprocess.run(
                    ["ssh", "-F", config, "gpu", f"cat {path}"], stdout=subprocess.DEVNULL, check=True
                ),
                "scp": lambda: subprocess.run(
                    ["scp", "-q", "-F", config, f"gpu:{path}", str(folder / "copy")], check=True
                ),
                "layertap, parts of 1 MiB": lambda: read_all(remote, path, 1 << 20),
                "layertap, parts of 8 MiB": lambda: read_all(remote, path, 8 << 20),
                "layertap without ssh, parts of 1 MiB": lambda: read_all(local, path, 1 << 20),
            }
            rates = {what: megabytes_per_second(size, move) for what, move in figures.items()}  # type: ignore[arg-type]
        finally:
            local.close()
            remote.close()
            sshd.stop()
    for what, rate in rates.items():
        print(f"{what:<40} {rate:>8} MB/s  {rate / rates['ssh cat']:>6.2f} of ssh cat")
    ratios = {what: round(rate / rates["ssh cat"], 3) for what, rate in rates.items()}
    print(json.dumps({"schema": 1, "megabytes": megabytes, "mb_per_second": rates, "ratios": ratios}))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
