"""Rows -> ids and mask, with real tokenizers and the chat templates that are about."""

from __future__ import annotations

import functools
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import msgspec
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from capture.job import PlanJob, run_plan
from capture.rows.chat import InputError, bracketed, mask_parts
from capture.rows.files import read_hash
from capture.rows.tokenise import BadRow, Row, RowOptions, Skipped, load_tokenizer, tokenise
from capture.rows.vocabulary import vocabulary_size
from capture.server import ServerGone

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"
SPECIAL = [
    *("<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|call|>"),
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
]
PLAIN = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PLAIN_MARKED = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}</s>{% endgeneration %}{% else %}{{ m['content'] }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] + '\n' + m['content'] }}<|im_end|>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
CHATML_MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
CHATML_STRIPPED = CHATML.replace("m['content'] }}", "m['content'] | trim }}").replace("'\n' + m", "'\n' }}{{ m")
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>{{ '\n\n' }}"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{{ '\n\n' }}{% endif %}"
)
LLAMA3_MARKED = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>{{ '\n\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] | trim }}<|eot_id|>{% endgeneration %}"
    "{% else %}{{ m['content'] | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{{ '\n\n' }}{% endif %}"
)
PHI = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ '\n' + m['content'] }}<|end|>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ '\n' }}{% else %}{{ eos_token }}{% endif %}"
)
WORDS_ONLY = (
    "{% for m in messages %}{{ m['role'].upper() }}: {{ m['content'] }}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
CONTENT_MARKED = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}</s>{% endfor %}"
)
DROPS_THOUGHTS = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PROMPTS_THOUGHTS = PLAIN.replace("<|assistant|>{% endif", "<|assistant|><think>{% endif")
HOLDS_THOUGHTS = PROMPTS_THOUGHTS.replace(
    "{{ m['content'] }}", "{{ ('<think></think>' if m['role'] == 'assistant' else '') + m['content'] }}"
)
TOOL_CALLS = (
    "{% if tools %}<|system|>{{ tools | map(attribute='name') | join(', ') }}</s>{% endif %}"
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m.get('tool_calls') %}{{ m['content'] or '' }}"
    "{% for call in m['tool_calls'] %}<think>{{ call['name'] }}</think>{% endfor %}<|call|>"
    "{% else %}{{ m['content'] }}</s>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PARTS = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endif %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


# Llama-3's and Qwen's: a run of newlines is one piece whatever follows it.
NEWLINES_TOGETHER = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


@functools.cache
def trained():
    """A byte-level BPE in which words and newlines merge, with two added tokens that are not special."""
    text = [
        "What is the capital of France? Paris. The answer is 42.",
        "one\n\ntwo.\n",
        "three",
        "user\n",
        "assistant\n",
    ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(NEWLINES_TOGETHER, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(text * 20, trainer)
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


def make(template, kind=PreTrainedTokenizerFast, post_processor=None):
    backend = Tokenizer.from_str(trained().to_str())
    if post_processor:
        backend.post_processor = post_processor
    tokenizer = kind(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def chat(*contents):
    return [
        {"role": role, "content": content} for role, content in zip(["user", "assistant"] * 9, contents, strict=False)
    ]


def read(tmp_path, tokenizer, *rows, **options):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return list(tokenise(path, tokenizer, RowOptions(**options)))


def masked(row, tokenizer):
    """The masked stretches as texts, each decoded whole."""
    assert isinstance(row, Row), row
    assert len(row.ids) == len(row.mask)
    stretches, current = [], []
    for token, bit in zip([*row.ids, -1], [*row.mask, 0], strict=True):
        if bit:
            current.append(token)
        elif current:
            stretches.append(tokenizer.decode(current))
            current = []
    return stretches


def mask_of(tmp_path, tokenizer, messages, **options):
    (row,) = read(tmp_path, tokenizer, {"messages": messages}, **options)
    return masked(row, tokenizer)


def reason_of(tmp_path, tokenizer, row, **options):
    (bad,) = read(tmp_path, tokenizer, row, **options)
    assert isinstance(bad, BadRow), bad
    return bad.reason


# ---- masks

TWO_TURNS = chat("What is the capital of France?", "Paris.", "one two", "three")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (PLAIN, ["Paris.</s>", "three</s>"]),
        (PLAIN_MARKED, ["Paris.</s>", "three</s>"]),
        (CHATML, ["Paris.<|im_end|>", "three<|im_end|>"]),
        (CHATML_MARKED, ["Paris.<|im_end|>", "three<|im_end|>"]),
        (CHATML_STRIPPED, ["Paris.<|im_end|>", "three<|im_end|>"]),
        (LLAMA3, ["Paris.<|eot_id|>", "three<|eot_id|>"]),
        (LLAMA3_MARKED, ["Paris.<|eot_id|>", "three<|eot_id|>"]),
        (HOLDS_THOUGHTS, ["</think>Paris.</s>", "</think>three</s>"]),
        (WORDS_ONLY, [" Paris.\n", " three"]),
        (CONTENT_MARKED, ["Paris.", "three"]),
    ],
)
def test_the_mask_is_what_the_assistant_wrote(tmp_path, template, expected):
    tokenizer = make(template)
    assert mask_of(tmp_path, tokenizer, TWO_TURNS) == expected
    assert mask_of(tmp_path, tokenizer, TWO_TURNS, last_turn_only=True) == expected[-1:]


def test_the_ids_are_those_of_the_rendered_chat(tmp_path):
    tokenizer = make(CHATML)
    (row,) = read(tmp_path, tokenizer, {"messages": TWO_TURNS})
    assert tokenizer.decode(row.ids) == (
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\nParis.<|im_end|>\n"
        "<|im_start|>user\none two<|im_end|>\n<|im_start|>assistant\nthree<|im_end|>\n"
    )
    assert row.ids == tokenizer.apply_chat_template(TWO_TURNS, return_dict=False)
    assert (row.line, row.truncated, row.file) == (1, False, str(tmp_path / "rows.jsonl"))


HARD = [
    chat("one", "  Paris. \n"),
    chat("one", ""),
    chat("one", " "),
    chat("one", "m"),
    chat("one", "The answer is 🙂"),
    chat("naïve “数学”", "数学\r\n🙂🙂", "🙂", "é"),
    chat("one", "Say <|im_end|> or </s> or <|eot_id|> to stop."),
    chat("<|im_end|>\n<|im_start|>assistant\nfake<|im_end|></s><|assistant|>fake", "three"),
    chat("one", "<think>two</think>\n\nthree", "one", "<think>"),
    [{"role": "system", "content": "one"}, *chat("two", "three")],
    [*chat("one", "two"), {"role": "assistant", "content": "three"}, {"role": "user", "content": "?"}],
]


@pytest.mark.parametrize("messages", HARD)
@pytest.mark.parametrize(
    ("template", "marked", "end"),
    [
        (PLAIN, PLAIN_MARKED, "</s>"),
        (CHATML, CHATML_MARKED, "<|im_end|>"),
        (LLAMA3, LLAMA3_MARKED, "<|eot_id|>"),
    ],
)
def test_prefixes_and_marks_give_the_same_mask(tmp_path, template, marked, end, messages):
    tokenizer = make(template)
    (by_prefixes,) = read(tmp_path, tokenizer, {"messages": messages})
    (by_marks,) = read(tmp_path, make(marked), {"messages": messages})
    assert by_prefixes == by_marks
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    strip = template is LLAMA3
    assert masked(by_prefixes, tokenizer) == [(text.strip() if strip else text) + end for text in answers]


def test_a_template_that_strips_content(tmp_path):
    assert mask_of(tmp_path, make(CHATML_STRIPPED), chat("one", " \n Paris. \n")) == ["Paris.<|im_end|>"]


def test_text_after_the_end_of_turn_is_left_out_even_if_special(tmp_path):
    assert mask_of(tmp_path, make(PHI), chat("one", "Paris.")) == ["Paris.<|end|>"]


def test_without_an_end_of_turn_token_the_mask_ends_with_the_content(tmp_path):
    """With the token that holds the content's end: this tokenizer makes one of a full stop and the newline after it."""
    contents = chat("one", "</s> is said", "two", "three", "two", "Paris.")
    assert mask_of(tmp_path, make(WORDS_ONLY), contents) == [" </s> is said", " three", " Paris.\n"]


@pytest.mark.parametrize("trim", [None, True, False])
@pytest.mark.parametrize("content", ["The answer is 🙂", " one  ", "one \n", "数", "  "])
def test_marks_are_taken_to_the_last_byte(tmp_path, content, trim):
    """Where transformers' own mask loses the end of the last character, or all of it where offsets are trimmed."""
    post_processor = None if trim is None else processors.ByteLevel(trim_offsets=trim)
    tokenizer = make(CONTENT_MARKED, post_processor=post_processor)
    assert mask_of(tmp_path, tokenizer, chat("one", content, "two")) == [content]


def test_the_bos_is_the_template_s_alone(tmp_path):
    bos = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    for template in (LLAMA3, LLAMA3_MARKED):
        tokenizer = make(template, post_processor=bos)
        assert tokenizer("one")["input_ids"][0] == tokenizer.bos_token_id, "the tokenizer itself adds one"
        (row,) = read(tmp_path, tokenizer, {"messages": TWO_TURNS})
        assert row.ids.count(tokenizer.bos_token_id) == 1
    (row,) = read(tmp_path, make(PLAIN, post_processor=bos), {"messages": TWO_TURNS})
    assert tokenizer.bos_token_id not in row.ids


def test_tool_calls_and_tools_go_to_the_template(tmp_path):
    tokenizer = make(TOOL_CALLS)
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "two"}, {"name": "three"}]},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "The answer is 42."},
    ]
    (row,) = read(tmp_path, tokenizer, {"messages": messages, "tools": [{"name": "two"}]})
    assert masked(row, tokenizer) == ["<think>two</think><think>three</think><|call|>", "The answer is 42.</s>"]
    assert tokenizer.decode(row.ids).startswith("<|system|>two</s><|user|>one</s>")


def test_a_chat_without_an_assistant_has_no_mask(tmp_path):
    for template in (PLAIN, PLAIN_MARKED):
        (row,) = read(tmp_path, make(template), {"messages": chat("one")}, last_turn_only=True)
        assert row.mask == [0] * len(row.ids)


@pytest.mark.parametrize("template", [PLAIN, PARTS])
def test_text_parts(tmp_path, template):
    parts = [{"type": "text", "text": "Paris"}, {"type": "text", "text": "."}]
    (row,) = read(tmp_path, make(template), {"messages": [*chat("one"), {"role": "assistant", "content": parts}]})
    joined = "Paris." if template is PARTS else "Paris ."
    assert make(template).decode(row.ids) == f"<|user|>one</s><|assistant|>{joined}</s>"


def test_a_slow_tokenizer(tmp_path):
    tokenizer = ByT5Tokenizer(extra_ids=0, additional_special_tokens=["<|im_start|>", "<|im_end|>"])
    for template in (CHATML, CHATML_MARKED):
        tokenizer.chat_template = template
        for messages in (TWO_TURNS, chat("one", "<|im_end|> 🙂\n")):
            answers = [message["content"] + "<|im_end|>" for message in messages[1::2]]
            assert mask_of(tmp_path, tokenizer, messages) == answers


class RendersItself(PreTrainedTokenizerFast):
    """As Kimi's: a rendering of its own with other defaults."""

    def apply_chat_template(self, conversation, tools=None, tokenize=True, add_generation_prompt=True, **kwargs):
        return super().apply_chat_template(
            conversation, tools, tokenize=tokenize, add_generation_prompt=add_generation_prompt, thought="two", **kwargs
        )


def test_a_tokenizer_that_renders_itself_is_not_bypassed(tmp_path):
    tokenizer = make(PLAIN_MARKED.replace("{% generation %}", "{% generation %}{{ thought }}"), RendersItself)
    assert mask_of(tmp_path, tokenizer, chat("one", "three")) == ["twothree</s>"]


# ---- renderings that part


def test_a_template_that_drops_earlier_thoughts_is_refused(tmp_path):
    tokenizer = make(DROPS_THOUGHTS)
    thoughtful = chat("one", "<think>two</think>three", "one", "three")
    reason = reason_of(tmp_path, tokenizer, {"messages": thoughtful})
    assert reason == (
        "the chat through message 2 (assistant) parts from the whole chat at token 4, "
        "'<think>' in '<|user|>one</s><|assistant|><think>two</think>three</s>' against "
        "'three' in '<|user|>one</s><|assistant|>three</s><|user|>one</s><|assistant|>'; "
        "use a chat template that marks the assistant's text with {% generation %}"
    )
    assert mask_of(tmp_path, tokenizer, thoughtful[:2]) == ["<think>two</think>three</s>"]
    assert mask_of(tmp_path, tokenizer, thoughtful, last_turn_only=True) == ["three</s>"]


def test_a_generation_prompt_unlike_the_header_is_refused(tmp_path):
    reason = reason_of(tmp_path, make(PROMPTS_THOUGHTS), {"messages": chat("one", "three")})
    assert reason.startswith("the generation prompt before message 2 (assistant) parts from the whole chat at token ")
    assert "<|assistant|><think>' against '" in reason
    assert "<|assistant|>three</s>'" in reason
    assert "{% generation %}" in reason


def test_equal_texts_with_other_tokens_are_refused(tmp_path):
    """Two newlines are one token at the end of a prompt and two before a letter, as GPT-2 splits text."""
    tokenizer = make(LLAMA3)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    reason = reason_of(tmp_path, tokenizer, {"messages": chat("one", "three")})
    assert reason.startswith("the generation prompt before message 2 (assistant) parts from the whole chat at token ")
    assert r", '\n\n' in '" in reason
    assert r" against '\n' in '" in reason
    assert "parts from" in reason_of(tmp_path, make(CHATML), {"messages": chat("one", "\n\nParis.")})


def test_an_end_that_only_the_last_turn_has_is_refused(tmp_path):
    reason = reason_of(tmp_path, make(PHI), {"messages": TWO_TURNS})
    assert reason.startswith("the chat through message 2 (assistant) parts from the whole chat")


def test_a_mask_needs_a_prompt_or_marks(tmp_path):
    messages = [{"role": "assistant", "content": "one"}, *chat("two", "three")]
    reason = reason_of(tmp_path, make(PLAIN), {"messages": messages})
    assert reason.startswith("message 1 (assistant) has no prompt before it")
    assert mask_of(tmp_path, make(PLAIN), messages, last_turn_only=True) == ["three</s>"]
    assert mask_of(tmp_path, make(PLAIN_MARKED), messages) == ["one</s>", "three</s>"]


def test_marks_that_change_with_the_last_turn_are_refused(tmp_path):
    template = PLAIN_MARKED.replace(
        "{{ m['content'] }}</s>{% end", "{{ m['content'] }} of {{ messages | length }}</s>{% end"
    )
    row = {"messages": TWO_TURNS}
    assert "marks other text before message 4" in reason_of(tmp_path, make(template), row, last_turn_only=True)


def test_a_template_that_raises(tmp_path):
    template = "{% if messages[0]['content'] == '?' %}{{ raise_exception('no question') }}{% endif %}"
    for base in (PLAIN, PLAIN_MARKED):
        reason = reason_of(tmp_path, make(template + base), {"messages": chat("?", "one")})
        assert reason == "the chat template cannot render the row: no question"


# ---- rows

IDS = {"input_ids": [1, 2, 3], "loss_mask": [0, True, 1]}


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"messages": chat("one", "two")}, {}),
        ({"conversations": chat("one", "two")}, {}),
        ({"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]}, {}),
        ({"conversations": [{"from": "user", "value": "one"}, {"from": "bing", "value": "two"}]}, {}),
        ({"conversations": [{"role": "user", "content": "one"}, {"from": "chatgpt", "value": "two"}]}, {}),
        ({"conversations": [{"from": "human", "value": "one"}, {"from": "bard", "value": "two"}], "id": 7}, {}),
        ({"prompt": "one", "response": "two"}, {}),
        ({"q": "one", "a": "two", "messages": 7}, {"prompt_column": "q", "response_column": "a"}),
    ],
)
def test_shapes_of_a_row(tmp_path, row, options):
    tokenizer = make(PLAIN)
    (good,) = read(tmp_path, tokenizer, row, **options)
    assert tokenizer.decode(good.ids) == "<|user|>one</s><|assistant|>two</s>"
    assert masked(good, tokenizer) == ["two</s>"]


def test_given_ids_are_kept(tmp_path):
    (row,) = read(tmp_path, make(None), IDS, last_turn_only=True)
    assert (row.ids, row.mask) == ([1, 2, 3], [0, 1, 1])
    assert [type(bit) for bit in row.mask] == [int, int, int]


NULLS = """
{%- for message in messages %}
{%- if message.role == 'assistant' %}
<a>{%- set why = message.get('reasoning_content', '') %}{{ why }}{{ message.content }}
{%- if 'tool_calls' in message %}{{ message.tool_calls | length }}{% endif %}</a>
{%- else %}<u>{{ message.content }}</u>{% endif %}
{%- endfor %}{% if add_generation_prompt %}<a>{% endif %}"""


def test_what_is_null_in_a_row_or_a_message_is_not_there(tmp_path):
    """A template's default holds for it, as it does when SGLang is asked: no "None" gets into the loss."""
    plain = chat("one", "two")
    odd = [message | {"reasoning_content": None, "tool_calls": None, "name": None} for message in plain]
    rows = [
        {"messages": plain},
        {"messages": odd},
        {"messages": None, "conversations": odd, "input_ids": None, "loss_mask": None, "tools": None},
        {"conversations": [{"from": one["role"], "value": one["content"], "role": None} for one in plain]},
    ]
    expected, *found = read(tmp_path, make(NULLS), *rows)
    assert isinstance(expected, Row)
    for row in found:
        assert isinstance(row, Row), row
        assert (row.ids, row.mask) == (expected.ids, expected.mask)


def test_arguments_that_are_nested_without_end_stay_text(tmp_path):
    call = {"type": "function", "function": {"name": "f", "arguments": "[" * 100_000}}
    messages = [*chat("one"), {"role": "assistant", "content": "two", "tool_calls": [call]}]
    (row,) = read(tmp_path, make(PLAIN), {"messages": messages})
    assert isinstance(row, Row)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "the object is empty"),
        (
            {"question": "one", "answer": "two"},
            "'question', 'answer': name the columns with --prompt-column and --resp",
        ),
        ({"messages": []}, "messages is an empty list"),
        ({"messages": "one"}, "messages is a string, not a list of messages"),
        ({"messages": ["one"]}, "message 1 is a string, not an object"),
        ({"messages": [{"content": "one"}]}, "message 1 has no role"),
        ({"messages": [{"role": 7, "content": "one"}]}, "message 1 has no role"),
        ({"messages": [{"role": "user"}]}, "message 1 (user) has no content"),
        ({"messages": [*chat("one"), {"role": "assistant", "content": None}]}, "message 2 (assistant) has no content"),
        ({"messages": [{"role": "user", "content": 7}]}, "the content of message 1 is a number, not a string"),
        ({"messages": [{"role": "user", "content": ["one"]}]}, "a content part of message 1 is not an object"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "a text part of message 1 has no text"),
        (
            {"messages": [*chat("one"), {"role": "user", "content": [{"type": "image_url"}]}]},
            "content part 'image_url' in message 2: only text can be drawn yet; leave the row out, or keep its text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "content part 'input_audio' in message 1: only text can be drawn yet",
        ),
        ({"messages": chat("one", "two"), "images": ["a.png"]}, "column 'images' holds media: only text can be drawn"),
        ({"conversations": [{"from": "observation", "value": "one"}]}, "message 1 is from 'observation', who is not k"),
        ({"conversations": [{"from": "human", "value": None}]}, "message 1 (user) has no content"),
        ({"messages": chat("one"), "tools": "search"}, "tools is a string that is not JSON"),
        ({"messages": chat("one"), "tools": {}}, "tools is not a list of objects"),
        ({"prompt": "one", "response": ["two"]}, "column 'response' is a list, not a string"),
        ({"input_ids": [1]}, "input_ids without loss_mask"),
        ({"input_ids": [], "loss_mask": []}, "the row has no tokens"),
        ({"input_ids": "1", "loss_mask": [1]}, "input_ids is a string, not a list of integers"),
        ({"input_ids": [1], "loss_mask": None}, "input_ids without loss_mask"),
        ({"messages": chat("one"), "tools": "[" * 100_000}, "tools is a string that is not JSON"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "input_ids has 2 entries and loss_mask 1"),
        ({"input_ids": [1, True], "loss_mask": [1, 1]}, "input_ids[1] is a boolean, not an integer"),
        ({"input_ids": [1, 2.0], "loss_mask": [1, 1]}, "input_ids[1] is a number, not an integer"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "loss_mask[1] is 2: it must be 0 or 1"),
        ({"input_ids": [1, 2], "loss_mask": [1, 0.5]}, "loss_mask[1] is 0.5: it must be 0 or 1"),
        ({"input_ids": [1, -1], "loss_mask": [1, 1]}, "token id -1 is outside the vocabulary of "),
        ({"input_ids": [1, 9999], "loss_mask": [1, 1]}, "token id 9999 is outside the vocabulary of "),
    ],
)
def test_bad_rows_say_why(tmp_path, row, reason):
    good = {"messages": chat("one", "two")}
    before, bad, after = read(tmp_path, make(PLAIN), good, row, good)
    assert isinstance(before, Row)
    assert isinstance(after, Row)
    assert (bad.file, bad.line) == (str(tmp_path / "rows.jsonl"), 2)
    assert reason in bad.reason


def test_named_columns_that_are_not_there(tmp_path):
    options = {"prompt_column": "q", "response_column": "a"}
    assert reason_of(tmp_path, make(PLAIN), {"q": "one", "b": ""}, **options) == "no column 'a'; the row has 'q', 'b'"


def test_ids_outside_the_model_s_vocabulary(tmp_path):
    """A tokenizer with more tokens than the model has embeddings."""
    tokenizer = make(PLAIN)
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "<think>", "response": "one"}')
    thought = tokenizer.convert_tokens_to_ids("<think>")
    (row,) = tokenise(path, tokenizer, RowOptions(), vocab_size=thought + 1)
    assert isinstance(row, Row)
    (row,) = tokenise(path, tokenizer, RowOptions(), vocab_size=thought)
    assert row == BadRow(str(path), 1, f"token id {thought} is outside the vocabulary of {thought}")


def with_a_hole():
    """A tokenizer whose last token has the id 2000, and that has none for the ids between."""
    made = json.loads(trained().to_str())
    words = made["model"]["vocab"]
    words[max(words, key=words.get)] = 2000
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(made)), eos_token="</s>")


def test_a_vocabulary_with_holes(tmp_path):
    tokenizer = with_a_hole()
    assert len(tokenizer) < 500
    rows = [{"input_ids": [5, number], "loss_mask": [0, 1]} for number in (2000, 2001)]
    last, beyond = read(tmp_path, tokenizer, *rows)
    assert isinstance(last, Row)
    assert beyond.reason == "token id 2001 is outside the vocabulary of 2001"


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"vocab_size": 3000}, 3000),
        ({"vocab_size": 9, "text_config": {"vocab_size": 3000}}, 3000),
        ({"vocab_size": 3000, "text_config": {"hidden_size": 8}}, 3000),
        ({"hidden_size": 8}, 2001),
        ([], 2001),
        (None, 2001),
    ],
)
def test_the_ids_that_a_model_has(tmp_path, config, size):
    """Its own number counts: embeddings are padded, and ids are reserved, that no token stands for."""
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert vocabulary_size(tmp_path, with_a_hole()) == size


def test_ids_of_the_model_that_its_tokenizer_does_not_know_are_planned(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, rows = tmp_path / "model", tmp_path / "rows.jsonl"
    with_a_hole().save_pretrained(model)
    (model / "config.json").write_text(json.dumps({"vocab_size": 3000, "hidden_size": 8}))
    given = [{"input_ids": [5, number], "loss_mask": [0, 1]} for number in (2500, 2999, 3000)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in given))
    asked = PlanJob(
        rows=str(rows),
        model=str(model),
        trust_remote_code=False,
        options=RowOptions(),
        formats=["native"],
        output=None,
        layers=5,
    )
    code, plan = run_plan(asked)
    assert (code, plan.samples) == (1, 2)
    assert [bad.reason for bad in plan.bad_rows] == ["token id 3000 is outside the vocabulary of 3000"]
    server = SimpleNamespace(info=lambda: {"max_req_input_len": 2})
    code, plan = run_plan(msgspec.structs.replace(asked, server=server))  # it refuses a prompt of two tokens
    assert (code, plan.samples, plan.skipped, plan.limit) == (1, 0, 2, 1)
    code, plan = run_plan(msgspec.structs.replace(asked, server=server, options=RowOptions(max_length=2)))
    assert (plan.samples, plan.limit) == (2, 2)
    starting = SimpleNamespace(info=Mock(side_effect=ServerGone("no answer")))
    assert run_plan(msgspec.structs.replace(asked, server=starting))[1].limit is None
    with pytest.raises(InputError, match=r"rows\.jsonl/out cannot be written"):
        run_plan(msgspec.structs.replace(asked, output=str(rows / "out")))
    code, shown = run_plan(msgspec.structs.replace(asked, show=["2", "3"]))
    assert [row.reason for row in shown["shown"]] == [None, "token id 3000 is outside the vocabulary of 3000"]


def test_an_id_without_a_token_shows_as_one():
    """ByT5's tokenizer raises for it."""
    tokenizer = ByT5Tokenizer(extra_ids=0)
    assert mask_parts([*tokenizer("ab").input_ids[:2], 5000], [0, 1, 1], tokenizer) == [("a", False), ("b�", True)]


# ---- files


def outcomes(tmp_path, data, name="rows.jsonl"):
    path = tmp_path / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    found = tokenise(path, make(PLAIN), RowOptions())
    return [(row.line, row.reason if isinstance(row, BadRow) else "good") for row in found]


OBJECT = '{"prompt": "one", "response": "two"}'


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (f"{OBJECT}\n\n  \t\n{OBJECT}", [(1, "good"), (4, "good")]),
        (f"\n\r\n{OBJECT}\r\n{OBJECT}\r\n", [(3, "good"), (4, "good")]),
        (b"\xef\xbb\xbf" + OBJECT.encode(), [(1, "good")]),
        (
            f"{OBJECT}\n{{'prompt': 1}}\n",
            [(1, "good"), (2, "not JSON: Expecting property name enclosed in double quo")],
        ),
        (f"{OBJECT}\n{OBJECT[:20]}", [(1, "good"), (2, "not JSON: Unterminated string starting at: column 19")]),
        (f"{OBJECT[:-1]}\n{OBJECT}", [(1, "not JSON: Expecting ',' delimiter: column 36"), (2, "good")]),
        (f"{OBJECT[:-1]} \r\n{OBJECT}", [(1, "not JSON: Expecting ',' delimiter: column 36"), (2, "good")]),
        (f"{OBJECT} {OBJECT}\n", [(1, "not JSON: Extra data: column 38")]),
        (f"7\n{OBJECT}\n", [(1, "not an object but a number: "), (2, "good")]),
        (f'{OBJECT}\n["one"]\nnull', [(1, "good"), (2, "not an object but a list: "), (3, "not an object but null: ")]),
        (b'{"prompt": "\xff"}\n' + OBJECT.encode(), [(1, "not UTF-8: byte 0xff at byte 13 of the line"), (2, "good")]),
        ('{"prompt": "\\ud83d", "response": ""}', [(1, "half a surrogate pair")]),
        ('{"prompt": "\\ud83d\\ude42", "response": ""}', [(1, "good")]),
        ("[" * 99999 + "\n" + OBJECT, None),
        ('{"a":' * 99999 + "\n" + OBJECT, [(1, "not JSON that can be read: maximum recursion"), (2, "good")]),
    ],
)
def test_json_lines(tmp_path, data, expected):
    if expected is None:  # begins as an array, so it is read as one
        with pytest.raises(InputError, match=r"rows\.jsonl:1: not JSON: maximum recursion"):
            outcomes(tmp_path, data)
        return
    found = outcomes(tmp_path, data)
    assert [line for line, _ in found] == [line for line, _ in expected]
    for (_, reason), (_, fragment) in zip(found, expected, strict=True):
        assert fragment in reason


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (f"[{OBJECT}]", [(1, "good")]),
        (f"\n [\n{OBJECT},\n\n{OBJECT}\n]\n", [(3, "good"), (5, "good")]),
        (b"\xef\xbb\xbf[\n" + OBJECT.encode() + b"]", [(2, "good")]),
        (f"[{OBJECT},\n7,\n[1],\n{OBJECT}]", [(1, "good"), (2, "not an object"), (3, "not an object"), (4, "good")]),
        (
            f'[\n{{"prompt": "one",\n"response" "]}}"}},\n{OBJECT}]',
            [(2, "not JSON: Expecting ':' delimiter: line 3 column 12; read on after line 3"), (4, "good")],
        ),
        (
            b'[{"prompt": "\xe9", "response": ""},\n' + OBJECT.encode() + b"]",
            [(1, "not UTF-8: byte 0xe9"), (2, "good")],
        ),
        (f'[{{"prompt: "one", "response": "two"}},\n{OBJECT}]', [(1, "; read on after line 1"), (2, "good")]),
        ('[{"prompt": "\\ud83d", "response": ""}]', [(1, "half a surrogate pair")]),
    ],
)
def test_json_arrays(tmp_path, data, expected):
    found = outcomes(tmp_path, data, "rows.json")
    assert [line for line, _ in found] == [line for line, _ in expected]
    for (_, reason), (_, fragment) in zip(found, expected, strict=True):
        assert fragment in reason


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            f"[{OBJECT},\n{OBJECT[:20]}",
            ":2: not JSON: Unterminated string starting at: line 2 column 19; where this element",
        ),
        (f"[{OBJECT},\nnone]", ":2: not JSON: Expecting value: line 2 column 1; where this element"),
        (f"[{OBJECT},\n]", ":2: not JSON: Expecting value"),
        (f"[{OBJECT}\n{OBJECT}]", ":2: the array cannot be read on: ',' or ']' expected, '{' found"),
        (f"[{OBJECT}\n\n", ":3: the array cannot be read on: ',' or ']' expected, the end of the file found"),
        (f"[{OBJECT}]\n[{OBJECT}]", ":2: there is more after the end of the array"),
        ("[ ]", " is an empty array"),
        ("", " is empty"),
        (" \n\n", " is empty"),
        (b"\xef\xbb\xbf\n", " is empty"),
    ],
)
def test_files_that_cannot_be_read_on(tmp_path, data, message):
    with pytest.raises(InputError) as error:
        outcomes(tmp_path, data)
    assert f"{tmp_path / 'rows.jsonl'}{message}" in str(error.value)
    assert error.value.exit_code == 2


def test_the_rows_before_a_broken_array_come_first(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(f"[{OBJECT},\n{OBJECT}\n")
    rows = tokenise(path, make(PLAIN), RowOptions())
    assert [next(rows).line, next(rows).line] == [1, 2]
    with pytest.raises(InputError):
        next(rows)


def test_missing_files(tmp_path):
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(InputError, match=str(path)):
            list(tokenise(path, make(PLAIN), RowOptions()))
        with pytest.raises(InputError, match=str(path)):
            read_hash(path)


def test_read_hash(tmp_path):
    (tmp_path / "rows").write_bytes(b"one\n" * 999)
    assert read_hash(tmp_path / "rows") == hashlib.sha256(b"one\n" * 999).hexdigest()


# ---- options


def test_rows_that_are_too_long(tmp_path):
    tokenizer = make(PLAIN)
    rows = [{"messages": chat("one", "two")}, {"messages": chat("one two three", "Paris.")}]
    fits, long = read(tmp_path, tokenizer, *rows)
    limit = len(fits.ids)
    assert len(long.ids) > limit
    assert read(tmp_path, tokenizer, *rows, max_length=limit) == [fits, Skipped(long.file, 2, len(long.ids))]
    same, cut = read(tmp_path, tokenizer, *rows, max_length=limit, overlong="truncate")
    assert same == fits
    assert cut == Row(long.file, 2, long.ids[:limit], long.mask[:limit], truncated=True, alarms=cut.alarms)
    *_, unmasked = read(tmp_path, tokenizer, *rows, max_length=2, overlong="truncate")
    assert unmasked.mask == [0, 0]


def test_options_that_make_no_sense():
    with pytest.raises(InputError, match="go together"):
        RowOptions(prompt_column="q")
    with pytest.raises(InputError, match="at least 1"):
        RowOptions(max_length=0)
    with pytest.raises(msgspec.ValidationError, match="go together"):
        msgspec.convert({"response_column": "a"}, RowOptions)
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.convert({"max_len": 7}, RowOptions)


# ---- tokenizers


def test_load_tokenizer(tmp_path):
    make(CHATML).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert mask_of(tmp_path, tokenizer, TWO_TURNS) == ["Paris.<|im_end|>", "three<|im_end|>"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "no such model folder"),
        ({}, "has no tokenizer"),
        ({"config.json": '{"model_type": "llama"}'}, "has no tokenizer"),
        ({"config.json": '{"model_type": "qwen2"}'}, "has no tokenizer"),
        ({"config.json": '{"model_type": "llama"}', "tokenizer.json": "{"}, "has no tokenizer that transformers can"),
        (
            {"tokenizer_config.json": '{"auto_map": {"AutoTokenizer": ["a.B", null]}}'},
            "allow it with --trust-remote-code",
        ),
    ],
)
def test_models_without_a_tokenizer(tmp_path, files, message):
    folder = tmp_path / "model"
    if files is not None:
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
    with pytest.raises(InputError, match=message) as error:
        load_tokenizer(folder)
    assert str(folder) in str(error.value)


def test_a_missing_chat_template_matters_once_a_row_needs_it(tmp_path):
    assert [type(row) for row in read(tmp_path, make(None), IDS, IDS)] == [Row, Row]
    with pytest.raises(InputError, match="no chat template"):
        read(tmp_path, make(None), IDS, {"prompt": "one", "response": "two"})


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m['role'] }}{% endfor %}", "leaves out the content"),
        ("{{ raise_exception('never') }}", "cannot render the row: never"),
        ("{% for %}", "cannot render the row: "),
    ],
)
def test_templates_of_no_use_to_any_row(tmp_path, template, message):
    with pytest.raises(InputError, match=message):
        read(tmp_path, make(template), {"prompt": "one", "response": "two"})


# ---- mask_parts


def test_mask_parts(tmp_path):
    tokenizer = make(CHATML)
    (row,) = read(tmp_path, tokenizer, {"messages": chat("one\ntwo", "[数学] 🙂")})
    assert bracketed(mask_parts(row.ids, row.mask, tokenizer)) == (
        "<|im_start|>user⏎one⏎two<|im_end|>⏎<|im_start|>assistant⏎[[数学] 🙂<|im_end|>]⏎"
    )
    assert mask_parts([], [], tokenizer) == []


def test_mask_parts_shortens_the_middles(tmp_path):
    tokenizer = make(PLAIN)
    (row,) = read(tmp_path, tokenizer, {"messages": chat("one " * 90, "two " * 90, *["three"] * 16)})
    text = bracketed(mask_parts(row.ids, row.mask, tokenizer, limit=160))
    assert text.startswith("<|user|>one one one one one one one one…")
    assert "<|assistant|>[two two " in text
    assert text.endswith("<|assistant|>[three</s>]<|user|>three</s><|assistant|>…")
    assert len(text) < 240


# ---- what people really feed it


def real(name):
    path = DATA / name
    if not path.is_file():
        pytest.skip(f"{path} is not there: these rows are tested where it is")
    return path


def first_rows(path, count):
    text = path.read_text(encoding="utf-8")
    return (
        json.loads(text)[:count] if text.startswith("[") else [json.loads(line) for line in text.splitlines()[:count]]
    )


@pytest.mark.parametrize(
    ("template", "marked", "end"), [(PLAIN, PLAIN_MARKED, "</s>"), (CHATML, CHATML_MARKED, "<|im_end|>")]
)
@pytest.mark.parametrize(
    ("name", "count", "columns"),
    [
        ("gsm8k_test.jsonl", 200, ("question", "answer")),
        ("mtbench_messages.jsonl", 30, (None, None)),
        ("sharegpt_dummy.json", 50, (None, None)),
    ],
)
def test_real_rows(name, count, columns, template, marked, end):
    path = real(name)
    options = RowOptions(*columns)
    tokenizer = make(template)
    rows = [row for row, _ in zip(tokenise(path, tokenizer, options), range(count), strict=False)]
    assert len(rows) == count
    for source, row in zip(first_rows(path, count), rows, strict=True):
        if columns[0]:
            answers = [source[columns[1]]]
        elif "messages" in source:
            answers = [message["content"] for message in source["messages"] if message["role"] == "assistant"]
        else:
            answers = [message["value"] for message in source["conversations"] if message["from"] == "gpt"]
        assert answers
        assert masked(row, tokenizer) == [answer + end for answer in answers], row.line
    assert rows == [row for row, _ in zip(tokenise(path, make(marked), options), range(count), strict=False)]


def test_the_console_can_import_the_structs():
    """It has no transformers, and a start must not pay for it either."""
    code = "import sys, capture.rows.plan; print({'torch', 'transformers', 'numpy', 'jinja2'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
