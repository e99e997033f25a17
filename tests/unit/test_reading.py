"""Reading a log once: which signatures its lines show, where, and what stands at its end."""

from __future__ import annotations

import random

import pytest
from test_startup import CPU_0_5_23, GPU_0_5_11

from backends.verdict.catalogue import catalogue
from backends.verdict.reading import LogReader

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


def read(*parts: str) -> LogReader:
    reader = LogReader()
    for part in parts:
        reader.feed(part)
    return reader


@pytest.mark.parametrize("log", [CPU_0_5_23, GPU_0_5_11])
def test_a_healthy_start_shows_nothing_that_alarms(log: str) -> None:
    hits = read(log).hits
    assert [name for name in hits if catalogue().by_id[name].kind in ("crash", "degraded")] == []


def test_a_hit_has_number_text_and_time() -> None:
    log = "a\nb\n[2026-06-01 09:00:00] x\n" + OOM + "\n[2026-06-01 09:05:00] y\n" + OOM + "\n"
    hit = read(log).hits["runtime-oom"]
    assert (hit.line, hit.text, hit.last, hit.count) == (4, OOM, 6, 2)
    assert hit.last_at - hit.at == 300


def test_the_phase_of_the_line_decides() -> None:
    begun = "[2026-06-01 09:00:00] Load weight begin. avail mem=1.00 GB\n"
    assert set(read(begun + OOM + "\n").hits) == {"cuda-oom-load", "runtime-oom"}
    ready = "[2026-06-01 09:09:00] The server is fired up and ready to roll!\n"
    assert set(read(begun + ready + OOM + "\n").hits) == {"runtime-oom"}


def test_what_follows_a_benign_line_is_benign() -> None:
    benign = "[2026-06-01 09:00:00] NVLink detection failed. This is normal if no NVLink is there.\n"
    traceback = "Traceback (most recent call last):\nRuntimeError: No CUDA GPUs are available\n"
    assert read(benign + traceback).hits == {}
    assert read(benign, traceback).hits == {}
    assert set(read(benign, "[2026-06-01 09:00:01] another\n", traceback).hits) == {"cuda-init"}
    deprecated = "[2026-06-01 09:00:01] '--disable-cuda-graph' is deprecated\n"
    assert set(read(deprecated, traceback).hits) == {"cuda-init"}


def test_cut_anywhere_behind_a_line_it_reads_the_same() -> None:
    log = GPU_0_5_11 + f"\x1b[31m{OOM}\x1b[0m\n" + "[2026-06-01 09:20:00 TP1] Scheduler hit an exception: x\n"
    whole = read(log)
    pieces = random.Random(0)
    for _ in range(20):
        lines = log.splitlines(keepends=True)
        cut = sorted(pieces.sample(range(len(lines)), 5))
        parts = ["".join(lines[a:b]) for a, b in zip([0, *cut], [*cut, len(lines)], strict=True)]
        reader = read(*parts)
        assert reader.hits == whole.hits
        assert (reader.startup.lines, reader.startup.crashed_line) == (whole.startup.lines, whole.startup.crashed_line)


def test_the_last_line() -> None:
    stall = catalogue().by_id["nccl-init-stall"]
    begin = "[2026-06-01 09:00:00 TP0] Init torch distributed begin.\n[2026-06-01 09:00:00 TP1] Init torch distributed begin.\n"
    assert read(begin).last_line(stall)
    assert not read(begin, "[2026-06-01 09:00:09 TP0] Init torch distributed ends. elapsed=9 s\n").last_line(stall)
    assert not read("").last_line(stall)


def test_the_newest_batch() -> None:
    reader = read(
        "[2026-06-01 09:00:00] Prefill batch, #new-seq: 1, #new-token: 9, #running-req: 3, #queue-req: 5, x\n",
        "[2026-06-01 09:00:05] Decode batch, #running-req: 0, #token: 1, gen throughput (token/s): 1, #queue-req: 7\n",
        "[2026-06-01 09:00:06] something else\n",
    )
    assert (reader.batch.running, reader.batch.queue) == (0, 7)
    assert reader.batch.at == reader.startup.last_stamp - 1


def test_a_batch_is_as_old_as_its_own_line() -> None:
    """Whatever stands behind it in the same part, as when a log is read for the first time."""
    reader = LogReader()
    reader.feed(
        "[2026-06-01 09:00:00 TP0] Prefill batch, #new-seq: 1, #new-token: 9, #running-req: 3, #queue-req: 5, x\n"
        '[2026-06-01 09:10:00] INFO:     127.0.0.1:1 - "GET /health HTTP/1.1" 200 OK\n'
    )
    assert reader.batch is not None
    assert reader.startup.last_stamp is not None
    assert reader.batch.at == reader.startup.last_stamp - 600


def test_where_a_crash_stands() -> None:
    log = f"a\n[2026-06-01 09:01:00] Scheduler hit an exception: Traceback (most recent call last):\n  File x\n{OOM}\n\nb\n"
    startup = read(log).startup
    assert (startup.crashed, startup.crashed_line) == (OOM, 4)
    assert startup.crashed_at == startup.last_stamp
