"""The Logs screen, by its keys: head, foot, prompts, and from one log to the other."""

from __future__ import annotations

from typing import Any

import pytest
from log_helpers import current, numbered, rows, text, until
from scenes import SCENES, MadeFeed
from textual.app import App
from textual.pilot import Pilot
from textual.widgets import Footer, Input

from console.log_buffer import LogBuffer
from console.tui.screens.logs import LogScreen
from console.tui.widgets.log_view import LogView

SERVER = "server server-20261129-173945-94e6"
JOB = "extract extract-20261129-174017-f039"
SIZES = [(80, 24), (120, 40), (200, 60)]


class FakeFeed(MadeFeed):
    def __init__(self) -> None:
        super().__init__(SCENES["live"])
        self.logs: dict[str, LogBuffer] = {SERVER: LogBuffer()}
        self.state = "live"

    def log_state(self, key: str) -> str:
        assert key in self.logs
        return self.state


class LogApp(App[None]):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.feed = FakeFeed()

    @property
    def server(self) -> LogBuffer:
        return self.feed.logs[SERVER]

    def on_mount(self) -> None:
        self.push_screen(LogScreen(self.feed))


def view(app: LogApp) -> LogView:
    assert isinstance(app.screen, LogScreen)
    assert app.screen.view is not None
    return app.screen.view


def head(app: LogApp) -> list[str]:
    return [text(app.screen.query_one("#log-names")), text(app.screen.query_one("#log-state"))]


def foot(app: LogApp) -> str:
    return text(app.screen.query_one("#log-line"))


async def opened(pilot: Pilot[None], app: LogApp) -> None:
    def takes_keys() -> bool:
        focused = app.focused
        return isinstance(focused, LogView) and bool(focused.virtual_size.height or not focused.buffer.next)

    await until(pilot, takes_keys, "the log is there and has the focus")


async def answer(pilot: Pilot[None], app: LogApp, key: str, typed: str) -> None:
    """Press a key that asks for something, and enter it."""
    await pilot.press(key)
    await until(pilot, lambda: isinstance(app.focused, Input), "the prompt has the focus")
    app.screen.query_one(Input).value = typed
    await pilot.press("enter")
    await opened(pilot, app)


@pytest.mark.asyncio
@pytest.mark.parametrize("size", SIZES)
async def test_the_head_says_how_the_log_is(size: tuple[int, int]) -> None:
    app = LogApp()
    app.server.feed(numbered(0, 84_112))
    async with app.run_test(size=size) as pilot:
        await opened(pilot, app)
        await until(pilot, lambda: head(app)[1] == "following · 84,112 lines · live · nothing missing")
        assert head(app)[0].strip() == SERVER
        app.feed.state = "reconnecting, attempt 3, next in 4 s"
        await pilot.press("k")
        app.server.feed(numbered(0, 214))
        await until(
            pilot, lambda: "paused (+214) · 84,326 lines · reconnecting, attempt 3, next in 4 s" in head(app)[1]
        )
        await until(pilot, lambda: foot(app) == "line 84,111")


@pytest.mark.asyncio
async def test_what_was_dropped_is_said() -> None:
    app = LogApp()
    app.feed.logs[SERVER] = buffer = LogBuffer(most_lines=1000)
    buffer.feed(numbered(0, 4000))
    async with app.run_test(size=(120, 30)) as pilot:
        await opened(pilot, app)
        dropped = f"{buffer.first:,} dropped from memory (the file on the host is whole)"
        await until(pilot, lambda: head(app)[1] == f"following · 4,000 lines · live · {dropped}")


@pytest.mark.asyncio
async def test_no_log_yet() -> None:
    app = LogApp()
    app.feed.logs.clear()
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "no log yet" in head(app)[0])
        await pilot.press("f", "slash", "t", "tab")
        app.feed.logs[JOB] = LogBuffer()
        await until(pilot, lambda: JOB in head(app)[0])
        await opened(pilot, app)
        assert rows(view(app))[0] == "  nothing logged yet"


@pytest.mark.asyncio
async def test_tab_goes_to_the_other_log_and_each_keeps_its_place() -> None:
    app = LogApp()
    app.server.feed(numbered(0, 1000))
    async with app.run_test(size=(100, 24)) as pilot:
        await opened(pilot, app)
        await until(pilot, lambda: "line 999" in text(view(app)))
        await pilot.press("g")
        assert "Tab" not in head(app)[0]
        app.feed.logs[JOB] = job = LogBuffer()
        job.feed(b"2026-11-29 17:40:21 conversations.jsonl: 24 samples added, 0 bad rows\n")
        await until(pilot, lambda: head(app)[0].endswith("Tab: the other log"))
        await pilot.press("tab")
        await until(
            pilot, lambda: rows(view(app))[0] == "  17:40:21  conversations.jsonl: 24 samples added, 0 bad rows"
        )
        await until(pilot, lambda: "following · 1 line ·" in head(app)[1])
        await opened(pilot, app)
        await pilot.press("tab")
        await until(pilot, lambda: current(view(app)) == "line 0")


@pytest.mark.asyncio
async def test_f_filters_and_remembers_what_was_typed() -> None:
    app = LogApp()
    app.server.feed(b"Prefill batch\nGET /health\nDecode batch\nPrefill health\n" * 100)
    async with app.run_test(size=(80, 24)) as pilot:
        await opened(pilot, app)
        await answer(pilot, app, "f", "Prefill !health")
        await until(pilot, lambda: head(app)[1].endswith("  filter: Prefill !health"))
        await until(pilot, lambda: rows(view(app))[-1] == "  Prefill batch")
        assert "Decode" not in text(view(app))
        await pilot.press("c")
        await until(pilot, lambda: head(app)[1].endswith("  filter: Prefill !health ±2"))
        await pilot.press("f")
        await until(pilot, lambda: isinstance(app.focused, Input))
        assert app.screen.query_one(Input).value == "Prefill !health"
        await pilot.press("escape")
        await opened(pilot, app)
        assert view(app).filter == "Prefill !health"
        await answer(pilot, app, "f", "")
        await until(pilot, lambda: "Decode batch" in text(view(app)))
        await until(pilot, lambda: "filter" not in head(app)[1])


@pytest.mark.asyncio
async def test_a_bad_filter_is_said_in_one_line_and_can_be_mended() -> None:
    app = LogApp()
    app.server.feed(b"Prefill batch\nDecode batch\n")
    async with app.run_test(size=(80, 24)) as pilot:
        await opened(pilot, app)
        await answer(pilot, app, "f", "Decode")
        await until(pilot, lambda: "Prefill" not in text(view(app)))
        await answer(pilot, app, "f", "/(/")
        await until(pilot, lambda: foot(app).startswith("/(/ is no regular expression: "))
        assert "filter: Decode" in head(app)[1]
        await pilot.press("f")
        await until(pilot, lambda: isinstance(app.focused, Input))
        assert app.screen.query_one(Input).value == "/(/"
        await pilot.press("escape")
        await opened(pilot, app)
        await answer(pilot, app, "f", "")
        await until(pilot, lambda: "filter" not in head(app)[1])
        assert foot(app).startswith("line ")


@pytest.mark.asyncio
async def test_slash_searches_and_t_goes_to_a_time() -> None:
    app = LogApp()
    app.server.feed(b"[2026-11-29 14:01:02] early\n" + numbered(0, 1000) + b"[2026-11-29 14:06:00] late\n")
    async with app.run_test(size=(80, 24)) as pilot:
        await opened(pilot, app)
        await answer(pilot, app, "slash", "/ 500$/")
        await until(pilot, lambda: current(view(app)) == "line 500")
        await until(pilot, lambda: foot(app) == "line 502 · search: / 500$/")
        await answer(pilot, app, "t", "-4m")
        await until(pilot, lambda: current(view(app)) == "14:06:00  late")
        await answer(pilot, app, "t", "14:01")
        await until(pilot, lambda: current(view(app)) == "14:01:02  early")
        await until(pilot, lambda: foot(app) == "line 1 · 2026-11-29 14:01:02 · search: / 500$/")
        await answer(pilot, app, "t", "")
        assert current(view(app)) == "14:01:02  early"
        assert view(app).note == ""
        await answer(pilot, app, "t", "noon")
        await until(pilot, lambda: foot(app) == "'noon' is no time: type 14:02, 14:02:11 or -5m")


@pytest.mark.asyncio
async def test_a_note_is_shown_below_the_log() -> None:
    app = LogApp()
    app.server.feed(numbered(0, 10))
    async with app.run_test(size=(80, 24)) as pilot:
        await opened(pilot, app)
        await pilot.press("e")
        await until(pilot, lambda: foot(app) == "no errors")
        await pilot.press("right")
        await until(pilot, lambda: foot(app) == "no errors")


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [*SIZES, (250, 70)])
async def test_it_fits_the_terminal(size: tuple[int, int]) -> None:
    app = LogApp()
    app.server.feed(numbered(0, 1000))
    async with app.run_test(size=size) as pilot:
        await opened(pilot, app)
        await until(pilot, lambda: rows(view(app))[-1] == "  line 999")
        assert view(app).size.height == size[1] - 5
        assert app.screen.max_scroll_y == 0
        shown = {active.binding.action for active in app.screen.active_bindings.values() if active.binding.show}
        assert len(shown - {"quit", "command_palette"}) == 7
        assert "app.command('help')" in shown
        footer = app.screen.query_one(Footer)
        assert sum(child.outer_size.width for child in footer.children) <= 80


@pytest.mark.asyncio
async def test_a_keymap_changes_keys() -> None:
    app = LogApp()
    app.server.feed(numbered(0, 1000))
    async with app.run_test(size=(80, 24)) as pilot:
        await opened(pilot, app)
        app.set_keymap({"logs.top": "ctrl+t", "logs.filter": "F"})
        await pilot.press("ctrl+t")
        await until(pilot, lambda: current(view(app)) == "line 0")
        await answer(pilot, app, "F", "line 7")
        await until(pilot, lambda: view(app).filter == "line 7")


@pytest.mark.asyncio
async def test_state_is_not_colour_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = LogApp()
    app.server.feed(b"RuntimeError: no\nplain\n")
    async with app.run_test(size=(80, 24)) as pilot:
        await opened(pilot, app)
        await pilot.press("g")
        await until(pilot, lambda: rows(view(app))[:2] == ["E▌RuntimeError: no", "  plain"])
