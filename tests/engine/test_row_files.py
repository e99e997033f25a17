"""What an input may be: files, folders of files, tables; and the processes that share the work."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import signal
from pathlib import Path

import datasets
import psutil
import pyarrow
import pyarrow.parquet
import pytest
from test_rows import TOOL_CALLS, TWO_TURNS, chat, make, masked

from capture.rows import files, parallel, table_rows
from capture.rows.chat import InputError
from capture.rows.tokenise import BadRow, Row, RowOptions, tokenise

CHATS = [chat(f"one {n}", "two", "three", f"The answer is {n}.") for n in range(700)]
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"city": "Paris"}'}}


def outcomes(path, template=TOOL_CALLS, workers=1, **options):
    return list(tokenise(path, make(template), RowOptions(**options), workers=workers))


@pytest.fixture(scope="module")
def tables(tmp_path_factory) -> Path:
    """The same rows as JSON lines, as Parquet in one file and in three, and saved by `datasets`."""
    folder = tmp_path_factory.mktemp("tables")
    rows = [{"messages": messages} for messages in CHATS]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, folder / "rows.parquet", row_group_size=300)
    (folder / "parts" / "deep").mkdir(parents=True)
    for name, start in (("a", 0), ("b", 300), ("deep/c", 600)):
        pyarrow.parquet.write_table(table.slice(start, 300), folder / "parts" / f"{name}.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(folder / "saved", num_shards=3)
    return folder


@pytest.mark.parametrize("name", ["rows.parquet", "parts", "saved"])
def test_tables_give_the_same_samples_as_json_lines(tables, name):
    expected, found = outcomes(tables / "rows.jsonl"), outcomes(tables / name)
    assert [(row.ids, row.mask) for row in found] == [(row.ids, row.mask) for row in expected]
    assert len(found) == len(CHATS)


def test_rows_of_tables_are_named_by_their_index(tables):
    parts = [(Path(row.file).name, row.line) for row in outcomes(tables / "parts")]
    assert parts[299:301] + parts[-1:] == [("a.parquet", 299), ("b.parquet", 0), ("c.parquet", 99)]
    saved = outcomes(tables / "saved")
    assert [(row.file, row.line) for row in saved] == [(str(tables / "saved"), n) for n in range(700)]
    tokenizer = make(TOOL_CALLS)
    rows = datasets.load_from_disk(tables / "saved")
    assert masked(saved[512], tokenizer)[-1] == rows[512]["messages"][-1]["content"] + "</s>"


def test_tables_are_read_as_they_go(tables, monkeypatch):
    seen = []
    decode = table_rows._decode
    monkeypatch.setattr(table_rows, "_decode", lambda row, kinds: seen.append(1) or decode(row, kinds))
    for name in ("rows.parquet", "saved"):
        rows = files.read(tables / name)
        for count in (1, 2, 3):
            next(rows)
            assert len(seen) == count
        rows.close()
        seen.clear()


def test_objects_that_are_not_alike_have_what_they_were_given(tmp_path):
    """Arrow gives all objects of a column the same keys, or `datasets` keeps them as JSON text."""
    messages = [
        [*chat("one"), {"role": "assistant", "content": None, "tool_calls": [{"name": "two", "arguments": {"a": 1}}]}],
        [*chat("one"), {"role": "assistant", "content": "three", "tool_calls": None}],
        chat("one", "two"),
    ]
    rows = [{"messages": row, "tools": [{"name": "f", "default": None}]} for row in messages]
    expected = ["<think>two</think><|call|>", "three</s>", "two</s>"]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "plain.parquet")
    kinds = datasets.Features({"messages": [datasets.Json()], "tools": [datasets.Json()]})
    made = datasets.Dataset.from_list(rows, features=kinds)
    made.save_to_disk(tmp_path / "saved")
    made.to_parquet(tmp_path / "json.parquet")
    # In Jinja a missing key is undefined, a null one is none: only the first must be what is not there.
    strict = TOOL_CALLS.replace("m.get('tool_calls')", "m.tool_calls is defined and m.tool_calls is not none")
    for name in ("plain.parquet", "saved", "json.parquet"):
        found = outcomes(tmp_path / name, strict)
        assert [masked(row, make(strict)) for row in found] == [[text] for text in expected], name
    kept = [row["tools"] for _, _, row in files.read(tmp_path / "json.parquet")]
    assert kept == [[{"name": "f", "default": None}]] * 3
    assert "tool_calls" not in next(row for _, n, row in files.read(tmp_path / "plain.parquet") if n == 2)


def test_tools_may_be_json_text(tmp_path):
    row = {"messages": chat("one", "two"), "tools": json.dumps([{"name": "search"}])}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "rows.parquet")
    (found,) = outcomes(tmp_path / "rows.parquet")
    assert make(None).decode(found.ids).startswith("<|system|>search</s>")


def test_ids_and_masks_from_a_table(tmp_path):
    rows = {"input_ids": [[1, 2, 3], [4]], "loss_mask": [[0, 1, 1], [1]], "seq_len": [3, 1]}
    datasets.Dataset.from_dict(rows).with_format("torch").save_to_disk(tmp_path / "saved")
    found = outcomes(tmp_path / "saved")
    assert [(row.ids, row.mask) for row in found] == [([1, 2, 3], [0, 1, 1]), ([4], [1])]


NOT_UTF_8 = pyarrow.StringArray.from_buffers(
    3, pyarrow.py_buffer(b"\0\0\0\0\3\0\0\0\6\0\0\0\x09\0\0\0"), pyarrow.py_buffer(b"oneab\xffsix")
)
YEAR_9999 = 253402300799  # its last second


def write_table(path: Path, kind: str, columns: dict[str, object]) -> Path:
    table = pyarrow.table(columns)
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        datasets.Dataset(table).save_to_disk(path)
    return path


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_a_value_that_cannot_be_read_costs_its_row_alone(tmp_path, kind):
    path = write_table(tmp_path / "rows", kind, {"prompt": NOT_UTF_8, "response": ["a", "b", "c"]})
    first, bad, last = outcomes(path)
    assert (type(first), type(last), last.line) == (Row, Row, 2)
    assert (bad.line, bad.reason) == (
        1,
        "column 'prompt' cannot be read: 'utf-8' codec can't decode byte 0xff in position 2: invalid start byte",
    )


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_a_column_that_is_not_wanted_need_not_be_readable(tmp_path, kind):
    columns = {
        "q": ["one", "two", "three"],
        "a": ["a", "b", "c"],
        "response": NOT_UTF_8,
        "when": pyarrow.array([0, YEAR_9999 + 1, None], pyarrow.timestamp("s")),
    }
    path = write_table(tmp_path / "rows", kind, columns)
    assert [type(row) for row in outcomes(path, prompt_column="q", response_column="a")] == [Row, Row, Row]
    assert [row.reason for row in outcomes(path, prompt_column="q", response_column="when")] == [
        "column 'when' is a number, not a string",
        "column 'when' cannot be read: date value out of range",
        "no column 'when'; the row has 'q', 'a', 'response'",
    ]


def test_text_that_is_no_json_costs_its_row_alone(tmp_path):
    kinds = datasets.Features({"messages": [datasets.Json()]})
    texts = pyarrow.array([*map(json.dumps, chat("one", "two")), '{"role": "us'])
    column = pyarrow.ListArray.from_arrays([0, 2, 3], pyarrow.ExtensionArray.from_storage(pyarrow.json_(), texts))
    table = pyarrow.Table.from_arrays([column], schema=kinds.arrow_schema)
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    good, bad = outcomes(tmp_path / "rows.parquet")
    assert isinstance(good, Row)
    assert bad.line == 1 and bad.reason.startswith("a column of JSON holds what is none: ")


def test_two_columns_of_one_name_are_refused(tmp_path):
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["prompt", "prompt"])
    pyarrow.parquet.write_table(twice, tmp_path / "rows.parquet")
    with pytest.raises(InputError, match=r"rows.parquet has several columns called 'prompt': give each a name of"):
        outcomes(tmp_path / "rows.parquet")


def test_pictures_are_refused_and_not_opened(tmp_path):
    schema = pyarrow.schema({"messages": pyarrow.list_(pyarrow.struct({"role": "string", "content": "string"}))})
    kinds = datasets.Features({**datasets.Features.from_arrow_schema(schema), "image": datasets.Image()})
    rows = [
        {"messages": chat("one", "two"), "image": image} for image in ({"bytes": b"no picture", "path": None}, None)
    ]
    datasets.Dataset.from_list(rows, features=kinds).save_to_disk(tmp_path / "saved")
    bad, good = outcomes(tmp_path / "saved")
    assert bad.reason.startswith("column 'image' holds media: only text can be drawn yet; leave the row out")
    assert isinstance(good, Row)


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda at: at.mkdir(), "holds no rows: give a folder of Parquet or JSONL files, or one that datasets saved"),
        (
            lambda at: [at.mkdir(), (at / "a.jsonl").touch(), (at / "b.parquet").touch()],
            "holds .parquet and .jsonl files: put what belongs together in a folder of its own",
        ),
        (
            lambda at: datasets.DatasetDict(
                {name: datasets.Dataset.from_dict({"prompt": ["one"]}) for name in ("train", "test")}
            ).save_to_disk(at),
            "holds several datasets (test, train): give the folder of one of them",
        ),
        (lambda at: at.write_bytes(b"PAR1 and then nothing of it"), "cannot be read as Parquet: "),
        (lambda at: [at.mkdir(), (at / "state.json").write_text("{}")], "state.json cannot be read: "),
        (
            lambda at: [
                datasets.Dataset.from_dict({"prompt": ["one"]}).save_to_disk(at),
                os.truncate(at / "data-00000-of-00001.arrow", 100),
            ],
            "data-00000-of-00001.arrow cannot be read as Arrow: ",
        ),
    ],
    ids=["empty", "mixed", "splits", "damaged", "state", "cut"],
)
def test_what_is_no_input_is_named(tmp_path, make_it, message):
    path = tmp_path / "input"
    make_it(path)
    with pytest.raises(InputError) as refused:
        outcomes(path)
    assert str(refused.value).startswith(str(path))
    assert message in str(refused.value)


ROW = json.dumps({"prompt": "one", "response": "two"})


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("bin.parquet", b"junk\n", "is no Parquet file, whatever its name says: copy it again, or call it what it is"),
        ("rows.jsonl.gz", gzip.compress(ROW.encode()), "is compressed by gzip: gunzip it, and give what comes of it"),
        ("rows.jsonl", lzma.compress(ROW.encode()), "is compressed by xz: unxz it, and give what comes of it"),
        ("rows.jsonl", bz2.compress(ROW.encode()), "is compressed by bzip2: bunzip2 it, and give what comes of it"),
        ("rows.jsonl", b"\x28\xb5\x2f\xfd..", "is compressed by zstd: unzstd it, and give what comes of it"),
        ("rows.zip", b"PK\3\4..", "is a zip archive: unzip it, and give what comes of it"),
        (
            "rows.arrow",
            b"ARROW1\0\0",
            "is an Arrow file: save its rows as Parquet or JSON lines, and give what comes of it",
        ),
        ("rows.jsonl", ROW.encode("utf-16"), "is UTF-16 text: save it as UTF-8, and give what comes of it"),
        ("rows.json", f"[{ROW}]".encode("utf-32"), "is UTF-32 text: save it as UTF-8, and give what comes of it"),
        (
            "rows.jsonl",
            ROW.encode("utf-16-le"),
            "is no UTF-8 text but UTF-16 or something else: save it as UTF-8, and give that",
        ),
        (
            "rows.jsonl",
            f"{ROW}\r{ROW}\r".encode(),
            "has lines that end with a lone carriage return: save it with \\n at their ends",
        ),
    ],
    ids=["parquet", "gzip", "xz", "bzip2", "zstd", "zip", "arrow", "utf-16", "utf-32", "utf-16 without mark", "return"],
)
def test_a_file_of_another_kind_is_one_error(tmp_path, name, data, said):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(InputError) as refused:
        outcomes(path)
    assert str(refused.value) == f"{path} {said}"


def test_a_carriage_return_inside_a_row_is_space(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'{"prompt": "one",\r"response": "two"}\r\n' + ROW.encode())
    (tmp_path / "rows.json").write_bytes(f"[{ROW},\r{ROW}]\r".encode())
    for name in ("rows.jsonl", "rows.json"):
        assert [type(row) for row in outcomes(tmp_path / name)] == [Row, Row]


def test_the_hash_of_several_files_has_their_names_and_bytes(tables, tmp_path):
    hashes = [files.read_hash(tables / name) for name in ("rows.parquet", "parts", "saved")]
    assert len({*hashes}) == 3
    for name, data in (("a.jsonl", "{}\n"), ("b.jsonl", "[]\n")):
        (tmp_path / name).write_text(data)
    seen = {files.read_hash(tmp_path)}
    (tmp_path / "b.jsonl").rename(tmp_path / "c.jsonl")
    seen.add(files.read_hash(tmp_path))
    (tmp_path / "c.jsonl").write_text("{}\n")
    seen.add(files.read_hash(tmp_path))
    assert len(seen) == 3


# ---- tool calls


def test_arguments_that_are_text_become_objects_as_when_served(tmp_path):
    template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
        "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}</s>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    odd = {"type": "function", "function": {"name": "f", "arguments": "not JSON"}}
    for call, expected in ((CALL, '{"city": "Paris"}</s>'), (odd, '"not JSON"</s>')):
        row = {"messages": [*chat("one"), {"role": "assistant", "content": None, "tool_calls": [call]}]}
        (tmp_path / "rows.jsonl").write_text(json.dumps(row))
        (found,) = outcomes(tmp_path / "rows.jsonl", template)
        assert masked(found, make(template)) == [expected], "and no None where the template would print null"


def test_a_template_that_knows_null_content_gets_it(tmp_path):
    template = TOOL_CALLS.replace("m['content'] or ''", "'silent' if m['content'] is none else ''")
    row = {"messages": [*chat("one"), {"role": "assistant", "content": None, "tool_calls": [{"name": "two"}]}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (found,) = outcomes(tmp_path / "rows.jsonl", template)
    assert masked(found, make(template)) == ["silent<think>two</think><|call|>"]


# ---- several processes


@pytest.fixture
def helpers():
    """What this test has started; servers of other tests are this process's children too."""
    before = set(psutil.Process().children())
    return lambda: set(psutil.Process().children()) - before


def test_several_processes_give_the_same_rows_in_order(tables, helpers):
    path = tables / "rows.jsonl"
    assert outcomes(path, workers=3) == outcomes(path)
    assert not helpers(), "they are gone afterwards"


def test_bad_rows_and_errors_come_out_of_processes(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"messages": []}\n' * 3)
    assert [row.reason for row in outcomes(path, workers=2)] == ["messages is an empty list"] * 3
    path.write_text(json.dumps({"messages": TWO_TURNS}))
    with pytest.raises(InputError, match="no chat template, which rows of text need"):
        outcomes(path, template=None, workers=2)


def test_a_process_that_is_killed_is_told(tables, helpers):
    rows = tokenise(tables / "rows.jsonl", make(TOOL_CALLS), RowOptions(), workers=2)
    assert not isinstance(next(rows), BadRow)
    for child in helpers():
        child.send_signal(signal.SIGKILL)
    with pytest.raises(parallel.WorkerLost, match="give the command again"):
        list(rows)
    assert not helpers()
