"""Reading a server's log once, for both who follow it: the start-up phases and the catalogue of signatures."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from backends.verdict.catalogue import Catalogue, Signature, catalogue
from backends.verdict.startup import ANSI, PREFIX, Startup, moment

BATCH = re.compile(r"(?:Prefill|Decode) batch.*?#running-req: (?P<running>\d+).*?#queue-req: (?P<queue>\d+)")


class Hit(msgspec.Struct):
    """Where a signature's lines stand: number, text and time (epoch seconds) of the first, number and time of the last.

    `count` is how many there are.
    """

    id: str
    line: int
    text: str
    at: float | None
    last: int
    last_at: float | None
    count: int = 1


class Batch(msgspec.Struct):
    """What the newest batch line says: requests that run and wait, and when that was (epoch seconds)."""

    running: int
    queue: int
    at: float | None


class LogReader:
    """Takes a log from its first line on; `startup` holds the phases, `hits` the signatures seen, by id."""

    def __init__(self, signatures: Catalogue | None = None) -> None:
        self.startup = Startup()
        self.hits: dict[str, Hit] = {}
        self.batch: Batch | None = None
        self._catalogue = signatures or catalogue()
        self._head = ""  # the newest line with a prefix: what has none belongs to it

    def feed(self, text: str) -> None:
        """Take the next part, cut as `Startup.feed` wants it. A long log is only searched, not taken apart."""
        if "\x1b" in text:
            text = ANSI.sub("", text)
        done = 0
        for start, end in self._telling(text):
            self.startup.feed(text[done:end])
            self._look_at(text, start, end)
            done = end
        self.startup.feed(text[done:])
        self._head = _head(text, len(text)) or self._head
        self._find_batch(text)

    def last_line(self, one: Signature) -> bool:
        """Whether one of its lines is the newest of the log."""
        hit = self.hits.get(one.id)
        return hit is not None and hit.last >= self.startup.lines

    def _telling(self, text: str) -> Iterator[tuple[int, int]]:
        """Where the lines begin and end that hold a needle, in their order; bars count as lines."""
        starts: dict[int, int] = {}
        for needle in self._catalogue.needles:
            place = text.find(needle)
            while place != -1:
                start = max(text.rfind("\n", 0, place), text.rfind("\r", 0, place)) + 1
                ends = [end for end in (text.find("\n", place), text.find("\r", place)) if end != -1]
                starts[start] = end = min(ends, default=len(text))
                place = text.find(needle, end)
        return ((start, starts[start]) for start in sorted(starts))

    def _look_at(self, text: str, start: int, end: int) -> None:
        line = text[start:end]
        prefix = PREFIX.match(line)
        message = line[prefix.end() :] if prefix else line
        if prefix is None and self._catalogue.benign_behind(_head(text, start) or self._head):
            return
        startup = self.startup
        phase = startup.current.id if startup.current else None
        stamp, number = startup.last_stamp, startup.lines + 1  # its newline comes with the next part
        for signature in self._catalogue.of_line(message, phase):
            hit = self.hits.get(signature.id)
            if hit is None:
                self.hits[signature.id] = Hit(signature.id, number, line.strip(), stamp, number, stamp)
            else:
                hit.last, hit.last_at, hit.count = number, stamp, hit.count + 1

    def _find_batch(self, text: str) -> None:
        place = max(text.rfind("Prefill batch"), text.rfind("Decode batch"))
        found = BATCH.match(text, place) if place != -1 else None
        if found is not None:
            # Its own time: more recent lines may stand behind it, and come from who asks for /health.
            prefix = PREFIX.match(text, max(text.rfind("\n", 0, place), text.rfind("\r", 0, place)) + 1)
            at = moment(prefix["stamp"]) if prefix else self.startup.last_stamp
            self.batch = Batch(int(found["running"]), int(found["queue"]), at)


def _head(text: str, place: int) -> str:
    """The last line with a prefix before a place, without it; empty where there is none."""
    while place > 0:
        place = text.rfind("[", 0, place)
        if place == -1:
            return ""
        prefix = PREFIX.match(text, place) if place == 0 or text[place - 1] in "\n\r" else None
        if prefix is not None:
            end = text.find("\n", prefix.end())
            return text[prefix.end() : end if end != -1 else len(text)]
    return ""
