"""The prompt of `try`, as text or as a chat."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tmpfs import fill, small_tmpfs
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from capture.job import TryJob, prompt_ids, report
from capture.locks import Busy, lock
from capture.rows.chat import InputError
from capture.server import Process, Server

SERVER = Server(run="r", url="", dump_dir="", secret="s", process=Process(0, 0), model="/models/base", profile="p")


@pytest.fixture
def tokenizer() -> Any:
    words = Tokenizer(models.WordLevel({"what": 0, "is": 1, "user:": 2}, "what"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words)


def asked(text: str, chat: bool = True) -> TryJob:
    return TryJob(server=SERVER, lock="", text=text, chat=chat)


def test_a_prompt_as_text_and_as_a_chat(tokenizer: Any) -> None:
    assert prompt_ids(tokenizer, asked("what is", chat=False)) == [0, 1]
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
    assert prompt_ids(tokenizer, asked("what is")) == [2, 0, 1]


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (None, "/models/base has no chat template; give the prompt as plain text, without --chat"),
        ("{{ raise_exception('no questions') }}", "the chat template cannot render the prompt: no questions"),
        ("{{ messages[0].content.nothing.at_all }}", "the chat template cannot render the prompt: "),
        ("{% for %}", "the chat template cannot render the prompt: "),
        ("", "/models/base has no chat template; "),
        ("{# nothing #}", "the prompt has no tokens; give some text"),
    ],
)
def test_a_prompt_that_is_none(tokenizer: Any, template: str | None, why: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(InputError) as refused:
        prompt_ids(tokenizer, asked("what is"))
    assert str(refused.value).startswith(why)


def test_progress_that_cannot_be_written_just_now_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with small_tmpfs(tmp_path / "small", "64k") as small:
        monkeypatch.chdir(small)
        report({"done": 1})
        fill(small)
        report({"done": "x" * 70_000})
        assert json.loads((small / "progress.json").read_text()) == {"done": 1}
        monkeypatch.chdir(tmp_path)


def test_a_lock_of_another_users_is_no_bug_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(Busy, match=r"\.lock is another user's: only who made it can lock it"):
        lock(tmp_path / ".lock", "")
