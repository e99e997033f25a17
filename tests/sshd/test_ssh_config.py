"""What OpenSSH's configuration comes to, and what its known_hosts files say."""

from __future__ import annotations

import base64
import os
import pwd
import stat
from pathlib import Path

import pytest
from packages import need
from sshd import Keys, keygen

from backends.errors import ConnectionFailed, UsageError
from backends.ssh_config import KnownHosts, Target, fingerprint, remember, resolve

HOME = pwd.getpwuid(os.getuid()).pw_dir
KIND = "ssh-ed25519"


# --- ssh -G ---


@pytest.fixture
def config(tmp_path: Path) -> Path:
    need("ssh", "openssh-client")
    return tmp_path / "config"


def resolved(config: Path, text: str, alias: str = "gpu") -> Target:
    config.write_text(text)
    return resolve(alias, str(config))


def test_what_a_host_is_without_a_configuration(config: Path) -> None:
    target = resolved(config, "", "gpu-7.example")
    assert (target.hostname, target.port, target.user) == ("gpu-7.example", 22, pwd.getpwuid(os.getuid()).pw_name)
    assert target.names == ["gpu-7.example"]
    assert target.user_known_hosts == [f"{HOME}/.ssh/known_hosts", f"{HOME}/.ssh/known_hosts2"]
    assert f"{HOME}/.ssh/id_ed25519" in target.identity_files
    assert target.methods == ["publickey", "keyboard-interactive", "password"]
    assert (target.strict, target.batch, target.identities_only, target.jumps) == ("ask", False, False, [])


def test_includes_matches_and_tokens(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOMEWHERE", "/run/agent")
    included = config.with_name("more")
    included.write_text("Match originalhost gpu\n  User alice\n  Port 2222\n")
    text = f"""
        Include {included}
        Host gpu
          HostName %h.example
          User bob
          IdentityFile ~/.ssh/%r-%h
          CertificateFile ${{SOMEWHERE}}/%n-cert.pub
          IdentityAgent ${{SOMEWHERE}}/socket
          IdentitiesOnly yes
          UserKnownHostsFile ~/.ssh/known_%h /etc/known
          GlobalKnownHostsFile none
          StrictHostKeyChecking accept-new
          PasswordAuthentication no
          PreferredAuthentications password,publickey,gssapi-with-mic
          ConnectTimeout 7
          BatchMode yes
          AddressFamily inet6
          ProxyCommand nc -X %r %h %p # %%
    """
    target = resolved(config, text)
    assert (target.user, target.hostname, target.port) == ("alice", "gpu.example", 2222)
    assert target.names == ["[gpu.example]:2222", "gpu.example"]
    assert target.identity_files == [f"{HOME}/.ssh/alice-gpu.example"]
    assert target.certificate_files == ["/run/agent/gpu-cert.pub"]
    assert target.identity_agent == "/run/agent/socket"
    assert target.user_known_hosts == [f"{HOME}/.ssh/known_gpu.example", "/etc/known"]
    assert target.global_known_hosts == []
    assert target.methods == ["publickey"]
    assert (target.strict, target.connect_timeout, target.batch, target.identities_only) == (
        "accept-new",
        7,
        True,
        True,
    )
    assert target.proxy_command == "nc -X alice gpu.example 2222 # %"


@pytest.mark.parametrize(
    ("said", "means"),
    [("yes", "yes"), ("no", "no"), ("off", "no"), ("ask", "ask"), ("accept-new", "accept-new")],
)
def test_strict_host_key_checking(config: Path, said: str, means: str) -> None:
    assert resolved(config, f"StrictHostKeyChecking {said}").strict == means


@pytest.mark.parametrize(
    ("said", "means"),
    [("SSH_AUTH_SOCK", "/run/one"), ("none", None), ("$OTHER", "/run/two"), ("/run/three", "/run/three")],
)
def test_where_the_agent_is(config: Path, monkeypatch: pytest.MonkeyPatch, said: str, means: str | None) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", "/run/one")
    monkeypatch.setenv("OTHER", "/run/two")
    assert resolved(config, f"IdentityAgent {said}").identity_agent == means


def test_a_host_key_alias_has_no_port(config: Path) -> None:
    assert resolved(config, "HostKeyAlias cluster\nPort 2222").names == ["cluster"]


def test_jumps_come_in_order_and_each_has_its_own_configuration(config: Path) -> None:
    text = """
        Host gpu
          ProxyJump carol@one:2201,two,[::1]:2203
        Host one
          HostName one.example
          User nobody
          ProxyJump door
        Host two
          User dave
          ProxyJump ignored
          ProxyCommand ignored
        Host door
          ProxyCommand cat
    """
    target = resolved(config, text)
    hops = [(hop.alias, hop.user, hop.hostname, hop.port) for hop in target.jumps]
    me = pwd.getpwuid(os.getuid()).pw_name
    assert hops == [
        ("door", me, "door", 22),
        ("one", "carol", "one.example", 2201),
        ("two", "dave", "two", 22),
        ("::1", me, "::1", 2203),
    ]
    assert [hop.proxy_command for hop in target.jumps] == ["cat", None, None, None]
    assert all(not hop.jumps for hop in target.jumps)


def test_a_jump_that_leads_back_to_itself(config: Path) -> None:
    with pytest.raises(UsageError, match="does a ProxyJump lead back to itself"):
        resolved(config, "Host a\n ProxyJump b\nHost b\n ProxyJump a", "a")


def test_a_configuration_that_ssh_does_not_take(config: Path) -> None:
    with pytest.raises(UsageError) as failed:
        resolved(config, "Host gpu\n Nonsense yes\n")
    assert str(failed.value).startswith(
        f"gpu: ssh does not take this: {config}: line 2: Bad configuration option: nonsense"
    )
    with pytest.raises(UsageError, match="'-oProxyCommand=x' is no host"):
        resolved(config, "", "-oProxyCommand=x")


def test_without_ssh(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(config.parent))
    with pytest.raises(ConnectionFailed) as failed:
        resolved(config, "")
    assert str(failed.value) == (
        "gpu: there is no `ssh` here, and only it can read ~/.ssh/config; install OpenSSH's client"
    )


def test_what_cannot_be_done(config: Path) -> None:
    with pytest.raises(ConnectionFailed, match="gpu: ProxyUseFdpass is not supported"):
        resolved(config, "ProxyUseFdpass yes\nProxyCommand x")


# --- known_hosts ---


def blob(keys: Keys, name: str) -> bytes:
    return base64.b64decode(keys.line(name).split()[1])


@pytest.fixture
def known(tmp_path: Path, keys: Keys):
    """The verdict on the key `host`, by the lines of a file in which {host}, {other}, {rsa} and {ca} are keys."""

    def verdict(text: str, *names: str, key: str = "host"):
        keys("rsa", kind="rsa")
        file = tmp_path / "known_hosts"
        file.write_text(text.format(**{name: keys.line(name) for name in ("host", "other", "rsa", "ca")}))
        found = KnownHosts([str(tmp_path / "none"), str(file)]).verdict(list(names), KIND, blob(keys, key))
        return found.state, found.by.line if found.by else None

    return verdict


@pytest.mark.parametrize(
    ("text", "names", "verdict"),
    [
        ("", ["gpu"], ("unknown", None)),
        ("gpu {host}\n", ["gpu"], ("known", 1)),
        ("GPU {host}\n", ["gpu"], ("known", 1)),
        ("gpu {host}\n", ["GPU"], ("known", 1)),
        ("gpu {other}\n", ["gpu"], ("changed", 1)),
        ("gpu {rsa}\n", ["gpu"], ("unknown", None)),
        ("gpu {other}\ngpu {host}\n", ["gpu"], ("known", 2)),
        ("# gpu {other}\n\n  gpu,10.0.0.7 {host} a comment\n", ["10.0.0.7"], ("known", 3)),
        ("gpu.example {host}\n", ["gpu"], ("unknown", None)),
        ("*.example,!cpu.* {host}\n", ["gpu.example"], ("known", 1)),
        ("*.example,!cpu.* {host}\n", ["cpu.example"], ("unknown", None)),
        ("gpu-? {host}\n", ["gpu-7"], ("known", 1)),
        ("gpu-? {host}\n", ["gpu-77"], ("unknown", None)),
        ("[gpu]:2222 {host}\n", ["[gpu]:2222", "gpu"], ("known", 1)),
        ("[gpu]:2222 {host}\n", ["g"], ("unknown", None)),
        ("gpu {host}\n", ["[gpu]:2222", "gpu"], ("known", 1)),
        ("gpu {other}\n", ["[gpu]:2222", "gpu"], ("unknown", None)),
        ("[gpu]:2222 {other}\ngpu {host}\n", ["[gpu]:2222", "gpu"], ("changed", 1)),
        ("gpu {host}\n@revoked * {host}\n", ["gpu"], ("revoked", 2)),
        ("@revoked gpu {other}\n", ["gpu"], ("unknown", None)),
        ("@cert-authority * {host}\n", ["gpu"], ("unknown", None)),
        ("@cert-authority * {ca}\ngpu {host}\n", ["gpu"], ("known", 2)),
    ],
)
def test_verdicts(known, text: str, names: list[str], verdict: tuple[str, int | None]) -> None:
    assert known(text, *names) == verdict


def test_lines_that_are_none_do_no_harm(known, tmp_path: Path) -> None:
    text = "\x00\xff nonsense\n@marker gpu {other}\n@revoked\ngpu ssh-ed25519\ngpu ssh-ed25519 !!!\ngpu 1024 35 1234\n"
    text += "gpu ssh-rsa AAAA\n|1|x gpu {other}\n|1|%%%|x {other}\ngpu {host}"
    assert known(text, "gpu") == ("known", 10)
    (tmp_path / "folder").mkdir()
    assert KnownHosts([str(tmp_path / "folder")]).keys == []


def test_hashed_names_are_openssh_s(known, keys: Keys, tmp_path: Path) -> None:
    file = tmp_path / "hashed"
    file.write_text(f"[gpu]:2222 {keys.line('host')}\ngpu {keys.line('other')}\n")
    keygen("-q", "-H", "-f", file)
    text = file.read_text()
    assert "gpu" not in text
    assert known(text, "[gpu]:2222") == ("known", 1)
    assert known(text, "gpu") == ("changed", 2)
    assert known(text, "cpu") == ("unknown", None)


@pytest.mark.parametrize("hashed", [False, True])
def test_a_new_key_is_appended(keys: Keys, tmp_path: Path, hashed: bool) -> None:
    file = tmp_path / "new" / "known_hosts"
    remember(str(file), "[gpu]:2222", KIND, blob(keys, "host"), hashed=hashed)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert ("gpu" in file.read_text()) is not hashed
    found = keygen("-F", "[gpu]:2222", "-f", file)
    assert keys.line("host").split()[1] in found


def test_other_lines_stay_as_they_are(keys: Keys, tmp_path: Path) -> None:
    file = tmp_path / "known_hosts"
    before = b"# mine\n@cert-authority * \xff odd \t line \r\n\nhalf a line"
    file.write_bytes(before)
    file.chmod(0o644)
    remember(str(file), "gpu", KIND, blob(keys, "host"), hashed=False)
    assert file.read_bytes() == before + f"\ngpu {keys.line('host')}\n".encode()
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    remember(str(file), "cpu", KIND, blob(keys, "host"), hashed=False)
    assert file.read_bytes().endswith(f"\ngpu {keys.line('host')}\ncpu {keys.line('host')}\n".encode())


def test_fingerprints_are_openssh_s(keys: Keys) -> None:
    assert fingerprint(blob(keys, "host")) == keys.fingerprint("host")


def test_dev_null_stays_what_it_is(keys: Keys) -> None:
    before = os.stat("/dev/null")
    remember("/dev/null", "gpu", KIND, blob(keys, "host"), hashed=False)
    after = os.stat("/dev/null")
    assert (before.st_mode, before.st_rdev) == (after.st_mode, after.st_rdev)
