"""A log on the screen, by its keys and by mouse: what is shown, not what is kept."""

from __future__ import annotations

import pytest
from log_helpers import ViewApp, current, numbered, rows, text, until
from textual import events
from textual.color import Color

from console.log_buffer import LogBuffer

SIZE = (80, 20)
STAMPED = b"""\
[2026-11-29 14:00:59 TP0] Load weight begin. avail mem=94.02 GB
[2026-11-29 14:01:02 TP0] Load weight end. elapsed=312.4 s, type=KimiK25, avail mem=17.90 GB, mem usage=76.12 GB.
[2026-11-29 14:01:05 TP1] Health check failed. Server couldn't get a response from detokenizer for last 20 seconds.
[2026-11-29 14:01:09] The server is fired up and ready to roll!
[2026-11-29 14:01:30 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "/x/scheduler.py", line 2000, in run_scheduler_process
ValueError: no
[2026-11-29 14:01:31] all is quiet
"""
FILTERED = b"".join(
    b"Prefill batch %d\nDecode batch %d\nGET /health 200\nGET /HEALTH 503\nplain %d\nx\ny\n" % (n, n, n)
    for n in range(3)
)


def app_with(*parts: bytes, **limits: int) -> ViewApp:
    buffer = LogBuffer(**limits)
    for part in parts:
        buffer.feed(part)
    return ViewApp(buffer)


# --- Following and pausing ---


@pytest.mark.asyncio
async def test_it_follows_the_end() -> None:
    app = app_with(numbered(0, 100))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: rows(app.view)[-1] == "  line 99")
        app.view.buffer.feed(numbered(100, 1000))
        await until(pilot, lambda: rows(app.view)[-1] == "  line 999")
        assert rows(app.view)[0] == "  line 980"


@pytest.mark.asyncio
@pytest.mark.parametrize("resume", ["G", "end", "space"])
async def test_scrolling_up_pauses_and_counts_what_comes(resume: str) -> None:
    app = app_with(numbered(0, 100))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: "line 99" in text(app.view))
        await pilot.press("k")
        assert current(app.view) == "line 98"
        before = rows(app.view)
        app.view.buffer.feed(numbered(100, 314))
        await until(pilot, lambda: app.view.behind == 214)
        assert rows(app.view) == before
        assert not app.view.following
        await pilot.press(resume)
        await until(pilot, lambda: rows(app.view)[-1] == "  line 313")
        assert (app.view.following, app.view.behind, current(app.view)) == (True, 0, "")


@pytest.mark.asyncio
async def test_space_pauses_too() -> None:
    app = app_with(numbered(0, 100))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: "line 99" in text(app.view))
        await pilot.press("space")
        assert current(app.view) == "line 99"


@pytest.mark.asyncio
async def test_the_wheel_pauses_and_takes_the_cursor_along() -> None:
    app = app_with(numbered(0, 100))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: rows(app.view)[-1] == "  line 99")
        for _ in range(20):
            app.view.post_message(events.MouseScrollUp(app.view, 1, 1, 0, -1, 0, False, False, False))
        await until(pilot, lambda: "line 99" not in text(app.view))
        assert not app.view.following
        assert current(app.view) == rows(app.view)[-1][2:]


@pytest.mark.asyncio
async def test_keys_move_the_cursor() -> None:
    app = app_with(numbered(0, 1000))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: "line 999" in text(app.view))
        for key, line in [
            ("j", ""),  # at the end already
            ("pagedown", ""),
            ("g", "line 0"),
            ("j", "line 1"),
            ("down", "line 2"),
            ("up", "line 1"),
            ("k", "line 0"),
            ("k", "line 0"),
            ("pagedown", "line 20"),
            ("pagedown", "line 40"),
            ("pageup", "line 20"),
            ("ctrl+d", "line 30"),
            ("ctrl+u", "line 20"),
            ("home", "line 0"),
        ]:
            await pilot.press(key)
            assert current(app.view) == line, key
        assert rows(app.view)[0] == " ▌line 0"


@pytest.mark.asyncio
async def test_what_is_shown_stands_still_while_old_lines_are_dropped() -> None:
    app = app_with(numbered(0, 1000), most_lines=1000)
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: "line 999" in text(app.view))
        await pilot.press("pageup")
        before = rows(app.view)
        app.view.buffer.feed(numbered(1000, 1500))
        await until(pilot, lambda: app.view.behind == 500)
        assert rows(app.view) == before
        app.view.buffer.feed(numbered(1500, 3000))  # what was shown is gone
        await until(pilot, lambda: app.view.behind == 2000)
        assert rows(app.view)[0][2:] == f"line {app.view.buffer.first}"


@pytest.mark.asyncio
async def test_half_a_line_is_shown_last_until_it_is_whole() -> None:
    app = app_with(b"one\n\rbar 10%\rbar 20%")
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: rows(app.view)[:3] == ["  one", "  bar 20%", ""])
        app.view.buffer.feed(b"\rbar 30%\n")
        await until(pilot, lambda: rows(app.view)[:3] == ["  one", "  bar 30%", ""])


@pytest.mark.asyncio
async def test_an_empty_log_says_so() -> None:
    app = app_with()
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: rows(app.view)[0] == "  nothing logged yet")
        for key in ("j", "k", "g", "G", "pageup", "e", "E", "n", "c", "y", "left", "right", "space"):
            await pilot.press(key)
        app.view.buffer.feed(b"one\n")
        await until(pilot, lambda: rows(app.view)[0] == "  one")


# --- How a line looks ---


@pytest.mark.asyncio
async def test_levels_ranks_phases_and_boundaries() -> None:
    app = app_with()
    app.view.buffer.mark("run server-1 begins")
    app.view.buffer.feed(b"server_args={'tp_size': 2}\n" + STAMPED)
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: "all is quiet" in text(app.view))
        shown = rows(app.view)
        assert shown[0] == "  " + "─" * 54 + " run server-1 begins ──"
        assert shown.pop(1) == "  server_args={'tp_size': 2}" + " " * 41 + "── args ──"
        assert shown[1] == "  14:00:59 TP0  Load weight begin. avail mem=94.02 GB             ── weights ──"
        assert shown[2].startswith("  14:01:02 TP0  Load weight end.")
        assert shown[2].endswith("…")
        assert shown[3].startswith("W 14:01:05 TP1  Health check failed.")
        assert shown[4] == "  14:01:09      The server is fired up and ready to roll!           ── ready ──"
        assert [row[:4] for row in shown[5:9]] == ["E 14", "E   ", "E Va", "  14"]
        assert max(map(len, shown)) == 79


@pytest.mark.asyncio
async def test_long_lines_are_cut_on_screen_only() -> None:
    app = app_with(b"short\n" + b"".join(b"%04d " % n for n in range(100)) + b"\n" + b"y" * 100_000 + b"\n")
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: "short" in text(app.view))
        assert rows(app.view)[1] == "  " + "".join(f"{n:04d} " for n in range(100))[:76] + "…"
        assert rows(app.view)[2].endswith(" ── 34,464 more bytes in the file ──")
        await pilot.press("right")
        assert rows(app.view)[0] == ""
        assert rows(app.view)[1].startswith("  003 0004 ")
        await pilot.press("left", "left")
        assert rows(app.view)[0] == "  short"


@pytest.mark.asyncio
async def test_wide_characters_do_not_run_over_the_edge() -> None:
    app = app_with(("漢字" * 60 + "\n" + "▏█" * 100 + "\n").encode())
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: "漢" in text(app.view))
        for y in range(3):
            assert app.view.render_line(y).cell_length == 79
        assert rows(app.view)[0].endswith("…")


def colours(app: ViewApp, row: int, column: int) -> tuple[Color, Color]:
    """The colours of the text and behind it."""
    strip = app.view.render_line(row).crop(column, column + 1)
    style = next(iter(strip)).style
    assert style is not None
    assert style.color is not None
    assert style.bgcolor is not None
    return Color.from_rich_color(style.color), Color.from_rich_color(style.bgcolor)


@pytest.mark.asyncio
@pytest.mark.parametrize("theme", ["textual-dark", "textual-light", "nord"])
async def test_every_part_can_be_read_and_the_cursor_is_seen(theme: str) -> None:
    app = app_with(STAMPED)
    async with app.run_test(size=SIZE) as pilot:
        app.theme = theme
        await until(pilot, lambda: "all is quiet" in text(app.view))
        await pilot.press("g")
        await pilot.pause()
        for row, column in [(0, 3), (0, 20), (0, 75), (2, 20), (4, 20), (3, 3)]:
            front, back = colours(app, row, column)
            assert abs(front.brightness - back.brightness) > 0.25, (row, column)
        assert colours(app, 0, 20)[1] != colours(app, 1, 20)[1]
        assert len({colours(app, row, 20)[0] for row in (1, 2, 4)}) == 3


# --- Filter ---


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("Prefill", ["Prefill batch 0", "Prefill batch 1", "Prefill batch 2"]),
        ("batch 1", ["Prefill batch 1", "Decode batch 1"]),
        ("batch !prefill 1", ["Decode batch 1"]),
        (r"/batch [12]$/ !Decode", ["Prefill batch 1", "Prefill batch 2"]),
        ("/health !503 !0", []),
        ("HEALTH !503", []),
        ("!/batch|health|plain/ x", ["x", "x", "x"]),
    ],
)
async def test_a_filter_leaves_what_matches_all_its_terms(typed: str, shown: list[str]) -> None:
    app = app_with(FILTERED)
    async with app.run_test(size=SIZE) as pilot:
        app.view.set_filter(typed)
        wanted = shown or [f"no line matches {typed}"]
        await until(pilot, lambda: [row[2:] for row in rows(app.view) if row] == wanted, typed)
        app.view.set_filter("")
        await until(pilot, lambda: "GET /health 200" in text(app.view))


@pytest.mark.asyncio
async def test_the_filter_follows_the_log() -> None:
    app = app_with(FILTERED)
    async with app.run_test(size=SIZE) as pilot:
        app.view.set_filter("plain")
        await until(pilot, lambda: "plain 2" in text(app.view))
        app.view.buffer.feed(FILTERED + b"plain 3\n")
        app.view.buffer.mark("the log was rotated, 12 bytes of it are gone")
        await until(pilot, lambda: "plain 3" in text(app.view))
        assert "the log was rotated" in rows(app.view)[7]
        assert "Prefill" not in text(app.view)


@pytest.mark.asyncio
async def test_a_bad_expression_is_said_and_the_filter_stays() -> None:
    app = app_with(FILTERED)
    async with app.run_test(size=SIZE) as pilot:
        app.view.set_filter("plain")
        await until(pilot, lambda: "Prefill" not in text(app.view))
        with pytest.raises(
            ValueError, match=r"^/\[/ is no regular expression: unterminated character set at position 0$"
        ):
            app.view.set_filter("/[/")
        assert app.view.filter == "plain"
        await pilot.pause()
        assert "Prefill" not in text(app.view)


@pytest.mark.asyncio
async def test_c_shows_lines_around_each_match() -> None:
    app = app_with(numbered(0, 100))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: "line 99" in text(app.view))
        await pilot.press("c")
        assert app.view.note == "context is shown around what a filter leaves: f filters"
        app.view.set_filter("/line [23]0$/")
        await until(pilot, lambda: rows(app.view)[:3] == ["  line 20", "  line 30", ""])
        await pilot.press("c")
        wanted = [*(f"  line {n}" for n in range(18, 23)), "  … 5 lines", *(f"  line {n}" for n in range(28, 33))]
        await until(pilot, lambda: rows(app.view)[:11] == wanted)
        await pilot.press("c")
        await until(pilot, lambda: rows(app.view) == [f"  line {n}" for n in range(16, 36)])
        await pilot.press("c")
        await until(pilot, lambda: rows(app.view)[:3] == ["  line 20", "  line 30", ""])


@pytest.mark.asyncio
async def test_the_cursor_stays_on_its_line_when_the_filter_goes() -> None:
    app = app_with(numbered(0, 100_000))  # more than a filter goes through at once
    async with app.run_test(size=SIZE) as pilot:
        app.view.set_filter("/5$/")
        await until(pilot, lambda: rows(app.view)[-1] == "  line 99995")
        app.view.search("/ 70005$/")
        await until(pilot, lambda: current(app.view) == "line 70005")
        app.view.set_filter("")
        await until(pilot, lambda: current(app.view) == "line 70005")
        app.view.set_filter("/0005$/")
        await until(pilot, lambda: current(app.view) == "line 70005")
        assert "line 60005" in text(app.view)


@pytest.mark.asyncio
async def test_a_search_waits_for_the_filter() -> None:
    app = app_with(numbered(0, 100_000))
    async with app.run_test(size=SIZE) as pilot:
        app.view.set_filter("/5$/")
        app.view.search("/ 99985$/")
        await until(pilot, lambda: current(app.view) == "line 99985")


# --- Search, errors, times ---


def marked(app: ViewApp, row: int) -> list[str]:
    """What is marked as a match in a row."""
    return [part.text for part in app.view.render_line(row) if part.style and part.style.reverse]


@pytest.mark.asyncio
async def test_a_search_marks_its_matches_and_n_goes_through_them() -> None:
    app = app_with(numbered(0, 1000))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: "line 999" in text(app.view))
        await pilot.press("n")
        assert app.view.note == "nothing was searched yet: / searches"
        app.view.search("/ .00$/")
        await until(pilot, lambda: current(app.view) == "line 900")
        assert marked(app, [row[2:] for row in rows(app.view)].index("line 900")) == [" 900"]
        await pilot.press("N")
        await until(pilot, lambda: current(app.view) == "line 800")
        await pilot.press("n")
        await until(pilot, lambda: current(app.view) == "line 900")
        await pilot.press("n")
        await until(pilot, lambda: current(app.view) == "line 100")
        assert app.view.note == "from the top again"
        app.view.search("nowhere")
        await until(pilot, lambda: app.view.note == "nothing matches nowhere")
        assert current(app.view) == "line 100"


@pytest.mark.asyncio
async def test_e_goes_from_error_to_error() -> None:
    app = app_with(numbered(0, 500), STAMPED, numbered(500, 1000), b"RuntimeError: late\n", numbered(1000, 1100))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: "line 1099" in text(app.view))
        await pilot.press("E")
        await until(pilot, lambda: current(app.view) == "RuntimeError: late")
        await pilot.press("E")
        await until(pilot, lambda: "Scheduler hit an exception" in current(app.view))
        await pilot.press("E")
        await until(pilot, lambda: current(app.view) == "RuntimeError: late")
        assert app.view.note == "from the end again"
        await pilot.press("e")
        await until(pilot, lambda: "Scheduler hit an exception" in current(app.view))
        app.view.set_filter("/^line/")
        await until(pilot, lambda: "Scheduler" not in text(app.view))
        await pilot.press("e")
        await until(pilot, lambda: app.view.note == "no errors in what is shown")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("14:01", "14:01:02 TP0  Load weight end."),
        ("14:01:05", "14:01:05 TP1  Health check"),
        ("14:01:06", "14:01:09      The server is fired up"),
        ("-1s", "14:01:30 TP0  Scheduler hit"),
        ("-5m", "14:00:59 TP0  Load weight begin."),
        ("23:00", "14:00:59 TP0  Load weight begin."),  # that of the day before
    ],
)
async def test_a_jump_to_a_time(typed: str, line: str) -> None:
    app = app_with(STAMPED, numbered(0, 500))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: "line 499" in text(app.view))
        app.view.jump(typed)
        await until(pilot, lambda: current(app.view).startswith(line))


@pytest.mark.asyncio
async def test_a_time_that_is_none_is_said() -> None:
    app = app_with(numbered(0, 10))
    async with app.run_test(size=SIZE):
        with pytest.raises(ValueError, match="no line of this log has a time yet"):
            app.view.jump("14:01")
        app.view.buffer.feed(STAMPED)
        with pytest.raises(ValueError, match=r"^'soon' is no time: type 14:02, 14:02:11 or -5m$"):
            app.view.jump("soon")
        with pytest.raises(ValueError, match=r"^'-9+m' is no time: type"):
            app.view.jump(f"-{'9' * 400}m")
        with pytest.raises(ValueError, match=r"^'25:00' is no time of day$"):
            app.view.jump("25:00")


# --- Selecting and copying ---


@pytest.mark.asyncio
async def test_y_copies_the_current_line_as_it_stands_in_the_log() -> None:
    app = app_with(STAMPED)
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: "all is quiet" in text(app.view))
        await pilot.press("y")
        assert app.clipboard == "[2026-11-29 14:01:31] all is quiet"
        await pilot.press("g", "y")
        assert app.clipboard == "[2026-11-29 14:00:59 TP0] Load weight begin. avail mem=94.02 GB"
        assert app.view.note == "copied 1 line"


@pytest.mark.asyncio
async def test_what_is_selected_by_mouse_is_copied_and_stands_still() -> None:
    app = app_with(numbered(0, 1000), most_lines=1000)
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: rows(app.view)[0] == "  line 980")
        await pilot.mouse_down(app.view, offset=(7, 2))
        await pilot.hover(app.view, offset=(4, 4))
        await pilot.mouse_up(app.view, offset=(4, 4))
        assert not app.view.following
        app.view.buffer.feed(numbered(1000, 1300))  # rows move up in the buffer
        await until(pilot, lambda: app.view.behind == 300)
        assert app.screen.get_selected_text() == "982\nline 983\nlin"
        await pilot.press("y")
        assert app.clipboard == "982\nline 983\nlin"
        assert app.view.note == "copied 3 lines"


@pytest.mark.asyncio
async def test_a_selection_has_only_what_a_filter_leaves() -> None:
    app = app_with(numbered(0, 1000))
    async with app.run_test(size=SIZE) as pilot:
        app.view.set_filter("/line 9[5-9]5/")
        await until(pilot, lambda: rows(app.view)[:5] == [f"  line 9{n}5" for n in range(5, 10)])
        await pilot.mouse_down(app.view, offset=(0, 0))
        await pilot.hover(app.view, offset=(50, 2))
        await pilot.mouse_up(app.view, offset=(50, 2))
        assert app.screen.get_selected_text() == "line 955\nline 965\nline 975"


@pytest.mark.asyncio
async def test_a_click_sets_the_cursor() -> None:
    app = app_with(numbered(0, 100))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: rows(app.view)[0] == "  line 80")
        await pilot.click(app.view, offset=(5, 3))
        assert current(app.view) == "line 83"
