"""Copying a dataset, or chosen samples of it, from a host to this machine.

    TARGET/pull.json                  what this folder is a copy of; there from the first moment on
           .lock                      held by whoever writes here
           tokens/ids.bin, mask.bin   as on the host, with holes where the samples are not wanted
           <format>/…                 the samples' files; one that is not whole yet ends in .part
           ledger.sqlite              the samples that are here, and no others; comes last, with manifest.json

A file gets its name only once it is whole and its checksum is the one that the host's ledger has. What is here already
is not fetched again, so the same command goes on with what an earlier one left.

`target.py` is the folder here, `source.py` the host; `wanted.py` knows which samples, `tokens.py` and `files.py` bring
them, `progress.py` counts what came.
"""

from __future__ import annotations

import errno
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from backends.datasets import LAST, Described, Range
from backends.errors import UsageError
from backends.host import Host
from capture.dumps.dump import write_json
from console.pull.files import Files
from console.pull.progress import Meter, Progress
from console.pull.source import Source
from console.pull.target import SCHEMA, claim, locked, make, require_ours
from console.pull.tokens import Tokens
from console.pull.wanted import Failure, Wanted, merged

__all__ = ["Failure", "Outcome", "Progress", "parse_samples", "pull"]


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
    return merged(found)


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
        require_ours(target, described)
        made = make(target)
        with locked(target):
            claim(target, described)
            wanted = Wanted(source, described, target)
            try:
                meter = Meter(source, show)
                tokens = Tokens(source, described, target, wanted)
                beside = [file for made in described.manifest.finished.values() for file in made.files]
                for file in beside:
                    wanted.require_inside(file)
                # Of some samples alone no trainer's own list could be right.
                files = Files(source, described, target, wanted, meter, beside if chosen is None else ())
                wanted.choose(chosen, meter)
                files.check()
                _require_space(target, files.missing_bytes() + tokens.missing_bytes())
                made = False  # from here on there is something to go on with
                tokens.fetch(meter)
                files.fetch()
                return _finish(source, described, target, wanted, whole=chosen is None)
            finally:
                wanted.db.close()
    except (OSError, sqlite3.DatabaseError) as error:
        full = getattr(error, "errno", None) == errno.ENOSPC
        hint = "; free some space, the same command goes on" if full else ""
        raise UsageError(f"{target}: {error}{hint}") from error
    finally:
        if made:
            shutil.rmtree(target, ignore_errors=True)


def _require_space(target: Path, needed: int) -> None:
    free = shutil.disk_usage(target).free
    if needed > free:
        raise UsageError(
            f"{target} has {free:,} bytes free, {needed:,} are still to be fetched; free some space, "
            "or choose fewer with --samples"
        )


def _finish(source: Source, described: Described, target: Path, wanted: Wanted, *, whole: bool) -> Outcome:
    """Put ledger and manifest in their places; what failed is not in them."""
    failed = {failure.path for failure in wanted.failures}
    finished = {
        name: made
        for name, made in described.manifest.finished.items()
        if whole and not any(file.path in failed for file in made.files)
    }
    skipped = wanted.here()
    samples, files, size = wanted.keep_what_came()
    counts = {"pending": 0, "sent": 0, "written": samples, "failed": 0}
    write_json(
        target / "manifest.json",
        msgspec.structs.replace(described.manifest, counts=counts, finished=finished),
        durable=True,
    )
    return Outcome(
        schema=SCHEMA,
        dataset=described.path,
        target=str(target),
        samples=samples,
        files=files,
        bytes=size,
        fetched_bytes=source.fetched,
        skipped_files=skipped,
        failed=wanted.failures,
    )
