"""How late the interface is while 20,000 lines/s run through the Logs screen, in a terminal of its own (a pty).

usage: python tests/bench/log_rate.py [SECONDS]      prints one JSON object
A thread feeds the lines as the console's link would; lateness is that of a 50 ms timer beside the screen, in ms.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import select
import struct
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from textual.app import App  # noqa: E402

from console.log_buffer import LogBuffer  # noqa: E402
from console.tui.screens.logs import LogScreen  # noqa: E402

RATE = 20_000  # lines/s
BATCH = 0.01  # seconds between two feeds
TIMER = 0.05
ROWS, COLUMNS = 40, 120
FULL_SPEED_LINES = 5_000_000
KEY = "server server-1"


def lines(count: int) -> bytes:
    """Lines of a server at work: mostly batches and requests, now and then a bar that is redrawn, rarely an error."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    batch = f"[{stamp} TP0] Prefill batch, #new-seq: 4, #new-token: 8190, #cached-token: 0, token usage: 0.12, #running-req: 48, #queue-req: 12, #pending-token: 90112, cuda graph: False, input throughput (token/s): 7412.31\n"
    request = f'[{stamp}] INFO:     127.0.0.1:52348 - "POST /generate HTTP/1.1" 200 OK\n'
    odd = "\rCapturing batches (bs=128):  33%|\u2588\u2588\u258f   | 12/36 [00:10<00:20]\rCapturing batches (bs=64):  36%|\u2588\u2588\u258e   | 13/36 [00:11<00:19]\n"
    error = f"[{stamp} TP1] Scheduler hit an exception: RuntimeError: CUDA error: out of memory\n"
    made = (batch + request) * (count // 2 - 1) + odd + error
    return made.encode()


class Feed:
    def __init__(self) -> None:
        self.logs = {KEY: LogBuffer()}

    def log_state(self, key: str) -> str:
        return "live"


class Bench(App[None]):
    """The Logs screen and somebody who times it."""

    def __init__(self, seconds: float, result: Path) -> None:
        super().__init__()
        self.seconds = seconds
        self.result = result
        self.feed = Feed()
        self.buffer = self.feed.logs[KEY]
        self.late: list[float] = []
        self.feeding = True

    async def on_mount(self) -> None:
        await self.push_screen(LogScreen(self.feed))
        self.run_worker(self._bench())

    async def _bench(self) -> None:
        timer = asyncio.create_task(self._time())
        found: dict[str, Any] = {
            "schema": 1,
            "load_before": os.getloadavg()[0],
            "rate": RATE,
            "terminal": [COLUMNS, ROWS],
            "seconds": self.seconds,
        }
        found["no_lines"] = await self._measure(5)  # how late this machine is by itself
        feeder = threading.Thread(target=self._feed, daemon=True)
        feeder.start()
        view = self.screen.view  # type: ignore[attr-defined]
        found["following"] = await self._measure(self.seconds)
        view.action_page(-1.0)
        found["paused"] = await self._measure(self.seconds / 2)
        view.set_filter("Prefill !health")
        found["filter_over_full_buffer"] = await self._measure(3, until=lambda: view.progress is None)
        view.set_filter(r"/#queue-req: \d+, .*\d+\.\d+$/ !decode")
        found["slow_filter"] = await self._measure(3, until=lambda: view.progress is None)
        view.set_filter("")
        view.search("not to be found")
        found["search_over_full_buffer"] = await self._measure(3, until=lambda: bool(view.note))
        view.action_follow()
        self.feeding = False
        feeder.join()
        found["full_speed"] = await asyncio.to_thread(self._full_speed)
        timer.cancel()
        self.result.write_text(json.dumps(found))
        self.exit()

    def _feed(self) -> None:
        begun, fed = time.perf_counter(), 0
        while self.feeding:
            due = int((time.perf_counter() - begun) * RATE) - fed
            if due >= 4:
                data = lines(due)
                self.buffer.feed(data)
                fed += data.count(b"\n")
            time.sleep(BATCH)

    async def _time(self) -> None:
        due = time.perf_counter() + TIMER
        while True:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            self.late.append(1000 * (time.perf_counter() - due))
            due = max(due + TIMER, time.perf_counter())

    async def _measure(self, seconds: float, until: Callable[[], bool] | None = None) -> dict[str, float]:
        process = psutil.Process()
        self.late.clear()
        begun, before, cpu = time.perf_counter(), self.buffer.next, sum(process.cpu_times()[:2])
        took = None
        while (spent := time.perf_counter() - begun) < seconds:
            await asyncio.sleep(TIMER)
            if until is not None and took is None and until():
                took = round(time.perf_counter() - begun, 2)
        late = sorted(self.late)
        found = {
            "lines_per_s": round((self.buffer.next - before) / spent),
            "late_p50_ms": round(late[len(late) // 2], 1),
            "late_p99_ms": round(late[int(len(late) * 0.99)], 1),
            "late_max_ms": round(late[-1], 1),
            "cpu_percent": round(100 * (sum(process.cpu_times()[:2]) - cpu) / spent),
            "rss_mb": round(process.memory_info().rss / 1e6),
        }
        return found if took is None else found | {"done_after_s": took}

    def _full_speed(self) -> dict[str, Any]:
        """The memory while as many lines come as can."""
        process, part, memory = psutil.Process(), lines(10_000), []
        begun, fed = time.perf_counter(), 0
        self.late.clear()
        while fed < FULL_SPEED_LINES:
            self.buffer.feed(part)
            fed += 10_000
            if fed % 500_000 == 0:
                memory.append(round(process.memory_info().rss / 1e6))
        late = sorted(self.late)
        return {
            "lines": fed,
            "lines_per_s": round(fed / (time.perf_counter() - begun)),
            "rss_mb_every_500k_lines": memory,
            "late_p99_ms": round(late[int(len(late) * 0.99)], 1),
            "lines_kept": self.buffer.next - self.buffer.first,
        }


def main(seconds: float) -> None:
    with tempfile.TemporaryDirectory(prefix="layertap-bench-") as folder:
        result = Path(folder) / "result.json"
        pid, terminal = pty.fork()
        if pid == 0:
            os.environ.update(TERM="xterm-256color", COLORTERM="truecolor")
            Bench(seconds, result).run()
            os._exit(0)
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        drawn = 0
        while True:
            select.select([terminal], [], [])
            try:
                drawn += len(os.read(terminal, 1 << 16))
            except OSError:  # the app has closed it
                break
        os.waitpid(pid, 0)
        found = json.loads(result.read_text())
    print(json.dumps(found | {"megabytes_drawn": round(drawn / 1e6, 1), "cpus": os.cpu_count()}))


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 20)
