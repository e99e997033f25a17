"""Launching a server: what is refused before anything starts, and what the server's process gets."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest
from helpers import FAKE_SGLANG, until

from backends import runs
from backends.errors import Locked, NotReady, UsageError
from backends.launch import Launching, check_layers, launch
from backends.ports import free_port, port_free
from backends.runs import Run, Runs, stop
from capture.layers import LayerChoice
from capture.tap.settings import TapSettings

Launch = Callable[..., Launching]
Server = Callable[..., Run]


@pytest.fixture
def refused(all_runs: Runs, payload_folder: Path, launching: Launch) -> Callable[..., str]:
    """Launches what must be refused; returns the sentence, and shows that nothing was started."""

    def launched(error: type[Exception], version: str | None = "0.5.23", **known: object) -> str:
        before = [run.id for run in all_runs.all()]
        with pytest.raises(error) as failed:
            launch(all_runs, payload_folder, launching(**known), version)
        assert [run.id for run in all_runs.all()] == before
        return str(failed.value)

    return launched


# --- Refused ---


def test_a_python_without_sglang(refused: Callable[..., str]) -> None:
    assert refused(NotReady, None) == f"{sys.executable} has no sglang; choose SGLang's own Python with --python"


def test_a_port_that_a_stranger_holds(refused: Callable[..., str], home: Path) -> None:
    with socket.socket() as stranger:
        stranger.bind(("0.0.0.0", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        assert refused(Locked, port=port) == (
            f"port {port} is taken by a process that is not ours; stop it or choose another --port"
        )
    assert not (home / "dumps").exists()


def test_a_port_that_a_server_of_ours_holds(refused: Callable[..., str], server: Server) -> None:
    first = server("silent")
    port = first.spec.port
    assert refused(Locked, port=port) == (
        f"a server of ours runs on port {port} already: {first.id}; `layertap stop {first.id}` stops it, or choose "
        "another --port"
    )


def test_gpus_that_are_being_tuned_on(refused: Callable[..., str], start: Callable[..., Run]) -> None:
    run = start("tune")
    assert refused(Locked) == (
        f"{run.id} measures servers on this host's GPUs; wait for it, or `layertap stop {run.id}`"
    )


def test_a_model_that_is_not_there(refused: Callable[..., str], home: Path) -> None:
    assert refused(UsageError, model="~/none") == (
        f"model {home}/none: there is no such folder; give that of a downloaded model on the host"
    )
    (home / "none").mkdir()
    assert refused(UsageError, model="~/none") == (
        f"model {home}/none: no config.json there; give the folder of a downloaded model on the host"
    )


def test_a_model_that_was_not_downloaded_to_its_end(refused: Callable[..., str], model: Path) -> None:
    """SGLang finds it late, and before 0.5.23 not at all."""
    names = [f"model-{number}-of-6.safetensors" for number in range(1, 7)]
    index = {"metadata": {}, "weight_map": {f"layer.{number}": name for number, name in enumerate(names)}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in names:
        (model / name).write_bytes(b"\x08\x00")
    (model / names[1]).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:x\nsize 5\n")
    sentence = f"model {model}: {names[1]} is not there or no weights; download the model again"
    assert refused(UsageError, model=str(model)) == sentence
    for name in names[2:]:
        (model / name).unlink()
    shown = ", ".join(names[1:4])
    sentence = f"model {model}: {shown} and 2 more are not there or no weights; download the model again"
    assert refused(UsageError, model=str(model)) == sentence


def test_layers_that_the_model_has_not(refused: Callable[..., str], model: Path) -> None:
    """A server finds that only once its weights are loaded."""
    sentence = "outputs of layers 1, 99: boundary 100 is outside 1 to 7, the model has 8 layers"
    for config in (
        {"num_hidden_layers": 8},
        {"text_config": {"num_hidden_layers": 8}, "vision_config": {"num_hidden_layers": 200}},
        {"thinker_config": {"text_config": {"num_hidden_layers": 8}, "num_hidden_layers": 200}},
    ):
        (model / "config.json").write_text(json.dumps(config))
        assert refused(UsageError, layers=LayerChoice(outputs=[1, 99])) == sentence


def test_layers_of_an_embedded_model_are_refused_before_it_is_made(all_runs: Runs, launching: Launch) -> None:
    with pytest.raises(UsageError, match="boundary 9 is outside 1 to 7, the model has 8 layers"):
        check_layers(launching(model="embedded:llama", layers=LayerChoice(boundaries=[9])))


@pytest.mark.parametrize("config", ["[]", "{}", '{"num_hidden_layers": "8"}', '{"text_config": 3}', "no JSON"])
def test_layers_are_left_to_the_server_where_the_config_says_nothing(
    launching: Launch, model: Path, config: str
) -> None:
    (model / "config.json").write_text(config)
    assert check_layers(launching(layers=LayerChoice(outputs=[99]))) == LayerChoice(outputs=[99])


def test_layers_are_left_to_the_server_where_the_config_is_overridden(launching: Launch, model: Path) -> None:
    (model / "config.json").write_text('{"num_hidden_layers": 8}')
    argv = ["-m", "sglang.launch_server", "--json-model-override-args", '{"num_hidden_layers": 100}']
    assert check_layers(launching(layers=LayerChoice(outputs=[50]), argv=argv)) == LayerChoice(outputs=[50])


def test_a_drafters_file(refused: Callable[..., str], launching: Launch, home: Path, model: Path) -> None:
    """From the home folder, as every path on a host: the server stands in a folder of its own."""
    assert refused(UsageError, layers=LayerChoice(draft="draft.json")) == (
        f"drafter config {home}/draft.json: No such file or directory; give the file's path on the host"
    )
    (home / "draft.json").write_text('{"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 30]}}')
    for said in ("draft.json", "~/draft.json", f"{home}/draft.json"):
        made = check_layers(launching(layers=LayerChoice(draft=said)))
        assert made == LayerChoice(draft=f"{home}/draft.json")
    (model / "config.json").write_text('{"num_hidden_layers": 8}')
    assert refused(UsageError, layers=LayerChoice(draft="draft.json")).endswith(
        "id 30 is outside 0 to 7, the model has 8 layers"
    )


def test_a_dump_root_that_is_a_symbolic_link(refused: Callable[..., str], home: Path) -> None:
    (home / "real").mkdir(mode=0o700)
    (home / "dumps").symlink_to(home / "real")
    assert refused(UsageError) == (
        f"{home}/dumps is not a folder (or is a symbolic link); remove it or choose another dump root"
    )


def test_a_dump_root_that_others_may_read(refused: Callable[..., str], home: Path) -> None:
    (home / "dumps").mkdir()
    (home / "dumps").chmod(0o755)
    assert refused(UsageError) == (f"{home}/dumps is open to other users; chmod 700 it or choose another dump root")


def test_a_dump_root_nowhere(refused: Callable[..., str], home: Path) -> None:
    assert refused(UsageError, dump_root=f"{home}/no/dumps") == f"{home}/no/dumps: No such file or directory"


# --- Started ---


def test_what_the_servers_process_gets(server: Server, home: Path, model: Path, payload_folder: Path) -> None:
    run = server("silent", embedded=True)
    port = run.spec.port
    process = psutil.Process(run.running.child.pid)
    argv = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(port)]
    assert process.cmdline() == argv
    env = process.environ()
    assert env["PYTHONPATH"] == f"{payload_folder}/engine:{payload_folder}/embedded:{FAKE_SGLANG}"
    assert env["PYTHONUNBUFFERED"] == "1"
    assert env["FAKE"] == "silent"
    settings = msgspec.json.decode(env["LAYERTAP_TAP"], type=TapSettings)
    assert settings.dump_dir == f"{home}/dumps/{run.id}"
    assert settings.layers.outputs == [2]
    assert (settings.memory, settings.writers) == (None, None)
    assert len(settings.secret) == 16
    assert Path(settings.dump_dir).stat().st_mode & 0o777 == 0o700


def test_what_is_written_down(server: Server, home: Path, model: Path, payload_folder: Path) -> None:
    shown_argv = ["-m", "sglang.launch_server", "--api-key", "***"]
    env = {"FAKE": "silent", "AN_API_KEY": "hunter2", "API_KEYS": "hunter3", "HTTPS_PROXY": "http://me:hunter4@proxy:1"}
    run = server("silent", shown_argv=shown_argv, env=env)
    spec = run.spec
    assert spec.argv == [sys.executable, "-m", "sglang.launch_server", "--api-key", "***"]
    assert (spec.kind, spec.sglang, spec.code) == ("server", "0.5.23", payload_folder.name)
    assert spec.dump_dir == f"{home}/dumps/{run.id}"
    assert spec.details == {
        "profile": "fake",
        "model": str(model),
        "layers": {"outputs": [2]},
        "layers_words": "outputs of layers 2",
        "env": {"FAKE": "silent", "AN_API_KEY": "***", "API_KEYS": "***", "HTTPS_PROXY": "http://***@proxy:1"},
    }
    secret = json.loads(run.private.env["LAYERTAP_TAP"])["secret"]
    written = (run.folder / "spec.json").read_text()
    assert secret not in written and "hunter" not in written
    assert run.private.env["HTTPS_PROXY"] == "http://me:hunter4@proxy:1"


def test_a_python_path_of_the_profile_is_kept_behind_ours(server: Server, payload_folder: Path) -> None:
    run = server(env={"FAKE": "silent", "PYTHONPATH": f"{FAKE_SGLANG}:/of/the/profile"})
    assert run.private.env["PYTHONPATH"] == f"{payload_folder}/engine:{FAKE_SGLANG}:/of/the/profile"


def test_secrets_differ_from_launch_to_launch(server: Server) -> None:
    secrets = [json.loads(server("silent").private.env["LAYERTAP_TAP"])["secret"] for _ in range(2)]
    assert secrets[0] != secrets[1]


def test_the_port_is_free_again_after_a_stop(server: Server, home: Path) -> None:
    run = server()
    port = run.spec.port
    until(lambda: not port_free(port), "the fake server listens")
    stopped = stop(run, "")
    assert (stopped.how, stopped.left) == ("asked", [])
    assert list((home / "dumps").iterdir()) == []
    assert server("silent", port=port).state() == "running"


# --- Dumps of the dead ---


def test_dumps_of_dead_runs_are_removed_and_nothing_else(server: Server, home: Path, all_runs: Runs) -> None:
    dead, alive, elsewhere = server("silent"), server("silent"), server("silent")
    for process in dead.processes():
        os.kill(process.pid, signal.SIGKILL)
    until(lambda: not dead.alive())
    forged = msgspec.structs.replace(elsewhere.running, machine="another")
    runs.write_json(elsewhere.folder / "run.json", forged)
    foreign = home / "dumps" / "server-19990101-000000-beef"
    foreign.mkdir()
    assert {folder.name for folder in (home / "dumps").iterdir()} == {dead.id, alive.id, elsewhere.id, foreign.name}
    new = server("silent", port=free_port())
    left = {folder.name for folder in (home / "dumps").iterdir()}
    assert left == {alive.id, elsewhere.id, foreign.name, new.id}
