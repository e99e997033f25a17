"""What a trainer wants beside the samples' files, written once they are there."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from capture.dataset import formats
from capture.dataset.ledger import Ledger
from capture.dataset.manifest import Finished, Manifest


def finish(
    output: Path,
    manifest: Manifest,
    ledger: Ledger,
    names: Iterable[str],
    vocabulary: formats.DraftVocabulary | None = None,
) -> None:
    """Write it for the formats `names` where the samples have changed, and note it in `manifest`.

    A drafter's `vocabulary` that was asked for once is made anew with the rest. Raises LedgerError where a format
    cannot take these samples, OSError.
    """
    for name in names:
        written, made = ledger.written_in(name), manifest.finished.get(name)
        wanted = vocabulary or (made.vocabulary if made else None)
        if not written or not (formats.find(name).finishes or wanted):
            continue
        if made and made.vocabulary == wanted and is_finished(output, manifest, ledger, name):
            continue
        manifest.finished[name] = Finished(written, formats.finish(name, output, ledger.all_tokens, wanted), wanted)


def is_finished(output: Path, manifest: Manifest, ledger: Ledger, name: str) -> bool:
    """Whether what lies beside the samples' files is there, and was made of the samples that are written now."""
    made = manifest.finished.get(name)
    if made is None or made.samples != ledger.written_in(name):
        return False
    try:
        return all((output / file.path).stat().st_size == file.bytes for file in made.files)
    except OSError:
        return False
