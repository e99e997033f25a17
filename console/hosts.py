"""From `--host NAME` to a live host and a session with it: this machine, or one that `ssh` reaches."""

from __future__ import annotations

import contextlib
import getpass
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends.errors import Interrupted, LayertapError
from backends.host import Host, LocalHost, Reconnecting, find_python
from backends.sglang import load_profiles
from console.config import Config, HostConfig
from console.session import Session
from console.words.printable import printable

if TYPE_CHECKING:
    from backends.ssh import Ask, Question

LOCAL = "local"


def open_session(
    name: str, config: Config, python: str | None, accept_new_host_key: str | None = None, ask: Ask | None = None
) -> Session:
    """A session with host `name`, as layertap.toml has it.

    Raises what `connect` raises, and UsageError for a profile that is wrong.
    """
    profiles = load_profiles(config.profile)
    host = connect(name, config, python, accept_new_host_key, ask)
    try:
        return Session(host, profiles, config.host.get(name, HostConfig()).dump_dir, config.extract)
    except BaseException:
        host.close()
        raise


def connect(
    name: str, config: Config, python: str | None, accept_new_host_key: str | None = None, ask: Ask | None = None
) -> Host:
    """A live link to host `name`; it is dialled again whenever it breaks.

    A question (host key, passphrase, password) goes to `ask`; without it, nobody is asked. Raises ConnectionFailed,
    HostKeyRefused.
    """
    found = config.host.get(name, HostConfig())
    python = python or found.python
    if name == LOCAL:
        local = find_python(python)
        return Reconnecting(lambda: LocalHost(local))
    from backends.ssh import SshHost, remembering
    from backends.ssh_config import resolve

    remembered = remembering(ask) if ask else None
    return Reconnecting(
        lambda: SshHost(
            resolve(found.ssh or name, found.ssh_config),
            python=python,
            exec_prefix=found.exec_prefix,
            ask=remembered,
            accept_new_host_key=accept_new_host_key,
        )
    )


def terminal() -> Ask | None:
    """The person at the terminal, if there is one to ask."""
    return ask_on_terminal if sys.stdin.isatty() and sys.stderr.isatty() else None


def ask_on_terminal(question: Question) -> str | None:
    """Put a question to the person at the terminal; None for no answer."""
    try:
        if question.kind == "host_key":
            asked = f"{question.text}\n{question.fingerprint}\nIs it the right one? (yes, or anything else) "
            sys.stderr.write(printable(asked))
            sys.stderr.flush()
            return sys.stdin.readline().strip() or None
        return getpass.getpass(f"{printable(question.text)}: ") or None
    except EOFError:
        return None
    except KeyboardInterrupt:
        raise Interrupted("interrupted") from None


def known(config: Config) -> list[str]:
    """Names that `--host` takes: this machine, those of layertap.toml, and the plain ones of ~/.ssh/config."""
    try:
        text = (Path.home() / ".ssh" / "config").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    lines = re.findall(r"^\s*host\s*[\s=]\s*(.+)$", text, re.IGNORECASE | re.MULTILINE)
    aliases = [word.strip('"') for line in lines for word in line.split()]
    plain = [alias for alias in aliases if not re.search(r"[*?!]", alias)]
    return list(dict.fromkeys([LOCAL, *config.host, *plain]))


def look(name: str, config: Config, python: str | None) -> dict[str, Any]:
    """How a host is, asked once and nobody being asked anything; never raises."""
    try:
        with contextlib.closing(connect(name, config, python)) as host:
            hello, sample = host.request("hello"), host.request("sample")
    except LayertapError as error:
        return {"name": name, "state": "failed", "why": str(error), "sglang": None, "gpus": None}
    gpus = [gpu["name"] for gpu in sample["gpus"]["gpus"]]
    return {"name": name, "state": "live", "why": None, "sglang": hello["sglang"], "gpus": gpus}
