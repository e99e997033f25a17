"""The prompt of `try`, as text or as a chat."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from capture.job import TryJob, prompt_ids
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
