"""Copying a dataset, or chosen samples of it, from a host to this machine.

    TARGET/pull.json                  what this folder is a copy of; there from the first moment on
           .lock                      held by whoever writes here
           tokens/ids.bin, mask.bin   as on the host, with holes where the samples are not wanted
           <format>/…                 the samples' files; one that is not whole yet ends in .part
           ledger.sqlite              the samples that are here, and no others; comes last, with manifest.json

A file gets its name only once it is whole and its checksum is the one that the host's ledger has. What is here already
is not fetched again, so the same command goes on with what an earlier one left.
"""

from __future__ import annotations

import errno
import fcntl
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import msgspec

from backends.datasets import LAST, Described, Range, WrittenSample
from backends.errors import ConnectionFailed, Locked, UsageError
from backends.host import Host
from capture.dump import write_json
from capture.formats import sync
from capture.ledger import TABLES, WrittenFile, token_key
from capture.manifest import Manifest, differences

SCHEMA = 1
CHUNK = 4 << 20  # bytes asked for at a time
AT_ONCE = 4  # files under way
BATCH = 64  # files handed out at a time
STRETCH = 1 << 20  # tokens read at a time
SHOWN_SECONDS = 0.5
TOKEN_FILES = (("ids.bin", 4), ("mask.bin", 1))  # name, bytes a token
PART = ".part"

T = TypeVar("T")


class Refused(Exception):
    """A file that cannot be had as it was recorded; the sentence says why."""


class Failure(msgspec.Struct, frozen=True):
    """A file that was not copied; its sample is then not in the local ledger."""

    sample: int
    path: str
    reason: str


class Outcome(msgspec.Struct):
    """What is in `target` now, and what had to be fetched for it; sizes in bytes, of the samples' files alone.

    `fetched_bytes` is what came over the link, tokens and second attempts too. `skipped_files` were here already.
    """

    schema: int
    dataset: str
    target: str
    samples: int
    files: int
    bytes: int
    fetched_bytes: int
    skipped_files: int
    failed: list[Failure]


class Progress(msgspec.Struct):
    """How far a pull is. `phase`: listing, checking, tokens, files. `link` says what the link is, unless it is live."""

    phase: str
    files_done: int = 0
    files: int = 0
    bytes_done: int = 0
    bytes: int = 0
    bytes_per_second: float | None = None
    link: str | None = None


class Claim(msgspec.Struct):
    """pull.json: whose copy a folder is."""

    schema: int
    dataset: str
    manifest: Manifest


def parse_samples(text: str) -> list[Range]:
    """`3,7,10-20` as ranges, ascending and apart from each other. Raises UsageError."""
    found: list[Range] = []
    for word in text.split(","):
        first, dash, last = word.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)):
            raise UsageError(f"--samples {text!r}: expected numbers and ranges, such as 3,7,10-20")
        found.append((int(first), int(last) if dash else int(first)))
        if found[-1][0] > found[-1][1] or found[-1][1] > LAST:
            raise UsageError(f"--samples {text!r}: {word.strip()} is no range of sample numbers")
    return _merged(found)


def pull(
    host: Host,
    dataset: str,
    target: Path,
    chosen: Sequence[Range] | None = None,
    show: Callable[[Progress], None] = lambda progress: None,
) -> Outcome:
    """Copy a dataset of a host into the folder `target`, which becomes a dataset itself.

    With `chosen`, only those samples, beside what `target` has of them already. Survives links that break for as long
    as `host` is dialled again. Raises UsageError where the dataset, the target or the disk does not allow it, Locked,
    ConnectionFailed. KeyboardInterrupt leaves what was fetched to the next call.
    """
    source = Source(host)
    described = msgspec.convert(source.request("dataset", path=dataset), Described)
    target = target.absolute()
    made = False
    try:
        _require_ours(target, described)
        made = _make(target)
        with _locked(target):
            write_json(target / "pull.json", Claim(SCHEMA, described.path, described.manifest), durable=True)
            copy = Copy(source, described, target, show)
            try:
                copy.list_wanted(chosen)
                copy.require_space()
                made = False  # from here on there is something to go on with
                copy.fetch_tokens()
                copy.fetch_files()
                return copy.finish()
            finally:
                copy.db.close()
    except (OSError, sqlite3.DatabaseError) as error:
        full = getattr(error, "errno", None) == errno.ENOSPC
        hint = "; free some space, the same command goes on" if full else ""
        raise UsageError(f"{target}: {error}{hint}") from error
    finally:
        if made:
            shutil.rmtree(target, ignore_errors=True)


class Source:
    """The host's side: whatever is asked waits for as long as a broken link is dialled again."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.fetched = 0  # bytes
        self.stopped = threading.Event()
        self.lock = threading.Lock()

    def request(self, method: str, **parameters: Any) -> Any:
        """Ask the agent. Raises what it met, ConnectionFailed once the link is over for good."""
        return self._patiently(lambda: self.host.request(method, **parameters))

    def read(self, path: str, offset: int, most: int) -> tuple[int, bytes]:
        """The size of a file in bytes, and up to `most` bytes of it. Raises Refused where it cannot be read."""
        try:
            head, data = self._patiently(lambda: self.host.read(path, offset, most))
        except UsageError as error:
            raise Refused(str(error)) from error
        with self.lock:
            self.fetched += len(data)
        return head["size"], data

    def _patiently(self, ask: Callable[[], T]) -> T:
        while True:
            if self.stopped.is_set():
                raise Refused("stopped")
            try:
                return ask()
            except ConnectionFailed:
                if self.host.ended.is_set():
                    raise


class Copy:
    """One copy under way. `db` is the ledger that will come of it."""

    def __init__(self, source: Source, described: Described, target: Path, show: Callable[[Progress], None]) -> None:
        self.source, self.described, self.target, self._show = source, described, target, show
        self.failures: list[Failure] = []
        self._progress = Progress("listing")
        self._began, self._before = time.monotonic(), 0  # when the files were begun, and the bytes fetched by then
        self._part = target / f"ledger.sqlite{PART}"
        for leftover in (self._part, target / f"ledger.sqlite{PART}-journal"):
            leftover.unlink(missing_ok=True)
        self.db = sqlite3.connect(self._part, isolation_level=None)
        self.db.executescript(f"{TABLES} CREATE TEMP TABLE here (sample, format, PRIMARY KEY (sample, format));")

    # --- What is wanted, and whether there is room for it ---

    def list_wanted(self, chosen: Sequence[Range] | None) -> None:
        """Write down the samples to copy with their files. Raises UsageError where one that is chosen is missing."""
        ranges = None if chosen is None else _merged([*chosen, *self._copied()])
        after = -1
        self.db.execute("BEGIN")
        while page := self._page(after, ranges):
            for sample in page:
                self._write_down(sample)
            after = page[-1].number
            self.show("listing")
        self.db.execute("COMMIT")
        if chosen is not None:
            self._require_all(chosen)
        if after < 0:
            raise UsageError(f"{self.described.path} has no written sample yet")

    def require_space(self) -> None:
        """See which files are here already, and raise UsageError where the others do not fit on the disk."""
        self._progress.files, self._progress.bytes = self.db.execute(
            "SELECT count(*), sum(bytes) FROM files"
        ).fetchone()
        for sample, file in self._files():
            if self._is_here(file):
                self.db.execute("INSERT INTO here VALUES (?,?)", (sample, file.format))
                self._done(file)
                self.show("checking")
        needed = sum(file.bytes - _size(self._local(file, PART)) for _, file in self._files(missing=True))
        needed += self._missing_tokens()
        free = shutil.disk_usage(self.target).free
        if needed > free:
            raise UsageError(
                f"{self.target} has {free:,} bytes free, {needed:,} are still to be fetched; free some space, "
                "or choose fewer with --samples"
            )

    def _copied(self) -> list[Range]:
        """The samples that an earlier pull brought here."""
        path = self.target / "ledger.sqlite"
        if not path.exists():
            return []
        earlier = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
        try:
            return [(number, number) for (number,) in earlier.execute("SELECT sample FROM samples")]
        finally:
            earlier.close()

    def _page(self, after: int, ranges: list[Range] | None) -> list[WrittenSample]:
        found = self.source.request("dataset_samples", path=self.described.path, after=after, ranges=ranges)
        return msgspec.convert(found, list[WrittenSample])

    def _write_down(self, sample: WrittenSample) -> None:
        self.db.execute(
            "INSERT INTO samples VALUES (?,?,?,?,?,?,?,'written',?,NULL)",
            (
                sample.number,
                sample.key,
                sample.occurrence,
                sample.file,
                sample.line,
                sample.start,
                sample.tokens,
                sample.attempts,
            ),
        )
        for file in sample.files:
            self._require_inside(file)
            row = sample.number, file.format, file.path, file.bytes, file.xxh3
            self.db.execute("INSERT INTO files VALUES (?,?,?,?,?)", row)

    def _require_inside(self, file: WrittenFile) -> None:
        parts = PurePosixPath(file.path).parts
        if len(parts) < 2 or parts[0] in ("/", "tokens") or ".." in parts:
            raise UsageError(f"the ledger of {self.described.path} names a file outside the dataset: {file.path!r}")

    def _require_all(self, chosen: Sequence[Range]) -> None:
        for first, last in chosen:
            found = self.db.execute("SELECT sample FROM samples WHERE sample BETWEEN ? AND ? ORDER BY 1", (first, last))
            next_one = first
            for (number,) in found:
                if number != next_one:
                    break
                next_one += 1
            if next_one <= last:
                raise UsageError(
                    f"sample {next_one} is not written in {self.described.path}, which has {self.described.written:,} "
                    "that are; choose others"
                )

    def _is_here(self, file: WrittenFile) -> bool:
        local = self._local(file)
        return _size(local) == file.bytes and local.is_file() and _xxh3(local) == file.xxh3

    def _missing_tokens(self) -> int:
        """Bytes of tokens that are not here yet."""
        finals = self._token_files()
        missing = (stretch for stretch in self._stretches() if self._tokens_here(stretch, finals) is None)
        return sum(stretch.tokens for stretch in missing) * sum(size for _, size in TOKEN_FILES)

    # --- Tokens ---

    def fetch_tokens(self) -> None:
        """Bring the tokens of the samples here, each checked against the sample's key."""
        finals, parts = self._token_files(), self._token_files(PART)
        if all(self._tokens_here(stretch, finals) is not None for stretch in self._stretches()):
            return
        finals[0].parent.mkdir(exist_ok=True)
        for part in parts:
            part.touch()
        for stretch in self._stretches():
            if self._tokens_here(stretch, parts) is None:
                self._write_tokens(stretch, parts, self._tokens_here(stretch, finals) or self._fetched_tokens(stretch))
            self.show("tokens")
        for part, final in zip(parts, finals, strict=True):
            _put(part, final)

    def _write_tokens(self, stretch: Stretch, parts: list[Path], data: list[bytes]) -> None:
        for part, block, (_, size) in zip(parts, data, TOKEN_FILES, strict=True):
            with part.open("r+b") as file:
                file.seek(stretch.start * size)
                file.write(block)

    def _token_files(self, suffix: str = "") -> list[Path]:
        return [self.target / "tokens" / f"{name}{suffix}" for name, _ in TOKEN_FILES]

    def _tokens_here(self, stretch: Stretch, files: list[Path]) -> list[bytes] | None:
        """The tokens of a stretch out of local files; None unless they are all there and right."""
        data = []
        for path, (_, size) in zip(files, TOKEN_FILES, strict=True):
            if not path.exists():
                return None
            with path.open("rb") as file:
                file.seek(stretch.start * size)
                data.append(file.read(stretch.tokens * size))
        return None if stretch.wrong(data) else data

    def _fetched_tokens(self, stretch: Stretch) -> list[bytes]:
        """The tokens of a stretch from the host; a sample whose tokens are wrong twice has failed."""
        for last in (False, True):
            try:
                data = [
                    self._token_block(name, stretch.start * size, stretch.tokens * size) for name, size in TOKEN_FILES
                ]
                wrong, reason = stretch.wrong(data), "its tokens are not those that its key was made of"
            except Refused as error:
                data, wrong, reason = [b"", b""], [number for number, *_ in stretch.samples], str(error)
            if last or not wrong:
                break
        self.failures += [Failure(number, "tokens", reason) for number in wrong]
        return data

    def _token_block(self, name: str, offset: int, size: int) -> bytes:
        path, block = f"{self.described.path}/tokens/{name}", b""
        while len(block) < size:
            _, data = self.source.read(path, offset + len(block), min(CHUNK, size - len(block)))
            if not data:
                raise Refused(f"{path} is shorter than the ledger says")
            block += data
        return block

    def _stretches(self) -> Iterator[Stretch]:
        """The samples in the order of their tokens, those that adjoin together."""
        stretch = Stretch()
        for row in self.db.execute("SELECT sample, key, start, tokens FROM samples ORDER BY start").fetchall():
            if stretch.samples and (row[2] != stretch.end or stretch.tokens >= STRETCH):
                yield stretch
                stretch = Stretch()
            stretch.samples.append(row)
        if stretch.samples:
            yield stretch

    # --- Files ---

    def fetch_files(self) -> None:
        """Bring the files here, some at a time; one that cannot be had is a failure and stops no other."""
        self._began, self._before = time.monotonic(), self.source.fetched
        pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="layertap-pull")
        try:
            for batch in _batches(self._files(missing=True), BATCH):
                begun = [pool.submit(self._fetch, *wanted) for wanted in batch]
                while wait(begun, SHOWN_SECONDS).not_done:
                    self.show("files")
                self.failures += [failure for future in begun if (failure := future.result())]
                self.show("files")
        finally:
            self.source.stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, sample: int, file: WrittenFile) -> Failure | None:
        """Bring one file here; what is wrong is fetched once more."""
        part, final = self._local(file, PART), self._local(file)
        final.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(2):
            try:
                self._fill(part, file)
            except Refused as error:
                if not self.source.stopped.is_set():
                    part.unlink()
                return Failure(sample, file.path, str(error))
            if _xxh3(part) == file.xxh3:
                _put(part, final)
                self._done(file)
                return None
            part.unlink()
        return Failure(sample, file.path, "its checksum is not the one that was recorded when it was written")

    def _fill(self, part: Path, file: WrittenFile) -> None:
        """Fetch what a .part lacks. Raises Refused where the host's file is not of the size that was recorded."""
        remote = f"{self.described.path}/{file.path}"
        if _size(part) > file.bytes:
            part.unlink()
        with part.open("ab") as out:
            while (offset := out.tell()) < file.bytes:
                size, data = self.source.read(remote, offset, min(CHUNK, file.bytes - offset))
                if size != file.bytes or not data:
                    raise Refused(f"it has {size:,} bytes on the host, {file.bytes:,} were written")
                out.write(data)
                out.flush()

    def _files(self, *, missing: bool = False) -> Iterator[tuple[int, WrittenFile]]:
        """The files by sample; only those that are not here, if asked."""
        where = "WHERE (sample, format) NOT IN (SELECT sample, format FROM here)" if missing else ""
        for sample, *row in self.db.execute(f"SELECT * FROM files {where} ORDER BY sample, format"):
            yield sample, WrittenFile(*row)

    def _local(self, file: WrittenFile, suffix: str = "") -> Path:
        return self.target / f"{file.path}{suffix}"

    # --- The end ---

    def finish(self) -> Outcome:
        """Put ledger and manifest in their places; what failed is not in them."""
        for failure in self.failures:
            for table in ("samples", "files"):
                self.db.execute(f"DELETE FROM {table} WHERE sample = ?", (failure.sample,))
        (samples,) = self.db.execute("SELECT count(*) FROM samples").fetchone()
        files, size = self.db.execute("SELECT count(*), coalesce(sum(bytes), 0) FROM files").fetchone()
        (skipped,) = self.db.execute("SELECT count(*) FROM here").fetchone()
        self.db.close()
        _put(self._part, self.target / "ledger.sqlite")
        counts = {"pending": 0, "sent": 0, "written": samples, "failed": 0}
        write_json(
            self.target / "manifest.json", msgspec.structs.replace(self.described.manifest, counts=counts), durable=True
        )
        return Outcome(
            schema=SCHEMA,
            dataset=self.described.path,
            target=str(self.target),
            samples=samples,
            files=files,
            bytes=size,
            fetched_bytes=self.source.fetched,
            skipped_files=skipped,
            failed=self.failures,
        )

    def show(self, phase: str) -> None:
        """Show how far it is."""
        now, link = self._progress, self.source.host.state
        now.phase, now.link = phase, None if link.state == "live" else link.state
        if phase == "files":
            seconds = time.monotonic() - self._began
            now.bytes_per_second = (self.source.fetched - self._before) / seconds if seconds > 0 else None
        self._show(now)

    def _done(self, file: WrittenFile) -> None:
        with self.source.lock:
            self._progress.files_done += 1
            self._progress.bytes_done += file.bytes


class Stretch:
    """Samples whose tokens adjoin: number, key, start and length in tokens of each."""

    def __init__(self) -> None:
        self.samples: list[tuple[int, str, int, int]] = []

    @property
    def start(self) -> int:
        """Its first token's place."""
        return self.samples[0][2]

    @property
    def end(self) -> int:
        """The place behind its last token."""
        return self.samples[-1][2] + self.samples[-1][3]

    @property
    def tokens(self) -> int:
        """How many there are."""
        return self.end - self.start

    def wrong(self, data: list[bytes]) -> list[int]:
        """The samples that ids and mask do not fit."""
        found, (ids, mask) = [], data
        for number, key, start, tokens in self.samples:
            at, end = start - self.start, start - self.start + tokens
            if token_key(ids[4 * at : 4 * end], mask[at:end]) != key:
                found.append(number)
        return found


def _make(target: Path) -> bool:
    """Make a folder unless it is there; returns whether it was made. Raises OSError."""
    try:
        target.mkdir(parents=True)
    except FileExistsError:
        return False
    return True


def _require_ours(target: Path, described: Described) -> None:
    """Raise UsageError unless `target` is empty, or an earlier pull of the same dataset."""
    there = {entry.name for entry in target.iterdir()} if target.exists() else set()
    if there <= {".lock"}:
        return
    claim = _read(target / "pull.json", Claim)
    earlier = claim.manifest if claim else _read(target / "manifest.json", Manifest)
    if earlier is None:
        raise UsageError(f"{target} is not empty and holds no dataset; pull into a new folder")
    differ = differences(earlier.settings, described.manifest.settings)
    if earlier.created != described.manifest.created and not differ:
        differ = [f"it was begun at another time, from {earlier.input}"]
    if differ:
        raise UsageError(f"{target} holds another dataset: {'; '.join(differ)}. Pull into a new folder")
    if claim is None:
        raise UsageError(f"{target} is this dataset itself, or a copy that `pull` did not make; pull into a new folder")


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path}: {error}; pull into a new folder") from error


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Be the only one that writes to `target`. Raises Locked."""
    with (target / ".lock").open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Locked(f"something else writes to {target}; wait for it, or pull into another folder") from None
        yield


def _put(part: Path, final: Path) -> None:
    """Give a whole file its name, so that it outlives a power cut."""
    sync(part)
    part.replace(final)
    sync(final.parent)


def _xxh3(path: Path) -> str:
    import xxhash

    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _size(path: Path) -> int:
    """Bytes of a file, 0 where there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _merged(ranges: Iterable[Range]) -> list[Range]:
    merged: list[Range] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return merged


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    batch: list[T] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
