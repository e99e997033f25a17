"""The kernel's log: what the catalogue knows of it, since a run began; nothing where it may not be read."""

from __future__ import annotations

import os
import time
from pathlib import Path

from backends.verdict.kernel import KernelLog

OOM = "Out of memory: Killed process 7 (sglang::schedul) total-vm:1kB, anon-rss:1kB"
XID = "NVRM: Xid (PCI:0000:01:00): 79, pid=1234, GPU has fallen off the bus."


def record(text: str, seconds_ago: float = 0.0) -> str:
    stamp = int((time.clock_gettime(time.CLOCK_MONOTONIC) - seconds_ago) * 1e6)
    return f"6,1,{stamp},-;{text}\n SUBSYSTEM=x\n"


def feed(tmp_path: Path) -> tuple[str, int]:
    """A pipe in the place of the kernel's log: like it, it gives one record a read, if one at a time is put in."""
    path = tmp_path / "kmsg"
    os.mkfifo(path)
    return str(path), os.open(path, os.O_RDWR | os.O_NONBLOCK)


def test_lines_that_are_known(tmp_path: Path) -> None:
    path, end = feed(tmp_path)
    log = KernelLog(time.time() - 10, path)
    assert log.read() == []
    for text in ("usb 1-1: new device", OOM):
        os.write(end, record(text).encode())
        log.read()
    assert log.read() == [OOM]
    os.write(end, record(XID).encode())
    assert log.read() == [OOM, XID]
    log.close()
    assert log.read() == [OOM, XID]
    os.close(end)


def test_what_was_before_the_run_does_not_count(tmp_path: Path) -> None:
    path, end = feed(tmp_path)
    log = KernelLog(time.time(), path)
    os.write(end, record(OOM, seconds_ago=60).encode())
    assert log.read() == []
    os.write(end, b"nonsense")
    assert log.read() == []
    log.close()
    os.close(end)


def test_a_victim_of_another_run_does_not_count(tmp_path: Path) -> None:
    path, end = feed(tmp_path)
    log = KernelLog(time.time() - 10, path)
    log._same_numbers = True  # as on the host itself
    os.write(end, record(OOM).encode())
    assert log.read() == [OOM]  # nothing is known of the run
    os.write(end, record(XID).encode())
    assert log.read({7, 8}) == [OOM, XID]
    assert log.read({8}) == [XID]
    log._same_numbers = False  # in a container the kernel's numbers are not ours
    assert log.read({8}) == [OOM, XID]
    log.close()
    os.close(end)


def test_an_error_that_somebody_else_made_on_a_gpu_does_not_count(tmp_path: Path) -> None:
    path, end = feed(tmp_path)
    log = KernelLog(time.time() - 10, path)
    log._same_numbers = True
    of_one = "NVRM: Xid (PCI:0000:3b:00): 94, pid=4242, name=python3, Ch 00000008"
    of_nobody = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
    os.write(end, record(of_one).encode())
    assert log.read({4242}) == [of_one]
    os.write(end, record(of_nobody).encode())
    assert log.read({4242}) == [of_one, of_nobody]
    assert log.read({1}) == [of_nobody]
    log.close()
    os.close(end)


def test_a_kernel_log_that_may_not_be_read(tmp_path: Path) -> None:
    assert KernelLog(0, str(tmp_path / "none")).read() == []
