"""What a tuning run came to, as it is shown, and as a profile of layertap.toml."""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

from backends.errors import UsageError
from backends.sglang import COMMAND_LINE, Overrides, Profile, holds_secret, load_profiles


def given(model: str | None, layers: dict[str, Any], overrides: Overrides) -> dict[str, Any]:
    """What was said beside the profile, without secrets: what the profile that comes of it says as well."""
    said = {"args": overrides.args, "env": overrides.env, "tap": overrides.tap}
    shown = {
        kind: {name: one for name, one in values.items() if not holds_secret(name, one)}
        for kind, values in said.items()
    }
    return {"model": model, "layers": layers, **shown}


def shown(result: dict[str, Any], name: str) -> dict[str, Any]:
    """The result of a tuning run with its trials best first, and the profile called `name` that it makes, if any."""
    trials = [{**one, "share_of_ceiling": _share(one)} for one in result["trials"]]
    trials.sort(key=lambda one: -(one["tokens_per_second"] or 0.0))
    text = profile_toml(result, name) if result["changes"] else None
    return {**result, "trials": trials, "profile_toml": text, "written": None}


def _share(trial: dict[str, Any]) -> float | None:
    speed, ceiling = trial["tokens_per_second"], trial["ceiling"]
    return round(speed / ceiling, 4) if speed and ceiling else None


def refuse_taken(name: str, profiles: dict[str, Profile]) -> None:
    """Raise UsageError where there is a profile of that name, or where it is none."""
    if re.fullmatch(r"[\w-]+", name, re.ASCII) is None:
        raise UsageError(f"{name!r} is no name for a profile: take letters, digits, - and _")
    if name in profiles:
        raise UsageError(f"there is a profile {name} already; say another name with --name")


def write(path: Path, name: str, text: str) -> None:
    """Add a profile to layertap.toml. Raises UsageError where it has one of that name, or cannot be written."""
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        refuse_taken(name, load_profiles(tomllib.loads(before).get("profile", {})))
        after = f"{before.rstrip()}\n\n{text}".lstrip()
        load_profiles(tomllib.loads(after)["profile"])
        place = path.resolve()  # it may be a link to where its owner keeps it
        place.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(prefix=f".{place.name}.", dir=place.parent)
        with open(handle, "w", encoding="utf-8") as file:
            file.write(after)
        if place.exists():
            os.chmod(scratch, place.stat().st_mode & 0o777)
        os.replace(scratch, place)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path}: {error}; the profile was not written") from error


def profile_toml(result: dict[str, Any], name: str) -> str:
    """The `[profile.NAME]` that extends the one that was tuned by what made it faster."""
    said, day = result["given"], time.strftime("%Y-%m-%d", time.localtime(result["at"]))
    best = next(one for one in result["trials"] if one["name"] == result["best"])
    speed = f"{best['tokens_per_second']:,.0f}"
    if best["ceiling"]:
        speed = f"{speed} of {best['ceiling']:,.0f} tokens/s that the bus lets through"
    else:
        speed = f"{speed} tokens/s"
    summary = f"{result['profile']}, tuned on {day}: {speed}"
    lines = [f"[profile.{name}]", f"extends = {_toml(result['profile'])}", f"summary = {_toml(summary)}"]
    if said["model"]:
        lines.append(f"model = {_toml(said['model'])}")
    if said["layers"]:
        lines.append(f"layers = {_toml(said['layers'])}")
    if match := _match(result["situation"]):
        lines.append(f"match = {_toml(match)}")
    for kind in ("args", "env", "tap"):
        settings = {key: {"value": value, "why": f"{COMMAND_LINE} of tune"} for key, value in said[kind].items()}
        settings |= {
            one["name"]: {"value": one["value"], "why": _why(one, day)}
            for one in result["changes"]
            if one["kind"] == kind
        }
        if settings:
            lines += ["", f"[profile.{name}.{kind}]"]
            lines += [f"{_key(key)} = {_toml(setting)}" for key, setting in settings.items()]
    return "\n".join(lines) + "\n"


def _why(change: dict[str, Any], day: str) -> str:
    without = f", {change['before']:,.0f} without it" if change["before"] else ""
    return f"measured by tune on {day}: {change['after']:,.0f} tokens/s{without}"


def _match(found: dict[str, Any]) -> dict[str, Any]:
    """What the tuned profile is for: hosts and models like the one it was tuned on."""
    if not found["gpus"]:
        return {}
    known = {name: found[name] for name in ("cc", "nvlink") if found[name] is not None}
    if found["vram_gib"]:
        known["vram_gib_min"] = math.floor(found["vram_gib"])
    if found["architecture"]:
        known["architectures"] = [found["architecture"]]
    return known


def _key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else json.dumps(name)


def _toml(value: Any) -> str:
    """A value as TOML; strings, numbers and lists are as in JSON."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(key)} = {_toml(one)}" for key, one in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
