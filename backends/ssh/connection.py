"""The way to a host: through what it takes to get there, trusted, logged in, and watched."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import paramiko

from backends.errors import ConnectionFailed, LayertapError
from backends.ssh.host_keys import check_host_key, host_key_algorithms
from backends.ssh.login import Login
from backends.ssh.questions import Ask
from backends.ssh.transport import Transport
from backends.ssh_config import KnownHosts, Target

CONNECT_SECONDS = 15.0  # for each step, where ConnectTimeout does not say
WINDOW = 16 << 20  # bytes on their way to us: with paramiko's 2 MiB, 100 ms of distance mean 20 MB/s


class Connection:
    """Authenticated transports, each through the one before it; the last one is the host's.

    `keepalive` and `dead_after` in seconds. Raises ConnectionFailed, HostKeyRefused.
    """

    def __init__(
        self, target: Target, ask: Ask | None, accept_new: str | None, keepalive: float, dead_after: float
    ) -> None:
        self.target = target
        self.notes: list[str] = []  # what a person should be told
        self._closed_because: str | None = None
        self._chain: list[Transport] = []
        self._proxy: subprocess.Popen[bytes] | None = None
        self._closed = threading.Event()
        self._awake = time.monotonic()
        try:
            for hop in (*target.jumps, target):
                with _plain_words(hop):
                    self._reach(hop, None if hop.batch else ask, accept_new)
        except BaseException:
            self.close("closed")
            raise
        for work, seconds in ((self._probe, keepalive), (self._watch, dead_after)):
            threading.Thread(target=work, args=(seconds,), name=f"layertap-{target.alias}-ssh", daemon=True).start()

    @property
    def silence(self) -> float:
        """Seconds since the host was last heard; time in which this process was stopped does not count."""
        return time.monotonic() - max(self._chain[-1].heard, self._awake)

    @property
    def why(self) -> str:
        """What ended it."""
        return self._closed_because or f"the link broke ({self._chain[-1].farewell or 'the other side closed it'})"

    def run(self, command: str) -> paramiko.Channel:
        """Run a command in the login shell. Raises ConnectionFailed."""
        with _plain_words(self.target):
            channel = self._chain[-1].open_session(window_size=WINDOW, timeout=_patience(self.target))
            channel.exec_command(command)
        return channel

    def close(self, why: str) -> None:
        """Hang up; never waits for the host."""
        self._closed_because = self._closed_because or why
        self._closed.set()
        for transport in self._chain:  # the first has the socket: the others may be stuck in sending through it
            transport.close()
        if self._proxy:
            _end(self._proxy)

    def _reach(self, hop: Target, ask: Ask | None, accept_new: str | None) -> None:
        known = KnownHosts([*hop.user_known_hosts, *hop.global_known_hosts])
        transport = Transport(self._socket(hop), _patience(hop))
        self._chain.append(transport)
        transport.host_key_algorithms = host_key_algorithms(hop, known, transport.preferred_keys)
        self._shake_hands(transport, hop)
        if note := check_host_key(transport.get_remote_server_key(), hop, known, ask, accept_new):
            self.notes.append(note)
        Login(transport, hop, ask).run()

    def _shake_hands(self, transport: Transport, hop: Target) -> None:
        try:
            transport.start_client(timeout=_patience(hop))
            if not transport.initial_kex_done:  # it came back because the time is up, which paramiko takes for success
                raise EOFError("no keys were agreed on")
        except (paramiko.SSHException, OSError, EOFError) as error:
            why = f"no SSH from {hop.hostname} port {hop.port} within {_patience(hop):g} s"
            why += f" ({str(error) or 'the other side hung up'})"
            if self._proxy and len(self._chain) == 1 and (code := _exit_code(self._proxy)) is not None:
                why = f"the ProxyCommand ended with {code}: {hop.proxy_command}"
            raise ConnectionFailed(f"{hop.alias}: {why}") from error

    def _socket(self, hop: Target) -> Any:
        if self._chain:
            return self._forward(hop)
        if hop.proxy_command:
            return self._start_proxy(hop.proxy_command)
        return _connect(hop)

    def _forward(self, hop: Target) -> paramiko.Channel:
        """A connection from the host that was reached last."""
        place = (hop.hostname, hop.port)
        try:
            return self._chain[-1].open_channel("direct-tcpip", place, ("127.0.0.1", 0), timeout=_patience(hop))
        except paramiko.ChannelException as error:
            why = f"the jump host does not lead to {hop.hostname} port {hop.port}: {error.text}"
            raise ConnectionFailed(f"{hop.alias}: {why}") from error

    def _start_proxy(self, command: str) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            self._proxy = subprocess.Popen(
                ["/bin/sh", "-c", f"exec {command}"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl+C is the console's
            )
        return ours

    def _probe(self, keepalive: float) -> None:
        """The thread that makes the host say something; paramiko's own keepalive asks for no answer."""
        while not self._closed.wait(keepalive):
            with contextlib.suppress(paramiko.SSHException, OSError, EOFError):
                self._chain[-1].global_request("keepalive@openssh.com", wait=True)

    def _watch(self, dead_after: float) -> None:
        """The thread that notices when it says nothing any more; the one that asked is still waiting then."""
        tick = min(dead_after / 10, 1.0)
        looked = time.monotonic()
        while not self._closed.wait(tick):
            if time.monotonic() - looked > 3 * tick:  # it was this process that was stopped, not the host
                self._awake = time.monotonic()
            looked = time.monotonic()
            if self.silence > dead_after:
                self.close(f"nothing heard for {dead_after:g} s")


def _patience(target: Target) -> float:
    return target.connect_timeout or CONNECT_SECONDS


def _connect(target: Target) -> socket.socket:
    """A TCP connection to the first of the host's addresses that takes one. Raises ConnectionFailed."""
    try:
        addresses = socket.getaddrinfo(target.hostname, target.port, target.family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConnectionFailed(f"{target.alias}: cannot find {target.hostname}: {error.strerror}") from error
    why = "it has no address"
    for family, kind, protocol, _, address in addresses:
        connection = socket.socket(family, kind, protocol)
        connection.settimeout(_patience(target))
        try:
            connection.connect(address)
        except OSError as error:
            why = error.strerror or str(error)
            connection.close()
            continue
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return connection
    raise ConnectionFailed(f"{target.alias}: cannot connect to {target.hostname} port {target.port}: {why}")


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """How a process ended that has let go of its socket; None if it goes on."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(0.3)
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(0.3)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _plain_words(target: Target) -> Iterator[None]:
    """Whatever paramiko raises, as a ConnectionFailed."""
    try:
        yield
    except LayertapError:
        raise
    except (paramiko.SSHException, OSError, EOFError) as error:
        raise ConnectionFailed(f"{target.alias}: {str(error) or 'the host hung up'}") from error
