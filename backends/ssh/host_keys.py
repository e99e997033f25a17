"""Whether a host is the one it should be, as OpenSSH decides it; a changed key is always refused."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence

from paramiko.pkey import PKey

from backends.errors import ConnectionFailed, HostKeyRefused
from backends.ssh.keys import CERTIFICATE, Certificate
from backends.ssh.questions import Ask, Question
from backends.ssh_config import KnownHosts, Target, fingerprint, remember


def host_key_algorithms(target: Target, known: KnownHosts, supported: Sequence[str]) -> list[str]:
    """What to ask a host for: first what can be checked, so that it shows the key that is known.

    Raises ConnectionFailed where the configuration leaves nothing.
    """
    kinds = known.kinds(target.names)
    wanted = [name for name in target.host_key_algorithms or supported if name in supported]
    if not known.has_authority(target.names):
        wanted = [name for name in wanted if not name.endswith(CERTIFICATE)]
    if not wanted:
        raise ConnectionFailed(f"{target.alias}: HostKeyAlgorithms leaves none of {', '.join(supported)}")
    return sorted(wanted, key=lambda name: (not name.endswith(CERTIFICATE), _kind(name) not in kinds))


def check_host_key(key: PKey, target: Target, known: KnownHosts, ask: Ask | None, accept_new: str | None) -> str | None:
    """Trust the host that has proved to have `key`, or raise HostKeyRefused.

    Returns what a person should be told, if anything. `accept_new` is the fingerprint of a new key to accept.
    """
    name, shown = target.names[0], fingerprint(key.asbytes())
    its = f"{target.alias}: the {key.algorithm_name} key {shown} of {name}"
    verdict = known.verdict(target.names, key.get_name(), key.asbytes())
    line = f"{verdict.by.file} line {verdict.by.line}" if verdict.by else ""
    if verdict.state == "revoked":
        raise HostKeyRefused(f"{its} is revoked by {line}")
    fault = _certificate_fault(key, target, known)
    if verdict.state == "known" or fault is None:
        return None
    if verdict.by:  # its rival
        remedy = f"ssh-keygen -f {shlex.quote(verdict.by.file)} -R {shlex.quote(name)}"
        raise HostKeyRefused(
            f"{its} is not the one in {line} ({fingerprint(verdict.by.key)}): somebody may be in between; "
            f"if the host was given a new key, delete the old one: {remedy}"
        )
    unknown = f"{its} is not known"
    if key.public_blob:
        unknown += f", and its certificate does not do ({fault})"
    if verdict.other_kinds:
        unknown += f", while {' and '.join(verdict.other_kinds)} of that host is"
    return f"{its} is new; {_accept(key, target, unknown, accept_new, ask, unasked=not verdict.other_kinds)}"


def _accept(key: PKey, target: Target, unknown: str, accept_new: str | None, ask: Ask | None, *, unasked: bool) -> str:
    """Accept a key that is not known, or raise HostKeyRefused. Returns by whose word, and where it is kept."""
    shown = fingerprint(key.asbytes())
    if accept_new is not None:
        if accept_new.rstrip("=") != shown:
            raise HostKeyRefused(f"{unknown}, nor is it the one of --accept-new-host-key {accept_new}")
        return f"accepted by --accept-new-host-key; {_keep(key, target)}"
    if unasked and target.strict in ("accept-new", "no"):
        return f"accepted by StrictHostKeyChecking {target.strict}; {_keep(key, target)}"
    if ask and target.strict != "yes" and ask(Question("host_key", unknown, shown)) in ("yes", shown):
        return f"confirmed; {_keep(key, target)}"
    raise HostKeyRefused(f"{unknown}; if it is the right one, say so with --accept-new-host-key {shown}")


def _keep(key: PKey, target: Target) -> str:
    if not target.user_known_hosts:
        return "it is kept nowhere"
    file = target.user_known_hosts[0]
    try:
        remember(file, target.names[0], key.get_name(), key.asbytes(), hashed=target.hash_known_hosts)
    except OSError as error:
        return f"it could not be kept in {file}: {error.strerror}"
    return f"it is kept in {file}"


def _certificate_fault(key: PKey, target: Target, known: KnownHosts) -> str | None:
    """Why no certificate proves that this is the host, None if one does."""
    if not key.public_blob:
        return "there is none"
    certificate = Certificate.parse(key.public_blob.key_blob)
    name = target.host_key_alias or target.hostname
    if not known.authority(target.names, certificate.authority):
        return f"known_hosts names no authority {fingerprint(certificate.authority)} for that host"
    if not certificate.for_host:
        return "it is a user's"
    if certificate.principals and name not in certificate.principals:
        return f"it is for {', '.join(certificate.principals)}"
    if not certificate.valid_after <= time.time() < certificate.valid_before:
        return "it is not valid now"
    if certificate.critical:
        return "it has a condition that is not understood"
    return None if certificate.is_signed() else "its signature is wrong, or of a kind that cannot be verified"


def _kind(algorithm: str) -> str:
    """The kind of key that an algorithm signs with."""
    return "ssh-rsa" if algorithm.startswith("rsa-sha2-") else algorithm
