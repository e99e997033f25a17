"""What a person says to launch a server, made into what the session takes, and shown before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from backends.errors import UsageError
from backends.sglang import Launch, Line, masked
from capture.layers import LayerChoice


def pairs(words: list[str], option: str) -> dict[str, Any]:
    """`NAME=VALUE` words; a bare NAME is a flag that is on, NAME=unset takes one away."""
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name:
            raise UsageError(f"{option} {word!r}: expected NAME=VALUE")
        found[name] = {"true": True, "false": False}.get(value, value) if equals else True
    return found


def layer_choice(given: dict[str, Any], of_profile: dict[str, Any] | None) -> LayerChoice:
    """The layers that were said, else those of the profile. Raises UsageError; no default is guessed."""
    chosen = given or of_profile
    if not chosen:
        raise UsageError("say which layers: --boundaries, --outputs, --eagle-ids or --draft; no profile guesses them")
    try:
        return LayerChoice(**chosen)
    except ValueError as error:
        raise UsageError(str(error)) from error


def shown(merged: Launch, layers: str) -> dict[str, Any]:
    """A merged launch as it is shown, secrets masked; args and env as (name, value, why)."""
    return {
        "schema": 1,
        "profile": merged.profile,
        "sglang": merged.version,
        "model": merged.model,
        "layers": layers,
        "args": [_shown_line(line) for line in merged.args],
        "env": [_shown_line(line) for line in merged.env],
    }


def _shown_line(line: Line) -> list[Any]:
    value = line.value if line.value is True else masked(line.name, line.value)
    return [line.name, value, f"{line.why} [{line.source}]".lstrip()]


def flags(argv: Sequence[str]) -> dict[str, str]:
    """The flags of an argv with their values, "" for one that has none."""
    found: dict[str, str] = {}
    name = ""
    for word in argv:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            found[name] = value
        elif name:
            found[name] = f"{found[name]} {word}".strip()
    return found


def differences(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """What another launch would change: `+ --flag value`, `- --flag value`, `~ --flag old -> new`."""
    old, new = flags(before), flags(after)
    lines = [f"+ {name} {new[name]}".rstrip() for name in new if name not in old]
    lines += [f"- {name} {old[name]}".rstrip() for name in old if name not in new]
    lines += [f"~ {name} {old[name]} -> {new[name]}" for name in new if name in old and old[name] != new[name]]
    return lines
