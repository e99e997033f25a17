"""What verbs have in common: the app that they belong to, their options, and the host that is meant."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Group, Parameter, validators

from backends.errors import UsageError
from backends.ports import require_port
from console import VERSION
from console.words.printable import printable

if TYPE_CHECKING:
    from backends.sglang import Overrides
    from console.session import Session

app = App(
    name="layertap",
    help="Verified EAGLE-3 training data out of a live SGLang server.",
    version=VERSION,
    help_format="plaintext",
    default_parameter=Parameter(negative_bool=(), negative_iterable=()),
)
LAYERS = Group("Layers", help="Which layers' states; name them in one way.")
SETTINGS = Group("Settings", help="What is changed of the profile.")
ROWS = Group("Rows", help="How rows are read.")


def _require_ports(_: object, given: int | list[int] | None) -> None:
    for number in given if isinstance(given, list) else [given]:
        if number is not None:
            require_port(number)


PORTS = Parameter(validator=_require_ports)
Port = Annotated[int, PORTS]
Seconds = Annotated[float, Parameter(validator=validators.Number(gt=0, lt=math.inf))]
Positive = Annotated[int, Parameter(validator=validators.Number(gte=1))]
NotNegative = Annotated[int, Parameter(validator=validators.Number(gte=0))]


@Parameter(name="*")
@dataclass(frozen=True)
class Common:
    """Options of every verb."""

    host: Annotated[str, Parameter(env_var="LAYERTAP_HOST")] = "local"
    """Host: what one would say to `ssh`, or a [host.NAME] of layertap.toml; paths are then that host's."""
    accept_new_host_key: str | None = None
    """Fingerprint (SHA256:...) of a host key that is not known yet and is right."""
    python: Annotated[str | None, Parameter(env_var="LAYERTAP_PYTHON")] = None
    """SGLang's Python on the host."""
    config: Annotated[Path | None, Parameter(env_var="LAYERTAP_CONFIG")] = None
    """layertap.toml to use."""
    json: bool = False
    """Print JSON."""


@Parameter(name="*")
@dataclass(frozen=True)
class RowOptions:
    """How rows are read."""

    prompt_column: Annotated[str | None, Parameter(group=ROWS)] = None
    """Column that holds the prompt."""
    response_column: Annotated[str | None, Parameter(group=ROWS)] = None
    """Column that holds the response."""
    max_length: Annotated[int | None, Parameter(group=ROWS)] = None
    """Most tokens of a sample; the server's own limit holds anyway."""
    overlong: Annotated[Literal["truncate", "skip"] | None, Parameter(group=ROWS)] = None
    """What becomes of longer rows; skipped ones are counted."""
    last_turn_only: Annotated[bool, Parameter(group=ROWS)] = False
    """Only the last assistant turn goes into the loss."""
    allow_ignored_roles: Annotated[bool, Parameter(group=ROWS)] = False
    """Take a chat template that renders what the assistant says like what the user says."""


@Parameter(name="*")
@dataclass(frozen=True)
class LayerOptions:
    """Which layers."""

    boundaries: Annotated[list[int] | None, Parameter(group=LAYERS, consume_multiple=True)] = None
    """What enters these layers, e.g. 3 31 59."""
    outputs: Annotated[list[int] | None, Parameter(group=LAYERS, consume_multiple=True)] = None
    """What these layers put out, e.g. 2 30 58."""
    eagle_ids: Annotated[list[int] | None, Parameter(group=LAYERS, consume_multiple=True)] = None
    """Ids as a drafter's config holds them."""
    draft: Annotated[str | None, Parameter(group=LAYERS)] = None
    """A drafter's config.json on the host."""

    def given(self, common: Common) -> dict[str, Any]:
        """What was said, the drafter's path as the host takes it."""
        said = {name: value for name, value in vars(self).items() if value is not None}
        return said if self.draft is None else said | {"draft": host_path(Path(self.draft), common)}


@Parameter(name="*")
@dataclass(frozen=True)
class SettingOptions:
    """What is changed of a profile."""

    set: Annotated[tuple[str, ...], Parameter(group=SETTINGS)] = ()
    """A server argument, NAME=VALUE or NAME; NAME=unset removes it."""
    env: Annotated[tuple[str, ...], Parameter(group=SETTINGS)] = ()
    """An environment variable, NAME=VALUE; NAME=unset removes it."""
    memory: Annotated[str | None, Parameter(group=SETTINGS)] = None
    """What the tap may take for states under way, e.g. "48 GiB", or bytes."""
    writers: Annotated[int | None, Parameter(group=SETTINGS)] = None
    """Processes of the tap that write states."""

    def overrides(self) -> Overrides:
        """What was said."""
        from backends.sglang import Overrides
        from console.launching import pairs, tap_options, variables

        return Overrides(
            args=pairs(list(self.set), "--set"),
            env=variables(list(self.env), "--env"),
            tap=tap_options(self.memory, self.writers),
        )


COMMON = Common()
LAYER_OPTIONS = LayerOptions()
SETTING_OPTIONS = SettingOptions()
ROW_OPTIONS = RowOptions()


@contextmanager
def open_host(common: Common) -> Iterator[Session]:
    """A session with the host that is meant."""
    from console import config
    from console.hosts import open_session, terminal

    session = open_session(
        common.host, config.load(common.config), common.python, common.accept_new_host_key, terminal()
    )
    try:
        for note in session.host.state.notes:
            sys.stderr.write(f"layertap: {printable(note)}\n")
        yield session
    finally:
        session.host.close()


def asked_formats(asked: str | None, session: Session) -> list[str]:
    """Formats by name, from `--format A,B` or else from layertap.toml."""
    return asked.split(",") if asked else list(session.defaults.format)


def asked_row_options(options: RowOptions, session: Session) -> dict[str, Any]:
    """The fields of the RowOptions of capture.rows; what was not said is as layertap.toml has it. Raises UsageError."""
    defaults = session.defaults
    if (options.prompt_column is None) != (options.response_column is None):
        raise UsageError("--prompt-column and --response-column go together")
    if options.max_length is not None and options.max_length < 1:
        raise UsageError(f"--max-length {options.max_length}: give at least 1 token, or leave it out for the server's")
    return {
        "prompt_column": options.prompt_column,
        "response_column": options.response_column,
        "max_length": defaults.max_length if options.max_length is None else options.max_length,
        "overlong": options.overlong or defaults.overlong,
        "last_turn_only": options.last_turn_only,
        "allow_ignored_roles": options.allow_ignored_roles,
    }


def host_model(model: str | None, common: Common) -> str | None:
    """A model as the host takes it: its folder, or the name of an embedded one."""
    from backends.launch import EMBEDDED

    return model if model is None or model.startswith(EMBEDDED) else host_path(Path(model), common)


def host_path(path: Path, common: Common) -> str:
    """A path as the host takes it: absolute on this machine, where the agent stands elsewhere; else as it was given."""
    return os.path.abspath(path.expanduser()) if common.host == "local" else str(path)
