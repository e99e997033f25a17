"""The command line in processes of its own: exit codes, data on stdout, narration on stderr. The server is a fake."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from helpers import FAKE_SGLANG, ROOT, gone, until
from made_dataset import make_dataset

from backends import runs
from backends.errors import OurBug
from backends.jobs import describe
from backends.ports import free_port
from backends.runs import Run, Runs
from console import cli

LAYERTAP = Path(sys.executable).with_name("layertap")
ENGINE_PYTHON = ROOT / ".venv-engine" / "bin" / "python"
FIRST_CASE = "kimi-k2_5-int4-8x-rtxpro6000"

Ran = subprocess.CompletedProcess


@pytest.fixture
def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "LAYERTAP_PYTHON": sys.executable}


@pytest.fixture
def layertap(environment: dict[str, str], home: Path) -> Callable[..., Ran]:
    """Runs `layertap` with these words to its end."""

    def run(*words: object, **env: str) -> Ran:
        argv = [str(LAYERTAP), *map(str, words)]
        return subprocess.run(
            argv, capture_output=True, text=True, env=environment | env, cwd=home, check=False, timeout=120
        )

    return run


@pytest.fixture
def begin(environment: dict[str, str], home: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts `layertap` with these words."""
    begun: list[subprocess.Popen] = []

    def start(*words: object, **env: str) -> subprocess.Popen:
        begun.append(
            subprocess.Popen(
                [str(LAYERTAP), *map(str, words)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment | env,
                cwd=home,
            )
        )
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        process.communicate()


@pytest.fixture
def launched(
    layertap: Callable[..., Ran], environment: dict[str, str], home: Path, model: Path
) -> Callable[..., tuple[Ran, int]]:
    """`layertap launch` of the fake server; what it came to, and the port."""
    environment |= fake(home, model)

    def launch(words: str = "", *options: object, port: int | None = None) -> tuple[Ran, int]:
        port = port or free_port()
        return layertap("launch", "fake", "--port", port, *options, FAKE=words), port

    return launch


def fake(home: Path, model: Path) -> dict[str, str]:
    """A config with a profile for the fake server; what the environment needs for it."""
    (home / "layertap.toml").write_text(f"""
        [host.local]
        dump_dir = "{home}/dumps"
        [profile.fake]
        model = "{model}"
        layers = {{ outputs = [2] }}
    """)
    return {"PYTHONPATH": str(FAKE_SGLANG), "LAYERTAP_CONFIG": f"{home}/layertap.toml"}


def ended(ran: Ran, code: int, said: str = "", printed: str = "") -> None:
    """The exit code, what stderr says and what stdout holds."""
    assert (ran.returncode, ran.stderr.strip(), ran.stdout.strip()) == (code, said, printed)


# --- Usage: 2 ---


def test_help_and_version(layertap: Callable[..., Ran]) -> None:
    shown = layertap("--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    for verb in (
        "launch",
        "status",
        "logs",
        "runs",
        "stop",
        "try",
        "plan",
        "extract",
        "pull",
        "verify",
        "export",
        "diff",
        "sample",
        "diagnose",
        "stacks",
        "tune",
        "doctor",
        "demo",
    ):
        assert re.search(rf"^│ {verb} ", shown.stdout, re.MULTILINE), verb
    ended(layertap("--version"), 0, printed="0.1.0")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("dance", "dance"),
        ("status --loud", "--loud"),
        ("stop --port many", "--port"),
        ("extract rows.jsonl --output out --overlong cut", "--overlong"),
        ("extract --output out", '"extract" parameter ROWS requires an argument'),
        ("verify", '"verify" parameter DATASET requires an argument'),
        ("launch base --timeout -1", '"-1.0" for --timeout'),
        ("launch base --timeout nan", '"nan" for --timeout'),
        ("tune base --timeout 0", '"0.0" for --timeout'),
        ("tune base --seconds -5", '"-5.0" for --seconds'),
        ("plan rows.jsonl --layers 0", '"0" for --layers'),
        ("extract rows.jsonl --output out --restart-server -1", '"-1" for --restart-server'),
        ("export out --format native --draft-vocab 0", '"0" for --draft-vocab'),
    ],
)
def test_words_that_are_not_understood(layertap: Callable[..., Ran], words: str, said: str) -> None:
    ran = layertap(*words.split())
    assert (ran.returncode, ran.stdout) == (2, "")
    assert said in ran.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("status --config none.toml", "none.toml: there is no such file"),
        ("extract rows.jsonl --output out --prompt-column q", "--prompt-column and --response-column go together"),
        ("stop server-1", "no run begins with 'server-1'; runs: none at all"),
        ("tune", "say which profile to tune; `layertap launch` lists those that suit this host"),
        ("tune base --name a.b --write", "'a.b' is no name for a profile: take letters, digits, - and _"),
        ("tune base --name base --write", "there is a profile base already; say another name with --name"),
        ("runs server-1", "no run begins with 'server-1'; runs: none at all"),
        (
            "plan rows.jsonl",
            "no server runs here to take the model from; name the model's folder with --model",
        ),
        *(
            (f"{verb} --port {port}", f"port {port}: there are ports 1 to 65535, choose one of them")
            for verb, port in (
                ("launch base", 99999),
                ("launch base", -1),
                ("status", 0),
                ("logs", 65536),
                ("doctor", -1),
                ("stop", 99999),
                ("stacks", 99999),
                ("try hello", 99999),
                ("plan rows.jsonl", 99999),
                ("extract rows.jsonl --output out --port 30000", 99999),
                ("", 99999),
                ("bundle", 10**30),
            )
        ),
        ("--serve 99999", "port 99999: there are ports 1 to 65535, choose one of them"),
        *(
            (
                f"verify out --sample {number}",
                f"--sample {number}: give how many samples to verify, 1 or more, or leave it out for all",
            )
            for number in (0, -1)
        ),
        (
            "plan rows.jsonl --model /m --max-length 0",
            "--max-length 0: give at least 1 token, or leave it out for the server's",
        ),
        ("verify out", "{home}/out: there is no such file or folder on this host"),
        ("sample out 3", "{home}/out is no dataset: there is no such folder"),
        ("frobnicate", "no command is called 'frobnicate'; see `layertap --help`"),
        ("lanch", "no command is called 'lanch'; did you mean launch?"),
        ("status now", "status takes no 'now' there; see `layertap status --help`"),
    ],
)
def test_what_cannot_be_done_as_asked(layertap: Callable[..., Ran], home: Path, words: str, said: str) -> None:
    ended(layertap(*words.split()), 2, f"layertap: {said.format(home=home)}")


def test_a_browsers_port_that_is_taken(layertap: Callable[..., Ran]) -> None:
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        ran = layertap("--serve", port)
    assert ran.returncode == 2
    said = f"layertap: port {port} of 127.0.0.1: Address already in use; choose another port for --serve"
    assert ran.stderr.splitlines()[-1] == said


def test_a_mistake_in_the_config(layertap: Callable[..., Ran], home: Path) -> None:
    (home / "layertap.toml").write_text('[host.local]\npyhton = "/p"\n')
    said = "Object contains unknown field `pyhton` - at `$.host.local`; did you mean `python`?"
    ended(layertap("status", "--config", "layertap.toml"), 2, f"layertap: layertap.toml: {said}")
    ended(layertap("status", LAYERTAP_CONFIG="layertap.toml"), 2, f"layertap: layertap.toml: {said}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "kimi-or-deepseek-8x-b200 --model /m",
            "say which layers: --boundaries, --outputs, --eagle-ids or --draft; no profile guesses them",
        ),
        (
            "base --model /m --outputs 2 30 --boundaries 3 31",
            "name the layers in one way, as boundaries, outputs, eagle_ids or draft; given: boundaries, outputs",
        ),
        ("bse --model /m", "profile bse does not exist; did you mean base?"),
        ("base --model /m --outputs 2 --set =8", "--set '=8': expected NAME=VALUE"),
        ("base --model /m --outputs 2 --env FOO", "--env 'FOO': expected NAME=VALUE"),
        *(
            (f"{words} --dry-run", said)
            for words, said in (
                (
                    "embedded-llama --outputs 1 2 99",
                    "outputs of layers 1, 2, 99: boundary 100 is outside 1 to 7, the model has 8 layers",
                ),
                ("embedded-llama --boundaries 9", "boundaries 9: boundary 9 is outside 1 to 7, the model has 8 layers"),
                (
                    "embedded-kimi-k2_5 --draft /nope.json",
                    "drafter config /nope.json: No such file or directory; give the file's path on the host",
                ),
                (
                    "base --model /m --draft nope.json",
                    "drafter config {home}/nope.json: No such file or directory; give the file's path on the host",
                ),
            )
        ),
        (
            "base --model /m --outputs 2 --set host=0.0.0.0",
            "host 0.0.0.0 is not loopback: the server is reached over SSH and binds 127.0.0.1 only",
        ),
        (
            "base --model /m --outputs 2",
            "model /m: there is no such folder; give that of a downloaded model on the host",
        ),
        (
            "base --model m --outputs 2",
            "model {home}/m: there is no such folder; give that of a downloaded model on the host",
        ),
        ("--model /m", "model /m: there is no such folder; give that of a downloaded model on the host"),
        ("--model .", "model {home}: no config.json there; give the folder of a downloaded model on the host"),
    ],
)
def test_a_launch_that_is_refused(layertap: Callable[..., Ran], home: Path, words: str, said: str) -> None:
    ended(layertap("launch", *words.split(), PYTHONPATH=str(FAKE_SGLANG)), 2, f"layertap: {said.format(home=home)}")


# --- No connection: 3, no SGLang: 6, nothing there: 9, a bug: 70 ---


def test_a_python_that_cannot_be_used(layertap: Callable[..., Ran]) -> None:
    said = "layertap: /nowhere/python is no program that can be run; set --python to SGLang's Python"
    ended(layertap("status", "--python", "/nowhere/python"), 3, said)
    said = "layertap: local: the agent ended before it was up; can /bin/true be used?"
    ended(layertap("status", "--python", "/bin/true"), 3, said)


def test_a_relative_path_to_python(layertap: Callable[..., Ran], home: Path) -> None:
    ran = layertap("status", "--python", os.path.relpath(sys.executable, home), "--json")
    assert json.loads(ran.stdout)["host"]["python"] == sys.executable


@pytest.mark.parametrize("words", ["launch base --model /m --outputs 2", "demo"])
def test_a_python_without_sglang(layertap: Callable[..., Ran], words: str) -> None:
    ended(
        layertap(*words.split()),
        6,
        f"layertap: {sys.executable} has no sglang; choose SGLang's own Python with --python",
    )


def test_a_status_of_nothing(layertap: Callable[..., Ran]) -> None:
    ran = layertap("status")
    assert ran.returncode == 9
    assert ran.stderr == "layertap: no server of ours ever ran here; `layertap launch` one\n"
    assert re.fullmatch(r"\S+@\S+ · \d\d:\d\d:\d\d\nno server of ours ever ran here\n", ran.stdout)
    ran = layertap("status", "--json")
    assert ran.returncode == 9
    now = json.loads(ran.stdout)
    assert now["host"]["sglang"] is None
    assert {key: now[key] for key in ("schema", "server", "dumps", "extraction")} == {
        "schema": 1,
        "server": None,
        "dumps": None,
        "extraction": None,
    }


@pytest.mark.parametrize("words", ["stop", "try hello", "extract rows.jsonl --output out"])
def test_nothing_can_be_done_without_a_server(layertap: Callable[..., Ran], words: str) -> None:
    ended(layertap(*words.split()), 9, "layertap: no server of ours runs here; `layertap launch` it")


def test_no_logs_and_no_runs(layertap: Callable[..., Ran]) -> None:
    ended(layertap("logs"), 9, "layertap: no server of ours ever ran here; `layertap launch` one")
    ended(layertap("runs"), 0)
    ended(layertap("runs", "--json"), 0, printed='{"schema":1,"runs":[]}')


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ZeroDivisionError("x"), 70, "ZeroDivisionError: x\nlayertap: this is a bug of ours\n"),
        (OurBug("a traceback of the agent"), 70, "layertap: a traceback of the agent\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_how_what_nobody_foresaw_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, said: str
) -> None:
    def app(**_: Any) -> None:
        raise error

    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(SystemExit) as exited:
        cli.main()
    assert exited.value.code == code
    assert capsys.readouterr().err.endswith(said)


# --- A dry run ---


def dry_run(layertap: Callable[..., Ran], python: Path | str, **env: str) -> tuple[list[str], dict[str, Any]]:
    words = ["launch", FIRST_CASE, "--dry-run", "--model", "/m", "--python", python, "--set", "api-key=sk-123"]
    words += [
        "--env",
        "HF_TOKEN=hf_456",
        "--env",
        "HTTPS_PROXY=http://me:pw_789@proxy:3128",
        "--set",
        "tp=4",
        "--set",
        "sleep-on-idle=unset",
        "--set",
        "skip-server-warmup",
        "--memory",
        "48 GiB",
    ]
    text, data = layertap(*words, **env), layertap(*words, "--json", **env)
    warning = "warning: model /m: there is no such folder; give that of a downloaded model on the host\n"
    assert (text.returncode, text.stderr, data.returncode, data.stderr) == (0, warning, 0, warning)
    assert not any(secret in text.stdout + data.stdout for secret in ("sk-123", "hf_456", "pw_789"))
    assert data.stdout.count("\n") == 1
    return text.stdout.splitlines(), json.loads(data.stdout)


def check_dry_run(lines: list[str], data: dict[str, Any], version: str) -> None:
    assert lines[0] == f"# profile {FIRST_CASE} for SGLang {version}; layers: outputs of layers 2, 30, 58"
    differs, settings = lines[1 : 1 + len(data["differs"])], lines[1 + len(data["differs"]) :]
    assert differs == [f"? {one}" for one in data["differs"]]
    for line in settings:
        assert re.fullmatch(r"\S.*  # .*\[[\w.-]+( line)?\]", line), line
    assert "HF_TOKEN=***" in [line.split("  #")[0].strip() for line in lines]
    assert "HTTPS_PROXY=http://***@proxy:3128" in [line.split("  #")[0].strip() for line in lines]
    assert "--api-key ***" in [line.split("  #")[0].strip() for line in lines]
    assert {key: data[key] for key in ("schema", "profile", "sglang", "model", "layers")} == {
        "schema": 1,
        "profile": FIRST_CASE,
        "sglang": version,
        "model": "/m",
        "layers": "outputs of layers 2, 30, 58",
    }
    args = {name: (value, why) for name, value, why in data["args"]}
    assert args["tp-size"] == ("4", "[command line]")
    assert args["api-key"] == ("***", "[command line]")
    assert args["skip-server-warmup"] == (True, "[command line]")
    assert args["max-running-requests"] == ("128", "requests per forward; lets short prompts fill it [base]")
    assert "sleep-on-idle" not in args
    assert data["tap"][0] == ["memory", "48 GiB", "[command line]"]
    assert data["tap"][1][:2] == ["writers", None]
    assert len(data["env"]) + len(data["args"]) + len(data["tap"]) == len(settings)


def test_a_dry_run_prints_every_setting_with_its_reason(layertap: Callable[..., Ran], all_runs: Runs) -> None:
    check_dry_run(*dry_run(layertap, sys.executable, PYTHONPATH=str(FAKE_SGLANG)), "0.5.23")
    assert all_runs.all() == []


@pytest.mark.skipif(not ENGINE_PYTHON.exists(), reason="there is no .venv-engine with a real SGLang")
def test_a_dry_run_with_a_real_sglang(layertap: Callable[..., Ran]) -> None:
    lines, data = dry_run(layertap, ENGINE_PYTHON)
    check_dry_run(lines, data, data["sglang"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--writers 0", "command line: writers 0: expected at least 1"),
        ("--memory lots", "command line: memory 'lots': expected bytes, or a size such as 48 GiB"),
    ],
)
def test_settings_of_the_tap_that_cannot_be(layertap: Callable[..., Ran], words: str, said: str) -> None:
    ran = layertap("launch", "base", "--model", "/m", *words.split(), PYTHONPATH=str(FAKE_SGLANG))
    assert (ran.returncode, ran.stdout, ran.stderr) == (2, "", f"layertap: {said}\n")


def test_without_a_profile_those_that_suit_the_host_are_listed(layertap: Callable[..., Ran], all_runs: Runs) -> None:
    ran = layertap("launch", "--json", PYTHONPATH=str(FAKE_SGLANG))
    assert (ran.returncode, ran.stderr) == (2, "layertap: say which profile to launch; + suits this host and model\n")
    listed = {one["name"]: one for one in json.loads(ran.stdout)["profiles"]}
    assert "base" not in listed
    lines = layertap("launch", PYTHONPATH=str(FAKE_SGLANG)).stdout.splitlines()
    assert {line[:2] + line[2:].split()[0] for line in lines[1:]} == {
        f"{'?' if one['differs'] else '+'} {name}" for name, one in listed.items()
    }
    if not json.loads(ran.stdout)["situation"]["gpus"]:
        assert listed["embedded-llama"]["differs"] == []
        assert listed[FIRST_CASE]["differs"] == ["it is for 8 GPUs, and here are none"]
        assert lines[0] == "here: no GPU" and lines[1].startswith("+ embedded-llama ")
    assert all_runs.all() == []


def test_a_model_that_is_embedded_is_no_folder(layertap: Callable[..., Ran]) -> None:
    ran = layertap("launch", "--model", "embedded:llama", PYTHONPATH=str(FAKE_SGLANG))
    assert ran.stderr == "layertap: say which profile to launch; + suits this host and model\n"


# --- A server's life ---


def test_from_launch_to_stop(launched: Callable[..., tuple[Ran, int]], layertap: Callable[..., Ran]) -> None:
    ran, port = launched()
    assert ran.returncode == 0
    (run_id,) = re.findall(r"^launched (server-\S+) on port", ran.stderr)
    lines = ran.stdout.splitlines()
    assert lines[:2] == [f"+ server {run_id}: healthy", f"  profile fake · SGLang 0.5.23 · port {port}"]
    assert lines[3] == "  tensors: outputs of layers 2 (boundaries 3)"
    assert "  ready …\n" in ran.stderr

    again, _ = launched(port=port)
    remedy = f"`layertap stop {run_id}` stops it, or choose another --port"
    ended(again, 7, f"layertap: a server of ours runs on port {port} already: {run_id}; {remedy}")

    shown = layertap("status")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.splitlines()[1] == f"+ server {run_id}: healthy"
    now = json.loads(layertap("status", "--json").stdout)
    assert (now["server"]["id"], now["server"]["port"], now["server"]["health"]) == (run_id, port, 200)
    assert now["dumps"]["seen"] == {"ours": 0, "warm_up": 1, "health": 0, "stranger": 0}

    log = layertap("logs")
    assert (log.returncode, log.stderr) == (0, "")
    assert "The server is fired up and ready to roll!" in log.stdout
    assert "api_key='***')" in log.stdout
    assert "sk-secret" not in log.stdout
    assert layertap("logs", run_id).stdout == log.stdout
    row = rf"{run_id}  {{}}  \d\d:\d\d:\d\d  \d.*[sm]  port {port}  fake"
    assert re.fullmatch(row.format("~ running") + "\n", layertap("runs").stdout)

    stopped = layertap("stop")
    assert (stopped.returncode, stopped.stderr) == (0, "")
    assert re.fullmatch(rf"{run_id} stopped in [\d.]+ s \(asked\)\n", stopped.stdout)
    after = layertap("status")
    assert after.returncode == 9
    assert after.stdout.splitlines()[1] == f"- server {run_id}: stopped"
    assert re.fullmatch(row.format("- stopped") + "\n", layertap("runs").stdout)
    line, *history = layertap("runs", run_id).stdout.splitlines()
    assert re.fullmatch(rf"{run_id}  - stopped, began [-\d]+ [:\d]+, lasted \d.*[sm]", line)
    said = ["started as process", "asked to stop: layertap stop", "ended by signal 15", "stopped in"]
    for event, beginning in zip(history, said, strict=True):
        assert re.match(rf"  \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d  {beginning}", event)
    shown = json.loads(layertap("runs", run_id, "--json").stdout)
    assert (shown["schema"], shown["id"]) == (1, run_id)
    assert [event["event"] for event in shown["events"]] == ["started", "stop_asked", "ended", "stopped"]
    assert layertap("logs").stdout == log.stdout
    ended(layertap("stop"), 9, "layertap: no server of ours runs here; `layertap launch` it")


def test_json_is_one_object_with_a_schema(
    launched: Callable[..., tuple[Ran, int]], layertap: Callable[..., Ran]
) -> None:
    ran, port = launched("", "--json", "--detach")
    assert ran.returncode == 0
    assert ran.stderr.startswith("launched server-")
    detached = json.loads(ran.stdout)
    assert (detached["schema"], detached["state"], detached["port"]) == (1, "running", port)
    listed = json.loads(layertap("runs", "--json").stdout)
    assert [run["id"] for run in listed["runs"]] == [detached["id"]]
    stopped = json.loads(layertap("stop", detached["id"], "--json").stdout)
    assert (stopped["schema"], stopped["id"], stopped["left"]) == (1, detached["id"], [])


def test_detached_it_prints_the_id(launched: Callable[..., tuple[Ran, int]], all_runs: Runs) -> None:
    ran, _ = launched("silent", "--detach")
    (run,) = all_runs.all()
    assert (ran.returncode, ran.stdout) == (0, f"{run.id}\n")
    assert run.alive()


def test_a_server_that_crashes(launched: Callable[..., tuple[Ran, int]], layertap: Callable[..., Ran]) -> None:
    ran, _ = launched("crash")
    assert ran.returncode == 6
    assert "  cause: GPU memory ran out while the weights were loading\n" in ran.stdout
    assert layertap("status").returncode == 9


def test_a_server_without_the_tap_is_not_waited_for(launched: Callable[..., tuple[Ran, int]]) -> None:
    ran, _ = launched("no-tap")
    assert ran.returncode == 6
    assert "  cause: the server is up without the tap\n" in ran.stdout


def test_a_server_that_takes_too_long(launched: Callable[..., tuple[Ran, int]], all_runs: Runs) -> None:
    ran, _ = launched("silent", "--timeout", 0.2)
    assert ran.returncode == 4
    assert ran.stderr.endswith("not ready after 0.2 s; it goes on, `layertap status --watch` follows it\n")
    (run,) = all_runs.all()
    assert ran.stdout.startswith(f"~ server {run.id}: starting")
    assert run.alive()


def test_a_launch_that_hangs_is_followed_to_its_end(
    environment: dict[str, str], launched: Callable[..., tuple[Ran, int]]
) -> None:
    environment["LAYERTAP_PATIENCE"] = "0.01"
    ran, _ = launched("silent", "--timeout", 6)
    assert ran.returncode == 4
    assert re.match(r"\? server \S+: hang_suspected, in weights for ", ran.stdout)
    assert "cause: loading the weights stands still" in ran.stdout
    assert "it goes on, `layertap status --watch` follows it" in ran.stderr
    assert (
        "  ? hang suspected: loading the weights stands still: nothing is read, and nothing is logged\n" in ran.stderr
    )


def test_a_support_bundle(server: Callable[..., Run], layertap: Callable[..., Ran], home: Path) -> None:
    run = server(env={"FAKE": "", "MY_SERVICE_TOKEN": "sesame-open-1"})
    done = layertap("bundle", "--output", home / "b.tar.gz", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"schema": 1, "path": f"{home}/b.tar.gz"}
    with tarfile.open(home / "b.tar.gz") as tar:
        files = {name.partition("/")[2]: tar.extractfile(name).read() for name in tar.getnames()}
    assert f"server {run.id}" in files["status.txt"].decode()
    assert not any(b"sesame-open-1" in data for data in files.values())
    refused = layertap("bundle", "no-such-run")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "no run begins with 'no-such-run'" in refused.stderr


def test_stacks_without_py_spy(server: Callable[..., Run], layertap: Callable[..., Ran], home: Path) -> None:
    run = server("silent")
    said = "pip install py-spy"
    ran = layertap("stacks", run.id, PATH=str(home))
    assert (ran.returncode, ran.stdout) == (6, "")
    assert said in ran.stderr


@pytest.mark.skipif(not ENGINE_PYTHON.exists(), reason="no .venv-engine")
def test_stacks(server: Callable[..., Run], layertap: Callable[..., Ran]) -> None:
    run = server("silent")
    until(lambda: "Load weight begin" in run.log.read_text())
    path = f"{ENGINE_PYTHON.parent}:{os.environ['PATH']}"
    ran = layertap("stacks", PATH=path)
    assert ran.returncode == 0
    assert "launcher stands in main (" in ran.stdout
    (kept,) = run.folder.glob("stacks-*.txt")
    assert f"all of them: {kept}" in ran.stdout
    report = json.loads(layertap("stacks", run.id, "--json", PATH=path).stdout)
    assert (report["schema"], report["run"], report["stacks"][0]["error"]) == (1, run.id, None)


def test_a_stop_that_leaves_something(server: Callable[..., Run], layertap: Callable[..., Ran]) -> None:
    run = server("no-port")
    port = run.spec.port
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", port))
        stranger.listen()
        ran = layertap("stop")
    assert ran.returncode == 8
    assert ran.stdout.splitlines()[1:] == [f"  left: port {port} is still open"]
    assert ran.stderr == f"layertap: {run.id} left something behind: port {port} is still open\n"


def test_several_servers(server: Callable[..., Run], layertap: Callable[..., Ran]) -> None:
    first, second = (server("silent").spec.port for _ in range(2))
    said = f"layertap: servers run on ports {second}, {first}; say which with --port"
    ended(layertap("status"), 2, said)
    ended(layertap("stop"), 2, said)
    assert layertap("stop", "--port", first).returncode == 0
    assert json.loads(layertap("status", "--json").stdout)["server"]["port"] == second


def test_whoever_is_told_to_say_which_server_can_say_it(
    server: Callable[..., Run], start: Callable[..., Run], layertap: Callable[..., Ran], home: Path, all_runs: Runs
) -> None:
    (home / "rows.jsonl").write_text("{}\n")
    first, second = (server("silent") for _ in range(2))
    ports = f"{second.spec.port}, {first.spec.port}"
    port = first.spec.port
    for verb in ("logs", "plan rows.jsonl", "bundle", "status", "stacks", "stop"):
        ended(layertap(*verb.split()), 2, f"layertap: servers run on ports {ports}; say which with --port")
    until(lambda: "Load weight" in first.log.read_text())
    logs = layertap("logs", "--port", port)
    assert logs.returncode == 0 and f"port={port}" in logs.stdout
    layertap("plan", "rows.jsonl", "--port", port)
    (planned,) = all_runs.all("plan")
    assert json.loads((planned.folder / "job.json").read_text())["model"] == first.spec.details["model"]
    verified, drew = start("verify"), start("extract", details={"output": "/data", "server": first.id})
    runs.write_json(drew.folder / "job.json", {"server": msgspec.to_builtins(describe(first))})
    for words, shown in (
        (("--port", port), first.id),
        ((first.id,), first.id),
        ((drew.id,), first.id),
        ((verified.id,), second.id),
    ):
        made = layertap("bundle", *words, "--output", home / "b.tar.gz")
        assert made.returncode == 0, made.stderr
        with tarfile.open(home / "b.tar.gz") as tar:
            files = {name.partition("/")[2]: tar.extractfile(name).read().decode() for name in tar.getnames()}
        assert f"server {shown}" in files["status.txt"]
        assert json.loads(files["overview.json"])["server"]["id"] == shown, words


def test_a_run_of_another_machine_cannot_be_stopped_here(
    server: Callable[..., Run], layertap: Callable[..., Ran]
) -> None:
    run = server("silent")
    runs.write_json(run.folder / "run.json", msgspec.structs.replace(run.running, machine="another"))
    said = f"layertap: {run.id} runs on another machine that shares this home; stop it from there"
    ended(layertap("stop", run.id), 2, said)


# --- Jobs ---


def test_an_extraction_is_attached_to_and_stopped(
    server: Callable[..., Run], layertap: Callable[..., Ran], home: Path, begin: Callable
) -> None:
    """The fake server never answers the first question, so the extraction is still there when it is asked for again."""
    mute = server("mute")
    until(lambda: "fired up" in mute.log.read_text())
    (home / "rows.jsonl").write_text("{}\n")
    extract = ["extract", "rows.jsonl", "--output", "data", "--allow-volatile"]
    first = layertap(*extract, "--detach")
    assert first.returncode == 0
    run_id = first.stdout.strip()
    assert first.stderr == f"started {run_id}\n"
    again = layertap(*extract, "--detach", "--json")
    assert again.stderr == f"attached to {run_id}, which writes to {home}/data already\n"
    assert json.loads(again.stdout)["id"] == run_id
    for changed, said in (
        (["others.jsonl"], f"its rows are {home}/rows.jsonl and not {home}/others.jsonl"),
        (["rows.jsonl", "--format", "native,specforge"], "its formats are native and not native,specforge"),
        (["rows.jsonl", "--max-length", "9"], "its options are max_length None and not max_length 9"),
    ):
        other = layertap("extract", *changed, *extract[2:], "--detach")
        ended(
            other,
            7,
            f"layertap: {run_id} writes to {home}/data already, {said}; wait for it, or `layertap stop {run_id}`",
        )

    watching = begin(*extract, "--watch", "--json")
    assert json.loads(watching.stdout.readline())["phase"] == "preparing"
    watching.send_signal(signal.SIGINT)
    _, said = watching.communicate()
    assert watching.returncode == 130
    assert said.splitlines()[-1] == (
        f"{run_id} goes on; the same command attaches to it again, `layertap stop {run_id}` stops it"
    )
    assert json.loads(layertap("status", "--json").stdout)["extraction"]["state"] == "running"
    stopped = layertap("stop", run_id)
    assert stopped.returncode == 0
    assert json.loads(layertap("status", "--json").stdout)["extraction"]["state"] == "exited"


def test_a_sample_that_is_not_there(layertap: Callable[..., Ran], home: Path) -> None:
    make_dataset(home / "data", samples=3)
    for number in (99, 10**20):
        ended(layertap("sample", "data", number), 2, f"layertap: no sample {number} in {home}/data/ledger.sqlite")


def test_ctrl_c_ends_a_try_and_its_job(server: Callable[..., Run], begin: Callable, all_runs: Runs) -> None:
    mute = server("mute")
    until(lambda: "fired up" in mute.log.read_text())
    trying = begin("try", "hello")
    until(lambda: "asked for /server_info" in mute.log.read_text())
    trying.send_signal(signal.SIGINT)
    out, said = trying.communicate()
    (job,) = all_runs.all("try")
    assert (trying.returncode, out, said) == (130, "", f"stopping {job.id} …\n")
    assert not job.alive()
    assert mute.alive()


def test_a_demo_never_replaces_what_is_no_demo(
    launched: Callable[..., tuple[Ran, int]], layertap: Callable[..., Ran], home: Path, all_runs: Runs
) -> None:
    (home / "data").mkdir()
    (home / "data" / "manifest.json").write_text(f'{{"profile": "{FIRST_CASE}"}}')
    ended(layertap("demo", "data"), 2, f"layertap: {home}/data is not empty and holds no demo; give another folder")
    assert (home / "data" / "manifest.json").exists()
    assert all_runs.all() == []


# --- Ctrl+C and broken pipes ---


def test_ctrl_c_during_a_launch_leaves_the_server(
    launched: Callable[..., tuple[Ran, int]], begin: Callable, all_runs: Runs
) -> None:
    launching = begin("launch", "fake", "--port", free_port(), FAKE="silent")
    seen = []
    while "  weights …\n" not in seen:
        seen.append(launching.stderr.readline())
        assert seen[-1], f"it ended: {seen}"
    launching.send_signal(signal.SIGINT)
    out, said = launching.communicate()
    (run,) = all_runs.all()
    assert (launching.returncode, out) == (130, "")
    assert said.strip() == (f"{run.id} goes on; `layertap status --watch` follows it, `layertap stop` stops it")
    assert run.alive()


@pytest.mark.parametrize("words", [["status", "--watch"], ["logs", "--follow"]])
def test_ctrl_c_ends_what_goes_on(server: Callable[..., Run], begin: Callable, words: list[str]) -> None:
    server("silent")
    watching = begin(*words)
    assert watching.stdout.readline()
    watching.send_signal(signal.SIGINT)
    _, said = watching.communicate()
    assert (watching.returncode, said) == (130, "")


@pytest.mark.parametrize("words", [["status", "--watch"], ["logs", "--follow"], ["status", "--watch", "--json"]])
def test_a_reader_that_leaves(server: Callable[..., Run], begin: Callable, words: list[str]) -> None:
    run = server("silent")
    watching = begin(*words)
    assert watching.stdout.readline()
    watching.stdout.close()

    def over() -> bool:
        with run.log.open("a") as log:
            log.write("another line\n")
        return watching.poll() is not None

    until(over)
    assert watching.returncode == 0
    assert watching.stderr.read() == ""


def test_the_agent_ends_with_the_command(begin: Callable, server: Callable[..., Run]) -> None:
    server("silent")
    watching = begin("status", "--watch")
    assert watching.stdout.readline()
    (agent,) = psutil.Process(watching.pid).children()
    watching.send_signal(signal.SIGKILL)
    until(lambda: gone(agent.pid))
