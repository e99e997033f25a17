"""What a person says to launch a server, made into what the session takes, and shown before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from backends.errors import UsageError
from backends.sglang import Launch, Line, candidates, masked
from capture.layers import LayerChoice

if TYPE_CHECKING:
    from console.session import Session

TAP_DEFAULTS = {
    "memory": "a quarter of what is available, for states that were not fetched yet [default]",
    "writers": "three quarters of the cores that the ranks leave [default]",
}


def pairs(words: list[str], option: str) -> dict[str, Any]:
    """`NAME=VALUE` words; a bare NAME is a flag that is on, NAME=unset takes one away. Raises UsageError."""
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name:
            raise UsageError(f"{option} {word!r}: expected NAME=VALUE")
        found[name] = {"true": True, "false": False}.get(value, value) if equals else True
    return found


def variables(words: list[str], option: str) -> dict[str, Any]:
    """`NAME=VALUE` words of an environment, whose values are texts; NAME=unset takes one away. Raises UsageError."""
    for word in words:
        if word.find("=") < 1:
            raise UsageError(f"{option} {word!r}: expected NAME=VALUE")
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def layer_choice(given: dict[str, Any], of_profile: dict[str, Any] | None) -> LayerChoice:
    """The layers that were said, else those of the profile. Raises UsageError; no default is guessed."""
    chosen = given or of_profile
    if not chosen:
        raise UsageError("say which layers: --boundaries, --outputs, --eagle-ids or --draft; no profile guesses them")
    try:
        return LayerChoice(**chosen)
    except ValueError as error:
        raise UsageError(str(error)) from error


def tap_options(memory: str | None, writers: int | None) -> dict[str, Any]:
    """The tap's settings that were said."""
    return {name: value for name, value in (("memory", memory), ("writers", writers)) if value is not None}


def suitable(session: Session, model: str | None) -> dict[str, Any]:
    """The profiles, those that suit the host and the model first, each with in what it differs.

    Raises UsageError where the model is not there: then nobody knows what suits it.
    """
    if model is not None:
        session.check_model(model)
    found = session.situation(model)
    listed = candidates(session.profiles, session.hello["sglang"], found)
    return {"schema": 1, "situation": msgspec.to_builtins(found), "profiles": msgspec.to_builtins(listed)}


def shown(merged: Launch, layers: str, differs: list[str] | None = None) -> dict[str, Any]:
    """A merged launch as it is shown, secrets masked; args, env and tap as (name, value, why).

    `differs` is in what the host and the model are not what the profile is for, None where nobody looked. A setting of
    the tap that nobody has made has the value None.
    """
    tap = {line.name: _shown_line(line) for line in merged.tap}
    return {
        "schema": 1,
        "profile": merged.profile,
        "sglang": merged.version,
        "model": merged.model,
        "layers": layers,
        "differs": differs,
        "tap": [tap.get(name, [name, None, why]) for name, why in TAP_DEFAULTS.items()],
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
