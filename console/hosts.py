"""From `--host NAME` to a live host: this machine, or one that `ssh` reaches."""

from __future__ import annotations

import contextlib
import getpass
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends.errors import Interrupted, LayertapError
from backends.host import Host, LocalHost, Reconnecting, find_python
from console.config import Config, HostConfig

if TYPE_CHECKING:
    from backends.ssh import Question

LOCAL = "local"


def connect(
    name: str, config: Config, python: str | None, accept_new_host_key: str | None = None, *, asking: bool = True
) -> Host:
    """A live link to host `name`; one over SSH is dialled again whenever it breaks.

    A question (host key, passphrase, password) is asked on the terminal where there is one, unless `asking` is off.
    Raises ConnectionFailed, HostKeyRefused.
    """
    found = config.host.get(name, HostConfig())
    python = python or found.python
    if name == LOCAL:
        return LocalHost(find_python(python))
    from backends.ssh import SshHost, remembering
    from backends.ssh_config import resolve

    person = asking and sys.stdin.isatty() and sys.stderr.isatty()
    ask = remembering(ask_on_terminal) if person else None
    return Reconnecting(
        lambda: SshHost(
            resolve(found.ssh or name, found.ssh_config),
            python=python,
            exec_prefix=found.exec_prefix,
            ask=ask,
            accept_new_host_key=accept_new_host_key,
        )
    )


def ask_on_terminal(question: Question) -> str | None:
    """Put a question to the person at the terminal; None for no answer."""
    try:
        if question.kind == "host_key":
            sys.stderr.write(f"{question.text}\n{question.fingerprint}\nIs it the right one? (yes, or anything else) ")
            sys.stderr.flush()
            return sys.stdin.readline().strip() or None
        return getpass.getpass(f"{question.text}: ") or None
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
        with contextlib.closing(connect(name, config, python, asking=False)) as host:
            hello, sample = host.request("hello"), host.request("sample")
    except LayertapError as error:
        return {"name": name, "state": "failed", "why": str(error), "sglang": None, "gpus": None}
    gpus = [gpu["name"] for gpu in sample["gpus"]["gpus"]]
    return {"name": name, "state": "live", "why": None, "sglang": hello["sglang"], "gpus": gpus}
