"""A support bundle: whole, and with no secret in it, wherever they were planted."""

from __future__ import annotations

import json
import stat
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from helpers import FAKE_SGLANG, until

from backends import runs
from backends.errors import UsageError
from backends.host import LocalHost
from backends.jobs import describe
from backends.runs import Run
from capture import events
from console import VERSION
from console.bundle import write
from console.session import Session

KEY, TOKEN, PASSWORD, PROXY, BASIC, BEARER, HUB, AGENTS = (
    "kQ7argvkey55", "vR8envtoken66", "wS9urlpass77", "pA4proxypass", "dGhlcmU6YmFzaWM=", "xT1bearer88", "hf_yU2hubtoken99abc", "zV3agent11",
)  # fmt: skip
SECRETS = (KEY, TOKEN, PASSWORD, PROXY, BASIC, BEARER, HUB, AGENTS)


@pytest.fixture
def session(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    monkeypatch.setenv("PYTHONPATH", str(FAKE_SGLANG))
    monkeypatch.setenv("SOME_AGENT_SECRET", AGENTS)
    link = LocalHost(sys.executable)
    yield Session(link, {})
    link.close()


def unpacked(path: Path) -> dict[str, str]:
    """The files by their names below the folder that all of them are in."""
    with tarfile.open(path) as tar:
        members = tar.getmembers()
        (folder,) = {member.name.split("/")[0] for member in members}
        assert folder.startswith("layertap-bundle-")
        files = {member.name: tar.extractfile(member) for member in members}
        return {name.removeprefix(f"{folder}/"): file.read().decode() for name, file in files.items() if file}


def plant(run: Run) -> None:
    """Secrets in the log and in the history."""
    with run.log.open("a") as log:
        log.write(
            f"[2026-01-01 00:00:00] server_args=ServerArgs(api_key='{KEY}', tp_size=1)\n"
            f"[2026-01-01 00:00:00] plain {KEY} and {TOKEN} and {AGENTS} without a name\n"
            f"[2026-01-01 00:00:00] HTTPS_PROXY=http://me:{PROXY}@proxy:3128\n"
            f"[2026-01-01 00:00:00] headers: Authorization: Basic {BASIC}\n"
            f"[2026-01-01 00:00:00] -H 'Authorization: Bearer {BEARER}' token {HUB}\n"
        )
    events.append(run.folder, "error", reason=f"https://me:{PASSWORD}@example.org said no to {HUB}")
    (run.folder / "stacks-20260101-000000.txt").write_text(f"Thread 1\n  api_key: {KEY!r}\n  url: //me:{PASSWORD}@x\n")


@pytest.fixture
def planted(server: Callable[..., Run], start: Callable[..., Run], model: Path, session: Session) -> tuple[Run, Run]:
    """A server and an extraction with secrets of every kind in everything that a bundle holds."""
    argv = ["-m", "sglang.launch_server", "--model-path", str(model), "--api-key", KEY]
    env = {"FAKE": "", "MY_SERVICE_TOKEN": TOKEN, "PIP_INDEX_URL": f"https://me:{PASSWORD}@index.example.org/simple"}
    run = server(argv=[*argv, "--port", "0"], shown_argv=[*argv[:-1], "***"], env=env)
    until(lambda: run.log.exists() and "Load weight" in run.log.read_text())
    job = start("extract", details={"output": "/data", "server": run.id})
    runs.write_json(job.folder / "job.json", {"server": msgspec.to_builtins(describe(run))})
    runs.write_json(job.folder / "result.json", {"error": f"bearer {BEARER}"})
    for one in (run, job):
        plant(one)
    return run, job


def test_no_secret_is_in_it_and_what_was_masked_is_listed(
    session: Session, planted: tuple[Run, Run], home: Path
) -> None:
    server, job = planted
    secret = json.loads(server.private.env["LAYERTAP_TAP"])["secret"]
    picture = {"screen.svg": f"<svg><text>key&#160;{KEY}</text><text>Bearer {BEARER}</text></svg>"}
    path = write(session, picture, None, home / "made.tar.gz")
    assert path == home / "made.tar.gz"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    files = unpacked(path)
    for name, text in files.items():
        for one in (*SECRETS, secret):
            assert one not in text, f"{one} in {name}"
    wanted = {
        "overview.json", "diagnosis.json", "effective.json", "versions.json", "console.json", "doctor.json",
        "masked.json", "screen.svg",
        *(f"{run.id}/{name}" for run in (server, job) for name in (
            "spec.json", "run.json", "events.jsonl", "environment.json", f"{run.spec.kind}.log", "stacks-20260101-000000.txt",
        )),
        f"{job.id}/job.json", f"{job.id}/result.json",
    }  # fmt: skip
    assert wanted <= files.keys()
    # What is there is whole: JSON is JSON, and says what it takes to judge.
    for name in files:
        if name.endswith(".json"):
            json.loads(files[name])
    assert json.loads(files["overview.json"])["server"]["id"] == server.id
    assert "verdict" in json.loads(files["diagnosis.json"])
    assert json.loads(files["console.json"])["layertap"] == VERSION
    assert json.loads(files["versions.json"])["packages"]["msgspec"]
    assert json.loads(files["doctor.json"])["checks"]
    shown = json.loads(files[f"{server.id}/environment.json"])
    assert (shown["MY_SERVICE_TOKEN"], shown["FAKE"]) == ("***", None)
    assert "without a name" in files[f"{server.id}/server.log"]
    assert "said no to ***" in files[f"{job.id}/events.jsonl"]
    # What was masked is listed, by place and kind.
    masked = json.loads(files["masked.json"])["masked"]
    kinds = {(one["file"], one["kind"]) for one in masked}
    log = f"{server.id}/server.log"
    assert {
        (log, "argument --api-key"), (log, "variable MY_SERVICE_TOKEN"), (log, "password in a URL"),
        (log, "Authorization header"), (log, "Hugging Face token"), (log, "variable SOME_AGENT_SECRET"),
        (f"{job.id}/job.json", "the tap's secret"), ("screen.svg", "argument --api-key"),
        (f"{server.id}/environment.json", "variable MY_SERVICE_TOKEN"), (f"{job.id}/result.json", "bearer token"),
    } <= kinds  # fmt: skip
    assert all(one["count"] > 0 for one in masked)


def test_a_bundle_of_one_run(session: Session, planted: tuple[Run, Run], home: Path) -> None:
    server, job = planted
    files = unpacked(write(session, {}, job.id, home / "one.tar.gz"))
    assert {name.split("/")[0] for name in files if "/" in name} == {server.id, job.id}


def test_a_bundle_where_nothing_ever_ran(session: Session, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    path = write(session, {"status.txt": "nothing"})
    assert path.parent == home and path.name.endswith(".tar.gz")
    assert {"overview.json", "doctor.json", "status.txt", "masked.json"} <= unpacked(path).keys()


def test_a_long_log_keeps_its_beginning_and_its_end(session: Session, start: Callable[..., Run], home: Path) -> None:
    run = start("verify")
    run.log.write_text("first line\n" + "x" * 99 + "\n" + ("y" * 99 + "\n") * 20_000 + "last line\n")
    text = unpacked(write(session, {}, run.id, home / "long.tar.gz"))[f"{run.id}/verify.log"]
    assert text.startswith("first line\n") and text.endswith("last line\n")
    assert "bytes are left out here" in text and len(text) < 1_400_000


def test_a_bundle_that_cannot_be_written(session: Session, home: Path) -> None:
    with pytest.raises(UsageError, match="give another file with --output"):
        write(session, {}, None, home / "nowhere" / "made.tar.gz")
    assert not list(home.glob("**/*.part"))
