"""A dataset made by hand, and a check of what a pull made of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from capture.dataset.ledger import Change, Ledger, WrittenFile
from capture.dataset.manifest import Manifest, Settings, read_manifest, write_manifest
from capture.layers import Layers
from capture.rows.tokenise import Row

SETTINGS = Settings(
    model="/models/tiny",
    model_config="ab" * 32,
    weights="89" * 32,
    tokenizer="cd" * 32,
    chat_template="ef" * 32,
    layers=Layers([3], [2], [3], [], "outputs 2"),
    hidden=8,
    dtype="bfloat16",
    max_length=None,
    overlong="skip",
    last_turn_only=False,
    formats=["native", "specforge"],
)


def make_dataset(place: Path, samples: int = 8, written: int | None = None, size: int = 5000, **known: Any) -> Path:
    """`samples` of which the first `written` are, two files of about `size` bytes each."""
    place.mkdir(parents=True)
    manifest = Manifest(
        settings=SETTINGS,
        norms={},
        input="rows.jsonl",
        input_hash="01" * 32,
        sglang="0.5.23",
        layertap="0.1.0",
        profile="fake",
        server={},
        created=1000.0,
        updated=1000.0,
    )
    write_manifest(place, msgspec.structs.replace(manifest, **known))
    with Ledger(place) as ledger:
        ledger.add(
            Row("rows.jsonl", i + 1, list(range(i, 3 * i + 5)), [i % 2] * (2 * i + 5), False) for i in range(samples)
        )
    write(place, range(samples if written is None else written), size)
    return place


def write(place: Path, numbers: range, size: int = 5000) -> None:
    """Write these samples, as an extraction does."""
    with Ledger(place) as ledger:
        ledger.settle(
            Change(i, "written", 1, files=[_file(place, i, name, size) for name in SETTINGS.formats]) for i in numbers
        )


def _file(place: Path, number: int, name: str, size: int) -> WrittenFile:
    path = place / name / "rows_0-2000" / f"{number}.bin"
    path.parent.mkdir(parents=True, exist_ok=True)
    data = os.urandom(size + number)
    path.write_bytes(data)
    return WrittenFile(name, str(path.relative_to(place)), len(data), xxhash.xxh3_64_hexdigest(data))


def require_copy(target: Path, source: Path, numbers: list[int]) -> None:
    """Check that `target` is a dataset of exactly these samples, each as in `source`, and that nothing is half there."""
    assert not list(target.rglob("*.part*"))
    assert read_manifest(target).settings == read_manifest(source).settings
    assert read_manifest(target).counts["written"] == len(numbers)
    with Ledger(target, read_only=True) as copy, Ledger(source, read_only=True) as original:
        assert [sample.number for sample in copy.samples()] == numbers
        for number in numbers:
            sample = copy.sample(number)
            assert sample == original.sample(number)
            assert copy.tokens(sample) == original.tokens(sample)
            assert copy.files(number) == original.files(number)
            for file in copy.files(number):
                assert (target / file.path).read_bytes() == (source / file.path).read_bytes()
