"""Putting all questions at once, none of which may take the others along."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import msgspec

from backends.doctor import disks, gpus, leftovers, machine, network, pcie, software
from backends.doctor.report import GROUPS, Asked, Check, Place, Question, unknown
from backends.sample import Aside

SECONDS = 4.0  # that one question may take; all are put at once

QUESTIONS: dict[str, Question] = {
    **gpus.QUESTIONS,
    **pcie.QUESTIONS,
    **machine.QUESTIONS,
    **network.QUESTIONS,
    **disks.QUESTIONS,
    **software.QUESTIONS,
    **leftovers.QUESTIONS,
}


class Report(msgspec.Struct, kw_only=True):
    """All checks, by group. `arrived` and `answered` are this host's clock, in seconds since the epoch."""

    schema: int = 1
    arrived: float
    answered: float
    checks: list[Check]


class Doctor:
    """Asks everything, as often as one likes; one for each agent. A question that hangs is not put a second time."""

    def __init__(self, place: Place, questions: Mapping[str, Question] = QUESTIONS, seconds: float = SECONDS) -> None:
        self._place = place
        self._asides = {name: Aside(question, wait=seconds) for name, question in questions.items()}
        self._lock = threading.Lock()

    def examine(self, asked: Asked) -> list[Check]:
        """Every check's result, in the order of the groups. Never raises for what a check met."""
        with self._lock, ThreadPoolExecutor(max(1, len(self._asides))) as pool:
            found = list(pool.map(lambda name: self._ask(name, asked), self._asides))
        checks = [check for some in found for check in some]
        return sorted(checks, key=lambda check: GROUPS.index(check.group))

    def _ask(self, name: str, asked: Asked) -> list[Check]:
        aside = self._asides[name]
        try:
            answer = aside.ask(self._place, asked)
        except Exception as error:  # whatever a strange host makes a check meet, the others are told
            return [unknown(name, f"could not be looked at: {type(error).__name__}: {error}")]
        if answer is None:
            why = f"has not answered for {aside.silent():.0f} s"
            return [unknown(name, why, "ask again; if it stays so, whatever hangs here will hang a run too")]
        return answer if isinstance(answer, list) else [answer]
