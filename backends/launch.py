"""Launching a server with the tap in it, on the host."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from backends.errors import Locked, NotReady, UsageError
from backends.folders import absolute
from backends.ports import port_free
from backends.runs import CODE, Run, Runs, python_path
from backends.sglang import Launch, mask_argv, masked
from backends.situation import read_layers
from capture import layers
from capture.dumps.dump import DumpError, make_private
from capture.layers import LayerChoice, LayerError
from capture.tap.settings import SETTINGS_VARIABLE, TapSettings

EMBEDDED = "embedded:"
INDEX = "model.safetensors.index.json"
OVERRIDE = "--json-model-override-args"  # with it, what config.json says need not hold
LFS_POINTER = b"version https://git-lfs"
SHOWN_NAMES = 3


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class Launching(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the console has merged: a profile as argv and environment for this host's SGLang.

    `argv` holds the server's arguments without the interpreter. A model `embedded:<name>` is made on the spot.
    `memory` (bytes) and `writers` are the tap's, see `TapSettings`.
    """

    profile: str
    model: str
    argv: list[str]
    shown_argv: list[str]
    env: dict[str, str]
    port: int
    layers: LayerChoice
    embedded: bool = False
    dump_root: str | None = None
    memory: int | None = None
    writers: int | None = None
    details: dict[str, Any] = {}


def as_launching(merged: Launch, layers: LayerChoice, dump_root: str | None) -> Launching:
    """A merged launch as `launch` takes it."""
    argv, tap = merged.argv("python")[1:], merged.tap_settings()
    return Launching(
        profile=merged.profile,
        model=merged.model,
        argv=argv,
        shown_argv=mask_argv(argv),
        env=merged.environ(),
        port=merged.port,
        layers=layers,
        embedded=merged.embedded,
        dump_root=dump_root,
        memory=tap.get("memory"),
        writers=tap.get("writers"),
    )


def launch(all_runs: Runs, payload: Path, asked: Launching, version: str | None) -> Run:
    """Start the server detached.

    Raises Locked (port taken), NotReady (no SGLang), UsageError (model, layers, dump root).
    """
    if version is None:
        raise NotReady(f"{sys.executable} has no sglang; choose SGLang's own Python with --python")
    all_runs.refuse_second(asked.port)
    for run in all_runs.live("tune"):
        if not asked.embedded and run.id != asked.details.get("tune"):
            raise Locked(f"{run.id} measures servers on this host's GPUs; wait for it, or `layertap stop {run.id}`")
    if not port_free(asked.port):
        raise Locked(f"port {asked.port} is taken by a process that is not ours; stop it or choose another --port")
    model = model_folder(asked.model)
    choice = check_layers(asked)
    root = dump_root(asked.dump_root)
    remove_dead_dumps(all_runs, root)
    secret = secrets.token_hex(8)

    def prepare(run: Run) -> dict[str, str]:
        folder = make_private(root / run.id)
        settings = TapSettings(
            dump_dir=str(folder), secret=secret, layers=choice, memory=asked.memory, writers=asked.writers
        )
        return {SETTINGS_VARIABLE: msgspec.json.encode(settings).decode()}

    paths = [payload / "engine", *([payload / "embedded"] if asked.embedded else [])]
    env = {**os.environ, **asked.env, "PYTHONUNBUFFERED": "1"}
    env["PYTHONPATH"] = python_path(paths, env)
    replaced = [model if word == asked.model else word for word in asked.argv]
    shown = [model if word == asked.model else word for word in asked.shown_argv]
    return all_runs.start(
        "server",
        [sys.executable, *replaced],
        env,
        code=payload.name,
        shown_argv=[sys.executable, *shown],
        port=asked.port,
        lock=all_runs.lock_path(asked.port),
        prepare=prepare,
        sglang=version,
        dump_root=root,
        details={
            **asked.details,
            "profile": asked.profile,
            "model": model,
            "layers": msgspec.to_builtins(choice),
            "layers_words": choice.words(),
            "env": {name: masked(name, value) for name, value in asked.env.items()},
        },
    )


def relaunch(all_runs: Runs, dead: Run) -> Run:
    """Launch a server anew, just as one that is dead: same arguments, environment, port and layers.

    Its dumps go to a folder of its own, and it has a secret of its own. Raises as `launch` does.
    """
    spec, private = dead.spec, dead.private
    assert spec.port is not None and spec.dump_dir is not None
    if not port_free(spec.port):
        raise Locked(f"port {spec.port} is taken; stop what holds it")
    model_folder(spec.details["model"])
    root = dump_root(str(Path(spec.dump_dir).parent))
    settings = msgspec.json.decode(private.env[SETTINGS_VARIABLE], type=TapSettings)

    def prepare(run: Run) -> dict[str, str]:
        ours = msgspec.structs.replace(settings, dump_dir=str(make_private(root / run.id)), secret=secrets.token_hex(8))
        return {SETTINGS_VARIABLE: msgspec.json.encode(ours).decode()}

    return all_runs.start(
        "server",
        private.argv,
        private.env,
        code=spec.code,
        shown_argv=spec.argv,
        port=spec.port,
        lock=all_runs.lock_path(spec.port),
        prepare=prepare,
        sglang=spec.sglang,
        dump_root=root,
        details={**spec.details, "relaunch_of": dead.id},
    )


def check_layers(asked: Launching) -> LayerChoice:
    """The layers that are asked for, a drafter's path made absolute: the server stands in a folder of its own.

    Raises UsageError for a drafter's file that is none, and for layers that the model has not by its config.json:
    a server finds that only once the weights are loaded.
    """
    choice = asked.layers
    if choice.draft is not None:
        choice = LayerChoice(draft=absolute(choice.draft))
    try:
        layers.check(choice, _layer_count(asked))
    except LayerError as error:
        raise UsageError(str(error)) from error
    return choice


def _layer_count(asked: Launching) -> int | None:
    if any(word.partition("=")[0] == OVERRIDE for word in asked.argv):
        return None
    if asked.model.startswith(EMBEDDED):  # which need not be made yet
        from backends.embedded import models

        return models.LAYERS.get(asked.model.removeprefix(EMBEDDED))
    return read_layers(Path(asked.model).expanduser())


def model_folder(model: str) -> str:
    """Where the model lies; an embedded one is made first. Raises UsageError where it is not there."""
    if model.startswith(EMBEDDED):
        return str(embedded_model(model.removeprefix(EMBEDDED)))
    path = named_folder(model)
    if missing := missing_shards(path):
        raise UsageError(f"model {path}: {_named(missing)} not there or no weights; download the model again")
    return str(path)


def named_folder(model: str) -> Path:
    """The folder of a model that is not embedded, its weights unseen. Raises UsageError where there is no model."""
    path = Path(model).expanduser()
    if not path.is_dir():
        raise UsageError(f"model {path}: there is no such folder; give that of a downloaded model on the host")
    if not (path / "config.json").exists():
        raise UsageError(f"model {path}: no config.json there; give the folder of a downloaded model on the host")
    return path


def missing_shards(model: Path) -> list[str]:
    """Files that a model's index names and that are not there, or are Git LFS's pointers to them.

    SGLang before 0.5.23 starts without them, on weights that nobody loaded.
    """
    try:
        index = msgspec.json.decode((model / INDEX).read_bytes(), type=_Index)
    except (OSError, msgspec.MsgspecError):
        return []
    return [name for name in sorted(set(index.weight_map.values())) if not _holds_weights(model / name)]


def _holds_weights(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(LFS_POINTER)) != LFS_POINTER
    except OSError:
        return False


def _named(names: list[str]) -> str:
    """A few names and how many more there are, with the verb."""
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return f"{', '.join(names[:SHOWN_NAMES])}{more} {'is' if len(names) == 1 else 'are'}"


def embedded_model(name: str) -> Path:
    """A tiny model by name, made if it is not there yet."""
    from backends.embedded import models

    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    folder = cache / "layertap" / "models" / f"{name}-{models.code_hash()}"
    if not folder.is_dir():
        # In a process of its own: the agent stays free of torch.
        made = subprocess.run(
            [sys.executable, "-P", "-m", "backends.embedded.models", name, str(folder)],
            env={**os.environ, "PYTHONPATH": python_path(CODE, os.environ)},
            stdin=subprocess.DEVNULL,  # the agent's is the link
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode:
            raise UsageError(f"the tiny model {name!r} could not be made: {made.stderr.strip().splitlines()[-1]}")
    return folder


def dump_root(asked: str | None) -> Path:
    """The private folder that holds a folder a server run. Raises UsageError where it is not safe to use."""
    root = Path(asked).expanduser() if asked else Path(f"/dev/shm/layertap-{os.geteuid()}")
    try:
        return make_private(root)
    except DumpError as error:
        raise UsageError(str(error)) from error


def remove_dead_dumps(all_runs: Runs, root: Path) -> None:
    """Remove what dead server runs left in `root`; nothing that is not named after a run of ours."""
    for run in all_runs.all("server"):
        folder = root / run.id
        if folder.is_dir() and not folder.is_symlink() and not run.alive() and run.state() != "elsewhere":
            shutil.rmtree(folder, ignore_errors=True)
