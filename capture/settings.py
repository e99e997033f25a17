"""What a launch hands to the tap, and how requests of ours are named."""

from __future__ import annotations

import msgspec

from capture.layers import LayerChoice

SETTINGS_VARIABLE = "LAYERTAP_TAP"


class TapSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a launch hands to the tap, as JSON in `LAYERTAP_TAP`. `secret` begins the rid of every request of ours.

    `memory` is what arena and dumps may take together, in bytes (None: see `capture.memory`), `writers` the number of
    writer processes (None: see `capture.writers`), `reserve` what they leave free of the dump folder's file system.
    """

    dump_dir: str
    secret: str
    layers: LayerChoice
    memory: int | None = None
    writers: int | None = None
    reserve: int = 16 << 20


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
