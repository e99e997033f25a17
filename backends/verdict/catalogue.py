"""The catalogue of signatures: what log lines and evidence can mean. `signatures.toml` holds all of them.

To add one, add a table there; whatever is wrong with it is said with its id when the catalogue is loaded.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Collection, Iterator
from importlib import resources
from typing import Any, Literal

import msgspec

from backends.errors import OurBug
from backends.verdict.startup import PHASES

FILE = "signatures.toml"
PLACES = ("launch", *PHASES)  # "launch": before the first phase

Kind = Literal["crash", "hang", "degraded", "slow", "watch", "benign"]
Need = Literal[
    "silent",  # the log is silent for longer than its phase allows
    "works",  # compilers run, a bar moves or bytes are read
    "compiler",  # compilers below the server use CPU
    "no_compiler",
    "bar_moves",  # the log's progress bar counts up
    "reads_move",  # bytes are read from files
    "reads_flat",
    "writes_files",  # a rank wrote files a moment ago
    "weights_missing",  # not all weights are loaded yet
    "memory_grows",  # the ranks' memory grows
    "ranks_busy",  # a rank uses most of a core
    "ranks_idle",  # every rank uses hardly any CPU
    "cpu_idle",  # no process of the server uses CPU
    "main_busy",  # the launcher uses most of a core
    "computes",  # ranks or GPUs work, as far as is known
    "host_busy",  # the server gets half of the CPU that it wants, or less
    "rank_stopped",  # state T
    "rank_disk_sleep",  # state D, all the time
    "rank_behind",  # the log of one rank is behind that of the others
    "ranks_apart",  # their stacks, read since the silence began, differ
    "gpus_spin",  # every GPU busy with the power of an idle one
    "one_gpu_idle",  # all but one busy
    "health_fails",  # /health does not answer 200 though the server was ready
    "queue_stuck",  # requests wait and none runs
    "throttled",  # by heat or power supply
    "pcie_narrow",
    "xid",
    "log_only",  # nothing but the log is known
    "rank_gone",  # a process of the server is a zombie, or no longer there
    "port_foreign",  # another process listens on the server's port
    "tap_failed",  # tap.json says that it is not in, and why
    "tap_missing",  # the log says ready, and there is no tap.json
]


class CatalogueError(OurBug):
    """An entry of the catalogue that is wrong; the text names it."""


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a line holds: `text`, and where given the regular expression `pattern` too."""

    text: str
    pattern: str | None = None

    def found_in(self, message: str) -> bool:
        """Whether a log line, without its prefix, is one of these."""
        return self.text in message and (self.pattern is None or _compiled(self.pattern).search(message) is not None)


class Signature(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry; what its fields mean stands at the top of signatures.toml."""

    id: str
    kind: Kind
    lines: list[str | Line] = []
    needs: list[Need] = []
    phases: list[str] = []
    traceback: bool = False
    last_line: bool = False
    generic: bool = False
    root: bool = False
    frames: list[str] = []
    examples: list[str] = []
    evidence: str = ""
    cause: str
    remedy: str = ""
    source: list[str]

    @property
    def patterns(self) -> list[Line]:
        """`lines`, each as a Line."""
        return [Line(line) if isinstance(line, str) else line for line in self.lines]

    def in_phase(self, phase: str | None) -> bool:
        """Whether it holds in a start-up phase; None is before the first."""
        return not self.phases or (phase or "launch") in self.phases

    def stands_in(self, functions: Collection[str]) -> bool:
        """Whether a stack of these functions is one of its."""
        return any(frame in function for frame in self.frames for function in functions)


class Catalogue:
    """All signatures, in the order of the file; of several that hold the first one speaks."""

    def __init__(self, signatures: list[Signature]) -> None:
        self.signatures = signatures
        self.by_id = {signature.id: signature for signature in signatures}
        benign = [one for one in signatures if one.kind == "benign"]
        self._benign = [line for one in benign for line in one.patterns]
        self._benign_traceback = [line for one in benign if one.traceback for line in one.patterns]
        telling = [one for one in signatures if one.kind != "benign" and one.lines]
        self._telling = sorted(((one, one.patterns) for one in telling), key=lambda pair: pair[0].generic)
        self.needles = tuple(dict.fromkeys(line.text for _, lines in self._telling for line in lines))
        """Texts of which every line that matters holds one."""

    def benign(self, message: str) -> bool:
        """Whether a line, without its prefix, never means anything."""
        return any(line.found_in(message) for line in self._benign)

    def benign_behind(self, message: str) -> bool:
        """Whether what follows this line without a prefix, such as its traceback, never means anything either."""
        return any(line.found_in(message) for line in self._benign_traceback)

    def of_line(self, message: str, phase: str | None) -> Iterator[Signature]:
        """The signatures of a line without its prefix, which was written in that phase; specific ones first."""
        if self.benign(message):
            return
        for signature, lines in self._telling:
            if signature.in_phase(phase) and any(line.found_in(message) for line in lines):
                yield signature

    def of_crash(self, message: str, phase: str | None) -> Signature | None:
        """What a line means that ended the server."""
        return next((one for one in self.of_line(message, phase) if one.kind == "crash"), None)

    def of_stack(self, functions: Collection[str]) -> Signature | None:
        """What a process does whose main thread stands in these functions."""
        return next((one for one in self.signatures if one.stands_in(functions)), None)


def load(text: str) -> Catalogue:
    """Read a catalogue, and check every entry of it. Raises CatalogueError."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise CatalogueError(f"{FILE}: {error}") from error
    return Catalogue([_signature(name, table) for name, table in tables.items()])


@functools.cache
def catalogue() -> Catalogue:
    """The catalogue that travels with the code."""
    return load(resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8"))


def _signature(name: str, table: Any) -> Signature:
    try:
        signature = msgspec.convert({**table, "id": name}, Signature)
    except (TypeError, msgspec.ValidationError) as error:
        raise CatalogueError(f"{FILE}: {name}: {error}") from error
    if fault := _fault(signature):
        raise CatalogueError(f"{FILE}: {name}: {fault}")
    return signature


def _fault(one: Signature) -> str | None:
    """What is wrong with an entry that has the right fields."""
    for line in one.patterns:
        if not line.text:
            return "a line without text would be looked for everywhere"
        try:
            re.compile(line.pattern or "")
        except re.error as error:
            return f"the pattern {line.pattern!r}: {error}"
        if not any(line.found_in(example) for example in one.examples):
            return f"no example shows the line {line.pattern or line.text!r}"
    for example in one.examples:
        if not any(line.found_in(example) for line in one.patterns):
            return f"it does not match its example {example!r}"
    if unknown := set(one.phases) - set(PLACES):
        return f"no phase is called {', '.join(sorted(unknown))}; there are {', '.join(PLACES)}"
    if one.kind == "watch":
        if one.lines or one.needs or one.frames:
            return "what the watch of a run sees is decided by its rule in alarms.py alone"
    elif not (one.lines or one.needs or one.frames):
        return "it has neither lines nor needs nor frames, so it never holds"
    if not one.source:
        return "its source is missing"
    if one.kind != "benign" and not (one.cause and one.remedy and one.evidence):
        return "cause, remedy and evidence must be said"
    if one.traceback and one.kind != "benign":
        return "only what follows a benign line can be benign too"
    if one.root and (one.generic or one.kind != "crash"):
        return "only what says why a server ended can be the root of it"
    if one.kind == "hang" and not one.needs:
        return "a hang is never told by lines alone; it needs evidence"
    return None


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
