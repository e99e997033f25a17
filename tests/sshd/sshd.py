"""A private OpenSSH server on loopback, a relay in front of it that cuts and freezes, and a user to log in as."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from helpers import until

from backends.ports import free_port
from backends.ssh import Ask, Question, SshHost
from backends.ssh.connection import Connection
from backends.ssh.host import DEAD_SECONDS, KEEPALIVE_SECONDS
from backends.ssh_config import Target, resolve

SYSTEM_FOLDERS = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin", "/opt/homebrew/sbin"])
ME = getpass.getuser()


class Keys:
    """Key pairs by name, made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, name: str, *, kind: str = "ed25519", passphrase: str = "") -> Path:
        """The private key's file; the public one is beside it."""
        path = self.folder / name
        if not path.exists():
            keygen("-q", "-t", kind, "-N", passphrase, "-C", name, "-f", path)
        return path

    def certificate(self, path: Path, name: str, *words: str, authority: str = "ca") -> Path:
        """A certificate for a key, put at `path`; `words` go to ssh-keygen."""
        keygen("-q", "-s", self(authority), "-I", name, *words, self.public(name))
        return (self.folder / f"{name}-cert.pub").replace(path)

    def public(self, name: str) -> Path:
        return self(name).with_name(f"{name}.pub")

    def line(self, name: str) -> str:
        """A public key as known_hosts has it, without the host."""
        return " ".join(self.public(name).read_text().split()[:2])

    def fingerprint(self, name: str) -> str:
        return keygen("-l", "-f", self.public(name)).split()[1]


def keygen(*words: str | Path) -> str:
    made = subprocess.run(["ssh-keygen", *map(str, words)], capture_output=True, text=True, check=True)
    return made.stdout


class Sshd:
    """A server, and a configuration for `ssh -F` in which it is called `gpu`."""

    def __init__(self, folder: Path, keys: Keys, options: dict[str, str], environment: dict[str, str]) -> None:
        self.folder, self.keys, self.port = folder, keys, free_port()
        folder.mkdir(exist_ok=True)
        self.home = folder / "home"
        self.known_hosts = folder / "known_hosts"
        self.authorized_keys = folder / "authorized_keys"
        self.authorized_keys.write_text(keys.public("id").read_text())
        self.know("host")
        environment = {
            "XDG_STATE_HOME": str(self.home / "state"),
            "XDG_CACHE_HOME": str(self.home / "cache"),
            **environment,
        }
        settings = {
            "Port": str(self.port),
            "ListenAddress": "127.0.0.1",
            "HostKey": str(keys("host")),
            "PidFile": "none",
            "AuthorizedKeysFile": str(self.authorized_keys),
            "StrictModes": "no",
            "UsePAM": "no",
            "PasswordAuthentication": "no",
            "KbdInteractiveAuthentication": "no",
            "PermitRootLogin": "yes",
            "MaxStartups": "100",
            "PrintMotd": "no",
            "LogLevel": "VERBOSE",
            "SetEnv": " ".join(f"{name}={value}" for name, value in environment.items()),
            **options,
        }
        config = folder / "sshd_config"
        config.write_text("".join(f"{name} {value}\n" for name, value in settings.items() if value))
        program = shutil.which("sshd", path=SYSTEM_FOLDERS)
        assert program
        self.log = folder / "sshd.log"
        with self.log.open("w") as log:
            self.process = psutil.Popen([program, "-D", "-e", "-f", str(config)], stderr=log)
        until(self._listens, "sshd listens")

    def know(self, key: str, host: str | None = None) -> None:
        """Let known_hosts hold this one line."""
        host = host or f"[127.0.0.1]:{self.port}"
        self.known_hosts.write_text(f"{host} {self.keys.line(key)}\n")

    def target(self, *lines: str, alias: str = "gpu", port: int | None = None) -> Target:
        """What `ssh gpu` means; `lines` come before the defaults, and so win."""
        return resolve(alias, str(self.config(*lines, port=port)))

    def config(self, *lines: str, port: int | None = None) -> Path:
        config = self.folder / "ssh_config"
        config.write_text(
            "\n".join(
                [
                    *lines,
                    "Host gpu",
                    "HostName 127.0.0.1",
                    f"Port {port or self.port}",
                    f"HostKeyAlias [127.0.0.1]:{self.port}" if port else "",  # known by that, whatever a relay's port
                    f"User {ME}",
                    f"IdentityFile {self.keys('id')}",
                    "IdentitiesOnly yes",
                    "IdentityAgent none",
                    f"UserKnownHostsFile {self.known_hosts}",
                    "GlobalKnownHostsFile none",
                    "HashKnownHosts no",
                    "",
                ]
            )
        )
        return config

    def connect(self, *lines: str, port: int | None = None, **options: Any) -> SshHost:
        """The host, with this Python."""
        return SshHost(self.target(*lines, port=port), **{"python": sys.executable, **options})

    def dial(self, *lines: str, ask: Ask | None = None, accept_new_host_key: str | None = None) -> Connection:
        """Only the way to the host, without an agent, which takes longer to start than all the rest."""
        return Connection(self.target(*lines), ask, accept_new_host_key, KEEPALIVE_SECONDS, DEAD_SECONDS)

    def agents(self) -> list[psutil.Process]:
        return [process for process in self._children() if "python" in _name(process)]

    def _children(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return self.process.children(recursive=True)
        return []

    def hang_up(self) -> None:
        """End every connection."""
        for process in self._children():
            if _name(process) == "sshd":
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """A host that is there and says nothing."""
        processes = [self.process, *(process for process in self._children() if _name(process) == "sshd")]
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for process in processes:
                process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End the server and its connections."""
        if self.process.poll() is None:
            for process in [*self._children(), self.process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.wait()

    def _listens(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


def _name(process: psutil.Process) -> str:
    """A process's name, empty once it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name()
    return ""


class Relay:
    """A way to a port that can be cut, now or after so many bytes, frozen, and closed to new connections."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._flowing = threading.Event()
        self._flowing.set()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.sent = 0  # bytes towards the port
        self.cut_after: int | None = None  # so many of them, once
        self.connections = 0
        self.refuses = False  # new ones
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def cut(self) -> None:
        """Break every connection; new ones are let through."""
        pairs, self._pairs = self._pairs, []
        for end in [end for pair in pairs for end in pair]:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def freeze(self) -> None:
        self._flowing.clear()

    def thaw(self) -> None:
        self._flowing.set()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # else accept goes on, with whatever has the descriptor next
        self._accepting.join()
        self._listener.close()
        self.cut()
        self.thaw()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                if self.refuses:
                    near.close()
                    continue
                far = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                return
            self.connections += 1
            self._pairs.append((near, far))
            threading.Thread(target=self._pump, args=(near, far, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(far, near, False), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, towards: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._flowing.wait()
                sink.sendall(data)
                if towards:
                    self._count(len(data))
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _count(self, size: int) -> None:
        self.sent += size
        if self.cut_after is not None and self.sent >= self.cut_after:
            self.cut_after = None
            self.cut()


class Answers:
    """A person who gives these answers, the last one for ever, and remembers what was asked."""

    def __init__(self, *answers: str | None) -> None:
        self.answers = list(answers)
        self.asked: list[Question] = []

    def __call__(self, question: Question) -> str | None:
        self.asked.append(question)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


class User:
    """A user of this machine for as long as the tests run; needs root. Deleted with everything that it runs."""

    password = "Correct-Horse-7"

    def __init__(self, home: Path) -> None:
        self.name, self.home = f"lt{os.getpid()}", home

    def create(self) -> None:
        subprocess.run(["useradd", "-M", "-d", str(self.home), "-s", "/bin/sh", self.name], check=True)
        subprocess.run(["chpasswd"], input=f"{self.name}:{self.password}\n", text=True, check=True)
        self.home.mkdir()
        shutil.chown(self.home, self.name)

    def use_shell(self, shell: str) -> None:
        subprocess.run(["usermod", "-s", shell, self.name], check=True)

    def delete(self) -> None:
        until(lambda: not self._killed(), "its processes are gone")
        subprocess.run(["userdel", "-f", self.name], check=False, capture_output=True)

    def agents(self) -> list[psutil.Process]:
        return [process for process in self._processes() if process.info["name"].startswith("python")]

    def _processes(self) -> list[psutil.Process]:
        everything = psutil.process_iter(["username", "name"])
        return [process for process in everything if process.info["username"] == self.name]

    def _killed(self) -> list[psutil.Process]:
        found = self._processes()
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return found
