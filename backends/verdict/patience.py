"""How patient verdicts and alarms are on this host: a factor on every threshold of theirs that is a time."""

from __future__ import annotations

import math
import os
from typing import Protocol, TypeVar

from backends.errors import UsageError

VARIABLE = "LAYERTAP_PATIENCE"

T = TypeVar("T", bound="Scaled")


class Scaled(Protocol):
    """Limits that can be made so many times as patient."""

    def scaled(self: T, factor: float) -> T:
        """The same, so many times as patient."""
        ...


def scaled(limits: T) -> T:
    """Limits as patient as the environment says. Raises UsageError."""
    text = os.environ.get(VARIABLE, "1")
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 0 < factor < math.inf:
        raise UsageError(f"{VARIABLE} is {text!r}; give a factor such as 2, or unset it")
    return limits.scaled(factor)
