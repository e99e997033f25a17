"""Paramiko's transport, mended where it waits for ever, races, or throws away what one wants to know."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import paramiko
from paramiko.auth_handler import AuthOnlyHandler
from paramiko.common import cMSG_SERVICE_REQUEST, cMSG_USERAUTH_REQUEST
from paramiko.message import Message
from paramiko.packet import Packetizer
from paramiko.transport import ServiceRequestingTransport

ANSWER_SECONDS = 30.0  # of the host, to one attempt to log in


class Transport(ServiceRequestingTransport):
    """An SSH connection over a socket or a channel; `seconds` for the host's first words and for the key exchange."""

    packetizer: ListeningPacketizer
    auth_handler: AuthHandler | None

    def __init__(self, connection: Any, seconds: float) -> None:
        super().__init__(connection, packetizer_class=ListeningPacketizer)
        self.banner_timeout = self.handshake_timeout = seconds
        self.auth_timeout = ANSWER_SECONDS
        self.host_key_algorithms: Sequence[str] = super().preferred_keys
        self._disconnect: str | None = None

    @property
    def preferred_keys(self) -> Sequence[str]:
        """The host key algorithms to ask for, the best first."""
        return self.host_key_algorithms

    @property
    def heard(self) -> float:
        """When the other side was last heard, on time.monotonic()."""
        return self.packetizer.heard

    @property
    def farewell(self) -> str | None:
        """Why the other side hung up, or how the connection broke."""
        return self._disconnect or (str(self.saved_exception) if self.saved_exception else None)

    def ensure_session(self) -> None:
        """Announce a login, once. Raises SSHException; paramiko's own waits for ever where nobody answers."""
        if self.auth_handler:
            return
        request = Message()
        request.add_byte(cMSG_SERVICE_REQUEST)
        request.add_string("ssh-userauth")
        self.packetizer.send_message(request)
        deadline = time.monotonic() + ANSWER_SECONDS
        while not self._service_userauth_accepted:  # type: ignore[attr-defined]
            if not self.is_active() or time.monotonic() > deadline:
                raise paramiko.SSHException(self.farewell or "the host does not answer")
            time.sleep(0.01)
        self.auth_handler = AuthHandler(self)

    def _parse_disconnect(self, message: Message) -> None:
        message.get_int()  # a code that says less than the words
        self._disconnect = message.get_text()


class ListeningPacketizer(Packetizer):
    """Knows when the other side was last heard, on time.monotonic()."""

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        self.heard = time.monotonic()

    def read_message(self) -> tuple[int, Message]:
        """As paramiko's."""
        message = super().read_message()
        self.heard = time.monotonic()
        return message


class AuthHandler(AuthOnlyHandler):
    """Also asks whether a public key would do, which paramiko never does: it signs at once."""

    auth_event: threading.Event
    _wanted = False

    def wants(self, user: str, public: bytes) -> bool:
        """Whether the host takes this public key or certificate."""
        self._wanted = False
        kind = Message(public).get_text()

        def finish(message: Message) -> None:
            message.add_boolean(False)  # only asking
            message.add_string(self._finalize_pubkey_algorithm(kind))  # type: ignore[attr-defined]
            message.add_string(public)

        with contextlib.suppress(paramiko.AuthenticationException):
            self.send_auth_request(user, "publickey", finish)
        return self._wanted

    def send_auth_request(
        self, username: str, method: str, finish_message: Callable[[Message], None] | None = None
    ) -> list[str]:
        """As paramiko's, which makes the event only once it has sent, so that a quick answer goes unheard."""
        self.auth_method, self.username = method, username
        message = Message()
        message.add_byte(cMSG_USERAUTH_REQUEST)
        for text in (username, "ssh-connection", method):
            message.add_string(text)
        if finish_message:
            finish_message(message)
        self.auth_event = event = threading.Event()
        with self.transport.lock:
            self.transport.packetizer.send_message(message)
        return self.wait_for_response(event)

    def _parse_userauth_info_request(self, message: Message) -> None:
        if self.auth_method == "publickey":  # the same number says here that the key would do
            self._wanted = True
            self.auth_event.set()
        else:
            super()._parse_userauth_info_request(message)  # type: ignore[misc]
