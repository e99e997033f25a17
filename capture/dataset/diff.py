"""Do two datasets hold the same? Sample by sample, found by content and not by number, state by state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from capture.dataset import formats
from capture.dataset.ledger import Ledger, WrittenFile
from capture.dataset.manifest import Manifest, differences, read_manifest
from capture.dataset.verify import Reader, first_other_row
from capture.dumps.verify import THREADS, Deviation, VerificationError, parting
from capture.in_order import in_order

SHOWN = 200
"""How many differences are listed; all of them are counted."""


class Difference(msgspec.Struct, frozen=True):
    """A sample that is not the same in both; its number in each, None where it is not there."""

    a: int | None
    b: int | None
    what: str


class StateDiff(msgspec.Struct):
    """One state over all samples that were compared: in how many it differs, and how far rows are off."""

    samples: int = 0
    different: int = 0
    deviation: Deviation = msgspec.field(default_factory=Deviation)


class Diff(msgspec.Struct, kw_only=True):
    """What differs between the datasets `a` and `b`.

    `samples` of each are those that are written: `equal`, `different` (found in both), `only_a` and `only_b`. They were
    read in the formats of `read`. `settings` tells in words what the manifests differ in. `states` goes by what is
    compared ("boundary 3", "final", "last"); `not_compared` are those that one of them does not hold.
    """

    schema: int = 1
    a: str
    b: str
    read: list[str]
    settings: list[str]
    samples: list[int]
    equal: int = 0
    different: int = 0
    only_a: int = 0
    only_b: int = 0
    differences: list[Difference] = []
    states: dict[str, StateDiff] = {}
    not_compared: list[str] = []
    same: bool = True


class _Pair(msgspec.Struct):
    """A sample in both datasets, with its files; the masks differ where the keys do."""

    a: int
    b: int
    files: tuple[WrittenFile, WrittenFile]
    ids: list[int]
    masks: tuple[list[int], list[int]]


class _Compared(msgspec.Struct):
    what: list[str] = []
    states: dict[str, StateDiff] = {}


def diff(a: Path, b: Path, progress: Callable[[int, int], None] | None = None) -> Diff:
    """Compare two datasets. `progress` gets the samples done and all. Raises ManifestError or LedgerError."""
    manifests = read_manifest(a), read_manifest(b)
    read = _formats_to_read(*manifests)
    with Ledger(a, read_only=True) as ledger_a, Ledger(b, read_only=True) as ledger_b:
        numbers, alone_a, alone_b = _matched(ledger_a, ledger_b)
        made = Diff(
            a=str(a),
            b=str(b),
            read=list(read),
            settings=differences(manifests[0].settings, _without_formats(manifests)),
            samples=[len(numbers) + len(alone_a), len(numbers) + len(alone_b)],
            only_a=len(alone_a),
            only_b=len(alone_b),
            not_compared=_not_compared(manifests, read),
        )
        made.differences += [Difference(number, None, "only in the first") for number in alone_a]
        made.differences += [Difference(None, number, "only in the second") for number in alone_b]
        comparer = _Comparer((a, b), manifests)
        pairs = _pairs(numbers, (ledger_a, ledger_b), read)
        for done, (pair, found) in enumerate(in_order(THREADS, comparer.compare, pairs), start=1):
            if found.what:
                made.different += 1
                made.differences.append(Difference(pair.a, pair.b, "; ".join(found.what)))
            else:
                made.equal += 1
            for name, seen in found.states.items():
                whole = made.states.setdefault(name, StateDiff())
                whole.samples, whole.different = whole.samples + 1, whole.different + seen.different
                whole.deviation.include(seen.deviation)
            if progress:
                progress(done, len(numbers))
    same_layers = manifests[0].settings.layers.boundaries == manifests[1].settings.layers.boundaries
    made.same = same_layers and not (made.different or made.only_a or made.only_b)
    made.differences = made.differences[:SHOWN]
    return made


def _without_formats(manifests: tuple[Manifest, Manifest]) -> Any:
    """The second's settings with the first's formats: in which ones they are kept is no difference in content."""
    return msgspec.structs.replace(manifests[1].settings, formats=manifests[0].settings.formats)


def _formats_to_read(a: Manifest, b: Manifest) -> tuple[str, str]:
    """Native where both have it, else one that both have, else the one of each that is nearest to it."""

    def nearest(name: str) -> tuple[bool, bool, str]:
        return formats.find(name).lossy, name != "native", name

    if common := sorted(set(a.formats) & set(b.formats), key=nearest):
        return common[0], common[0]
    return min(a.formats, key=nearest), min(b.formats, key=nearest)


def _labels(manifest: Manifest, name: str) -> dict[str, str]:
    """What the states of a format mean, by their names: aux states by their boundaries."""
    boundaries = manifest.settings.layers.boundaries
    return {
        state: f"boundary {boundaries[int(state[4:])]}" if state.startswith("aux_") else state
        for state in formats.find(name).holds(len(boundaries))
    }


def _not_compared(manifests: tuple[Manifest, Manifest], read: tuple[str, str]) -> list[str]:
    held = [list(_labels(manifest, name).values()) for manifest, name in zip(manifests, read, strict=True)]
    return [label for label in dict.fromkeys([*held[0], *held[1]]) if not (label in held[0] and label in held[1])]


def _matched(a: Ledger, b: Ledger) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    """Pairs of numbers, and the numbers of those that are in one alone.

    By key; where no key is the same, by token ids, so that a sample with another loss mask is told as that.
    """
    in_a = {(key, occurrence): number for number, key, occurrence in a.written_keys()}
    in_b = {(key, occurrence): number for number, key, occurrence in b.written_keys()}
    pairs = [(number, in_b.pop(place)) for place, number in in_a.items() if place in in_b]
    paired = {number for number, _ in pairs}
    left = defaultdict[bytes, list[int]](list)
    for number in in_b.values():
        left[_ids(b, number)].append(number)
    alone_a = []
    for number in in_a.values():
        if number in paired:
            continue
        if others := left.get(_ids(a, number)):
            pairs.append((number, others.pop(0)))
        else:
            alone_a.append(number)
    return sorted(pairs), alone_a, sorted(number for others in left.values() for number in others)


def _ids(ledger: Ledger, number: int) -> bytes:
    import xxhash

    return xxhash.xxh3_128_digest(msgspec.json.encode(ledger.tokens(ledger.sample(number))[0]))


def _pairs(numbers: list[tuple[int, int]], ledgers: tuple[Ledger, Ledger], read: tuple[str, str]) -> Iterator[_Pair]:
    for pair in numbers:
        files, masks, ids = [], [], list[int]()
        for number, ledger, name in zip(pair, ledgers, read, strict=True):
            here = {file.format: file for file in ledger.files(number)}
            files.append(here.get(name) or WrittenFile(name, "", 0, ""))
            ids, mask = ledger.tokens(ledger.sample(number))
            masks.append(mask)
        yield _Pair(*pair, (files[0], files[1]), ids, (masks[0], masks[1]))


class _Comparer:
    """Compares a sample of one dataset with its counterpart."""

    def __init__(self, folders: tuple[Path, Path], manifests: tuple[Manifest, Manifest]) -> None:
        self.manifests = manifests
        self.readers = [Reader(folder, manifest) for folder, manifest in zip(folders, manifests, strict=True)]

    def compare(self, pair: _Pair) -> _Compared:
        """What differs."""
        found, held = _Compared(), []
        if pair.masks[0] != pair.masks[1]:
            found.what.append(f"loss_mask differs{parting(*pair.masks).replace('expected', 'in the second')}")
        for which, reader, manifest, file, mask in zip(
            ("first", "second"), self.readers, self.manifests, pair.files, pair.masks, strict=True
        ):
            try:
                if not file.path:
                    raise VerificationError(f"the ledger knows no file of it in {file.format}")
                states, labels = reader.states(file, pair.ids, mask), _labels(manifest, file.format)
            except VerificationError as error:
                found.what.append(f"in the {which} it cannot be read: {error}")
            else:
                held.append({labels[name]: state for name, state in states.items()})
        if len(held) == 2:
            self._compare_states(held[0], held[1], found)
        return found

    @staticmethod
    def _compare_states(a: dict[str, Any], b: dict[str, Any], found: _Compared) -> None:
        for label in a.keys() & b.keys():
            seen = found.states[label] = StateDiff()
            if a[label].shape != b[label].shape or a[label].dtype != b[label].dtype:
                seen.different = 1
                kinds = [f"{list(one[label].shape)} of {str(one[label].dtype)[6:]}" for one in (a, b)]
                found.what.append(f"{label} is {kinds[0]}, in the second {kinds[1]}")
                continue
            row = first_other_row(a[label], b[label])
            seen.deviation.add(a[label], b[label])
            if row is not None:
                seen.different = 1
                off = seen.deviation.largest
                found.what.append(f"{label} differs, first in row {row}, a row by at most {off:.2%} of its norm")
        found.what.sort()
