"""The host key, before anybody logs in: known, new, changed, revoked, certified; and what a person is asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from paramiko.pkey import PublicBlob
from sshd import Answers, Keys, Sshd, keygen

from backends.errors import ExitCode, HostKeyRefused
from backends.ssh import Question
from backends.ssh.connection import Connection
from backends.ssh.keys import Certificate


def refused(sshd: Sshd, *lines: str, **options: object) -> str:
    with pytest.raises(HostKeyRefused) as error:
        sshd.dial(*lines, **options)
    assert error.value.exit_code == ExitCode.HOST_KEY == 5
    assert "Accepted" not in sshd.log.read_text()
    return str(error.value)


def notes(connection: Connection) -> list[str]:
    connection.close("looked at")
    return connection.notes


@pytest.fixture
def name(sshd: Sshd) -> str:
    return f"[127.0.0.1]:{sshd.port}"


@pytest.fixture
def unknown(sshd: Sshd) -> None:
    sshd.known_hosts.write_text("# mine\n")


# --- New ---


def test_a_new_key_is_refused_where_nobody_can_be_asked(sshd: Sshd, keys: Keys, name: str, unknown: None) -> None:
    shown = keys.fingerprint("host")
    assert refused(sshd) == (
        f"gpu: the ED25519 key {shown} of {name} is not known; "
        f"if it is the right one, say so with --accept-new-host-key {shown}"
    )
    assert sshd.known_hosts.read_text() == "# mine\n"


def test_a_new_key_is_accepted_by_its_fingerprint_once(sshd: Sshd, keys: Keys, name: str, unknown: None) -> None:
    shown = keys.fingerprint("host")
    said = notes(sshd.dial(accept_new_host_key=shown))
    assert said == [
        f"gpu: the ED25519 key {shown} of {name} is new; accepted by --accept-new-host-key; it is kept in {sshd.known_hosts}"
    ]
    assert sshd.known_hosts.read_text() == f"# mine\n{name} {keys.line('host')}\n"
    assert notes(sshd.dial()) == []


def test_another_fingerprint_is_refused(sshd: Sshd, keys: Keys, unknown: None) -> None:
    other = keys.fingerprint("other")
    assert f"is not known, nor is it the one of --accept-new-host-key {other}" in refused(
        sshd, accept_new_host_key=other, ask=Answers("yes")
    )


@pytest.mark.parametrize("answer", ["yes", "fingerprint"])
def test_a_person_confirms_a_new_key(sshd: Sshd, keys: Keys, name: str, unknown: None, answer: str) -> None:
    shown = keys.fingerprint("host")
    person = Answers(shown if answer == "fingerprint" else answer)
    assert "; confirmed; it is kept in " in notes(sshd.dial(ask=person))[0]
    assert person.asked == [Question("host_key", f"gpu: the ED25519 key {shown} of {name} is not known", shown)]
    assert name in sshd.known_hosts.read_text()


@pytest.mark.parametrize("answer", ["no", "", "y", None, "SHA256:other"])
def test_a_person_does_not_confirm_it(sshd: Sshd, unknown: None, answer: str | None) -> None:
    assert "is not known" in refused(sshd, ask=Answers(answer))
    assert sshd.known_hosts.read_text() == "# mine\n"


@pytest.mark.parametrize("option", ["StrictHostKeyChecking yes", "BatchMode yes"])
def test_nobody_is_asked_where_the_configuration_says_so(sshd: Sshd, unknown: None, option: str) -> None:
    person = Answers("yes")
    assert "is not known" in refused(sshd, option, ask=person)
    assert person.asked == []


def test_what_a_person_should_be_told_is_in_the_state(sshd: Sshd, unknown: None) -> None:
    host = sshd.connect("StrictHostKeyChecking no")
    host.close()
    assert len(host.state.notes) == 1


@pytest.mark.parametrize("strict", ["accept-new", "no"])
def test_a_new_key_is_accepted_where_the_configuration_says_so(sshd: Sshd, unknown: None, strict: str) -> None:
    said = notes(sshd.dial(f"StrictHostKeyChecking {strict}"))
    assert len(said) == 1
    assert f"is new; accepted by StrictHostKeyChecking {strict}; it is kept in {sshd.known_hosts}" in said[0]
    assert notes(sshd.dial()) == []


def test_a_new_key_that_cannot_be_kept(sshd: Sshd, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    strict = "StrictHostKeyChecking no"
    [said] = notes(sshd.dial(strict, f"UserKnownHostsFile {tmp_path}/folder"))
    assert said.endswith(f"it could not be kept in {tmp_path}/folder: Is a directory")
    [said] = notes(sshd.dial(strict, "UserKnownHostsFile none"))
    assert said.endswith("it is kept nowhere")


def test_a_new_key_is_kept_hashed(sshd: Sshd, keys: Keys, name: str, unknown: None) -> None:
    assert len(notes(sshd.dial("StrictHostKeyChecking no", "HashKnownHosts yes"))) == 1
    assert name not in sshd.known_hosts.read_text()
    assert keygen("-F", name, "-f", sshd.known_hosts)
    assert notes(sshd.dial()) == []


# --- Known, changed, revoked ---


@pytest.mark.parametrize("pattern", ["{name}", "127.0.0.1", "*", "[127.0.0.?]:{port}", "x,*,!y"])
def test_a_known_key(sshd: Sshd, name: str, pattern: str) -> None:
    sshd.know("host", pattern.format(name=name, port=sshd.port))
    assert notes(sshd.dial()) == []


def test_a_hashed_key(sshd: Sshd) -> None:
    keygen("-q", "-H", "-f", sshd.known_hosts)
    assert notes(sshd.dial()) == []


def test_a_global_file(sshd: Sshd) -> None:
    assert notes(sshd.dial(f"GlobalKnownHostsFile {sshd.known_hosts}", "UserKnownHostsFile none")) == []


def test_a_host_key_alias(sshd: Sshd) -> None:
    sshd.know("host", "cluster")
    assert notes(sshd.dial("HostKeyAlias cluster")) == []


@pytest.mark.parametrize("strict", ["ask", "accept-new", "no"])
def test_a_changed_key_is_always_refused(sshd: Sshd, keys: Keys, name: str, strict: str) -> None:
    sshd.know("other")
    person = Answers("yes")
    said = refused(sshd, f"StrictHostKeyChecking {strict}", ask=person, accept_new_host_key=keys.fingerprint("host"))
    assert said == (
        f"gpu: the ED25519 key {keys.fingerprint('host')} of {name} is not the one in {sshd.known_hosts} line 1 "
        f"({keys.fingerprint('other')}): somebody may be in between; if the host was given a new key, "
        f"delete the old one: ssh-keygen -f {sshd.known_hosts} -R '{name}'"
    )
    assert person.asked == []


def test_a_revoked_key_is_always_refused(sshd: Sshd, keys: Keys) -> None:
    with sshd.known_hosts.open("a") as file:
        file.write(f"@revoked * {keys.line('host')}\n")
    said = refused(sshd, accept_new_host_key=keys.fingerprint("host"))
    assert said.endswith(f" is revoked by {sshd.known_hosts} line 2")


def test_the_kind_of_key_that_is_known_is_asked_for(start_sshd: Callable[..., Sshd], keys: Keys) -> None:
    """A host has several; ed25519 would come first, and be unknown."""
    keys("rsa", kind="rsa")
    sshd = start_sshd(HostKey=f"{keys('host')}\nHostKey {keys('rsa')}")
    sshd.know("rsa")
    assert notes(sshd.dial()) == []


@pytest.mark.parametrize("strict", ["accept-new", "no"])
def test_a_new_kind_of_key_is_not_accepted_unasked(sshd: Sshd, keys: Keys, strict: str) -> None:
    """Whoever is in between would show one."""
    keys("rsa", kind="rsa")
    sshd.know("rsa")
    said = refused(sshd, f"StrictHostKeyChecking {strict}")
    assert "is not known, while ssh-rsa of that host is; if it is the right one" in said


def test_host_key_algorithms_are_those_of_the_configuration(start_sshd: Callable[..., Sshd], keys: Keys) -> None:
    keys("rsa", kind="rsa")
    sshd = start_sshd(HostKey=f"{keys('host')}\nHostKey {keys('rsa')}")
    sshd.known_hosts.write_text("")
    assert f"the RSA key {keys.fingerprint('rsa')}" in refused(sshd, "HostKeyAlgorithms rsa-sha2-512")


# --- Certificates ---


@pytest.fixture
def certified(start_sshd: Callable[..., Sshd], keys: Keys, tmp_path: Path) -> Callable[..., Sshd]:
    """Starts a server with a certificate, made with these words of ssh-keygen; only an authority is known."""

    def start(*words: str, authority: str = "ca", known: str = "ca") -> Sshd:
        made = keys.certificate(tmp_path / "host-cert.pub", "host", *words, authority=authority)
        sshd = start_sshd(HostCertificate=str(made))
        sshd.known_hosts.write_text(f"@cert-authority *,!nothing {keys.line(known)}\n")
        return sshd

    return start


def test_a_certified_host(certified: Callable[..., Sshd]) -> None:
    assert notes(certified("-h", "-n", "127.0.0.1,gpu", "-V", "-1d:+1d").dial()) == []


@pytest.mark.parametrize("kind", ["rsa", "ecdsa"])
def test_an_authority_of_another_kind(certified: Callable[..., Sshd], keys: Keys, kind: str) -> None:
    keys(f"{kind}-ca", kind=kind)
    assert notes(certified("-h", "-n", "127.0.0.1", authority=f"{kind}-ca", known=f"{kind}-ca").dial()) == []


def test_a_certificate_that_was_tampered_with(keys: Keys, tmp_path: Path) -> None:
    blob = PublicBlob.from_file(keys.certificate(tmp_path / "cert.pub", "host", "-h", "-n", "cpu-7")).key_blob
    assert Certificate.parse(blob).is_signed()
    other = Certificate.parse(blob.replace(b"cpu-7", b"gpu-7"))
    assert (other.principals, other.is_signed()) == (["gpu-7"], False)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["-n", "127.0.0.1"], "it is a user's"),
        (["-h", "-n", "gpu,cpu"], "it is for gpu, cpu"),
        (["-h", "-V", "-2d:-1d"], "it is not valid now"),
        (["-h", "-V", "+1d:+2d"], "it is not valid now"),
        (["-h", "-O", "critical:odd=1"], "it has a condition that is not understood"),
    ],
)
def test_a_certificate_that_does_not_do(certified: Callable[..., Sshd], words: list[str], fault: str) -> None:
    """The key may still be known, or be accepted."""
    sshd = certified(*words)
    assert f"is not known, and its certificate does not do ({fault}); if it is the right one" in refused(sshd)
    assert notes(sshd.dial("StrictHostKeyChecking no"))
    assert notes(sshd.dial()) == []


def test_a_certificate_of_another_authority(certified: Callable[..., Sshd], keys: Keys) -> None:
    sshd = certified("-h", "-n", "127.0.0.1", known="other")
    said = refused(sshd)
    assert f"(known_hosts names no authority {keys.fingerprint('ca')} for that host)" in said


def test_a_certificate_of_a_revoked_authority(certified: Callable[..., Sshd], keys: Keys) -> None:
    sshd = certified("-h", "-n", "127.0.0.1")
    with sshd.known_hosts.open("a") as file:
        file.write(f"@revoked * {keys.line('ca')}\n")
    assert "known_hosts names no authority" in refused(sshd)


def test_a_changed_key_with_a_certificate_that_does_not_do(certified: Callable[..., Sshd], keys: Keys) -> None:
    sshd = certified("-h", "-n", "gpu")
    with sshd.known_hosts.open("a") as file:
        file.write(f"* {keys.line('other')}\n")
    assert "is not the one in" in refused(sshd)
