"""Profiles, and what they become on SGLang's command line: arguments and environment, by SGLang version.

Built-in profiles lie in `profiles.toml`; a user's own are the `[profile.NAME]` tables of layertap.toml. Every profile
but `base` extends another one, `base` unless it says otherwise.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import operator
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

import msgspec

from backends.errors import UsageError
from backends.ports import require_port
from backends.situation import Match, Situation
from capture.tap.memory import parse_bytes

Value = str | int | float | bool | list[Any] | dict[str, Any] | None
"""A setting's value. None, or "unset" in TOML, takes the setting away."""

OLDEST = "0.5.11"
UNSET = "unset"
MASK = "***"
USER_WHY = "layertap.toml"
COMMAND_LINE = "command line"

ALIASES = {
    "tp": "tp-size",
    "tensor-parallel-size": "tp-size",
    "dp": "dp-size",
    "data-parallel-size": "dp-size",
    "pp": "pp-size",
    "pipeline-parallel-size": "pp-size",
    "model": "model-path",
}

# Set by resolve() itself: argument -> where the user says it instead.
RESERVED = {"model-path": "--model, or model in the profile", "port": "--port"}

# CUDA graph flags from before 0.5.14: SGLang refuses to start on them from 0.5.20 on.
REMOVED_IN_0_5_20 = frozenset(
    {
        "disable-piecewise-cuda-graph",
        "enforce-piecewise-cuda-graph",
        "enable-breakable-cuda-graph",
        "piecewise-cuda-graph-max-tokens",
        "piecewise-cuda-graph-tokens",
        "piecewise-cuda-graph-compiler",
        "cuda-graph-max-bs",
        "cuda-graph-bs",
    }
)

LAYER_KEYS = ("boundaries", "outputs", "eagle_ids", "draft")

# The tap's own settings: each with how it is read.
TAP_KEYS: dict[str, Callable[[Any], int]] = {"memory": parse_bytes, "writers": int}


class ProfileError(UsageError):
    """A profile that cannot be read, or not used as asked; the sentence says which, why and what to do."""


class Setting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One argument or variable as a profile gives it, and the reason to show beside it."""

    value: Value = None
    why: str = ""


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings for one kind of model and machine, as written: what it extends is not merged in yet.

    `args_if` maps a version specification such as "<0.5.14" to arguments for those versions. `layers` has exactly one
    of boundaries, outputs, eagle_ids and draft. `tap` has the tap's own settings: memory ("48 GiB", or bytes) and
    writers. `match` says what it is made for. An `embedded` profile runs on the CPU engine that comes with Layertap.
    """

    name: str
    summary: str = ""
    extends: str | list[str] | None = None
    requires_sglang: str | None = None
    model: str | None = None
    layers: dict[str, list[int] | str] | None = None
    match: Match | None = None
    embedded: bool = False
    tap: dict[str, Setting] = {}
    env: dict[str, Setting] = {}
    args: dict[str, Setting] = {}
    args_if: dict[str, dict[str, Setting]] = {}
    unset: list[str] = []

    def __post_init__(self) -> None:
        if self.layers is not None and (len(self.layers) != 1 or not self.layers.keys() <= set(LAYER_KEYS)):
            raise ValueError(f"layers takes exactly one of {', '.join(LAYER_KEYS)}")
        for key in self.tap:
            if key not in TAP_KEYS:
                raise ValueError(f"tap takes {' and '.join(TAP_KEYS)}, not {key}")


class Line(msgspec.Struct, frozen=True):
    """One resolved argument or variable: its value, the reason, and the profile (or command line) it came from."""

    name: str
    value: Value
    why: str
    source: str


class Overrides(msgspec.Struct, frozen=True):
    """Arguments, variables and settings of the tap from the command line; they win over every profile."""

    args: dict[str, Value] = {}
    env: dict[str, Value] = {}
    tap: dict[str, Value] = {}


class Launch(msgspec.Struct, frozen=True):
    """A server about to be started: a profile merged for one SGLang version, model and port."""

    profile: str
    version: str
    model: str
    port: int
    args: list[Line]
    env: list[Line]
    tap: list[Line] = []
    layers: dict[str, list[int] | str] | None = None
    match: Match | None = None
    embedded: bool = False

    def argv(self, python: str) -> list[str]:
        """The command line under the interpreter `python`. It holds secrets in clear: show it through mask_argv()."""
        return [python, "-m", "sglang.launch_server", *(word for line in self.args for word in _flag(line))]

    def environ(self) -> dict[str, str]:
        """The variables to add to the server's environment."""
        return {line.name: _text(line.value) for line in self.env}

    def tap_settings(self) -> dict[str, int]:
        """What is said of the tap: memory (bytes) and writers, or neither."""
        return {line.name: tap_setting(line) for line in self.tap}

    def on_port(self, port: int) -> Launch:
        """This launch on another port."""
        args = [msgspec.structs.replace(line, value=port) if line.name == "port" else line for line in self.args]
        return msgspec.structs.replace(self, args=args, port=port)

    def changed(self, args: Mapping[str, Setting], env: Mapping[str, Setting], source: str) -> Launch:
        """This launch with other arguments and variables, as those of a further profile called `source`."""
        lines = {line.name: line for line in self.args}, {line.name: line for line in self.env}
        for known, settings in zip(lines, (args, env), strict=True):
            _apply(known, settings, source)
        return msgspec.structs.replace(self, args=list(lines[0].values()), env=list(lines[1].values()))


def tap_setting(line: Line) -> int:
    """A setting of the tap as a number. Raises ProfileError."""
    try:
        number = TAP_KEYS[line.name](line.value)
    except (TypeError, ValueError) as error:
        raise ProfileError(f"{line.source}: {line.name} {line.value!r}: {error}") from error
    if number < 1:
        raise ProfileError(f"{line.source}: {line.name} {line.value!r}: expected at least 1")
    return number


def load_profiles(extra: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Profile]:
    """The built-in profiles and `extra`, the `[profile.NAME]` tables of layertap.toml, by name.

    Raises ProfileError for an unknown key, a wrong type, a name that is built in, an unknown parent or a cycle.
    """
    built_in = tomllib.loads(resources.files(__package__).joinpath("profiles.toml").read_text(encoding="utf-8"))
    profiles = {name: _profile(name, table, why="") for name, table in built_in.items()}
    for name, table in (extra or {}).items():
        if name in built_in:
            raise ProfileError(
                f'profile {name} is built in: give yours another name, with extends = "{name}" to start from it'
            )
        profiles[name] = _profile(name, table, why=USER_WHY)
    for name in profiles:
        _lineage(name, profiles)
    return profiles


def resolve(
    profile_name: str,
    profiles: Mapping[str, Profile],
    *,
    version: str,
    model: str | None,
    port: int,
    host: str = "127.0.0.1",
    overrides: Overrides | None = None,
) -> Launch:
    """Merge a profile, what it extends and `overrides` into the launch of one server under SGLang `version`.

    `model` wins over the profile's. Raises ProfileError where the version is outside the profile's range, no model is
    named, the host is not loopback, or an argument is one that this version does not take any more, UsageError where
    `port` is none.
    """
    require_port(port)
    overrides = overrides or Overrides()
    lineage = _lineage(profile_name, profiles)
    _check_version(lineage, version)
    args, env, tap = _merged(lineage, version)
    _apply(args, _settings("args", overrides.args, why="", as_flags=True), COMMAND_LINE)
    _apply(env, _settings("env", overrides.env, why=""), COMMAND_LINE)
    _apply(tap, _settings("tap", overrides.tap, why=""), COMMAND_LINE)
    for line in tap.values():
        tap_setting(line)
    _check_args(args, version)
    if "host" in args:
        host = str(args.pop("host").value)
    _check_loopback(host)
    served = _model_line(model, lineage)
    fixed = [
        served,
        Line("host", host, "loopback only: whoever reaches the port can use the server", "layertap"),
        Line("port", port, "one server a port; --port chooses another", "layertap"),
    ]
    return Launch(
        profile=profile_name,
        version=version,
        model=str(served.value),
        port=port,
        args=fixed + list(args.values()),
        env=list(env.values()),
        tap=list(tap.values()),
        layers=next((profile.layers for profile in reversed(lineage) if profile.layers), None),
        match=next((profile.match for profile in reversed(lineage) if profile.match), None),
        embedded=any(profile.embedded for profile in lineage),
    )


class Candidate(msgspec.Struct, frozen=True):
    """A profile that could be launched, and in what the host and the model differ from what it is for."""

    name: str
    summary: str
    embedded: bool
    differs: list[str]


def candidates(profiles: Mapping[str, Profile], version: str | None, found: Situation) -> list[Candidate]:
    """Every profile but base, those that suit a host and a model first; `version` is the host's SGLang."""
    made = []
    for name in profiles:
        if name == "base":
            continue
        lineage = _lineage(name, profiles)
        match = next((profile.match for profile in reversed(lineage) if profile.match), Match())
        differs = match.differs(found)
        for profile in lineage:
            wanted = profile.requires_sglang
            if version is not None and wanted is not None and not matches(version, wanted):
                differs.append(f"it is for SGLang {wanted}, and here is {version}")
        embedded = any(profile.embedded for profile in lineage)
        if embedded and found.gpus:
            differs.append("it runs on the CPU")
        made.append(Candidate(name, profiles[name].summary, embedded, differs))
    return sorted(made, key=lambda one: len(one.differs))


# --- Versions ---


def parse_version(text: str) -> tuple[int, ...]:
    """The release numbers of an SGLang version, without post, dev or rc: "0.5.11.post1" is (0, 5, 11)."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", text.strip())
    if match is None:
        raise ProfileError(f"SGLang version {text!r} cannot be read; a number such as 0.5.23 is wanted")
    return tuple(int(number) for number in match[1].split("."))


COMPARISONS = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


def matches(version: str, spec: str) -> bool:
    """Whether `version` satisfies every clause of `spec`, such as ">=0.5.11,<=0.5.23"."""
    return all(_satisfies(version, clause.strip()) for clause in spec.split(","))


def _satisfies(version: str, clause: str) -> bool:
    match = re.fullmatch(r"(>=|<=|==|!=|>|<)\s*([\w.]+)", clause)
    if match is None:
        raise ProfileError(f"version specification {clause!r} cannot be read; write it as >=0.5.11 or <0.5.14")
    left, right = parse_version(version), parse_version(match[2])
    length = max(len(left), len(right))
    return bool(COMPARISONS[match[1]](_padded(left, length), _padded(right, length)))


def _padded(numbers: tuple[int, ...], length: int) -> tuple[int, ...]:
    return numbers + (0,) * (length - len(numbers))


def _check_version(lineage: Sequence[Profile], version: str) -> None:
    if matches(version, f"<{OLDEST}"):
        raise ProfileError(f"SGLang {version} has no plugins, which the tap needs: use {OLDEST} or newer")
    for profile in lineage:
        if profile.requires_sglang is not None and not matches(version, profile.requires_sglang):
            raise ProfileError(
                f"profile {profile.name} is for SGLang {profile.requires_sglang}, and the host has {version}: "
                "choose another profile, or an SGLang in that range"
            )


# --- Reading ---


def _profile(name: str, table: Mapping[str, Any], *, why: str) -> Profile:
    known = [field for field in Profile.__struct_fields__ if field != "name"]
    for key in table:
        if key not in known:
            raise ProfileError(f"profile {name}: unknown key {key}{_suggestion(key, known)}")
    filled: dict[str, Any] = {**table, "name": name}
    filled["env"] = _settings(f"profile {name}: env", table.get("env", {}), why)
    filled["tap"] = _settings(f"profile {name}: tap", table.get("tap", {}), why)
    filled["args"] = _settings(f"profile {name}: args", table.get("args", {}), why, as_flags=True)
    filled["args_if"] = {
        spec: _settings(f"profile {name}: args_if.{spec}", args, why, as_flags=True)
        for spec, args in table.get("args_if", {}).items()
    }
    try:
        profile = msgspec.convert(filled, Profile)
    except msgspec.ValidationError as error:
        raise ProfileError(f"profile {name}: {error}") from error
    for spec in filter(None, [*profile.args_if, profile.requires_sglang]):
        matches(OLDEST, spec)
    return profile


def _settings(where: str, table: Any, why: str, *, as_flags: bool = False) -> dict[str, Setting]:
    """Plain values and {value, why} tables alike, as Settings; a table without `value` is a value itself."""
    if not isinstance(table, Mapping):
        raise ProfileError(f"{where} must be a table")
    settings = {}
    for name, given in table.items():
        if not (isinstance(given, dict) and "value" in given):
            given = {"value": given}
        try:
            setting = msgspec.convert({"why": why, **given}, Setting)
        except msgspec.ValidationError as error:
            raise ProfileError(f"{where}.{name}: {error}") from error
        settings[_flag_name(name) if as_flags else name] = setting
    return settings


def _flag_name(name: str) -> str:
    name = name.removeprefix("--").replace("_", "-")
    return ALIASES.get(name, name)


def _suggestion(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


# --- Merging ---


def _lineage(name: str, profiles: Mapping[str, Profile], children: tuple[str, ...] = ()) -> list[Profile]:
    """The profile and all that it extends, farthest first, each once."""
    if name not in profiles:
        user = f"profile {children[-1]} extends {name}, which" if children else f"profile {name}"
        there = _suggestion(name, profiles) or f"; there are {', '.join(profiles)}"
        raise ProfileError(f"{user} does not exist{there}")
    if name in children:
        raise ProfileError(f"profiles extend each other in a circle: {' -> '.join([*children, name])}")
    profile = profiles[name]
    lineage: list[Profile] = []
    for parent in _parents(profile):
        lineage += [p for p in _lineage(parent, profiles, (*children, name)) if p not in lineage]
    return [*lineage, profile]


def _parents(profile: Profile) -> list[str]:
    if profile.name == "base":
        return []
    if isinstance(profile.extends, str):
        return [profile.extends]
    return profile.extends or ["base"]


def _merged(lineage: Sequence[Profile], version: str) -> tuple[dict[str, Line], dict[str, Line], dict[str, Line]]:
    args: dict[str, Line] = {}
    env: dict[str, Line] = {}
    tap: dict[str, Line] = {}
    for profile in lineage:
        _apply(args, profile.args, profile.name)
        for spec, more in profile.args_if.items():
            if matches(version, spec):
                _apply(args, more, profile.name)
        _apply(env, profile.env, profile.name)
        _apply(tap, profile.tap, profile.name)
        for name in profile.unset:
            args.pop(_flag_name(name), None)
            env.pop(name, None)
    return args, env, tap


def _apply(lines: dict[str, Line], settings: Mapping[str, Setting], source: str) -> None:
    for name, setting in settings.items():
        if setting.value is None or setting.value == UNSET:
            lines.pop(name, None)
        else:
            lines[name] = Line(name, setting.value, setting.why, source)


def _check_args(args: Mapping[str, Line], version: str) -> None:
    for name, instead in RESERVED.items():
        if name in args:
            raise ProfileError(f"{args[name].source}: args cannot hold {name}; give {instead}")
    removed = args.keys() & REMOVED_IN_0_5_20
    if removed and matches(version, ">=0.5.20"):
        name = min(removed)
        raise ProfileError(
            f"{args[name].source}: SGLang {version} has no {name}; disable-cuda-graph, which base sets, covers it"
        )


def _check_loopback(host: str) -> None:
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ProfileError(f"host {host} is not loopback: the server is reached over SSH and binds 127.0.0.1 only")


def _model_line(model: str | None, lineage: Sequence[Profile]) -> Line:
    if model:
        return Line("model-path", model, "the model whose states are drawn", COMMAND_LINE)
    for profile in reversed(lineage):
        if profile.model:
            return Line("model-path", profile.model, "the model whose states are drawn", profile.name)
    raise ProfileError(f"profile {lineage[-1].name} names no model: give --model, or model in the profile")


# --- Writing ---


def _flag(line: Line) -> list[str]:
    if line.value is None or line.value is False:
        return []
    if line.value is True:
        return [f"--{line.name}"]
    if isinstance(line.value, list):
        return [f"--{line.name}", *(_text(item) for item in line.value)]
    return [f"--{line.name}", _text(line.value)]


def _text(value: Value) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, (list, dict)):
        return json.dumps(value)
    return str(value)


# --- Secrets ---

# The last word of a secret's name, as in api-key, HF_TOKEN or ssl-keyfile-password. Names such as skip-tokenizer-init,
# ssl-keyfile and speculative-token-map end in others.
SECRET_WORDS = frozenset(
    {"key", "apikey", "apikeys", "token", "pat", "password", "passwords", "passwd", "passphrase", "credentials"}
)
# Beside one of these, tokens and keys are what is counted or missed: max-total-tokens, missing_keys.
COUNTED = frozenset({
    "max", "min", "num", "total", "per", "prefill", "decode", "draft", "graph", "chunk", "prompt", "completion",
    "input", "output", "cached", "new", "stop", "special", "missing", "unexpected",
})  # fmt: skip
URL_LOGIN = re.compile(r"//(?P<secret>[^\s/@:\"'<>]{0,200}:(?P<password>[^\s/\"'<>]{0,500}))@")
"""The login in a URL, `me:x` of https://me:x@host. All of it is masked: some sites take a token for the name."""

_SECRET_NAME = r"(?:api[_-]?key|hf[_-]token|hub[_-]token|access[_-](?:key|token)|secret|password)s?"
_SECRET_TEXT = re.compile(
    rf"""
    (?P<quoted> {_SECRET_NAME}["']?\s*[=:]\s*(?P<quote>["'])) (?:\\.|(?!(?P=quote)).)+   # api_key='x', "api_key": "x"
    | (?P<flag> --[\w-]*{_SECRET_NAME}["']?[\s,=]+["']?) [^\s"',]+                       # --api-key x, '--api-key', 'x'
    | (?P<plain> {_SECRET_NAME}=) (?!none\b|null\b) [^\s"',;)]+                          # HF_TOKEN=x
    | (?P<bearer> bearer\s+) [\w.~+/=-]+
    | (?P<basic> authorization["']?\s*[:=]\s*["']?(?:basic|token)\s+) [\w.~+/=-]+
    | (?P<hub> \bhf_) [a-z0-9]{{20,}}
    """,
    re.IGNORECASE | re.VERBOSE,
)
# What every match of it contains: most log text has none of these, and the pattern itself is slow (6 MB/s).
_SECRET_HINTS = (
    "apikey", "api_key", "api-key", "hf_", "hf-", "hub_", "hub-", "access", "secret", "password", "bearer",
    "authorization", "@",
)  # fmt: skip


def is_secret(name: str) -> bool:
    """Whether an argument or variable of this name holds a secret."""
    *before, last = re.split(r"[-_.]", name.strip("-").lower())
    if last in ("keys", "tokens"):
        return bool(before) and COUNTED.isdisjoint(before)
    if last == "token" and before[-1:] in (["per"], ["first"]):  # bucket-time-to-first-token
        return False
    return last in SECRET_WORDS or not {"secret", "secrets"}.isdisjoint([*before, last])


def masked(name: str, value: Value) -> str:
    """The value as text to show: `***` where the name says that it is a secret, else without the secrets in it."""
    return MASK if is_secret(name) and value else mask_text(_text(value))


def holds_secret(name: str, value: Value) -> bool:
    """Whether a setting cannot be shown as it is."""
    return masked(name, value) != _text(value)


def secret_parts(argv: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Every word of a command line in two, what may be shown and the secret behind it, after the flag that it is of.

    Flag and secret are "" for a word that holds none. The first word behind a secret flag is its value even where it
    looks like a flag, and so are all further ones that do not.
    """
    flag, first = "", False
    for word in argv:
        name, equals, value = word.partition("=")
        if flag and (first or not word.startswith("--")):
            yield flag, "", word
            first = False
        elif word.startswith("--") and is_secret(name):
            yield name, f"{name}{equals}", value
            flag, first = ("", False) if equals else (name, True)
        else:
            yield "", word, ""
            flag = ""


def mask_argv(argv: Sequence[str]) -> list[str]:
    """A command line to show or to store: the value of every secret flag is `***`, and so is a secret in another's."""
    return [f"{shown}{MASK}" if secret else mask_text(shown) for _, shown, secret in secret_parts(argv)]


def mask_text(text: str, secrets: Iterable[str] = ()) -> str:
    """Log or JSON text to show: `secrets`, and whatever stands where keys and tokens stand, become `***`."""
    for secret in secrets:
        if secret:
            text = text.replace(secret, MASK)
    lower = text.lower()
    if not any(hint in lower for hint in _SECRET_HINTS):
        return text
    return _SECRET_TEXT.sub(_masked_match, URL_LOGIN.sub(f"//{MASK}@", text))


def _masked_match(match: re.Match[str]) -> str:
    return f"{match[match.lastgroup or 0]}{MASK}"
