"""Logging in the way OpenSSH does: its order of methods and of keys, and its questions."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import paramiko
from paramiko.agent import AgentKey, AgentSSH
from paramiko.pkey import PKey, PublicBlob

from backends.errors import ConnectionFailed
from backends.ssh.keys import (
    CERTIFICATE,
    Certificate,
    PassphraseNeeded,
    UnusableKey,
    identity_exists,
    load_certificate,
    load_private_key,
    public_part,
)
from backends.ssh.questions import Ask, Question
from backends.ssh.transport import ANSWER_SECONDS, Transport
from backends.ssh_config import METHODS, Target, fingerprint

PERSON_SECONDS = 600.0  # of a person, to what the host asks
AGENT_SECONDS = 60.0  # of ssh-agent, which may ask a person too


class Offer(NamedTuple):
    """A public key to log in with, and what signs for it: a key of the agent, or the one in a file."""

    label: str
    public: bytes | None  # None where only the encrypted part of a file has it
    signer: AgentKey | str
    certificate: PublicBlob | None = None


class Login:
    """One login at one host. Without `ask` nobody is asked anything."""

    def __init__(self, transport: Transport, target: Target, ask: Ask | None) -> None:
        self._transport, self._target, self._ask = transport, target, ask
        self._who = f"{target.user}@{target.hostname}"
        self._tried: list[str] = []
        self._keys: dict[str, PKey | None] = {}  # by file
        self._offers: Iterator[Offer] = iter(())

    def run(self) -> None:
        """Log in. Raises ConnectionFailed, naming what was tried, and what paramiko raises for a broken link."""
        wanted = self._wanted_at_first()
        methods = list(self._target.methods)
        with contextlib.ExitStack() as stack:
            self._offers = self._find_offers(stack)
            while wanted:
                method = next((method for method in methods if method in wanted), None)
                if method is None:
                    raise self._refusal(wanted)
                further = self._try(method)
                if further is None:
                    methods.remove(method)
                else:
                    wanted, methods = further, list(self._target.methods)

    def _wanted_at_first(self) -> list[str]:
        """The methods of which the host wants one; none where it lets in anybody."""
        try:
            return self._transport.auth_none(self._target.user)
        except paramiko.BadAuthenticationType as error:
            return list(error.allowed_types)

    def _try(self, method: str) -> list[str] | None:
        """None: not let in. Else the methods of which the host wants one more; none if we are in."""
        if method == "publickey":
            return next((further for offer in self._offers if (further := self._offer(offer)) is not None), None)
        if self._ask is None:
            self._tried.append(f"no {method}, as there is nobody to ask")
            return None
        return self._interactive(self._ask) if method == "keyboard-interactive" else self._password(self._ask)

    def _attempt(self, what: str, log_in: Callable[[], list[str]]) -> list[str] | None:
        """As `_try`. Raises ConnectionFailed where the host hung up, or did not answer."""
        began = time.monotonic()
        try:
            return log_in()
        except paramiko.AuthenticationException:
            self._tried.append(what)
        if not self._transport.is_active():
            why = self._transport.farewell or "the host hung up"
            raise self._failed(f"{why}; tried {', '.join(self._tried)}")
        if self._transport.heard < began:
            raise self._failed("the host does not answer")
        return None

    def _failed(self, why: str) -> ConnectionFailed:
        return ConnectionFailed(f"{self._target.alias}: {self._who} was not let in: {why}")

    def _refusal(self, wanted: Sequence[str]) -> ConnectionFailed:
        if not set(wanted) & set(METHODS):
            return self._failed(f"the host takes only {', '.join(wanted)}; Layertap knows {', '.join(METHODS)}")
        tried = f"tried {', '.join(self._tried)}" if self._tried else "there was nothing to try"
        return self._failed(f"{tried}; the host takes {', '.join(wanted)}")

    # --- Keys ---

    def _find_offers(self, stack: contextlib.ExitStack) -> Iterator[Offer]:
        """Certificates that are asked for; keys of the agent, first those that the configuration names; files."""
        in_agent = {key.asbytes(): key for key in self._agent_keys(stack)}
        files = {path: public_part(path) for path in self._target.identity_files if identity_exists(path)}
        signers: dict[bytes, AgentKey | str] = {public: path for path, public in files.items() if public}
        signers.update(in_agent)
        for path in self._target.certificate_files:
            yield from self._certified(path, signers)
        named = [public for public in files.values() if public and public in in_agent]
        others = [] if self._target.identities_only else [public for public in in_agent if public not in named]
        for public in (*named, *others):
            yield Offer(f"the agent's {_label(in_agent[public])}", public, in_agent[public])
        for path in files:
            if files[path] not in in_agent and os.path.exists(path):
                yield Offer(path, files[path], path)
            if not self._target.certificate_files:
                yield from self._certified(f"{path}-cert.pub", signers)

    def _certified(self, path: str, signers: dict[bytes, AgentKey | str]) -> Iterator[Offer]:
        try:
            certificate = load_certificate(path)
        except UnusableKey as error:
            self._tried.append(f"{path} ({error})")
            return
        if certificate and (signer := signers.get(Certificate.parse(certificate.key_blob).key)):
            yield Offer(path, certificate.key_blob, signer, certificate)

    def _agent_keys(self, stack: contextlib.ExitStack) -> Sequence[AgentKey]:
        if self._target.identity_agent is None:
            return ()
        try:
            agent = _Agent(self._target.identity_agent)
        except (OSError, ValueError, paramiko.SSHException) as error:
            self._tried.append(f"no agent at {self._target.identity_agent} ({error})")
            return ()
        stack.callback(agent.connection.close)
        return agent.get_keys()

    def _offer(self, offer: Offer) -> list[str] | None:
        """As `_try`."""
        key = self._unlock(offer, offer.signer) if isinstance(offer.signer, str) else offer.signer
        if key is None:
            return None
        key.public_blob = offer.certificate
        try:
            return self._attempt(offer.label, partial(self._transport.auth_publickey, self._target.user, key))
        except (paramiko.SSHException, OSError) as error:
            if not self._transport.is_active():
                raise
            self._tried.append(f"{offer.label} (it cannot sign: {error})")
            return None
        finally:
            key.public_blob = None

    def _unlock(self, offer: Offer, path: str) -> PKey | None:
        """The key in a file, None if it cannot be had. Its passphrase is asked for once, and only if it would do."""
        if path not in self._keys:
            try:
                self._keys[path] = load_private_key(path, None)
            except UnusableKey as error:
                self._tried.append(f"{path} ({error})")
                self._keys[path] = None
            except PassphraseNeeded:
                if self._ask and offer.public and not self._is_wanted(offer.public):
                    self._tried.append(offer.label)
                    return None  # with a certificate it may be
                self._keys[path] = self._ask_passphrase(path)
        return self._keys[path]

    def _is_wanted(self, public: bytes) -> bool:
        assert self._transport.auth_handler
        return self._transport.auth_handler.wants(self._target.user, public)

    def _ask_passphrase(self, path: str) -> PKey | None:
        if self._ask is None:
            self._tried.append(f"{path} (it needs a passphrase, and there is nobody to ask)")
            return None
        for attempt in range(self._target.password_prompts):
            passphrase = self._ask(Question("passphrase", f"Passphrase of {path}", again=attempt > 0))
            if not passphrase:
                break
            with contextlib.suppress(UnusableKey):
                return load_private_key(path, passphrase)
        self._tried.append(f"{path} (without its passphrase)")
        return None

    # --- Passwords ---

    def _password(self, ask: Ask) -> list[str] | None:
        """As `_try`."""
        for attempt in range(self._target.password_prompts):
            password = ask(Question("password", f"Password of {self._who}", again=attempt > 0))
            if password is None:
                break
            log_in = partial(self._transport.auth_password, self._target.user, password, fallback=False)
            if (further := self._attempt("a password", log_in)) is not None:
                return further
        return None

    def _interactive(self, ask: Ask) -> list[str] | None:
        """As `_try`."""
        self._transport.auth_timeout = PERSON_SECONDS
        try:
            for attempt in range(self._target.password_prompts):
                conversation = _Conversation(self._who, ask, self._failed, again=attempt > 0)
                log_in = partial(self._transport.auth_interactive, self._target.user, conversation)
                if (further := self._attempt("keyboard-interactive", log_in)) is not None:
                    return further
                if not conversation.asked:  # the host has nothing to ask in this way
                    break
        finally:
            self._transport.auth_timeout = ANSWER_SECONDS
        return None


class _Agent(AgentSSH):
    """The ssh-agent at a socket; paramiko's own knows only $SSH_AUTH_SOCK. Raises OSError, SSHException."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.connection.settimeout(AGENT_SECONDS)
        self.connection.connect(path)
        self._connect(self.connection)  # type: ignore[attr-defined]
        for key in self.get_keys():
            if key.get_name().endswith(CERTIFICATE):
                # With it, paramiko makes of an RSA certificate the key that it is about.
                key.inner_key = None  # type: ignore[attr-defined]


class _Conversation:
    """Puts to a person what the host asks. Runs on paramiko's thread: what it raises ends the connection."""

    def __init__(self, who: str, ask: Ask, failed: Callable[[str], Exception], *, again: bool) -> None:
        self._who, self._ask, self._failed, self._again = who, ask, failed, again
        self.asked = False

    def __call__(self, title: str, instructions: str, prompts: list[tuple[str, bool]]) -> list[str]:
        before = [part.strip() for part in (title, instructions) if part.strip()]
        return [self._answer(". ".join([*before, prompt.strip()])) for prompt, _ in prompts]

    def _answer(self, prompt: str) -> str:
        self.asked = True
        answer = self._ask(Question("password", f"{self._who}: {prompt}", again=self._again))
        if answer is None:
            raise self._failed(f"{prompt!r} was not answered")
        return answer


def _label(key: AgentKey) -> str:
    return key.comment or fingerprint(key.asbytes())
