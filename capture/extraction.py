"""What an extraction is asked for, and how far it is."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from capture.dataset.ledger import Ledger
from capture.dumps.verify import Failure
from capture.rows.tokenise import RowOptions
from capture.server import Server

Tell = Callable[..., None]
"""Takes an event, and its facts by name."""


class Source(msgspec.Struct, frozen=True):
    """A server, and its lock for drawing."""

    server: Server
    lock: str


class ExtractJob(msgspec.Struct, frozen=True, kw_only=True):
    """What an extraction is asked for; paths are the host's.

    `lock` is the server's lock for drawing, `beside` are more servers, of the same model and layers.
    """

    server: Server
    lock: str
    beside: list[Source] = []
    rows: str
    output: str
    formats: list[str]
    options: RowOptions
    layertap: str
    allow_volatile: bool = False

    @property
    def sources(self) -> list[Source]:
        """Every server that is drawn from."""
        return [Source(self.server, self.lock), *self.beside]


class Progress(msgspec.Struct, kw_only=True):
    """progress.json of an extraction. Rates are over the last ten seconds; None where unknown.

    `rows` were read and tokenised by this run, 0 where that was done by an earlier one. `written_by` counts what this
    run wrote by the server that it was drawn from.
    """

    schema: int = 1
    phase: str
    output: str
    rows: int = 0
    samples: int = 0
    pending: int = 0
    sent: int = 0
    captured: int = 0
    written: int = 0
    written_by: dict[str, int] = {}
    failed: int = 0
    not_finite: int = 0
    bad_rows: int = 0
    overlong_rows: int = 0
    tokens: int = 0
    tokens_written: int = 0
    longest: int = 0
    tokens_per_second: float | None = None
    bytes_written: int = 0
    eta_seconds: float | None = None
    seconds: float = 0.0
    failures: list[Failure] = []

    def count(self, ledger: Ledger) -> None:
        """Take over what a ledger holds; nothing is under way."""
        counts = ledger.counts()
        self.samples = sum(counts.values())
        self.pending, self.written = counts["pending"] + counts["sent"], counts["written"]
        self.failed, self.sent, self.captured = counts["failed"], 0, 0
        self.bad_rows, self.overlong_rows = len(ledger.unused("bad")), len(ledger.unused("overlong"))
        self.tokens, self.tokens_written = ledger.total(), ledger.total("written")
        self.bytes_written = ledger.bytes_written()
