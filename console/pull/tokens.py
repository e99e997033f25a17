"""Pulling the tokens of samples, each checked against the sample's key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from backends.datasets import Described
from capture.dataset.ledger import token_key
from console.pull.progress import Meter
from console.pull.source import Refused, Source
from console.pull.target import PART, put
from console.pull.wanted import Failure, Wanted

STRETCH = 1 << 20  # tokens read at a time
TOKEN_FILES = (("ids.bin", 4), ("mask.bin", 1))  # name, bytes a token


class Tokens:
    """The tokens of the wanted samples."""

    def __init__(self, source: Source, described: Described, target: Path, wanted: Wanted) -> None:
        self._source, self._wanted = source, wanted
        self._remote, self._local = f"{described.path}/tokens", target / "tokens"

    def missing_bytes(self) -> int:
        """Bytes of tokens that are not here yet."""
        finals = self._files()
        missing = (stretch for stretch in self._stretches() if self._here(stretch, finals) is None)
        return sum(stretch.tokens for stretch in missing) * sum(size for _, size in TOKEN_FILES)

    def fetch(self, meter: Meter) -> None:
        """Bring them here; a sample whose tokens cannot be had right is a failure."""
        finals, parts = self._files(), self._files(PART)
        if all(self._here(stretch, finals) is not None for stretch in self._stretches()):
            return
        self._local.mkdir(exist_ok=True)
        for part in parts:
            part.touch()
        for stretch in self._stretches():
            if self._here(stretch, parts) is None:
                self._write(stretch, parts, self._here(stretch, finals) or self._fetched(stretch))
            meter.show("tokens")
        for part, final in zip(parts, finals, strict=True):
            put(part, final)

    def _write(self, stretch: Stretch, parts: list[Path], data: list[bytes]) -> None:
        for part, block, (_, size) in zip(parts, data, TOKEN_FILES, strict=True):
            with part.open("r+b") as file:
                file.seek(stretch.start * size)
                file.write(block)

    def _files(self, suffix: str = "") -> list[Path]:
        return [self._local / f"{name}{suffix}" for name, _ in TOKEN_FILES]

    def _here(self, stretch: Stretch, files: list[Path]) -> list[bytes] | None:
        """The tokens of a stretch out of local files; None unless they are all there and right."""
        data = []
        for path, (_, size) in zip(files, TOKEN_FILES, strict=True):
            if not path.exists():
                return None
            with path.open("rb") as file:
                file.seek(stretch.start * size)
                data.append(file.read(stretch.tokens * size))
        return None if stretch.wrong(data) else data

    def _fetched(self, stretch: Stretch) -> list[bytes]:
        """The tokens of a stretch from the host; a sample whose tokens are wrong twice has failed."""
        for last in (False, True):
            try:
                data = [self._block(name, stretch.start * size, stretch.tokens * size) for name, size in TOKEN_FILES]
                wrong, reason = stretch.wrong(data), "its tokens are not those that its key was made of"
            except Refused as error:
                data, wrong, reason = [b"", b""], [number for number, *_ in stretch.samples], str(error)
            if last or not wrong:
                break
        self._wanted.failures += [Failure(number, "tokens", reason) for number in wrong]
        return data

    def _block(self, name: str, offset: int, size: int) -> bytes:
        path, block = f"{self._remote}/{name}", b""
        while len(block) < size:
            _, data = self._source.read(path, offset + len(block), size - len(block))
            if not data:
                raise Refused(f"{path} is shorter than the ledger says")
            block += data
        return block

    def _stretches(self) -> Iterator[Stretch]:
        """The samples in the order of their tokens, those that adjoin together."""
        stretch = Stretch()
        for row in self._wanted.tokens():
            if stretch.samples and (row[2] != stretch.end or stretch.tokens >= STRETCH):
                yield stretch
                stretch = Stretch()
            stretch.samples.append(row)
        if stretch.samples:
            yield stretch


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
