"""What a filter leaves of a log, slice by slice, while the log grows and loses its oldest lines."""

from __future__ import annotations

from itertools import count

import pytest

from console.log_buffer import LogBuffer
from console.log_filter import SLICE, AllRows, FilteredRows, Rows, Terms


def numbered(first: int, next: int) -> bytes:
    return b"".join(b"line %d\n" % number for number in range(first, next))


def shown(rows: Rows) -> list[int | str]:
    return ["…" if rows.is_gap(row) else rows.number(row) for row in range(len(rows))]


@pytest.mark.parametrize(
    ("typed", "text", "matches"),
    [
        ("", "anything", True),
        ("prefill", "Prefill batch", True),
        ("Prefill", "prefill batch", False),
        ("prefill batch", "batch Prefill", True),
        ("prefill !batch", "batch Prefill", False),
        ("/a.c/", "abc", True),
        ("a.c", "abc", False),
        ("/two words/", "two  words", False),
        ("/two words/", "two words", True),
        (r"/\S+\W/", "a-", True),
        ("!/^x/", "yx", True),
        ("/health", "GET /health 200", True),
        ("/v1/chat", "POST /v1/chat/completions", True),
        (r"/\/v1\/\w+/", "POST /v1/chat/completions", True),
        ("!", "!", True),
    ],
)
def test_terms(typed: str, text: str, matches: bool) -> None:
    assert Terms(typed).match(text) is matches


def test_where_a_search_matches() -> None:
    assert Terms("ab /b+/ !x").spans("ab abbb") == [(0, 2), (3, 5), (5, 7)]
    assert Terms("/x*/").spans("aa") == []


def test_a_bad_expression_says_which() -> None:
    with pytest.raises(ValueError, match=r"^!/\(/ is no regular expression: missing \), unterminated subpattern"):
        Terms("good !/(/")


def test_all_rows_follow_the_buffer() -> None:
    buffer = LogBuffer(most_lines=100)
    buffer.feed(numbered(0, 50))
    rows = AllRows(buffer)
    assert (rows.advance(1), len(rows), rows.number(7), rows.row(7)) == (0, 50, 7, 7)
    buffer.feed(numbered(50, 150))
    gone = rows.advance(1)
    assert gone == buffer.first == rows.number(0)
    assert (len(rows), rows.row(0), rows.row(1000)) == (150 - gone, 0, 150 - gone)


@pytest.mark.parametrize("context", [0, 2, 5])
def test_groups_are_the_same_however_the_log_comes(context: int) -> None:
    whole = LogBuffer()
    whole.feed(numbered(0, 100))
    at_once = FilteredRows(whole, Terms("/[36]0$/"), context)
    at_once.advance(10)
    buffer = LogBuffer()
    by_line = FilteredRows(buffer, Terms("/[36]0$/"), context)
    for number in range(100):
        buffer.feed(numbered(number, number + 1))
        by_line.advance(10)
    gap = ["…"] if context else []
    wanted = [*range(30 - context, 31 + context), *gap, *range(60 - context, 61 + context)]
    assert shown(at_once) == shown(by_line) == wanted
    assert [at_once.row(number) for number in (0, 30, 31 + context, 60 - context, 99)] == [
        0,
        context,
        2 * context + 1 + len(gap),
        2 * context + 1 + len(gap),
        len(at_once),
    ]


def test_groups_that_touch_are_one() -> None:
    buffer = LogBuffer()
    buffer.feed(numbered(0, 100))
    rows = FilteredRows(buffer, Terms("/^line (10|15|21)$/"), 2)
    rows.advance(10)
    assert shown(rows) == [*range(8, 18), "…", *range(19, 24)]


def test_a_filter_goes_on_in_slices_and_says_how_far() -> None:
    buffer = LogBuffer()
    buffer.feed(numbered(0, 10 * SLICE))
    rows = FilteredRows(buffer, Terms("7"), 0)
    assert rows.progress == 0
    ticks = count()
    for done in range(1, 10):
        rows.advance(2, clock=lambda: next(ticks))  # time for one slice
        assert rows.progress == pytest.approx(done / 10)
    rows.advance(2, clock=lambda: next(ticks))
    assert rows.progress is None
    assert shown(rows)[:3] == [7, 17, 27]


def test_rows_go_with_the_lines_that_are_dropped() -> None:
    buffer = LogBuffer(most_lines=1000)
    buffer.feed(numbered(0, 1000))
    rows = FilteredRows(buffer, Terms("/00$/"), 1)
    rows.advance(10)
    buffer.feed(numbered(1000, 1100))
    assert rows.advance(10) == 4  # 99, 100, 101 and the gap behind them
    assert 101 < buffer.first < 199
    assert shown(rows) == [
        *(each for at in range(200, 1000, 100) for each in (at - 1, at, at + 1, "…")),
        999,
        1000,
        1001,
    ]
    buffer.feed(b"nothing\n" * 5000)
    rows.advance(10)
    assert shown(rows) == []


def test_lines_of_our_own_always_match() -> None:
    buffer = LogBuffer()
    buffer.feed(b"one\n")
    buffer.mark("run server-2 begins")
    rows = FilteredRows(buffer, Terms("two"), 0)
    rows.advance(10)
    assert shown(rows) == [1]
