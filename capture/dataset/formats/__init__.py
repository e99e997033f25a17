"""Training formats: one module each; `FORMATS` is the list that everything else goes by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from capture.dataset.formats.base import Format
from capture.dataset.formats.files import checksum, put, sync
from capture.dataset.formats.modelopt import ModelOpt
from capture.dataset.formats.native import Native
from capture.dataset.formats.specforge import SpecForge
from capture.dataset.formats.speculators import Speculators, SpeculatorsFp8
from capture.dataset.formats.speculators_legacy import SpeculatorsLegacy
from capture.dataset.formats.vocabulary import DraftVocabulary, maps
from capture.dataset.ledger import Tokens, WrittenFile

__all__ = ["FORMATS", "DraftVocabulary", "Format", "UnknownFormat", "find", "finish", "sync", "write"]

FORMATS: dict[str, Format] = {
    chosen.name: chosen
    for chosen in (Native(), SpecForge(), Speculators(), SpeculatorsFp8(), SpeculatorsLegacy(), ModelOpt())
}


class UnknownFormat(Exception):
    """There is no format of that name; the sentence says which there are."""


def find(name: str) -> Format:
    """The format of that name. Raises UnknownFormat."""
    try:
        return FORMATS[name]
    except KeyError:
        raise UnknownFormat(f"no format is called {name!r}; there are {', '.join(FORMATS)}") from None


def write(name: str, output: Path, number: int, states: dict[str, Any], ids: Any, mask: Any) -> WrittenFile:
    """Write a sample in format `name`: whole and on disk under its name, or not there at all. Raises OSError."""
    chosen = find(name)
    relative = chosen.path(number)
    return WrittenFile(name, relative, *put(output / relative, chosen.encode(states, ids, mask)))


def finish(
    name: str, output: Path, rows: Callable[[], Iterator[Tokens]], vocabulary: DraftVocabulary | None = None
) -> list[WrittenFile]:
    """Write what a trainer wants of format `name` beside the samples' files; see `Format.finish`.

    Raises OSError, and LedgerError where `vocabulary` does not fit.
    """
    chosen = find(name)
    written = chosen.finish(output / name, rows)
    if vocabulary and chosen.takes_vocabulary:
        written += chosen.write_vocabulary(output / name, *maps(rows(), vocabulary))
    return [WrittenFile(name, str(path.relative_to(output)), *checksum(path)) for path in written]
