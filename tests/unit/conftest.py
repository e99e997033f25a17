"""What the tests of runs, agent and console share: folders of their own, the payload, and a stand-in for SGLang."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import FAKE_SGLANG, SLEEP, end_all

from backends import bootstrap, payload, runs
from backends.launch import Launching, launch
from backends.ports import free_port
from capture.layers import LayerChoice


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home of the test's own, also for every process that it starts; what runs there is ended afterwards."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("PYTHONPATH", "LAYERTAP_PYTHON", "LAYERTAP_CONFIG", "LAYERTAP_RUN"):
        monkeypatch.delenv(name, raising=False)
    yield tmp_path
    end_all(tmp_path / "state" / "layertap")


@pytest.fixture
def all_runs(home: Path) -> runs.Runs:
    return runs.Runs(home / "state" / "layertap")


@pytest.fixture
def start(all_runs: runs.Runs) -> Callable[..., runs.Run]:
    """Starts a run of a program, one that sleeps if none is given."""

    def started(kind: str = "verify", argv: list[str] = SLEEP, **known: Any) -> runs.Run:
        return all_runs.start(kind, argv, known.pop("env", dict(os.environ)), code="0123", **known)

    return started


@pytest.fixture(scope="session")
def payload_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The payload, unpacked as on a host."""
    name, archive = payload.pack()
    folder = tmp_path_factory.mktemp("payload") / name
    bootstrap.unpack(archive, str(folder))
    return folder


@pytest.fixture
def fake_sglang(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Python started from here has SGLang 0.5.23, a fake one."""
    monkeypatch.setenv("PYTHONPATH", str(FAKE_SGLANG))


@pytest.fixture
def model(home: Path) -> Path:
    folder = home / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 8, "dtype": "bfloat16"}')
    return folder


@pytest.fixture
def launching(fake_sglang: None, home: Path, model: Path) -> Callable[..., Launching]:
    """A launch of the fake server; `fake` are its words."""

    def made(fake: str = "", **known: Any) -> Launching:
        port = known.pop("port", None) or free_port()
        argv = ["-m", "sglang.launch_server", "--model-path", str(model), "--port", str(port)]
        given: dict[str, Any] = {
            "profile": "fake",
            "model": str(model),
            "argv": argv,
            "shown_argv": argv,
            "env": {"FAKE": fake},
            "port": port,
            "layers": LayerChoice(outputs=[2]),
            "dump_root": str(home / "dumps"),
        }
        return Launching(**given | known)

    return made


@pytest.fixture
def server(all_runs: runs.Runs, payload_folder: Path, launching: Callable[..., Launching]) -> Callable[..., runs.Run]:
    """Launches the fake server."""

    def launched(fake: str = "", **known: Any) -> runs.Run:
        return launch(all_runs, payload_folder, launching(fake, **known), "0.5.23")

    return launched
