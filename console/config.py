"""layertap.toml: hosts, profiles and defaults, read into Structs; an unknown key is an error that names the file."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec

from backends.errors import UsageError


class HostConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[host.NAME]`; NAME is what `--host` takes.

    `ssh` is what one would say to `ssh`, NAME itself without it, and `ssh_config` a file for its `-F`; `python` is
    SGLang's Python there, `exec_prefix` what stands before it (`["docker", "exec", "-i", "sglang"]`), `dump_dir` where
    the dumps go (a folder on tmpfs).
    """

    ssh: str | None = None
    ssh_config: str | None = None
    python: str | None = None
    exec_prefix: list[str] = []
    dump_dir: str | None = None


class ExtractConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """`[extract]`: defaults of `layertap extract` and `layertap plan`."""

    format: list[str] = msgspec.field(default_factory=lambda: ["native"])
    max_length: int | None = None
    overlong: Literal["skip", "truncate"] = "skip"


class ConsoleConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[console]`: how the console looks, and which keys do what.

    `keymap` has other keys for commands by their ids (`"server.stop" = "ctrl+k"`); the help lists the ids' commands.
    """

    theme: str = "layertap-dark"
    animations: bool = True
    keymap: dict[str, str] = {}


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file. A profile's table is checked where profiles are merged."""

    host: dict[str, HostConfig] = {}
    profile: dict[str, dict[str, Any]] = {}
    extract: ExtractConfig = ExtractConfig()
    console: ConsoleConfig = ConsoleConfig()


def default_path() -> Path:
    """layertap.toml in the user's config folder."""
    import platformdirs

    return Path(platformdirs.user_config_path("layertap")) / "layertap.toml"


def load(path: Path | None) -> Config:
    """The config at `path`, else in the user's config folder; empty where there is none.

    Raises UsageError naming the file and the key that is wrong.
    """
    found = path or default_path()
    try:
        table = tomllib.loads(found.read_text(encoding="utf-8"))
        return msgspec.convert(table, Config)
    except FileNotFoundError:
        if path:
            raise UsageError(f"{found}: there is no such file") from None
        return Config()
    except OSError as error:
        raise UsageError(f"{found} cannot be read: {error.strerror}; give a file like layertap.toml") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{found}: {error}") from error
    except msgspec.ValidationError as error:
        raise UsageError(f"{found}: {_with_host(str(error), table)}{_suggestion(str(error))}") from error


def _with_host(error: str, table: dict[str, Any]) -> str:
    """The error with the name of the host that it is about, which msgspec does not tell."""
    for name, host in table["host"].items() if "`$.host[...]" in error else ():
        try:
            msgspec.convert(host, HostConfig)
        except msgspec.ValidationError:
            return error.replace("`$.host[...]", f"`$.host.{name}")
    return error


def _suggestion(error: str) -> str:
    """`did you mean`, for a key that nearly is one."""
    if "unknown field" not in error:
        return ""
    word = error.split("`")[1]
    kinds: dict[str, type[msgspec.Struct]] = {"host": HostConfig, "extract": ExtractConfig, "console": ConsoleConfig}
    kind = next((kind for table, kind in kinds.items() if f"`$.{table}" in error), Config)
    close = difflib.get_close_matches(word, kind.__struct_encode_fields__, 1)
    return f"; did you mean `{close[0]}`?" if close else ""
