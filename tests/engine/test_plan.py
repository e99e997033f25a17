"""What a plan says of rows whose counts are known."""

from __future__ import annotations

import json
import os
import shutil
from types import SimpleNamespace

import msgspec
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from capture.rows.alarms import Odd
from capture.rows.chat import InputError
from capture.rows.plan import Plan, Preview, make_plan, refuse_unwritable
from capture.rows.tokenise import BadRow, Row, RowOptions, Skipped, tokenise

FILE = "rows.jsonl"


@pytest.fixture(scope="module")
def tokenizer():
    """A token a byte, and three special ones: lengths can be counted by hand."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=259,
        special_tokens=["<|user|>", "<|assistant|>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    made.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    return made


def row(line, length, masked=1, first=3, truncated=False):
    """A row of `length` tokens, the last `masked` of them in the loss; `first` tells rows apart."""
    return Row(FILE, line, [first] + [4] * (length - 1), [0] * (length - masked) + [1] * masked, truncated)


def plan_of(rows, tokenizer, **known):
    given = {"bytes_per_token": {"native": 10.0}, "output": None, **known}
    return make_plan(rows, tokenizer=tokenizer, **given)


def test_a_plan_from_a_file(tmp_path, tokenizer):
    path = tmp_path / FILE
    rows = [
        {"prompt": "How many?", "response": "42"},  # <|user|> 9 </s> <|assistant|> 2 </s> = 15 tokens, 3 in the loss
        {"prompt": "How many?", "response": "42"},
        {"messages": [{"role": "user", "content": "?" * 14}]},  # 16 tokens, none in the loss
        {"prompt": "?" * 30, "response": "?"},  # 35 tokens, longer than allowed
        {"question": "?"},
        {"prompt": "?" * 15, "response": "7"},  # 20 tokens, 2 in the loss
    ]
    path.write_text("".join(json.dumps(fields) + "\n" for fields in rows) + "{\n")
    outcomes = tokenise(path, tokenizer, RowOptions(max_length=30))
    plan = make_plan(outcomes, {"native": 100.5, "specforge": 80.0}, tmp_path / "out" / "set", tokenizer, 30)
    free = plan.free_bytes
    assert free is not None
    assert plan == Plan(
        rows=7,
        samples=4,
        tokens=66,
        longest=20,
        median=15,
        p99=20,
        histogram=[(16, 3), (32, 1)],
        masked_tokens=8,
        masked_share=8 / 66,
        truncated=0,
        skipped=1,
        skipped_rows=[Skipped(str(path), 4, 35)],
        limit=30,
        bad=2,
        bad_rows=plan.bad_rows,
        alarms=plan.alarms,
        bytes_per_token={"native": 100.5, "specforge": 80.0},
        total_bytes={"native": 6633, "specforge": 5280},
        free_bytes=free,
        fits=True,
        output=str(tmp_path / "out" / "set"),
        preview=Preview(
            1,
            "<|user|>How many?</s><|assistant|>[42</s>]",
            [("<|user|>How many?</s><|assistant|>", False), ("42</s>", True)],
        ),
        schema=1,
    )
    assert [(bad.file, bad.line) for bad in plan.bad_rows] == [(str(path), 5), (str(path), 7)]
    assert [(alarm.id, alarm.count, alarm.rows) for alarm in plan.alarms] == [
        ("zero_mask", 1, [Odd(str(path), 3, "16 tokens")]),
        ("duplicate", 1, [Odd(str(path), 2, "15 tokens")]),
    ]
    assert not (tmp_path / "out").exists(), "a plan writes nothing"
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan


def test_nothing_to_draw(tokenizer):
    plan = plan_of([BadRow(FILE, 1, "not JSON"), Skipped(FILE, 2, 9000)], tokenizer)
    assert (plan.rows, plan.samples, plan.tokens, plan.bad, plan.skipped) == (2, 0, 0, 1, 1)
    assert (plan.longest, plan.median, plan.p99, plan.masked_share, plan.preview) == (None,) * 5
    assert plan.histogram == []
    assert plan.total_bytes == {"native": 0}
    assert plan_of([], tokenizer).rows == 0


@pytest.mark.parametrize(
    ("lengths", "longest", "median", "p99"),
    [
        ([7], 7, 7, 7),
        ([1, 9], 9, 1, 9),
        ([9, 1, 5], 9, 5, 9),
        (range(1, 101), 100, 50, 99),
        ([*[8] * 99, 4000], 4000, 8, 8),
        ([*[8] * 98, 4000, 4000], 4000, 8, 4000),
    ],
)
def test_lengths(tokenizer, lengths, longest, median, p99):
    plan = plan_of((row(line, length) for line, length in enumerate(lengths, 1)), tokenizer)
    assert (plan.longest, plan.median, plan.p99) == (longest, median, p99)
    assert plan.tokens == sum(lengths)


@pytest.mark.parametrize(
    ("lengths", "histogram"),
    [
        ([1], [(1, 1)]),
        ([1, 2, 3, 4, 5], [(1, 1), (2, 1), (4, 2), (8, 1)]),
        ([512, 513, 4096], [(512, 1), (1024, 1), (2048, 0), (4096, 1)]),
    ],
)
def test_the_histogram_goes_by_powers_of_two(tokenizer, lengths, histogram):
    assert plan_of((row(1, length) for length in lengths), tokenizer).histogram == histogram


def test_lines_are_named_up_to_twenty_and_counted_beyond(tokenizer):
    rows = [
        *(row(line, 5, masked=1, truncated=True) for line in range(1, 31)),
        *(Skipped(FILE, line, 99) for line in range(31, 61)),
        *(BadRow(FILE, line, "not JSON") for line in range(61, 91)),
    ]
    plan = plan_of(rows, tokenizer)
    (alarm,) = plan.alarms
    assert (alarm.id, alarm.count, plan.truncated, plan.skipped, plan.bad) == ("duplicate", 29, 30, 30, 30)
    assert [odd.line for odd in alarm.rows] == list(range(2, 22))
    assert [skipped.line for skipped in plan.skipped_rows] == list(range(31, 51))
    assert [bad.line for bad in plan.bad_rows] == list(range(61, 81))


def test_duplicates_have_the_same_ids_and_mask(tokenizer):
    same, other_mask, other_ids = row(1, 5), row(2, 5, masked=2), row(3, 5, first=7)
    assert plan_of([same, other_mask, other_ids], tokenizer).alarms == []
    (alarm,) = plan_of([same, other_mask, row(4, 5), other_ids, row(5, 5)], tokenizer).alarms
    assert (alarm.id, [odd.line for odd in alarm.rows]) == ("duplicate", [4, 5])


def test_the_preview_is_the_first_row_that_has_a_mask(tokenizer):
    assert plan_of([row(1, 3, 0), BadRow(FILE, 2, ""), row(3, 3, 1), row(4, 3, 2)], tokenizer).preview.line == 3
    assert plan_of([row(1, 3, 0), row(2, 3, 0)], tokenizer).preview.line == 1


def test_whether_all_formats_fit_together(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    for size, fits in ((5.0, True), (5.001, False)):
        sizes = {"native": size, "specforge": 5.0}
        plan = plan_of([row(1, 10)], tokenizer, bytes_per_token=sizes, output=tmp_path / "out")
        assert (plan.fits, plan.free_bytes) == (fits, 100)


def test_free_space_is_unknown_where_it_cannot_be_asked(tmp_path, tokenizer):
    for output in (None, tmp_path / "file" / "out"):
        (tmp_path / "file").touch()
        plan = plan_of([row(1, 10)], tokenizer, output=output)
        assert (plan.free_bytes, plan.fits) == (None, None)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for output in (tmp_path / "new" / "out", tmp_path):
        refuse_unwritable(output)
    with pytest.raises(InputError) as refused:
        refuse_unwritable(tmp_path / "file" / "out")
    assert str(refused.value) == (
        f"{tmp_path}/file/out cannot be written: {tmp_path}/file is no folder that we may write to; choose another one"
    )
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # as on a read-only file system
    with pytest.raises(InputError, match=f"{tmp_path} is no folder that we may write to"):
        refuse_unwritable(tmp_path / "new" / "out")


def test_progress(tokenizer):
    seen = []
    plan_of((row(line, 2) for line in range(1, 1202)), tokenizer, progress=seen.append)
    assert seen == [500, 1000, 1201]


def test_what_is_wrong_with_the_file_comes_through(tmp_path, tokenizer):
    with pytest.raises(InputError):
        plan_of(tokenise(tmp_path / "none.jsonl", tokenizer, RowOptions()), tokenizer)
