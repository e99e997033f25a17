"""Pulling the files of samples, some at a time, each checked against its checksum."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

from backends.datasets import Described
from capture.dataset.ledger import WrittenFile
from console.pull.progress import Meter
from console.pull.source import Refused, Source
from console.pull.target import PART, put, size, xxh3
from console.pull.wanted import Failure, Wanted

AT_ONCE = 4  # files under way
BATCH = 64  # files handed out at a time
SHOWN_SECONDS = 0.5

T = TypeVar("T")


class Files:
    """The files of the wanted samples, and those that lie `beside` them."""

    def __init__(
        self,
        source: Source,
        described: Described,
        target: Path,
        wanted: Wanted,
        meter: Meter,
        beside: Sequence[WrittenFile] = (),
    ) -> None:
        self._source, self._wanted, self._meter = source, wanted, meter
        self._remote, self._target = described.path, target
        self._beside = beside

    def check(self) -> None:
        """See which files, and how much of the others, are here already."""
        files, size = self._wanted.size()
        self._meter.expect(files + len(self._beside), size + sum(file.bytes for file in self._beside))
        for sample, file in self._wanted.files():
            if self._is_here(file):
                self._wanted.mark_here(sample, file)
                self._meter.whole(file)
                self._meter.show("checking")
            else:
                self._meter.came(file, self._begun(file))

    def missing_bytes(self) -> int:
        """Bytes that are not here yet."""
        missing = [file for _, file in self._wanted.files(missing=True)]
        missing += [file for file in self._beside if not self._is_here(file)]
        return sum(file.bytes - self._begun(file) for file in missing)

    def fetch(self) -> None:
        """Bring them here, some at a time; one that cannot be had is a failure and stops no other."""
        self._meter.begin()
        for file in self._beside:
            self._fetch_beside(file)
        pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="layertap-pull")
        try:
            for batch in _batches(self._wanted.files(missing=True), BATCH):
                begun = [pool.submit(self._fetch, *wanted) for wanted in batch]
                while wait(begun, SHOWN_SECONDS).not_done:
                    self._meter.show("files")
                self._wanted.failures += [failure for future in begun if (failure := future.result())]
                self._meter.show("files")
        finally:
            self._source.stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def _fetch_beside(self, file: WrittenFile) -> None:
        if self._is_here(file):
            self._meter.whole(file)
        elif failure := self._fetch(None, file):
            self._wanted.failures.append(failure)
        self._meter.show("files")

    def _fetch(self, sample: int | None, file: WrittenFile) -> Failure | None:
        """Bring one file here; what is wrong is fetched once more."""
        part, final = self._local(file, PART), self._local(file)
        final.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(2):
            try:
                self._fill(part, file)
            except Refused as error:
                if not self._source.stopped.is_set():
                    part.unlink()
                return Failure(sample, file.path, str(error))
            if xxh3(part) == file.xxh3:
                put(part, final)
                self._meter.whole(file)
                return None
            part.unlink()
        return Failure(sample, file.path, "its checksum is not the one that was recorded when it was written")

    def _fill(self, part: Path, file: WrittenFile) -> None:
        """Fetch what a .part lacks. Raises Refused where the host's file is not of the size that was recorded."""
        remote = f"{self._remote}/{file.path}"
        if not self._begun(file):
            part.unlink(missing_ok=True)
        with part.open("ab") as out:
            while (offset := out.tell()) < file.bytes:
                there, data = self._source.read(remote, offset, file.bytes - offset)
                if there != file.bytes or not data:
                    raise Refused(f"it has {there:,} bytes on the host, {file.bytes:,} were written")
                out.write(data)
                out.flush()
                self._meter.came(file, out.tell())

    def _is_here(self, file: WrittenFile) -> bool:
        local = self._local(file)
        return size(local) == file.bytes and local.is_file() and xxh3(local) == file.xxh3

    def _begun(self, file: WrittenFile) -> int:
        """Bytes of a file that an earlier pull left; 0 where they are too many to be its."""
        found = size(self._local(file, PART))
        return found if found <= file.bytes else 0

    def _local(self, file: WrittenFile, suffix: str = "") -> Path:
        return self._target / f"{file.path}{suffix}"


def _batches(items: Iterable[T], most: int) -> Iterator[list[T]]:
    batch: list[T] = []
    for item in items:
        batch.append(item)
        if len(batch) == most:
            yield batch
            batch = []
    if batch:
        yield batch
