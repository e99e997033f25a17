"""What a launch hands to the tap, and how requests of ours are named."""

from __future__ import annotations

from pathlib import Path

import msgspec

from capture.layers import LayerChoice

SETTINGS_VARIABLE = "LAYERTAP_TAP"


def replica_folder(dump_dir: Path, replica: int) -> Path:
    """The folder of one replica's tap in the dump folder of a server that has several."""
    return dump_dir / f"replica_{replica}"


class TapSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a launch hands to the tap, as JSON in `LAYERTAP_TAP`. `secret` begins the rid of every request of ours.

    `memory` is what arena and dumps may take together, in bytes (None: see `memory.py`), `writers` the number of
    writer processes (None: see `writers.py`), `reserve` what they leave free of the dump folder's file system.
    `replica` is None but where a server has several (`--dp-size`): each has a tap and a folder of its own, and its
    share of the memory.
    """

    dump_dir: str
    secret: str
    layers: LayerChoice
    memory: int | None = None
    writers: int | None = None
    reserve: int = 16 << 20
    replica: int | None = None

    @property
    def folder(self) -> Path:
        """Where this tap's dumps, tap.json and arena lie."""
        return Path(self.dump_dir) if self.replica is None else replica_folder(Path(self.dump_dir), self.replica)


class Rid(msgspec.Struct, frozen=True):
    """A request id of ours: `<secret>.<extract>.<row>.<attempt>.<tokens>`."""

    secret: str
    extract: str
    row: int
    attempt: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.secret}.{self.extract}.{self.row}.{self.attempt}.{self.tokens}"

    @classmethod
    def parse(cls, text: str) -> Rid | None:
        """The parts of `text`, None where it is no rid of this form."""
        parts = text.split(".")
        if len(parts) != 5 or not all(part.isdecimal() for part in parts[2:]):
            return None
        return cls(parts[0], parts[1], int(parts[2]), int(parts[3]), int(parts[4]))
