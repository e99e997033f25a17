"""What the kernel said about a run: the OOM killer's victims, GPUs that failed. Only where /dev/kmsg may be read."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Collection

from backends.verdict.catalogue import catalogue

KMSG = "/dev/kmsg"
RECORD = 8192  # bytes; the kernel gives one a read
KEPT = 10
EARLY = 5.0  # seconds; the two clocks differ a little
# A victim, or who made an error that is its own: a fault of the GPU names whoever was there, and meets all.
OWNER = re.compile(r"Killed process (\d+)|Xid \([^)]*\): (?:13|31|32|43|45|68|94), pid=([1-9]\d*)")
FIRST_NAMESPACE = 0xEFFFFFFC  # inode of the kernel's own pid namespace: elsewhere it counts processes otherwise


class KernelLog:
    """Follows the kernel's log since a moment; keeps the newest lines that the catalogue knows."""

    def __init__(self, since: float, path: str = KMSG) -> None:
        self._same_numbers = os.stat("/proc/self/ns/pid").st_ino == FIRST_NAMESPACE
        self._since = since - EARLY
        self._lines: list[str] = []
        self._file: int | None = None
        with contextlib.suppress(OSError):  # many hosts keep it from plain users, and containers have none
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def read(self, pids: Collection[int] = ()) -> list[str]:
        """The lines up to now; empty also where the log may not be read.

        `pids` are the processes that the run was ever seen to have: what happened to one that is none of them, or
        what it did, is another's.
        """
        boot = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
        while self._file is not None:
            try:
                record = os.read(self._file, RECORD).decode(errors="replace")
            except BlockingIOError:
                break
            except BrokenPipeError:  # records were overwritten before they were read
                continue
            except OSError:
                self.close()
                break
            if not record:
                break
            head, _, message = record.partition(";")
            fields = head.split(",")
            told = message.partition("\n")[0]
            young = len(fields) > 2 and fields[2].isdigit() and boot + int(fields[2]) / 1e6 >= self._since
            if young and catalogue().of_crash(told, None):
                self._lines = [*self._lines, told][-KEPT:]
        return [line for line in self._lines if not self._of_another(line, pids)]

    def _of_another(self, line: str, pids: Collection[int]) -> bool:
        owner = OWNER.search(line)
        return bool(owner and pids and self._same_numbers and int(owner[1] or owner[2]) not in pids)

    def close(self) -> None:
        """Let it go."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __del__(self) -> None:
        self.close()
