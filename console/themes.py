"""Themes: those that come with the console, and the user's own, one a TOML file. A bad one is said, and left out."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

import msgspec
import platformdirs
from textual.color import Color, ColorParseError
from textual.theme import Theme

COLOURS = ("primary", "secondary", "warning", "error", "success", "accent", "foreground", "background", "surface",
           "panel", "boost")  # fmt: skip


class ThemeError(Exception):
    """A theme file that cannot be used; the sentence names the file and the key."""


def folder() -> Path:
    """Where the user's own themes lie."""
    return platformdirs.user_config_path("layertap") / "themes"


def load() -> tuple[list[Theme], list[str]]:
    """All themes, the user's after ours, and a sentence for each file that is none."""
    found, faults = [], []
    for place in (resources.files("themes"), folder()):
        if not place.is_dir():
            continue
        for file in sorted(place.iterdir(), key=lambda file: file.name):
            if not file.name.endswith(".toml"):
                continue
            try:
                found.append(read(file))
            except ThemeError as error:
                faults.append(str(error))
    return found, faults


def read(file: Traversable) -> Theme:
    """One theme; its name is the file's. Raises ThemeError."""
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
        unknown = sorted(set(table) - {field.name for field in fields(Theme)} | set(table) & {"name"})
        if unknown:
            raise ThemeError(f"{file}: unknown key {unknown[0]!r}")
        theme = msgspec.convert({"name": file.name.removesuffix(".toml"), **table}, Theme, strict=True)
        named = {key: table[key] for key in COLOURS if key in table} | theme.variables
        for key, value in named.items():
            if key.endswith("text-style"):
                continue
            try:
                Color.parse(value.partition(" ")[0])  # a variable may have an opacity behind it
            except ColorParseError:
                raise ThemeError(f"{file}: {key} = {value!r} is no colour") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ThemeError(f"{file}: {error}") from error
    return theme


def stamp() -> tuple[tuple[str, int, int], ...]:
    """Changes when a user's theme file does; sizes tell a file that was read while it was being written."""
    try:
        found = [(file.name, file.stat()) for file in folder().glob("*.toml")]
    except OSError:
        return ()
    return tuple(sorted((name, stat.st_mtime_ns, stat.st_size) for name, stat in found))
