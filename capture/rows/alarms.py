"""What is odd about rows that are good, or about a template: told before it costs any GPU time."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from capture.rows.chat import InputError
from capture.rows.tokenise import Outcome, Row, RowOptions, token_digest

SHOWN = 20
"""How many rows of a kind are named; all of them are counted."""


class Odd(msgspec.Struct, frozen=True):
    """A row with an alarm, and what was seen in it."""

    file: str
    line: int
    seen: str


class Alarm(msgspec.Struct):
    """One kind of oddity: how many rows have it, and the first of them. `fatal`: the masks would be wrong."""

    id: str
    fatal: bool
    what: str
    remedy: str
    count: int
    rows: list[Odd]


# What each alarm says and what to do, by its name and in the order in which they are shown. The first is fatal.
KINDS = {
    "ignores_roles": (
        "the chat template renders what the assistant says like what the user says",
        "give the model its own chat template, or say --allow-ignored-roles if it is a base model's",
    ),
    "mask_cut_off": ("all that is in the loss was cut off", "raise --max-length, or leave these rows out"),
    "zero_mask": ("nothing is in the loss", "leave these rows out: no trainer learns from them"),
    "unknown_role": (
        "a message's role is none that is known, and what it says is not in the loss",
        "correct it: a role is system, developer, user, assistant, tool, function or ipython",
    ),
    "empty_turn": (
        "a turn of the assistant's in the loss has no text",
        "leave the turn out: a drafter would learn to say nothing",
    ),
    "calls_left_out": (
        "the chat template does not render the assistant's tool calls",
        "give the model a chat template that does, or leave these rows out: the call is not in the loss",
    ),
    "bos_twice": (
        "the text begins with two BOS tokens",
        "take the BOS out of the rows or out of the template: serving sends one",
    ),
    "special_from_text": (
        "what somebody says holds the text of a special token, and becomes one",
        "take it out of the text unless it is meant",
    ),
    "duplicate": ("ids and mask were there before", "leave repeated rows out unless they are meant to count more"),
}
FATAL = "ignores_roles"


class Alarms:
    """Counts what is odd while rows go by; keeps 16 bytes a row, to know it again."""

    def __init__(self) -> None:
        self.found: dict[str, Alarm] = {}
        self._digests: set[bytes] = set()

    def add(self, row: Row) -> None:
        """Look at a good row."""
        for name, seen in row.alarms.items():
            self._count(name, row, seen)
        digest = token_digest(array("i", row.ids).tobytes(), bytes(row.mask))
        if digest in self._digests:
            self._count("duplicate", row, f"{len(row.ids):,} tokens")
        self._digests.add(digest)

    def _count(self, name: str, row: Row, seen: str) -> None:
        alarm = self.found.setdefault(name, Alarm(name, name == FATAL, *KINDS[name], 0, []))
        alarm.count += 1
        if len(alarm.rows) < SHOWN:
            alarm.rows.append(Odd(row.file, row.line, seen))

    def watch(self, rows: Iterable[Outcome], options: RowOptions) -> Iterator[Outcome]:
        """The rows as they are. Raises `InputError` at the first with a fatal alarm that `options` do not allow."""
        for row in rows:
            if isinstance(row, Row):
                self.add(row)
                if FATAL in row.alarms and not options.allow_ignored_roles:
                    what, remedy = KINDS[FATAL]
                    raise InputError(f"{row.file}:{row.line}: {what}; {remedy}")
            yield row

    def all(self) -> list[Alarm]:
        """What was found so far."""
        return [self.found[name] for name in KINDS if name in self.found]


def words(alarm: Any) -> str:
    """An alarm and its first row in one line."""
    first = alarm.rows[0]
    rows = "1 row" if alarm.count == 1 else f"{alarm.count:,} rows"
    return f"{rows}: {alarm.what} (first {first.file}:{first.line}, {first.seen}); {alarm.remedy}"
