"""What there is to try, and what of it this host, this model and this SGLang can use."""

from __future__ import annotations

import importlib.util
import tomllib
from collections.abc import Collection, Mapping
from importlib import resources
from typing import Any, Literal, get_args

import msgspec

from backends.errors import UsageError
from backends.sglang import UNSET, Launch, Setting, Value, matches
from backends.situation import Situation

Stage = Literal["attention", "moe", "prefill", "overlap", "nccl"]
STAGES: tuple[Stage, ...] = get_args(Stage)


class When(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a variant can be used; what is left out does not matter.

    `device` is the server's, `cc` the GPUs' compute capability, `ranks` the fewest ranks, `quantization` the
    checkpoint's method ("none" without one), `package` one that SGLang's Python has.
    """

    device: str | None = None
    cc: list[str] | None = None
    nvlink: bool | None = None
    ranks: int = 1
    mla: bool | None = None
    moe: bool | None = None
    quantization: list[str] | None = None
    sglang: str | None = None
    package: str | None = None

    def holds(self, situation: Situation, launch: Launch) -> bool:
        """Whether a server launched like that, on such a host, could use it."""
        return (
            self.device in (None, device(launch))
            and (self.cc is None or situation.cc in self.cc)
            and self.nvlink in (None, situation.nvlink)
            and ranks(launch) >= self.ranks
            and self.mla in (None, situation.mla)
            and self.moe in (None, situation.moe)
            and (self.quantization is None or situation.quantization in self.quantization)
            and (self.sglang is None or matches(launch.version, self.sglang))
            and (self.package is None or importlib.util.find_spec(self.package) is not None)
        )


class Variant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A change of a launch that may make it faster; one with a `risk` is not taken, however fast it is."""

    name: str
    stage: Stage
    args: dict[str, Value] = {}
    env: dict[str, Value] = {}
    when: When = When()
    risk: str | None = None

    def applied(self, launch: Launch) -> Launch:
        """`launch` with this change."""
        return launch.changed(_settings(self.args), _settings(self.env), f"tune: {self.name}")

    def words(self) -> list[str]:
        """What it changes: `attention-backend=triton`, `NCCL_P2P_LEVEL unset`."""
        changes = {**self.args, **self.env}
        return [f"{name} {UNSET}" if value == UNSET else f"{name}={value}" for name, value in changes.items()]

    def changes_nothing(self, launch: Launch, effective: Mapping[str, Any]) -> bool:
        """Whether a server of `launch`, whose resolved arguments are `effective`, has all of it already."""
        known = {line.name: line.value for line in (*launch.args, *launch.env)}
        for name, value in {**self.args, **self.env}.items():
            resolved = known.get(name, effective.get(name.replace("-", "_")))
            if known.get(name) if value == UNSET else str(resolved) != str(value):
                return False
        return True


def _settings(changes: Mapping[str, Value]) -> dict[str, Setting]:
    return {name: Setting(value) for name, value in changes.items()}


def load_variants() -> list[Variant]:
    """All of them, in the order of the file."""
    tables = tomllib.loads(resources.files(__package__).joinpath("variants.toml").read_text(encoding="utf-8"))
    return [msgspec.convert({"name": name, **table}, Variant) for name, table in tables.items()]


def choose(only: Collection[str], situation: Situation, launch: Launch) -> list[Variant]:
    """The variants to try: what can be used here, of it those whose name or stage is in `only`, all where it is empty.

    Raises UsageError for a name that there is not, or that cannot be used here.
    """
    known = load_variants()
    usable = [variant for variant in known if variant.when.holds(situation, launch)]
    for word in only:
        if not any(word in (variant.name, variant.stage) for variant in known):
            raise UsageError(f"no variant or stage is called {word!r}; here there are {_names(usable)}")
        if not any(word in (variant.name, variant.stage) for variant in usable):
            raise UsageError(f"{word} cannot be used with this host, model and SGLang; here there are {_names(usable)}")
    return [variant for variant in usable if not only or {variant.name, variant.stage} & set(only)]


def _names(variants: Collection[Variant]) -> str:
    return ", ".join(variant.name for variant in variants)


def argument(launch: Launch, name: str) -> Value:
    """An argument's value, None where it is not there."""
    return next((line.value for line in launch.args if line.name == name), None)


def device(launch: Launch) -> str:
    """What the server runs on: "cuda" or "cpu"."""
    return str(argument(launch, "device") or "cuda")


def ranks(launch: Launch) -> int:
    """The tensor-parallel ranks."""
    return int(str(argument(launch, "tp-size") or 1))
