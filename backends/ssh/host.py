"""A host that `ssh` reaches: the agent on one exec channel."""

from __future__ import annotations

import contextlib
import io
import shlex
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import paramiko

from backends import payload
from backends.host import ENDED, AgentLink, LinkState, agent_command
from backends.ssh.connection import Connection
from backends.ssh.questions import Ask
from backends.ssh_config import Target

KEEPALIVE_SECONDS = 3.0
DEAD_SECONDS = 15.0
STDERR_KEPT = 4096  # bytes

# Becomes the Python that is asked for, else LAYERTAP_PYTHON, else the first on PATH with sglang. Any POSIX sh reads it.
FIND_PYTHON = r"""
python=${1:-$LAYERTAP_PYTHON}
shift
fail() { printf '\nLAYERTAP error %s\n' "$1"; exit 0; }
has_sglang() { "$1" -c "from importlib.metadata import version; version('sglang')" </dev/null >/dev/null 2>&1; }
find_python() {
    IFS=:
    for folder in $PATH; do
        for name in python3 python; do
            if has_sglang "$folder/$name"; then python=$folder/$name; return; fi
        done
    done
    fail "no Python on the PATH there has sglang: name SGLang's own with --python, LAYERTAP_PYTHON or [host].python"
}
if [ -z "$python" ]; then find_python; fi
case $python in "~/"*) python=$HOME/${python#??} ;; esac
found=$(command -v "$python") && test -x "$found" ||
    fail "$python is no program that can be run there; set --python to SGLang's Python"
cd /
exec "$python" "$@"
"""


class SshHost(AgentLink):
    """The agent on a host, started in `python` there behind `exec_prefix`, e.g. `["docker", "exec", "-i", "sglang"]`.

    Without `python` it is the host's LAYERTAP_PYTHON, else the first Python on the PATH there that has sglang. Without
    `ask` nobody is asked anything. `accept_new_host_key` is the fingerprint (SHA256:...) of a host key to accept that
    is not known yet. The host is probed every `keepalive` seconds and given up after `dead_after` seconds of silence.

    Raises ConnectionFailed, HostKeyRefused.
    """

    def __init__(
        self,
        target: Target,
        *,
        python: str | None = None,
        exec_prefix: Sequence[str] = (),
        ask: Ask | None = None,
        accept_new_host_key: str | None = None,
        keepalive: float = KEEPALIVE_SECONDS,
        dead_after: float = DEAD_SECONDS,
    ) -> None:
        self._stale_after = 2 * keepalive
        self._connection = Connection(target, ask, accept_new_host_key, keepalive, dead_after)
        try:
            name, archive = payload.pack()
            script = agent_script(python, exec_prefix, name, len(archive))
            self._channel = self._connection.run(f"sh -c 'eval \"$(dd bs=1 count={len(script)} 2>/dev/null)\"'")
            self._stderr = _Tail(self._channel)
            to_agent = _ChannelWriter(self._channel)
            from_agent = io.BufferedReader(_ChannelReader(self._channel), 1 << 18)
            super().__init__(target.alias, python or "the Python there", to_agent, from_agent)  # type: ignore[arg-type]
            with contextlib.suppress(OSError):  # greet knows why
                to_agent.write(script)
            self.greet(archive)
        except BaseException:
            self.close()
            raise

    @property
    def state(self) -> LinkState:
        """See `Host`."""
        state, silence = super().state, self._connection.silence
        if state.state == "live" and silence > self._stale_after:
            state = LinkState(state="stale", since=time.time() - silence)
        return msgspec.structs.replace(state, heard_age=silence, notes=self._connection.notes)

    def close(self) -> None:
        """See `Host`. Takes no time, whatever has become of the host; sshd ends the agent."""
        self._connection.close("closed")

    def _cause(self, why: str) -> str:
        if self._channel.closed and not self._channel.eof_received:  # else it is the agent that ended
            why = self._connection.why
        elif why.startswith(ENDED) and (said := self._stderr.read()):
            why += f" (it said: {said})"
        self._connection.close(why)
        return why


def agent_script(python: str | None, exec_prefix: Sequence[str], payload_name: str, payload_size: int) -> bytes:
    """What `sh` on a host evaluates to become the agent.

    It goes there on stdin: a login shell may be fish or csh, which read quotes, backslashes and lines in their own way.
    The braces are for a link that breaks over it, for half of them is no command.
    """
    words = agent_command(python or "", payload_name, payload_size)
    return f"{{\nexec {shlex.join([*exec_prefix, 'sh', '-c', FIND_PYTHON, 'sh', *words])}\n}}".encode()


class _ChannelReader(io.RawIOBase):
    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._channel.recv(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class _ChannelWriter(io.RawIOBase):
    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            self._channel.sendall(data)
        except (paramiko.SSHException, EOFError) as error:
            raise OSError(str(error) or "the link is gone") from error
        return len(data)


class _Tail:
    """The last that comes on a channel's stderr; unread, it would stop the agent once the window is full."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel
        self._kept = b""
        self._thread = threading.Thread(target=self._drain, name="layertap-stderr", daemon=True)
        self._thread.start()

    def read(self) -> str:
        """What was said last, in one line."""
        self._thread.join(1)
        lines = self._kept.decode(errors="replace").split("\n")
        return "; ".join(line.strip() for line in lines if line.strip())[-300:]

    def _drain(self) -> None:
        while data := self._channel.recv_stderr(STDERR_KEPT):
            self._kept = (self._kept + data)[-STDERR_KEPT:]
