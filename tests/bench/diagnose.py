"""How long `layertap diagnose` takes for a log of many MB, healthy and with an error in every thousandth line.

usage: python tests/bench/diagnose.py [MEGABYTES]      prints one JSON object; times in seconds of this process's CPU
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from backends.verdict.catalogue import catalogue  # noqa: E402
from backends.verdict.log_report import report  # noqa: E402

STAMP = "[2026-11-29 21:10:00 TP0] "
BEGIN = f"{STAMP}server_args=ServerArgs(model_path='/m')\n{STAMP}The server is fired up and ready to roll!\n"
BATCH = (
    f"{STAMP}Prefill batch, #new-seq: 4, #new-token: 8190, #cached-token: 0, token usage: 0.12, #running-req: 48, "
    "#queue-req: 12, #pending-token: 90112, cuda graph: False, input throughput (token/s): 7412.31\n"
)
REQUEST = f'{STAMP}INFO:     127.0.0.1:52348 - "POST /generate HTTP/1.1" 200 OK\n'
ERROR = f"{STAMP}KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_token_ratio: 0.7\n"


def measure(block: str, megabytes: int) -> dict[str, object]:
    """Diagnose a log made of blocks."""
    with tempfile.TemporaryDirectory(prefix="layertap-bench-") as folder:
        log = Path(folder) / "server.log"
        size = len(block.encode())
        with log.open("w", encoding="utf-8") as file:
            file.write(BEGIN)
            for _ in range(megabytes * 1_000_000 // size):
                file.write(block)
        wall, cpu = time.perf_counter(), time.process_time()
        made = report(log, time.time())
        return {
            "megabytes": round(log.stat().st_size / 1e6, 1),
            "lines": block.count("\n") * (megabytes * 1_000_000 // size) + 2,
            "verdict": made.verdict,
            "cpu_s": round(time.process_time() - cpu, 2),
            "wall_s": round(time.perf_counter() - wall, 2),
        }


def main(megabytes: int) -> None:
    catalogue()
    load_before = os.getloadavg()[0]
    found = {
        "schema": 1,
        "load_before": load_before,
        "cpus": os.cpu_count(),
        "signatures": len(catalogue().signatures),
        "needles": len(catalogue().needles),
        "healthy": measure((BATCH + REQUEST) * 500, megabytes),
        "every_thousandth_line_degraded": measure((BATCH + REQUEST) * 500 + ERROR, megabytes),
        "rss_mb": round(psutil.Process().memory_info().rss / 1e6),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
