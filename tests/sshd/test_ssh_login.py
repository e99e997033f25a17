"""Logging in: keys, certificates, agents and passwords, in OpenSSH's order, each failing in words of its own."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import until
from packages import need
from sshd import ME, Answers, Keys, Sshd, User

from backends.errors import ConnectionFailed
from backends.ssh import Ask, Question, SshHost, remembering
from backends.ssh_config import resolve

WHO = f"{ME}@127.0.0.1"


def refused(sshd: Sshd, *lines: str, ask: Ask | None = None) -> str:
    with pytest.raises(ConnectionFailed) as error:
        sshd.dial(*lines, ask=ask)
    assert error.value.exit_code == 3
    return str(error.value)


def enters(sshd: Sshd, *lines: str, ask: Ask | None = None) -> None:
    connection = sshd.dial(*lines, ask=ask)
    assert connection.run("true").recv_exit_status() == 0
    connection.close("looked at")


def attempts(sshd: Sshd) -> int:
    return len(re.findall("^Failed ", sshd.log.read_text(), re.MULTILINE))


# --- Keys ---


@pytest.mark.parametrize("kind", ["rsa", "ecdsa", "ed25519"])
@pytest.mark.parametrize("passphrase", ["", "open sesame"])
def test_a_key_of_each_kind(sshd: Sshd, keys: Keys, kind: str, passphrase: str) -> None:
    name = f"{kind}-{len(passphrase)}"
    key = keys(name, kind=kind, passphrase=passphrase)
    sshd.authorized_keys.write_text(keys.public(name).read_text())
    person = Answers(passphrase)
    enters(sshd, f"IdentityFile {key}", ask=person)
    assert person.asked == ([Question("passphrase", f"Passphrase of {key}")] if passphrase else [])


def test_a_key_that_the_host_does_not_take(sshd: Sshd, keys: Keys) -> None:
    sshd.authorized_keys.write_text("")
    assert refused(sshd) == (f"gpu: {WHO} was not let in: tried {keys('id')}; the host takes publickey")


def test_nothing_to_try(sshd: Sshd, tmp_path: Path) -> None:
    config = sshd.config(f"IdentityFile {tmp_path}/none")
    config.write_text(config.read_text().replace(f"IdentityFile {sshd.keys('id')}", ""))
    with pytest.raises(ConnectionFailed) as error:
        SshHost(resolve("gpu", str(config)))
    assert str(error.value) == f"gpu: {WHO} was not let in: there was nothing to try; the host takes publickey"


def test_files_that_are_no_keys(sshd: Sshd, tmp_path: Path, keys: Keys) -> None:
    (tmp_path / "nonsense").write_text("nonsense")
    (tmp_path / "public.pub").write_text(keys.public("other").read_text())
    (tmp_path / "folder").mkdir()
    sshd.authorized_keys.write_text("")
    said = refused(sshd, *(f"IdentityFile {tmp_path}/{name}" for name in ("nonsense", "public.pub", "folder")))
    assert f"tried {tmp_path}/nonsense (" in said
    assert f"{tmp_path}/folder (Is a directory)" in said


def test_the_right_key_after_others(sshd: Sshd, keys: Keys) -> None:
    enters(sshd, *(f"IdentityFile {keys(f'other{number}')}" for number in range(4)))
    assert attempts(sshd) == 4


def test_too_many_keys(start_sshd: Callable[..., Sshd], keys: Keys) -> None:
    sshd = start_sshd(MaxAuthTries="3")
    said = refused(sshd, *(f"IdentityFile {keys(f'other{number}')}" for number in range(4)))
    assert said == (
        f"gpu: {WHO} was not let in: Too many authentication failures; "
        f"tried {keys('other0')}, {keys('other1')}, {keys('other2')}"
    )


# --- Passphrases ---


@pytest.fixture
def locked(sshd: Sshd, keys: Keys) -> str:
    """The configuration with the right key, which is encrypted."""
    key = keys("locked", passphrase="open sesame")
    sshd.authorized_keys.write_text(keys.public("locked").read_text())
    return f"IdentityFile {key}"


def test_a_passphrase_is_asked_for_until_it_is_right(sshd: Sshd, keys: Keys, locked: str) -> None:
    person = Answers("wrong", "open sesame")
    enters(sshd, locked, ask=person)
    assert [(question.kind, question.again) for question in person.asked] == [
        ("passphrase", False),
        ("passphrase", True),
    ]


@pytest.mark.parametrize(("answer", "times"), [("wrong", 3), (None, 1), ("", 1)])
def test_a_passphrase_that_is_not_known(sshd: Sshd, keys: Keys, locked: str, answer: str | None, times: int) -> None:
    person = Answers(answer)
    assert f"tried {keys('locked')} (without its passphrase)" in refused(sshd, locked, ask=person)
    assert len(person.asked) == times


@pytest.mark.parametrize("options", [[], ["BatchMode yes"]])
def test_a_passphrase_that_cannot_be_asked_for(sshd: Sshd, keys: Keys, locked: str, options: list[str]) -> None:
    ask = Answers("open sesame") if options else None
    said = refused(sshd, locked, *options, ask=ask)
    assert f"tried {keys('locked')} (it needs a passphrase, and there is nobody to ask)" in said


@pytest.mark.parametrize("public", [True, False])
def test_no_passphrase_is_asked_for_in_vain(sshd: Sshd, keys: Keys, public: bool) -> None:
    """The host is asked first whether that key would do."""
    key = keys("useless", passphrase="open sesame")
    if not public:
        keys.public("useless").unlink()
    person = Answers("open sesame")
    enters(sshd, f"IdentityFile {key}", ask=person)
    assert person.asked == []


def test_what_was_answered_is_remembered(sshd: Sshd, locked: str) -> None:
    person = Answers("wrong", "open sesame", "asked too often")
    ask = remembering(person)
    for _ in range(3):
        enters(sshd, locked, ask=ask)
    assert len(person.asked) == 2


# --- Certificates ---


@pytest.fixture
def trusting(start_sshd: Callable[..., Sshd], keys: Keys) -> Sshd:
    """A server that only takes certificates."""
    sshd = start_sshd(TrustedUserCAKeys=str(keys.public("ca")))
    sshd.authorized_keys.write_text("")
    return sshd


@pytest.mark.parametrize("kind", ["rsa", "ecdsa", "ed25519"])
def test_a_certificate_beside_the_key(trusting: Sshd, keys: Keys, kind: str) -> None:
    key = keys(f"beside-{kind}", kind=kind)
    keys.certificate(Path(f"{key}-cert.pub"), f"beside-{kind}", "-n", ME)
    enters(trusting, f"IdentityFile {key}")


def test_a_certificate_elsewhere(trusting: Sshd, keys: Keys, tmp_path: Path) -> None:
    certificate = keys.certificate(tmp_path / "elsewhere", "elsewhere", "-n", ME)
    enters(trusting, f"CertificateFile {certificate}", f"IdentityFile {keys('elsewhere')}")
    assert attempts(trusting) == 0


def test_a_certificate_for_an_encrypted_key(trusting: Sshd, keys: Keys) -> None:
    key = keys("certified", passphrase="open sesame")
    keys.certificate(Path(f"{key}-cert.pub"), "certified", "-n", ME)
    person = Answers("open sesame")
    enters(trusting, f"IdentityFile {key}", ask=person)
    assert len(person.asked) == 1


def test_a_certificate_that_the_host_does_not_take(trusting: Sshd, keys: Keys, tmp_path: Path) -> None:
    expired = keys.certificate(tmp_path / "expired", "expired", "-n", ME, "-V", "-2d:-1d")
    (tmp_path / "nonsense").write_text("nonsense")
    said = refused(
        trusting,
        f"CertificateFile {tmp_path}/nonsense",
        f"CertificateFile {expired}",
        f"IdentityFile {keys('expired')}",
    )
    assert said.startswith(
        f"gpu: {WHO} was not let in: tried {tmp_path}/nonsense (Not enough fields for public blob: ['nonsense']), "
        f"{expired}, {keys('expired')}, "
    )


# --- An agent ---


class Agent:
    def __init__(self, path: Path) -> None:
        self.path = path
        need("ssh-agent", "openssh-client")
        self.process = subprocess.Popen(["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.DEVNULL)
        until(self._listens, "the agent listens")

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.path)) == 0

    def add(self, *words: str | Path) -> None:
        environment = os.environ | {"SSH_AUTH_SOCK": str(self.path)}
        subprocess.run(["ssh-add", "-q", *map(str, words)], env=environment, check=True)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    made = Agent(tmp_path / "agent")
    yield made
    made.process.terminate()
    made.process.wait()


@pytest.mark.parametrize("kind", ["rsa", "ecdsa", "ed25519"])
def test_a_key_of_the_agent(sshd: Sshd, keys: Keys, agent: Agent, kind: str) -> None:
    agent.add(keys(f"agent-{kind}", kind=kind))
    sshd.authorized_keys.write_text(keys.public(f"agent-{kind}").read_text())
    enters(sshd, f"IdentityAgent {agent.path}", "IdentitiesOnly no")
    assert attempts(sshd) == 0


def test_the_agent_of_the_environment(sshd: Sshd, keys: Keys, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", str(agent.path))
    agent.add(keys("other"))
    sshd.authorized_keys.write_text(keys.public("other").read_text())
    enters(sshd, "IdentityAgent SSH_AUTH_SOCK", "IdentitiesOnly no")


def test_only_the_identities_of_the_configuration(sshd: Sshd, keys: Keys, agent: Agent, tmp_path: Path) -> None:
    """One of which may be only the public half of what the agent holds."""
    for name in ("other", "held"):
        agent.add(keys(name))
    sshd.authorized_keys.write_text(keys.public("held").read_text())
    use = f"IdentityAgent {agent.path}"
    assert f"tried {keys('id')}; the host takes" in refused(sshd, use)
    (tmp_path / "held.pub").write_text(keys.public("held").read_text())
    enters(sshd, use, f"IdentityFile {tmp_path}/held.pub")
    enters(sshd, use, f"IdentityFile {tmp_path}/held")


def test_the_agent_s_key_of_the_configuration_comes_first(sshd: Sshd, keys: Keys, agent: Agent) -> None:
    for name in ("other", "id"):
        agent.add(keys(name))
    enters(sshd, f"IdentityAgent {agent.path}", "IdentitiesOnly no")
    assert attempts(sshd) == 0


def test_an_encrypted_key_that_the_agent_holds(
    sshd: Sshd, keys: Keys, agent: Agent, locked: str, tmp_path: Path
) -> None:
    (tmp_path / "open").write_bytes(keys("locked").read_bytes())
    (tmp_path / "open").chmod(0o600)
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "open sesame", "-N", "", "-f", tmp_path / "open"], check=True)
    agent.add(tmp_path / "open")
    enters(sshd, locked, f"IdentityAgent {agent.path}")


@pytest.mark.parametrize("kind", ["rsa", "ecdsa", "ed25519"])
def test_a_certificate_for_a_key_of_the_agent(
    trusting: Sshd, keys: Keys, agent: Agent, tmp_path: Path, kind: str
) -> None:
    agent.add(keys(f"agent-{kind}", kind=kind))
    certificate = keys.certificate(tmp_path / "cert", f"agent-{kind}", "-n", ME)
    enters(trusting, f"IdentityAgent {agent.path}", f"CertificateFile {certificate}")


@pytest.mark.parametrize("kind", ["rsa", "ecdsa", "ed25519"])
def test_a_certificate_that_the_agent_holds(
    trusting: Sshd, keys: Keys, agent: Agent, tmp_path: Path, kind: str
) -> None:
    key = tmp_path / "key"
    key.write_bytes(keys(f"agent-{kind}", kind=kind).read_bytes())
    key.chmod(0o600)
    keys.certificate(tmp_path / "key-cert.pub", f"agent-{kind}", "-n", ME)
    agent.add(key)
    enters(trusting, f"IdentityAgent {agent.path}", "IdentitiesOnly no")


def test_an_agent_that_is_gone(sshd: Sshd, keys: Keys, tmp_path: Path) -> None:
    use = f"IdentityAgent {tmp_path}/gone"
    enters(sshd, use)
    sshd.authorized_keys.write_text("")
    assert f"tried no agent at {tmp_path}/gone ([Errno 2] No such file or directory), {keys('id')};" in refused(
        sshd, use
    )


def test_an_agent_that_will_not_sign(sshd: Sshd, keys: Keys, agent: Agent) -> None:
    """As one does whose owner says no; the next key is tried."""
    agent.add("-c", keys("other"))
    sshd.authorized_keys.write_text(keys.public("other").read_text())
    said = refused(sshd, f"IdentityAgent {agent.path}", "IdentitiesOnly no")
    assert f"tried the agent's other (it cannot sign: key cannot be used for signing), {keys('id')};" in said


# --- Passwords ---


def as_user(user: User) -> list[str]:
    return [f"User {user.name}", "PubkeyAuthentication no"]


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({"PasswordAuthentication": "yes", "UsePAM": "no"}, "Password of {who}"),
        ({"PasswordAuthentication": "yes", "UsePAM": "yes"}, "Password of {who}"),
        ({"KbdInteractiveAuthentication": "yes", "UsePAM": "yes"}, "{who}: Password:"),
    ],
)
def test_a_password(users_sshd: Callable[..., Sshd], user: User, options: dict[str, str], asked: str) -> None:
    person = Answers(User.password)
    host = users_sshd(**options).connect(*as_user(user), ask=person, python=None)
    assert host.request("hello")["user"] == user.name
    host.close()
    assert person.asked == [Question("password", asked.format(who=f"{user.name}@127.0.0.1"))]


def test_a_password_that_is_wrong_at_first(users_sshd: Callable[..., Sshd], user: User) -> None:
    sshd = users_sshd(PasswordAuthentication="yes")
    person = Answers("wrong", User.password)
    sshd.connect(*as_user(user), ask=person, python=None).close()
    assert [question.again for question in person.asked] == [False, True]


def test_a_password_that_is_wrong(users_sshd: Callable[..., Sshd], user: User) -> None:
    sshd = users_sshd(PasswordAuthentication="yes")
    person = Answers("wrong")
    said = refused(sshd, *as_user(user), "NumberOfPasswordPrompts 2", ask=person)
    who = f"{user.name}@127.0.0.1"
    assert said == f"gpu: {who} was not let in: tried a password, a password; the host takes publickey, password"
    assert len(person.asked) == 2


def test_a_question_of_the_host_that_is_not_answered(users_sshd: Callable[..., Sshd], user: User) -> None:
    sshd = users_sshd(KbdInteractiveAuthentication="yes", UsePAM="yes")
    said = refused(sshd, *as_user(user), ask=Answers(None))
    assert said == f"gpu: {user.name}@127.0.0.1 was not let in: 'Password:' was not answered"


def test_nobody_to_ask_for_a_password(users_sshd: Callable[..., Sshd], user: User) -> None:
    said = refused(users_sshd(PasswordAuthentication="yes"), *as_user(user))
    assert "tried no password, as there is nobody to ask; the host takes" in said


def test_a_key_and_a_password(users_sshd: Callable[..., Sshd], user: User) -> None:
    sshd = users_sshd(AuthenticationMethods="publickey,password", PasswordAuthentication="yes")
    person = Answers(User.password)
    host = sshd.connect(f"User {user.name}", ask=person, python=None)
    host.close()
    assert [question.kind for question in person.asked] == ["password"]


# --- What cannot be done ---


@pytest.mark.parametrize("methods", ["gssapi-with-mic", "hostbased"])
def test_a_configuration_that_leaves_nothing(sshd: Sshd, methods: str) -> None:
    assert "there was nothing to try; the host takes publickey" in refused(sshd, f"PreferredAuthentications {methods}")


def test_a_host_that_takes_nothing_that_is_known(start_sshd: Callable[..., Sshd]) -> None:
    sshd = start_sshd(PubkeyAuthentication="no", HostbasedAuthentication="yes")
    assert refused(sshd) == (
        f"gpu: {WHO} was not let in: the host takes only hostbased; "
        "Layertap knows publickey, keyboard-interactive, password"
    )
