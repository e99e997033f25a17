"""What OpenSSH knows about a host: its configuration, asked of `ssh -G`, and the known_hosts files."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import pwd
import re
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from backends.errors import ConnectionFailed, UsageError

SSH_PORT = 22
RESOLVE_SECONDS = 30.0  # a `Match exec` may ask the network
MOST_JUMPS = 8
METHODS = ("publickey", "keyboard-interactive", "password")  # in OpenSSH's order
Strict = Literal["yes", "ask", "accept-new", "no"]
STRICT: dict[str, Strict] = {"yes": "yes", "true": "yes", "accept-new": "accept-new", "no": "no", "false": "no"}
FAMILY = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where to connect and how, as `ssh ALIAS` would."""

    alias: str
    hostname: str
    port: int
    user: str
    family: int = socket.AF_UNSPEC
    connect_timeout: float | None = None  # seconds; None where the configuration says nothing
    jumps: list[Target] = []  # to be gone through in this order
    proxy_command: str | None = None

    host_key_alias: str | None = None
    user_known_hosts: list[str] = []
    global_known_hosts: list[str] = []
    strict: Strict = "ask"
    hash_known_hosts: bool = False
    host_key_algorithms: list[str] = []

    methods: list[str] = []  # of METHODS, in the order to try them
    identity_files: list[str] = []
    certificate_files: list[str] = []
    identities_only: bool = False
    identity_agent: str | None = None  # the agent's socket
    batch: bool = False  # never ask a person
    password_prompts: int = 3

    @property
    def names(self) -> list[str]:
        """What known_hosts may call this host: the second one only counts where it has the very key."""
        if self.host_key_alias:
            return [self.host_key_alias]
        if self.port == SSH_PORT:
            return [self.hostname]
        return [f"[{self.hostname}]:{self.port}", self.hostname]


def resolve(alias: str, config: str | None = None) -> Target:
    """What `ssh alias` would do; `config` is a file for `ssh -F`.

    Raises UsageError for a configuration that ssh itself does not take, ConnectionFailed where it cannot be asked.
    """
    return _resolve(alias, [], config, MOST_JUMPS)


def _resolve(alias: str, arguments: list[str], config: str | None, jumps_left: int) -> Target:
    if alias.startswith("-"):
        raise UsageError(f"{alias!r} is no host")
    options = _ask_ssh([*(["-F", config] if config else []), *arguments, "-G", "--", alias], alias)
    one = {key: values[0] for key, values in options.items()}
    if one.get("proxyusefdpass") == "yes":
        raise ConnectionFailed(f"{alias}: ProxyUseFdpass is not supported; a ProxyCommand that relays the bytes is")
    jump = one.get("proxyjump", "none")
    expand = _Expansion(alias, one)
    return Target(
        alias=alias,
        hostname=one["hostname"],
        port=int(one["port"]),
        user=one["user"],
        family=FAMILY.get(one.get("addressfamily", "any"), socket.AF_UNSPEC),
        connect_timeout=float(one["connecttimeout"]) if one.get("connecttimeout", "none").isdigit() else None,
        jumps=[] if jump == "none" else _jumps(alias, jump, config, jumps_left),
        proxy_command=_unless_none(expand(one.get("proxycommand", "none"))) if jump == "none" else None,
        host_key_alias=one.get("hostkeyalias"),
        user_known_hosts=_files(one.get("userknownhostsfile"), expand),
        global_known_hosts=_files(one.get("globalknownhostsfile"), expand),
        strict=STRICT.get(one.get("stricthostkeychecking", "ask"), "ask"),
        hash_known_hosts=one.get("hashknownhosts") == "yes",
        host_key_algorithms=[name for name in one.get("hostkeyalgorithms", "").split(",") if name],
        methods=_methods(one),
        identity_files=[expand.path(path) for path in options.get("identityfile", []) if path != "none"],
        certificate_files=[expand.path(path) for path in options.get("certificatefile", []) if path != "none"],
        identities_only=one.get("identitiesonly") == "yes",
        identity_agent=_agent_socket(one.get("identityagent", "SSH_AUTH_SOCK"), expand),
        batch=one.get("batchmode") == "yes",
        password_prompts=int(one.get("numberofpasswordprompts", 3)),
    )


def _ask_ssh(arguments: list[str], alias: str) -> dict[str, list[str]]:
    """The options that `ssh -G` prints, each with its values."""
    if shutil.which("ssh") is None:
        raise ConnectionFailed(
            f"{alias}: there is no `ssh` here, and only it can read ~/.ssh/config; install OpenSSH's client"
        )
    try:
        asked = subprocess.run(
            ["ssh", *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=RESOLVE_SECONDS
        )
    except subprocess.TimeoutExpired:
        why = f"`ssh -G` took more than {RESOLVE_SECONDS:g} s; is a `Match exec` stuck?"
        raise ConnectionFailed(f"{alias}: {why}") from None
    if asked.returncode:
        said = [line for line in asked.stderr.splitlines() if not line.startswith("Pseudo-terminal")]
        raise UsageError(f"{alias}: ssh does not take this: {'; '.join(said) or 'it said nothing'}")
    options: dict[str, list[str]] = {}
    for line in asked.stdout.splitlines():
        key, _, value = line.partition(" ")
        options.setdefault(key.lower(), []).append(value)
    return options


def _jumps(alias: str, jump: str, config: str | None, left: int) -> list[Target]:
    """The hops of a ProxyJump; what the first of them needs itself comes before it, as in OpenSSH."""
    if not left:
        raise UsageError(f"{alias}: more than {MOST_JUMPS} jumps; does a ProxyJump lead back to itself?")
    chain: list[Target] = []
    for number, hop in enumerate(jump.split(",")):
        user, host, port = _parse_hop(hop)
        arguments = [*(["-l", user] if user else []), *(["-p", port] if port else [])]
        resolved = _resolve(host, arguments, config, left - 1)
        if number:  # reached through the hop before it, whatever its own configuration says
            chain.append(msgspec.structs.replace(resolved, jumps=[], proxy_command=None))
        else:
            chain += [*resolved.jumps, msgspec.structs.replace(resolved, jumps=[])]
    return chain


def _parse_hop(hop: str) -> tuple[str, str, str]:
    """User, host and port of `[ssh://][user@]host[:port]`; what is not given is empty."""
    user, _, place = hop.removeprefix("ssh://").rstrip("/").rpartition("@")
    bracketed = re.fullmatch(r"\[(.*)\](?::(\d+))?", place) or re.fullmatch(r"([^:]*)(?::(\d+))?", place)
    host, port = bracketed.groups("") if bracketed else (place, "")  # else a bare IPv6 address
    return user, host, port


def _methods(one: dict[str, str]) -> list[str]:
    wanted = one.get("preferredauthentications", ",".join(METHODS)).split(",")
    allowed = {
        "publickey": one.get("pubkeyauthentication", "yes") not in ("no", "false"),
        "keyboard-interactive": one.get("kbdinteractiveauthentication", "yes") == "yes",
        "password": one.get("passwordauthentication", "yes") == "yes",
    }
    return [method for method in wanted if allowed.get(method)]


def _agent_socket(said: str, expand: _Expansion) -> str | None:
    if said == "none":
        return None
    if said == "SSH_AUTH_SOCK":
        return os.environ.get("SSH_AUTH_SOCK")
    if said.startswith("$") and not said.startswith("${"):
        return os.environ.get(said[1:])
    return expand.path(said)


def _files(said: str | None, expand: _Expansion) -> list[str]:
    return [expand.path(path) for path in (said or "").split() if path != "none"]


def _unless_none(said: str) -> str | None:
    return None if said == "none" else said


class _Expansion:
    """Tokens such as %h, `${NAME}` and `~`, which `ssh -G` leaves as they are in most options."""

    def __init__(self, alias: str, one: dict[str, str]) -> None:
        me = pwd.getpwuid(os.getuid())
        here = socket.gethostname()
        jump = one.get("proxyjump", "")
        self.home = me.pw_dir
        self.tokens = {
            "%": "%",
            "d": me.pw_dir,
            "h": one["hostname"],
            "i": str(os.getuid()),
            "j": jump,
            "k": one.get("hostkeyalias", alias),
            "L": here.partition(".")[0],
            "l": here,
            "n": alias,
            "p": one["port"],
            "r": one["user"],
            "u": me.pw_name,
        }
        parts = (here, one["hostname"], one["port"], one["user"], jump)
        self.tokens["C"] = hashlib.sha1("".join(parts).encode()).hexdigest()

    def __call__(self, text: str) -> str:
        return re.sub("%(.)", lambda match: self.tokens.get(match[1], match[0]), text)

    def path(self, text: str) -> str:
        """The path that `text` means; ssh asks the user database for the home, not $HOME."""
        text = re.sub(r"\$\{(\w+)\}", lambda match: os.environ.get(match[1], ""), self(text))
        return self.home + text[1:] if text == "~" or text.startswith("~/") else os.path.expanduser(text)


# --- known_hosts ---


class KnownKey(msgspec.Struct, frozen=True):
    """One line of a known_hosts file."""

    file: str
    line: int
    marker: str  # "", "@cert-authority" or "@revoked"
    patterns: str
    kind: str  # of the key: ssh-ed25519, ...
    key: bytes

    def matches(self, name: str) -> bool:
        """Whether the line is about the host of this name."""
        if self.patterns.startswith("|1|"):
            return _is_hash_of(self.patterns, name)
        found = False
        for pattern in self.patterns.split(","):
            if _matches(pattern.removeprefix("!"), name):
                if pattern.startswith("!"):
                    return False
                found = True
        return found


class Verdict(msgspec.Struct, frozen=True):
    """What the known_hosts files say of a host's key."""

    state: Literal["known", "unknown", "changed", "revoked"]
    by: KnownKey | None = None  # the line that says so
    other_kinds: list[str] = []  # of keys that are known for an unknown one's host


class KnownHosts:
    """The lines of some known_hosts files, in order; what is no such line, or cannot be read, is passed over."""

    def __init__(self, files: list[str]) -> None:
        self.keys = [key for file in files for key in _read(file)]

    def verdict(self, names: list[str], kind: str, key: bytes) -> Verdict:
        """What is known of a key of a host that has these names (see `Target.names`)."""
        first, *others = [self._verdict(name, kind, key) for name in names]
        if first.state == "unknown":
            return next((verdict for verdict in others if verdict.state in ("known", "revoked")), first)
        return first

    def _verdict(self, name: str, kind: str, key: bytes) -> Verdict:
        if revoked := self._revoked(name, key):
            return Verdict("revoked", revoked[0])
        plain = self._about(name, "")
        if same := [known for known in plain if known.key == key]:
            return Verdict("known", same[0])
        if rivals := [known for known in plain if known.kind == kind]:
            return Verdict("changed", rivals[0])
        return Verdict("unknown", other_kinds=sorted({known.kind for known in plain}))

    def authority(self, names: list[str], key: bytes) -> KnownKey | None:
        """The line by which certificates signed with this key are good for the host."""
        lines = [known for name in names for known in self._about(name, "@cert-authority") if known.key == key]
        revoked = [known for name in names for known in self._revoked(name, key)]
        return lines[0] if lines and not revoked else None

    def has_authority(self, names: list[str]) -> bool:
        """Whether certificates may be good for the host at all."""
        return any(self._about(name, "@cert-authority") for name in names)

    def kinds(self, names: list[str]) -> set[str]:
        """The kinds of keys that are known for the host."""
        return {known.kind for name in names for known in self._about(name, "")}

    def _about(self, name: str, marker: str) -> list[KnownKey]:
        return [known for known in self.keys if known.marker == marker and known.matches(name)]

    def _revoked(self, name: str, key: bytes) -> list[KnownKey]:
        return [known for known in self._about(name, "@revoked") if known.key == key]


def fingerprint(key: bytes) -> str:
    """As OpenSSH shows it: SHA256:..."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key).digest()).decode().rstrip("=")


def remember(file: str, name: str, kind: str, key: bytes, *, hashed: bool) -> None:
    """Append a key to a known_hosts file, which is made if need be; its other lines stay as they are.

    Raises OSError.
    """
    path = Path(file)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    line = f"{_hash(name.lower(), os.urandom(20)) if hashed else name} {kind} {base64.b64encode(key).decode()}\n"
    with open(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600), "r+b", buffering=0) as stream:
        whole = _ends_a_line(stream.fileno())
        stream.write((b"" if whole else b"\n") + line.encode())


def _ends_a_line(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"


def _read(file: str) -> Iterator[KnownKey]:
    try:
        text = Path(file).read_bytes().decode(errors="replace")
    except OSError:
        return
    for number, line in enumerate(text.split("\n"), 1):
        words = line.split()
        marker = words.pop(0) if words and words[0].startswith("@") else ""
        if len(words) < 3 or words[0].startswith("#") or marker not in ("", "@cert-authority", "@revoked"):
            continue
        patterns, kind, text_of_key = words[:3]
        try:
            key = base64.b64decode(text_of_key, validate=True)
        except (binascii.Error, ValueError):
            continue
        if key.startswith(struct.pack(">I", len(kind)) + kind.encode()):
            yield KnownKey(file, number, marker, patterns, kind, key)


def _matches(pattern: str, name: str) -> bool:
    """OpenSSH's patterns: only * and ? are special."""
    expression = "".join({"*": ".*", "?": "."}.get(letter, re.escape(letter)) for letter in pattern.lower())
    return re.fullmatch(expression, name.lower()) is not None


def _is_hash_of(patterns: str, name: str) -> bool:
    try:
        salt = base64.b64decode(patterns.split("|")[2])
    except (binascii.Error, IndexError):
        return False
    return hmac.compare_digest(_hash(name.lower(), salt).encode(), patterns.encode())


def _hash(name: str, salt: bytes) -> str:
    made = hmac.digest(salt, name.encode(), "sha1")
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(made).decode()}"
