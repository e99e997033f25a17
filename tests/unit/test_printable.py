"""Text of rows, logs and files on a terminal: shown, and never obeyed."""

from __future__ import annotations

import json

import pytest

from backends.errors import UsageError
from console import cli, headless
from console.words import of_dataset
from console.words.printable import printable

EVIL = "\x1b[2J\x1b[31mRED\x1b]0;pwned\x07\0\r\x9b1m\u202e\ud800"
SHOWN = r"\x1b[2J\x1b[31mRED\x1b]0;pwned\x07\x00\r\x9b1m\u202e\ud800"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("plain", "plain"),
        ("two\nlines", "two\nlines"),
        ("größer · 東京　大阪 👋\u00a0e\u0301", "größer · 東京　大阪 👋\u00a0e\u0301"),
        (EVIL, SHOWN),
        ("a\tb\u2028c", r"a\tb\u2028c"),
        ("\\x1b", "\\x1b"),
    ],
)
def test_what_a_terminal_would_obey_is_an_escape(text: str, said: str) -> None:
    assert printable(text) == said


def test_text_of_both_streams_is_safe_and_json_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "file": "a\x1b.jsonl", "line": 1, "reason": None, "truncated": False, "tokens": 9, "masked_tokens": 9,
        "text": EVIL, "alarms": {},
    }  # fmt: skip
    headless.out({"shown": [row]}, False, of_dataset.chosen_rows)
    headless.say(f"failed: {EVIL}")
    said = capsys.readouterr()
    assert said.out == f"a\\x1b.jsonl:1: 9 tokens, 9 in the loss, [ ]:\n  {SHOWN}\n"
    assert said.err == f"failed: {SHOWN}\n"
    headless.out({"text": EVIL[:-1]}, True, of_dataset.chosen_rows)
    assert json.loads(capsys.readouterr().out) == {"text": EVIL[:-1]}


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (UsageError(f"{EVIL}: no such file"), f"layertap: {SHOWN}: no such file\n"),
        (RuntimeError(EVIL), f"RuntimeError: {SHOWN}\nlayertap: this is a bug of ours\n"),
    ],
)
def test_an_error_is_safe(
    error: Exception, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(**_: object) -> int:
        raise error

    monkeypatch.setattr(cli, "app", failing)
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().err.endswith(said)


def test_a_log_is_printed_without_what_its_lines_would_do_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    log = b"\x1b[31mred\x1b[0m\tend\r\n 10%|#\r100%|##########\n\x1b]0;pwned\x07\0api_key='sk-\x1b[0m123456789'"
    assert headless.log_text(log) == log.decode().replace("sk-\x1b[0m123456789", "***")  # into a file goes all of it
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert headless.log_text(log) == "red     end\n100%|##########\n\ufffdapi_key='***'"
