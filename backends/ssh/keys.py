"""Key files and certificates, as OpenSSH writes them."""

from __future__ import annotations

import base64
import binascii
import os
from pathlib import Path
from typing import NamedTuple

import paramiko
from paramiko.message import Message
from paramiko.pkey import OPENSSH_AUTH_MAGIC, PKey, PublicBlob, UnknownKeyType

CERTIFICATE = "-cert-v01@openssh.com"
HOST_CERTIFICATE = 2


class PassphraseNeeded(Exception):
    """A key file is encrypted."""


class UnusableKey(Exception):
    """A key file is none, or of a kind that paramiko does not know, or the passphrase is wrong."""


class Certificate(NamedTuple):
    """An OpenSSH certificate, as far as it is looked at; times in seconds since the epoch."""

    key: bytes  # the public key that it is about
    for_host: bool
    principals: list[str]
    valid_after: int
    valid_before: int
    critical: bytes
    authority: bytes  # a public key
    signed: bytes
    signature: bytes

    @classmethod
    def parse(cls, blob: bytes) -> Certificate:
        """The fields in the order of OpenSSH's PROTOCOL.certkeys."""
        message = Message(blob)
        kind = message.get_binary().decode(errors="replace").removesuffix(CERTIFICATE)
        message.get_binary()  # a nonce
        key = Message()
        key.add_string(kind)
        for _ in range(1 if kind == "ssh-ed25519" else 2):
            key.add_string(message.get_binary())
        message.get_int64()  # a serial number
        for_host = message.get_int() == HOST_CERTIFICATE
        message.get_binary()  # a name for the certificate
        principals = _strings(message.get_binary())
        valid_after, valid_before = message.get_int64(), message.get_int64()
        critical = message.get_binary()
        message.get_binary()  # extensions
        message.get_binary()  # reserved
        authority = message.get_binary()
        signed = message.get_so_far()
        signature = message.get_binary()
        return cls(
            key.asbytes(), for_host, principals, valid_after, valid_before, critical, authority, signed, signature
        )

    def is_signed(self) -> bool:
        """Whether the authority has signed it, in a way that paramiko can verify."""
        try:
            authority = PKey.from_type_string(Message(self.authority).get_text(), self.authority)
        except (UnknownKeyType, paramiko.SSHException):
            return False
        return authority.verify_ssh_sig(self.signed, Message(self.signature))


def load_private_key(path: str, passphrase: str | None) -> PKey:
    """The private key of a file, without the certificate beside it. Raises PassphraseNeeded, UnusableKey."""
    try:
        # Paramiko's annotation says str, and it fails with one.
        key = PKey.from_path(path, passphrase.encode() if passphrase else None)  # type: ignore[arg-type]
    except (TypeError, paramiko.PasswordRequiredException) as error:
        raise PassphraseNeeded(path) from error
    except UnknownKeyType as error:
        raise UnusableKey("a kind of key that only an agent can use") from error
    except OSError as error:
        raise UnusableKey(error.strerror) from error
    except (ValueError, paramiko.SSHException) as error:
        raise UnusableKey(str(error)) from error
    key.public_blob = None
    return key


def load_certificate(path: str) -> PublicBlob | None:
    """The certificate in a file, None where there is no such file. Raises UnusableKey."""
    try:
        found = PublicBlob.from_file(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UnusableKey(str(error)) from error
    if not found.key_type.endswith(CERTIFICATE):
        raise UnusableKey("no certificate")
    return found


def public_part(path: str) -> bytes | None:
    """The public key of an identity file: the file is one, has one in front of the encrypted part, or beside it."""
    return _public_key(path) or _clear_part(path) or _public_key(f"{path}.pub")


def identity_exists(path: str) -> bool:
    """Whether there is a key file of that name, or at least its public half: an agent may hold the other one."""
    return os.path.exists(path) or os.path.exists(f"{path}.pub")


def _public_key(path: str) -> bytes | None:
    try:
        return PublicBlob.from_file(path).key_blob
    except (OSError, ValueError):
        return None


def _clear_part(path: str) -> bytes | None:
    try:
        lines = Path(path).read_bytes().splitlines()
        data = base64.b64decode(b"".join(line for line in lines if not line.startswith(b"-----")))
    except (OSError, binascii.Error):
        return None
    if not data.startswith(OPENSSH_AUTH_MAGIC):
        return None
    message = Message(data.removeprefix(OPENSSH_AUTH_MAGIC))
    for _ in ("cipher", "key derivation", "its options"):
        message.get_binary()
    message.get_int()  # how many keys: one
    return message.get_binary()


def _strings(packed: bytes) -> list[str]:
    message, found = Message(packed), []
    while message.get_remainder():
        found.append(message.get_binary().decode(errors="replace"))
    return found
