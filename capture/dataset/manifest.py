"""manifest.json of a dataset: what it was drawn from, with which settings, and what became of it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from capture.dataset.formats.vocabulary import DraftVocabulary
from capture.dataset.ledger import WrittenFile
from capture.dumps.dump import write_json
from capture.layers import Layers
from capture.rows.alarms import Alarm

FORMAT = 1
STRETCH = 1 << 16  # bytes
SCRATCH = re.compile(r"\.manifest\.json\.\d+")  # what `write_json` leaves where it is killed
NORMS = {"final": "after the final norm", "last": "before the final norm"}


class ManifestError(Exception):
    """A folder that is no dataset, or was made with other settings; the sentence names what differs."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What must not change over the life of a dataset."""

    model: str
    model_config: str
    weights: str
    tokenizer: str
    chat_template: str
    layers: Layers
    hidden: int
    dtype: str
    max_length: int | None
    overlong: str
    last_turn_only: bool
    prompt_column: str | None = None
    response_column: str | None = None
    formats: list[str]


class Finished(msgspec.Struct, frozen=True):
    """What lies beside the samples' files of a format, and of how many samples it was made."""

    samples: int
    files: list[WrittenFile]
    vocabulary: DraftVocabulary | None = None


class Beside(msgspec.Struct):
    """A further server that samples were drawn from, as the manifest describes the first."""

    run: str
    profile: str
    server: dict[str, Any]
    probe: dict[str, Any] | None = None


class Drawn(msgspec.Struct, kw_only=True):
    """What samples were drawn from: a server, those `beside` it, and the GPU of each one's first rank."""

    sglang: str
    layertap: str
    profile: str
    server: dict[str, Any]
    beside: list[Beside] = []
    probe: dict[str, Any] | None = None
    gpus: list[str] = []


class Manifest(Drawn, kw_only=True):
    """manifest.json. Hashes are sha256 in hex. `norms` says for each state whether the final norm was applied.

    `earlier`: what was drawn from before, oldest first, where a run went on with another server. `limit`: how long a
    sample may be where no --max-length was said, which is what the first server took. `alarms`: what was odd about the
    rows when they were last read. `exported` are the formats that came later than the extraction; `source` is the
    dataset that this one was exported from, None for one that was drawn. `finished` goes by format.
    """

    format: int = FORMAT
    settings: Settings
    norms: dict[str, str]
    input: str
    input_hash: str
    limit: int | None = None
    earlier: list[Drawn] = []
    counts: dict[str, int] = {}
    alarms: list[Alarm] = []
    exported: list[str] = []
    finished: dict[str, Finished] = {}
    source: str | None = None
    created: float
    updated: float

    @property
    def formats(self) -> list[str]:
        """Every format that the dataset holds."""
        return sorted({*self.settings.formats, *self.exported})

    def draw_from(self, now: Drawn) -> None:
        """Name what the samples to come are drawn from; what others were drawn from is kept."""
        if self.probe and _runs(self) != _runs(now):
            self.earlier = [*self.earlier, Drawn(**described(self))]
        for name, value in described(now).items():
            setattr(self, name, value)


def _runs(drawn: Drawn) -> set[str]:
    """The servers' runs, the first one's as its probe names it."""
    return {*([drawn.probe["run"]] if drawn.probe else []), *(one.run for one in drawn.beside)}


def described(drawn: Drawn) -> dict[str, Any]:
    """What was drawn from, field by field."""
    return {name: getattr(drawn, name) for name in Drawn.__struct_fields__}


# What `Settings` fields are called when they differ; the layers are compared by their boundaries.
WORDS = {
    "model_config": "the model's config.json",
    "weights": "the model (its weights)",
    "tokenizer": "the tokenizer",
    "chat_template": "the chat template",
    "hidden": "the hidden size",
    "dtype": "the dtype of the states",
    "max_length": "--max-length",
    "overlong": "--overlong",
    "last_turn_only": "--last-turn-only",
    "prompt_column": "--prompt-column",
    "response_column": "--response-column",
    "formats": "--format",
}


def read_manifest(output: Path) -> Manifest:
    """The manifest of a dataset. Raises ManifestError where there is none or it cannot be read."""
    path = output / "manifest.json"
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        why = "it has no manifest.json" if output.is_dir() else "there is no such folder"
        raise ManifestError(f"{output} is no dataset: {why}") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise ManifestError(f"{path}: {error}") from error
    if manifest.format != FORMAT:
        raise ManifestError(f"{path} has format {manifest.format}, this version reads {FORMAT}")
    return manifest


def write_manifest(output: Path, manifest: Manifest) -> None:
    """Replace the manifest atomically."""
    write_json(output / "manifest.json", manifest, durable=True)


def differences(old: Settings, new: Settings) -> list[str]:
    """Every setting in which two datasets differ, in words."""
    differ = [
        f"{words} was {_short(getattr(old, name))}, now {_short(getattr(new, name))}"
        for name, words in WORDS.items()
        if getattr(old, name) != getattr(new, name)
    ]
    if old.layers.boundaries != new.layers.boundaries:
        differ.append(f"the layers were {old.layers.words()}, now {new.layers.words()}")
    return differ


def require_same(old: Settings, new: Settings, output: Path) -> None:
    """Raise ManifestError naming every setting in which a dataset differs from what is asked of it now."""
    if differ := differences(old, new):
        raise ManifestError(
            f"{output} was made with other settings: {'; '.join(differ)}. "
            "Ask for the same, or extract into a new folder"
        )


def take_folder(output: Path, allow_volatile: bool, say: Callable[[str], None]) -> None:
    """Make the folder of a dataset, or see that one is there. Raises ManifestError for a folder that cannot be one."""
    if output.exists() and not output.is_dir():
        raise ManifestError(f"{output} is a file; give a folder")
    if output.is_dir() and not os.access(output, os.R_OK | os.W_OK | os.X_OK):
        raise ManifestError(f"{output} is a folder that we may not write to; choose another one")
    there = [entry.name for entry in output.iterdir()] if output.is_dir() else []
    if "pull.json" in there:
        raise ManifestError(f"{output} is a copy that was pulled; write into the dataset that it came from")
    if "manifest.json" not in there and not all(name == ".lock" or SCRATCH.fullmatch(name) for name in there):
        raise ManifestError(f"{output} is not empty and holds no dataset; give a new or empty folder")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ManifestError(f"{output}: {error.strerror}") from error
    if volatile(output) and not allow_volatile:
        raise ManifestError(
            f"{output} lies in memory (tmpfs), a reboot would take it; choose a disk, or say --allow-volatile"
        )
    if on_network(output):
        say(f"warning: {output} lies on a network file system; its locks and fsync may mean less than a local disk's")


def hash_file(path: Path) -> str:
    """sha256 of a file, in hex. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_weights(model: Path) -> str:
    """Hash over name, size and three short stretches of each weight file: tells fine-tunes apart, reads no whole file.

    The folder's own path does not count, so that a model may move.
    """
    digest = hashlib.sha256()
    for path in sorted((*model.glob("*.safetensors"), *model.glob("*.bin"), *model.glob("*.index.json"))):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for start in (0, size // 2, max(0, size - STRETCH)):
                file.seek(start)
                digest.update(file.read(STRETCH))
    return digest.hexdigest()


def hash_tokenizer(tokenizer: Any) -> str:
    """Hash of what turns text into ids: the vocabulary with its merges, and the added tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        text = backend.to_str()
    else:
        text = json.dumps([sorted(tokenizer.get_vocab().items()), str(tokenizer.added_tokens_decoder)])
    return hashlib.sha256(text.encode()).hexdigest()


def hash_text(text: Any) -> str:
    """sha256 of a text or of anything that JSON holds."""
    return hashlib.sha256((text if isinstance(text, str) else json.dumps(text, sort_keys=True)).encode()).hexdigest()


def volatile(output: Path) -> bool:
    """Whether a folder lies on tmpfs, so that a reboot takes what is in it."""
    return _file_system(output) in ("tmpfs", "ramfs")


def on_network(output: Path) -> bool:
    """Whether a folder lies on a network file system, where locks and fsync may mean less."""
    return _file_system(output) in ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "lustre", "ceph", "9p", "glusterfs")


def _file_system(folder: Path) -> str:
    real = folder.resolve()
    best = "/", ""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, kind, *_ = line.split()
        point = point.replace("\\040", " ")
        if (real == Path(point) or Path(point) in real.parents) and len(point) >= len(best[0]):
            best = point, kind
    return best[1]


def _short(value: Any) -> str:
    text = ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
    return f"{text[:12]}…" if len(text) == 64 and os.sep not in text else text
