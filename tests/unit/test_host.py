"""Reaching a host: the payload goes over once, the agent answers many threads, and every way to fail has its words."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from helpers import FAKE_SGLANG, ROOT, gone, until

from backends import host, payload
from backends.errors import ConnectionFailed, NotReady, OurBug, RunDied, UsageError
from backends.host import LocalHost, bootstrap_source, find_python


@pytest.fixture
def local(home: Path) -> Iterator[LocalHost]:
    link = LocalHost(sys.executable)
    yield link
    link.close()


@pytest.fixture
def cache(home: Path) -> Path:
    """Where payloads lie."""
    return home / "cache" / "layertap" / "payload"


def wrapper(folder: Path, script: str) -> str:
    """An interpreter of one's own: a shell script."""
    path = folder / "wrapped-python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def bootstrap(stdin: bytes, *, prelude: str = "", cwd: Path | None = None) -> bytes:
    """What the bootstrap says to a link that closes after `stdin`."""
    name, archive = payload.pack()
    argv = [sys.executable, "-u", "-c", prelude + bootstrap_source(), name, str(len(archive))]
    return subprocess.run(argv, input=stdin, stdout=subprocess.PIPE, cwd=cwd, check=True).stdout


# --- Payload and bootstrap ---


def test_the_payload_is_the_same_for_the_same_code() -> None:
    assert payload.pack() == payload.pack()


def test_what_sglang_finds_in_the_payload(payload_folder: Path) -> None:
    def entry_points(part: str) -> set[tuple[str, str, str]]:
        found = importlib.metadata.distributions(path=[str(payload_folder / part)])
        return {(entry.group, entry.name, entry.value) for one in found for entry in one.entry_points}

    assert entry_points("engine") == {("sglang.srt.plugins", "layertap", "capture.tap.plugin:register")}
    assert entry_points("embedded") == {
        ("sglang.srt.platforms", "layertap_cpu", "layertap_cpu:activate"),
        ("sglang.srt.plugins", "layertap_cpu", "layertap_cpu:register"),
    }
    assert (payload_folder / "host/backends/agent.py").exists()
    assert (payload_folder / "engine/capture/tap/forward.py").exists()
    assert not list(payload_folder.rglob("*.pyc"))


def test_the_payload_goes_over_once(cache: Path) -> None:
    name, archive = payload.pack()
    assert bootstrap(archive) == b"\nLAYERTAP need\n\nLAYERTAP have\n"
    assert [entry.name for entry in cache.iterdir()] == [name]
    assert cache.stat().st_mode & 0o777 == 0o700
    assert bootstrap(b"") == b"\nLAYERTAP have\n"


def test_a_damaged_payload_is_not_unpacked(cache: Path) -> None:
    _, archive = payload.pack()
    said = b"\nLAYERTAP need\n\nLAYERTAP error the payload arrived damaged\n"
    assert bootstrap(archive[:-1] + b"x") == said
    assert bootstrap(archive[:1000]) == said
    assert not cache.exists()


def test_the_console_says_that_the_payload_arrived_damaged(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload, "pack", lambda: ("0123456789abcdef", b"something else"))
    with pytest.raises(ConnectionFailed) as failed:
        LocalHost(sys.executable)
    assert str(failed.value) == "local: the payload arrived damaged"


def test_two_that_come_at_once_share_a_payload(cache: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        links = list(pool.map(lambda _: LocalHost(sys.executable), range(3)))
    try:
        name, _ = payload.pack()
        assert [link.request("hello")["payload"] for link in links] == [name] * 3
        assert [entry.name for entry in cache.iterdir()] == [name]
    finally:
        for link in links:
            link.close()


def test_a_cache_that_cannot_be_written(home: Path) -> None:
    (home / "cache").write_text("in the way")
    with pytest.raises(ConnectionFailed) as failed:
        LocalHost(sys.executable)
    assert str(failed.value) == (
        f"local: {home}/cache/layertap: Not a directory; let us write there, or have XDG_CACHE_HOME name another folder"
    )


def test_a_state_folder_that_cannot_be_written(home: Path) -> None:
    (home / "state").write_text("in the way")
    with pytest.raises(ConnectionFailed) as failed:
        LocalHost(sys.executable)
    assert str(failed.value) == (
        f"local: {home}/state/layertap: Not a directory; let us write there, or have XDG_STATE_HOME name another folder"
    )
    (home / "state").unlink()


def test_a_python_that_is_too_old(home: Path) -> None:
    said = bootstrap(b"", prelude="import sys; sys.version_info = (3, 10)\n")
    assert (
        said
        == (
            f"\nLAYERTAP error {sys.executable} is Python 3.10; "
            "SGLang's own Python, 3.11 or newer, is wanted: name it with --python\n"
        ).encode()
    )


def test_a_python_without_what_sglang_brings(home: Path) -> None:
    with pytest.raises(ConnectionFailed) as failed:
        LocalHost(wrapper(home, f'exec {sys.executable} -S "$@"'))
    assert str(failed.value) == f"local: {sys.executable}: No module named 'msgspec'; SGLang's own Python is wanted"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exit 0", "local: the agent ended before it was up; can {python} be used?"),
        ("echo Welcome; exit 1", "local: the agent ended before it was up; can {python} be used?"),
        ("exec yes", "local: expected the agent's greeting, got a flood of other text"),
    ],
)
def test_a_program_that_is_no_python(home: Path, script: str, said: str) -> None:
    python = wrapper(home, script)
    with pytest.raises(ConnectionFailed) as failed:
        LocalHost(python)
    assert str(failed.value) == said.format(python=python)
    assert failed.value.exit_code == 3


def test_a_program_that_cannot_be_run(home: Path) -> None:
    (home / "python").write_text("")
    with pytest.raises(ConnectionFailed, match=f"{home}/python: Permission denied"):
        LocalHost(str(home / "python"))


def test_a_program_that_says_nothing_is_ended(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "START_SECONDS", 0.2)
    before = set(psutil.Process().children())
    with pytest.raises(ConnectionFailed, match=r"local: the agent said nothing for 0\.2 s"):
        LocalHost(wrapper(home, "exec sleep 600"))
    assert set(psutil.Process().children()) <= before


def test_a_banner_before_the_agent_speaks_is_skipped(home: Path) -> None:
    link = LocalHost(wrapper(home, f'echo "Welcome to gpu-7"; echo; printf "ready> "; exec {sys.executable} "$@"'))
    try:
        assert link.request("hello")["python"] == sys.executable
    finally:
        link.close()


def test_modules_in_the_folder_one_stands_in_do_no_harm(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("io.py", "zipfile.py", "hashlib.py", "msgspec.py", "backends.py"):
        (home / name).write_text("raise SystemExit('the wrong module')")
    (home / "capture").mkdir()
    (home / "capture" / "__init__.py").write_text("raise SystemExit('the wrong module')")
    monkeypatch.chdir(home)
    link = LocalHost(sys.executable)
    link.close()
    assert bootstrap(b"", cwd=home) == b"\nLAYERTAP have\n"


# --- The agent ---


def test_hello_without_sglang(local: LocalHost, home: Path) -> None:
    name, _ = payload.pack()
    hello = local.request("hello")
    assert hello["sglang"] is None
    assert hello["payload"] == name
    assert hello["payload_folder"] == f"{home}/cache/layertap/payload/{name}"
    assert hello["state"] == f"{home}/state/layertap"
    assert hello["python"] == sys.executable
    assert hello["cores"] == os.cpu_count()


def test_a_file_comes_as_it_is(local: LocalHost, home: Path) -> None:
    (home / "log").write_bytes(b"\x00\xffline 1\r\nline 2")
    inode = (home / "log").stat().st_ino
    assert local.read(f"{home}/log", 2) == ({"size": 16, "inode": inode}, b"line 1\r\nline 2")
    assert local.read(f"{home}/log", 2, 4) == ({"size": 16, "inode": inode}, b"line")
    assert local.read(f"{home}/log", 99) == ({"size": 16, "inode": inode}, b"")


def test_what_the_agent_meets_comes_back_as_it_was(local: LocalHost, home: Path) -> None:
    with pytest.raises(UsageError) as failed:
        local.read(f"{home}/none", 0)
    assert str(failed.value) == f"{home}/none: No such file or directory"
    with pytest.raises(RunDied) as died:
        local.request("server")
    assert str(died.value) == "no server of ours runs here; `layertap launch` it"
    asked = {
        "profile": "p",
        "model": "m",
        "argv": [],
        "shown_argv": [],
        "env": {},
        "port": 1,
        "layers": {"outputs": [1]},
    }
    with pytest.raises(NotReady) as unready:
        local.request("launch", launching=asked)
    assert str(unready.value) == f"{sys.executable} has no sglang; choose SGLang's own Python with --python"
    with pytest.raises(OurBug, match=r"TypeError: .*missing 1 required positional argument: 'run_id'"):
        local.request("run")
    assert [int(error.exit_code) for error in (UsageError, RunDied, NotReady, OurBug)] == [2, 9, 6, 70]


@pytest.mark.parametrize("method", ["nonsense", "_summary", "__init__", "runs", "payload"])
def test_an_unknown_request(local: LocalHost, method: str) -> None:
    with pytest.raises(UsageError, match=f"the agent knows no request '{method}'"):
        local.request(method)


def test_many_threads_ask_at_once(local: LocalHost, home: Path) -> None:
    for number in range(100):
        (home / f"{number}").write_bytes(b"%d" % number * 1000)
    with ThreadPoolExecutor(8) as pool:
        bodies = list(pool.map(lambda number: local.read(f"{home}/{number}", 0)[1], range(100)))
    assert bodies == [b"%d" % number * 1000 for number in range(100)]


@pytest.fixture
def stuck(home: Path) -> str:
    """A file that cannot be opened before somebody writes to it."""
    os.mkfifo(home / "stuck")
    return str(home / "stuck")


def test_a_request_that_takes_too_long(local: LocalHost, stuck: str) -> None:
    with pytest.raises(ConnectionFailed) as failed:
        local.request("read", seconds=0.2, path=stuck, offset=0, most=1)
    assert str(failed.value) == "local: no answer to 'read' within 0.2 s"
    assert local.request("hello")["sglang"] is None
    os.close(os.open(stuck, os.O_WRONLY))  # the late answer goes nowhere
    assert local.request("all") == []


def test_an_agent_that_is_killed(local: LocalHost, stuck: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(local.read, stuck, 0)
        until(lambda: local._waiting, "the request is on its way")
        local._process.kill()
        assert str(asked.exception(60)) == "local: the agent ended"
    with pytest.raises(ConnectionFailed, match="local: the agent ended"):
        local.request("hello")


def test_after_the_agent_was_killed_another_one_finds_the_runs(local: LocalHost, start: Callable) -> None:
    run = start()
    assert local.request("run", run_id=run.id)["state"] == "running"
    local._process.kill()
    again = LocalHost(sys.executable)
    try:
        assert again.request("run", run_id=run.id)["state"] == "running"
    finally:
        again.close()


def test_the_agent_ends_with_its_link(home: Path, stuck: str) -> None:
    link = LocalHost(sys.executable)
    with pytest.raises(ConnectionFailed):
        link.request("read", seconds=0.1, path=stuck, offset=0, most=1)
    link.close()
    assert link._process.returncode == 0
    with pytest.raises(ConnectionFailed):
        link.request("hello")


def test_the_agent_ends_when_the_console_is_killed(home: Path) -> None:
    program = (
        "import sys, time; from backends.host import LocalHost; link = LocalHost(sys.executable); "
        "print(link._process.pid, flush=True); time.sleep(600)"
    )
    console = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT, text=True)
    assert console.stdout is not None
    with console.stdout:
        agent = int(console.stdout.readline())
        assert not gone(agent)
        console.send_signal(signal.SIGKILL)
        console.wait()
        until(lambda: gone(agent), "the agent ended")


def test_prints_in_the_agent_land_on_stderr(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (home / "sitecustomize.py").write_text(
        "import os, socket\n"
        "name = socket.gethostname()\n"
        "socket.gethostname = lambda: print('stray print', flush=True) or os.write(1, b'stray write\\n') and name\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(home))
    link = LocalHost(sys.executable)
    try:
        assert link.request("hello")["host"] == os.uname().nodename
    finally:
        link.close()
    assert "stray print\nstray write\n" in capfd.readouterr().err


# --- Which Python ---


def test_a_python_that_is_asked_for(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path is one of the folder one stands in: the agent stands elsewhere."""
    wrapper(home, "")
    monkeypatch.chdir(home)
    assert find_python("./wrapped-python") == f"{home}/wrapped-python"
    assert find_python("~/wrapped-python") == f"{home}/wrapped-python"
    assert find_python("sh") in ("/bin/sh", "/usr/bin/sh")
    with pytest.raises(ConnectionFailed) as failed:
        find_python("./none")
    assert str(failed.value) == "./none is no program that can be run; set --python to SGLang's Python"


def test_the_environment_beside_the_consoles_comes_next(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = home / ".venv-engine" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    monkeypatch.setattr(sys, "prefix", str(home / ".venv"))
    assert find_python(None) == str(python)


def test_else_the_first_on_path_that_has_sglang(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout in the folder one stands in is not an SGLang of that Python."""
    (home / "bin").mkdir()
    monkeypatch.chdir(FAKE_SGLANG)
    monkeypatch.setattr(sys, "prefix", str(home / "elsewhere"))
    monkeypatch.setenv("PATH", f"{home}/bin")
    with pytest.raises(ConnectionFailed) as failed:
        find_python(None)
    assert str(failed.value) == (
        "no Python here has sglang: name SGLang's own with --python, LAYERTAP_PYTHON or [host].python"
    )
    (home / "bin" / "python3").write_text("#!/bin/sh\nexit 0\n")
    (home / "bin" / "python3").chmod(0o755)
    assert find_python(None) == f"{home}/bin/python3"
