"""What is odd about rows, told before it costs GPU time."""

from __future__ import annotations

import json

import pytest
from test_rows import CHATML, CHATML_MARKED, CONTENT_MARKED, PLAIN, TWO_TURNS, WORDS_ONLY, chat, make

from capture.rows import alarms
from capture.rows.alarms import Alarms, Odd
from capture.rows.chat import ChatTemplate, InputError
from capture.rows.plan import make_plan, show_rows
from capture.rows.tokenise import Encoder, Row, RowOptions, tokenise

ROLES_ALIKE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
BY_PLACE = "{% for m in messages %}{{ '<|user|>' if loop.index0 % 2 == 0 else '<|assistant|>' }}{{ m['content'] }}</s>{% endfor %}"
CALLS_WITHOUT_TEXT = PLAIN.replace(
    "{{ m['content'] }}", "{{ m['content'] or '' }}{{ m.tool_calls | tojson if m.tool_calls }}"
)
TWO_BOS = "{{ bos_token }}{{ bos_token }}" + PLAIN


def found(tmp_path, template, *rows, **options):
    """(name, count, first row) of every alarm."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = make(template)
    made = make_plan(tokenise(tmp_path / "rows.jsonl", tokenizer, RowOptions(**options)), {}, None, tokenizer)
    assert all(odd.file == str(tmp_path / "rows.jsonl") for alarm in made.alarms for odd in alarm.rows)
    return [(alarm.id, alarm.count, alarm.rows[0].line, alarm.rows[0].seen) for alarm in made.alarms]


def test_good_rows_raise_none(tmp_path):
    assert found(tmp_path, PLAIN, {"messages": TWO_TURNS}, {"messages": chat("one", "two")}) == []


@pytest.mark.parametrize("template", [ROLES_ALIKE, BY_PLACE])
def test_a_template_that_ignores_roles(tmp_path, template):
    rows = [{"messages": chat("one", "two")}, {"input_ids": [1, 2], "loss_mask": [0, 1]}]
    assert found(tmp_path, template, *rows) == [("ignores_roles", 1, 1, "2 messages")]
    outcomes = list(tokenise(tmp_path / "rows.jsonl", make(template), RowOptions()))
    with pytest.raises(InputError, match=r"rows\.jsonl:1: the chat template renders .* --allow-ignored-roles"):
        list(Alarms().watch(outcomes, RowOptions()))
    allowed = Alarms()
    assert list(allowed.watch(outcomes, RowOptions(allow_ignored_roles=True))) == outcomes
    assert [(alarm.id, alarm.fatal) for alarm in allowed.all()] == [("ignores_roles", True)]


@pytest.mark.parametrize("template", [PLAIN, CHATML, CHATML_MARKED, WORDS_ONLY, CONTENT_MARKED])
def test_templates_that_tell_roles_apart(template):
    assert not ChatTemplate(make(template)).ignores_roles


def test_two_bos(tmp_path):
    text, ids = {"messages": chat("one", "two")}, {"input_ids": [0, 0, 7], "loss_mask": [0, 0, 1]}
    assert found(tmp_path, TWO_BOS, text, ids) == [("bos_twice", 2, 1, "token 0 twice")]
    assert found(tmp_path, "{{ bos_token }}" + PLAIN, text) == []


def test_special_tokens_that_come_from_text(tmp_path):
    rows = [
        {"messages": chat("one <|user|>", "two")},
        {"messages": chat("one", "two", "three", "<s>struck</s> out")},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "<|end|>"}]}, *chat("one", "two")[1:]]},
        {"messages": chat("one < two", "<think>five</think> | <b>")},
    ]
    assert found(tmp_path, PLAIN, rows[0]) == [("special_from_text", 1, 1, "<|user|> in message 1 (user)")]
    assert found(tmp_path, PLAIN, rows[1]) == [("special_from_text", 1, 1, "<s> in message 4 (assistant)")]
    assert found(tmp_path, PLAIN, rows[2]) == [("special_from_text", 1, 1, "<|end|> in message 1 (user)")]
    assert found(tmp_path, PLAIN, rows[3]) == [], "added tokens that are not special are text that means something"


def says(content, **more):
    """A question, and a turn of the assistant's."""
    return {"messages": [*chat("one"), {"role": "assistant", "content": content, **more}]}


CALLS = {"tool_calls": [{"type": "function", "name": "f", "function": {"name": "f", "arguments": "{}"}}]}
PARTS_OF_NOTHING = [{"type": "text", "text": " "}]


@pytest.mark.parametrize("role", ["asistant", "wizard", "Assistant", "gpt"])
def test_a_role_that_nobody_knows(tmp_path, role):
    row = {"messages": [*chat("one", "two", "three"), {"role": role, "content": "four"}]}
    assert found(tmp_path, PLAIN, row) == [("unknown_role", 1, 1, f"{role!r} in message 4")]


@pytest.mark.parametrize("role", ["system", "developer", "user", "tool", "function", "ipython"])
def test_roles_that_are_known(tmp_path, role):
    row = {"messages": [{"role": role, "content": "be"}, *chat("one", "two")]}
    share_gpt = {"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": role}]}
    assert found(tmp_path, PLAIN, row, share_gpt) == []


@pytest.mark.parametrize("template", [PLAIN, CHATML, CHATML_MARKED, CONTENT_MARKED])
@pytest.mark.parametrize("content", ["", " \n", [], PARTS_OF_NOTHING])
def test_a_turn_without_text(tmp_path, template, content):
    alarms = found(tmp_path, template, {"messages": TWO_TURNS}, says(content))
    assert ("empty_turn", 1, 2, "message 2") in alarms


@pytest.mark.parametrize("template", [PLAIN, CHATML_MARKED, CALLS_WITHOUT_TEXT])
@pytest.mark.parametrize("content", [None, "", "two"])
def test_tool_calls_that_the_template_leaves_out(tmp_path, template, content):
    seen = [("calls_left_out", 1, 1, "message 2")]
    assert found(tmp_path, template, says(content, **CALLS)) == ([] if template == CALLS_WITHOUT_TEXT else seen)


def test_a_turn_that_only_thinks_is_text_where_that_is_rendered(tmp_path):
    thinks = PLAIN.replace("{{ m['content'] }}", "{{ m.get('reasoning_content', '') }}{{ m['content'] }}")
    assert found(tmp_path, thinks, says("", reasoning_content="two")) == []
    assert found(tmp_path, PLAIN, says("", reasoning_content="two")) == [("empty_turn", 1, 1, "message 2")]


def test_an_empty_turn_that_is_not_in_the_loss(tmp_path):
    row = {"messages": chat("one", "", "three", "four")}
    assert found(tmp_path, PLAIN, row, last_turn_only=True) == []
    assert found(tmp_path, PLAIN, row) == [("empty_turn", 1, 1, "message 2")]


def test_all_of_the_mask_cut_off(tmp_path):
    """<|user|> o n e </s> <|assistant|> comes first, and is no loss."""
    whole, cut = {"messages": chat("one", "two")}, {"messages": chat("What is the capital of France?" * 9, "two")}
    options = {"max_length": 20, "overlong": "truncate"}
    ((name, count, line, seen),) = found(tmp_path, PLAIN, whole, cut, **options)
    assert (name, count, line) == ("mask_cut_off", 1, 2)
    assert seen.startswith("the first is token ")


def test_nothing_in_the_loss(tmp_path):
    ids = {"input_ids": [5, 6, 7], "loss_mask": [0, 0, 0]}
    assert found(tmp_path, PLAIN, {"messages": chat("one", "two")}, ids) == [("zero_mask", 1, 2, "3 tokens")]


def test_repeated_rows(tmp_path):
    one, two = {"messages": chat("one", "two")}, {"messages": chat("one", "three")}
    ((name, count, line, _),) = found(tmp_path, PLAIN, one, two, one, two, one)
    assert (name, count, line) == ("duplicate", 3, 3)


def test_a_row_of_an_alarm_is_named_in_its_line():
    many = Alarms()
    for line in range(1, 1202):
        many.add(Row("rows.jsonl", line, [line], [0], False, {"zero_mask": "1 tokens"}))
    (alarm,) = many.all()
    assert alarm.rows == [Odd("rows.jsonl", line, "1 tokens") for line in range(1, 21)]
    assert alarms.words(alarm) == (
        "1,201 rows: nothing is in the loss (first rows.jsonl:1, 1 tokens); "
        "leave these rows out: no trainer learns from them"
    )


# ---- chosen rows


def test_chosen_rows_are_shown_whole(tmp_path):
    long = "What is the capital of France? " * 300
    rows = [{"messages": chat("one", "two")}, {"messages": []}, {"messages": chat(long, "Paris.")}]
    path, tokenizer = tmp_path / "rows.jsonl", make(PLAIN)
    path.write_text("\n".join(json.dumps(row) for row in rows))
    first, bad, whole = show_rows(
        str(path), Encoder(tokenizer, RowOptions(), 9999), ["1", "rows.jsonl:3", "2"], tokenizer
    )
    assert (first.line, first.text, first.masked_tokens) == (1, "<|user|>one</s><|assistant|>[two</s>]", 2)
    assert (bad.line, bad.reason) == (2, "messages is an empty list")
    assert whole.text == f"<|user|>{long}</s><|assistant|>[Paris.</s>]"
    assert whole.parts == [(f"<|user|>{long}</s><|assistant|>", False), ("Paris.</s>", True)]
    for name, message in (("9", "has no row 9"), ("b.jsonl:1", "has no row b.jsonl:1"), ("first", "names no row")):
        with pytest.raises(InputError, match=message):
            show_rows(str(path), Encoder(tokenizer, RowOptions(), 9999), [name], tokenizer)
