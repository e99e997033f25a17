"""Taking secrets out of text that leaves the host, and keeping count of where they were: never what they were.

Two nets: the values that this host knows to be secret (its servers' keys, its environment), wherever they stand, and
whatever looks like a secret by its form or by the name before it.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from backends.sglang import MASK, URL_LOGIN, is_secret, secret_parts

SHORTEST = 6  # characters of a value that is looked for everywhere: shorter ones stand in too many words
DEPTH = 5  # of names within values that are looked at; what lies deeper is masked whatever it is
HARMLESS = frozenset({"false", "true", "none", "null", "no", "yes", "on", "off", "auto", "default", "***"})
NUMBER = re.compile(r"-?\d{1,9}(?:\.\d+)?")
VARIABLE = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH", re.IGNORECASE)


class Masked(msgspec.Struct, frozen=True):
    """How often a kind of secret was masked in a file."""

    file: str
    kind: str
    count: int


class Pattern(NamedTuple):
    """What looks like a secret: group `secret` of it is masked, unless it is harmless, and in some only by the name."""

    kind: str
    found: re.Pattern[str]
    by_name: bool = False


def _pattern(kind: str, text: str, *, by_name: bool = False) -> Pattern:
    return Pattern(kind, re.compile(text, re.VERBOSE | re.DOTALL), by_name)


# Quotes may be escaped, as in JSON within JSON. What repeats is bounded or begins at a word only: a line of a megabyte
# must not take an hour.
NAME = r"(?<![\w.-])(?P<name>[A-Za-z_][\w.-]{0,100})"
QUOTE = r"\\?[\"']"
PATTERNS = (
    _pattern("private key", r"-----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----(?P<secret>.+?)(?:-----END[ ][A-Z ]*KEY-----|\Z)"),
    Pattern("password in a URL", URL_LOGIN),
    _pattern(
        "Authorization header",
        rf"(?i:\b(?:proxy-)?authorization)(?:{QUOTE})?\s*[:=,]\s*(?:{QUOTE})?(?P<secret>[^\"'\\\r\n]+)",
    ),
    _pattern("bearer token", r"(?i:\bbearer)\s+(?P<secret>[\w.~+/=-]{6,})"),
    _pattern("Hugging Face token", r"\b(?P<secret>(?:hf|api_org)_[A-Za-z0-9]{8,})"),
    _pattern("API key", r"\b(?P<secret>(?:sk|pk|rk)-[A-Za-z0-9_-]{8,})"),
    _pattern(
        "argument",
        rf"(?<![\w-])(?P<name>--[\w-]{{1,100}})(?:{QUOTE})?(?:\s+|=|\s*,\s*)(?:{QUOTE})?(?P<secret>[^\s\"',\\]+)",
        by_name=True,
    ),
    _pattern("named value", rf"{NAME}{QUOTE}\s*[:=]\s*\\?\"(?P<secret>(?:\\[^\"\n]|[^\"\\\n])+)", by_name=True),
    _pattern("named value", rf"{NAME}(?:{QUOTE})?\s*[:=]\s*\\?'(?P<secret>(?:\\.|[^'\\\n])+)", by_name=True),
    _pattern("named value", rf"{NAME}=(?P<secret>[^\s\"',;)}}\]&]+)", by_name=True),
    _pattern("named value", rf"{NAME}:\s+(?P<secret>[^\s\"',;)}}\]{{\[]+)", by_name=True),
)


def names_a_secret(name: str) -> bool:
    """Whether what is called so is a secret: an argument by its last word, a variable in capitals by any of them."""
    bare = name.lstrip("-")
    return variable_is_secret(bare) if bare.isupper() else is_secret(bare)


def variable_is_secret(name: str) -> bool:
    """Whether a variable of the environment may hold a secret."""
    return is_secret(name) or VARIABLE.search(name) is not None


def worth_hiding(value: str) -> bool:
    """Whether a value can be a secret at all."""
    return value.lower() not in HARMLESS and not NUMBER.fullmatch(value)


class Masker:
    """Masks text. `values` are what is known to be secret, by value, with their kinds."""

    def __init__(self, values: Mapping[str, str]) -> None:
        known = {value: kind for value, kind in values.items() if len(value) >= SHORTEST and worth_hiding(value)}
        forms = {form: kind for value, kind in known.items() for form in (value, html.escape(value), _json(value))}
        self._values = sorted(forms.items(), key=lambda pair: -len(pair[0]))
        self._counts: Counter[tuple[str, str]] = Counter()

    def text(self, file: str, text: str) -> str:
        """The text without its secrets; what was found is counted for `file`."""
        for value, kind in self._values:
            if count := text.count(value):
                self._counts[file, kind] += count
                text = text.replace(value, MASK)
        for pattern in PATTERNS:
            text = pattern.found.sub(self._hide(file, pattern), text)
        return text

    def _hide(self, file: str, pattern: Pattern, depth: int = 0) -> Callable[[re.Match[str]], str]:
        def hide(match: re.Match[str]) -> str:
            secret = match["secret"]
            begin, end = match.start("secret") - match.start(), match.end("secret") - match.start()
            if pattern.by_name and depth < DEPTH and not names_a_secret(match["name"]):
                shown = pattern.found.sub(self._hide(file, pattern, depth + 1), secret)  # x=api_key=y
            elif MASK in secret or not worth_hiding(secret.strip()):
                shown = secret
            else:
                shown = MASK
                self._counts[file, pattern.kind] += 1
            return match[0][:begin] + shown + match[0][end:]

        return hide

    def note(self, file: str, kind: str) -> None:
        """Count one that was masked by its place."""
        self._counts[file, kind] += 1

    def report(self) -> list[Masked]:
        """What was masked, by file and kind."""
        return [Masked(file, kind, count) for (file, kind), count in sorted(self._counts.items())]


def secrets_of_argv(argv: Sequence[str]) -> dict[str, str]:
    """Secret values of a command line, with their kinds."""
    return {secret: f"argument {flag}" for flag, _, secret in secret_parts(argv) if secret}


def secrets_of_env(env: Mapping[str, str]) -> dict[str, str]:
    """Secret values of an environment, with their kinds: of variables with such a name, and passwords in any URL."""
    found = {}
    for name, value in env.items():
        if variable_is_secret(name) and not _is_path(value):
            found[value] = f"variable {name}"
        found |= {one["password"]: f"password in variable {name}" for one in URL_LOGIN.finditer(value)}
    return found


def environment(env: Mapping[str, str], shown: Iterable[str], masker: Masker, file: str) -> dict[str, str | None]:
    """An environment to show: values of variables that begin with one of `shown`, of the others only their names."""
    prefixes = tuple(shown)
    made: dict[str, str | None] = {}
    for name in sorted(env):
        if variable_is_secret(name) and worth_hiding(env[name]):
            masker.note(file, f"variable {name}")
            made[name] = MASK
        else:
            made[name] = env[name] if name.startswith(prefixes) else None
    return made


def _is_path(value: str) -> bool:
    return value.startswith(("/", "~", "./"))


def _json(value: str) -> str:
    return msgspec.json.encode(value).decode()[1:-1]
