"""What only a person knows on the way to a host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec


class Question(msgspec.Struct, frozen=True):
    """Whether a host key is the right one (the answer is "yes" or its fingerprint), a passphrase or a password."""

    kind: Literal["host_key", "passphrase", "password"]
    text: str
    fingerprint: str | None = None
    again: bool = False  # the last answer was wrong


Ask = Callable[[Question], str | None]  # None: no answer


def remembering(ask: Ask) -> Ask:
    """`ask` for a host that is dialled again: what was answered once is asked again only if it was wrong."""
    answers: dict[tuple[str, str], str] = {}

    def answer(question: Question) -> str | None:
        about = (question.kind, question.text)
        if question.again or about not in answers:
            answers.pop(about, None)
            given = ask(question)
            if given is None:
                return None
            answers[about] = given
        return answers[about]

    return answer
