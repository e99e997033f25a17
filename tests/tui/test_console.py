"""Every command of the console by its key, what refuses it, and what leaving says."""

from __future__ import annotations

from typing import Any

import pytest
from consoles import console, ignored, shown, until, until_settled, until_shown
from scenes import AT, SCENES, dumps, server, snapshot

from console.commands import COMMANDS
from console.config import ConsoleConfig
from console.tui import app as tui
from console.tui.app import VIEWS

STOPPED = {"id": "server-20261129-135548-a1b2", "seconds": 4.1, "how": "asked", "left": []}
SIZE = (120, 40)
ANSWERS: dict[str, Any] = {
    "all": [],
    "gate": {"findings": [], "effective": {}, "probe": None},
    "doctor": {"schema": 1, "arrived": 0.0, "answered": 0.0, "checks": []},
}

pytestmark = pytest.mark.asyncio


def asked(app: Any, method: str) -> list[dict[str, Any]]:
    return [parameters for name, parameters in app.feed.asked if name == method]


def titles(app: Any) -> set[str]:
    return {type(screen).__name__ for screen in app.screen_stack}


# --- The registry ---


async def test_no_two_commands_share_a_key_or_an_id() -> None:
    assert len({command.key for command in COMMANDS}) == len(COMMANDS)
    assert len({command.id for command in COMMANDS}) == len(COMMANDS)


async def test_every_command_has_a_verb_that_there_is() -> None:
    from console.cli import app as cli

    verbs = {name for name in cli if not name.startswith("-")}
    assert {command.verb for command in COMMANDS if command.verb} <= verbs


async def test_the_footer_has_at_most_seven_keys() -> None:
    assert sum(command.footer for command in COMMANDS) <= 7
    app = console(answers=ANSWERS)
    async with app.run_test(size=(200, 40), notifications=True) as pilot:
        for command in COMMANDS:
            if command.id in VIEWS:
                await pilot.press(command.key)
                await until(pilot, lambda: len(app.screen_stack) == 3)
                shown_keys = {
                    one.binding.description for one in app.screen.active_bindings.values() if one.binding.show
                }
                assert len(shown_keys) <= 7, (command.id, shown_keys)
                await pilot.press("escape")
                await until(pilot, lambda: len(app.screen_stack) == 2)


# --- Views ---


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.id in VIEWS], ids=lambda one: one.id)
async def test_a_view_opens_by_its_key_and_goes_by_escape(command: Any) -> None:
    app = console(answers=ANSWERS)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await until_shown(pilot, "READY")
        await pilot.press(command.key)
        await until(pilot, lambda: len(app.screen_stack) == 3, command.id)
        await pilot.press("escape")
        await until(pilot, lambda: titles(app) == {"Screen", "DashboardScreen"}, "back")


async def test_one_view_takes_the_place_of_another() -> None:
    app = console(answers={"all": []})
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await pilot.press("r")
        await pilot.press("l")
        await until(pilot, lambda: titles(app) == {"Screen", "DashboardScreen", "LogScreen"})


async def test_the_palette_lists_every_command() -> None:
    app = console()
    async with app.run_test(size=(120, 60), notifications=True) as pilot:
        await pilot.press("ctrl+p")
        for command in COMMANDS:
            await until_shown(pilot, command.label)
        await pilot.press("escape")


async def test_a_command_from_the_palette() -> None:
    app = console(answers={"all": []})
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await pilot.press("ctrl+p", *"Runs")
        await until_shown(pilot, "everything that ran on this host")
        await pilot.press("down", "enter")
        await until(pilot, lambda: "RunsScreen" in titles(app))


async def test_help_has_every_command_and_the_keys_of_the_screen() -> None:
    app = console()
    async with app.run_test(size=(120, 80), notifications=True) as pilot:
        await pilot.press("l", "question_mark")
        for command in COMMANDS:
            await until_shown(pilot, command.help)
        await until_shown(pilot, "Filter")
        await pilot.press("escape")
        await until(pilot, lambda: "HelpScreen" not in titles(app))


# --- What changes something ---


async def test_stopping_the_server_is_confirmed_and_cancel_is_first() -> None:
    app = console(answers={"stop": STOPPED})
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await pilot.press("K")
        await until_shown(pilot, "Stop the server server-20261129-135548-a1b2 on port 30000")
        await pilot.press("enter")
        await until(pilot, lambda: "Confirm" not in titles(app))
        assert asked(app, "stop") == []
        await pilot.press("K")
        await until_shown(pilot, "Stop the server")
        await pilot.press("right", "enter")
        await until_shown(pilot, "nothing left")
        assert [stop["run_id"] for stop in asked(app, "stop")] == ["server-20261129-135548-a1b2"]


async def test_a_stop_that_leaves_something_says_what() -> None:
    app = console(answers={"stop": STOPPED | {"left": ["process 4242 (python)"]}})
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await pilot.press("K")
        await until_shown(pilot, "Stop the server")
        await pilot.press("right", "enter")
        await until_shown(pilot, "process 4242")


async def test_the_stacks_are_summarised_with_their_file() -> None:
    report = {
        "run": "server-20261129-135548-a1b2",
        "at": 0.0,
        "path": "/state/runs/x/stacks-20261129-140000.txt",
        "summary": ["scheduler_TP2 differs from the other 3 ranks: look at it first"],
    }
    app = console(answers={"stacks": report})
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await until_shown(pilot, "READY")
        await pilot.press("b")
        await until_shown(pilot, "scheduler_TP2 differs from the other 3 ranks")
        await until_shown(pilot, "stacks-20261129-140000.txt")
        assert asked(app, "stacks") == [{"run_id": "server-20261129-135548-a1b2"}]


async def test_a_stopped_server_resolves_nothing_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    over = {"code": None, "signal": 15, "at": AT - 5.0}
    verdict = {"verdict": "stopped", "cause": None, "remedy": None, "evidence": []}
    stopped = server(state="exited", exit=over, stop_asked=True, verdict=verdict, tap=None, layers=None, health=None)
    monkeypatch.setitem(SCENES, "made", snapshot(server=stopped, dumps=None))
    app = console("made")
    async with app.run_test(size=SIZE) as pilot:
        await until_shown(pilot, "- STOPPED")
        await until_shown(pilot, "tensors: outputs of layers 2, 30, 58")
        assert "not resolved" not in shown(app)


STACKS = {
    "run": "server-20261129-135548-a1b2",
    "at": 0.0,
    "path": "/state/runs/x/stacks-20261129-140000.txt",
    "summary": [f"scheduler_TP{rank} differs from the other 3 ranks: look at it first" for rank in range(16)],
}


@pytest.mark.parametrize("key", ["K", "X"])
async def test_nothing_lies_over_a_dialog(key: str) -> None:
    app = console(answers={"stacks": STACKS})
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await until_shown(pilot, "READY")
        await pilot.press("b")
        await until_shown(pilot, "scheduler_TP15 differs")
        await pilot.press(key)
        await until_shown(pilot, "Stop it")
        assert "Cancel" in shown(app)
        await until(pilot, lambda: "differs" not in shown(app), "messages are cleared, also below the dialog")
        app.notify("\n".join(STACKS["summary"]), timeout=60, markup=False)  # what comes while it is there
        await until(pilot, lambda: app.screen.query("Toast"), "the message")
        await until_settled(pilot)
        assert "differs" in shown(app)
        assert "Cancel" in shown(app)
        assert "Stop it" in shown(app)


async def test_escape_clears_messages_where_nothing_else_takes_it() -> None:
    app = console(answers={"stacks": STACKS, "all": []})
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await until_shown(pilot, "READY")
        await pilot.press("b")
        await until_shown(pilot, "scheduler_TP15 differs")
        await pilot.press("r")
        await until(pilot, lambda: "RunsScreen" in titles(app))
        await pilot.press("escape")
        await until(pilot, lambda: "RunsScreen" not in titles(app))
        await until_shown(pilot, "scheduler_TP15 differs")
        await pilot.press("escape")
        await until(pilot, lambda: "differs" not in shown(app), "messages are cleared")


async def test_stopping_the_extraction() -> None:
    app = console(answers={"stop": STOPPED | {"id": "extract-20261129-140200-e5f6"}})
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await pilot.press("X")
        await until_shown(pilot, "Stop extract-20261129-140200-e5f6?")
        await pilot.press("right", "enter")
        await until(pilot, lambda: asked(app, "stop"), "asked")


@pytest.mark.parametrize("key", [command.key for command in COMMANDS if command.changes])
async def test_read_only_refuses_what_changes_something(key: str) -> None:
    app = console(read_only=True)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await until_shown(pilot, "READY")
        await pilot.press(key)
        await until_shown(pilot, "--read-only")
        assert app.feed.asked == []  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("scene", "key", "why"),
    [
        ("crashed", "K", "no server runs; launch one first"),
        ("starting", "X", "no extraction runs"),
        ("reconnecting", "X", "the link is reconnecting"),
        ("live", "R", "Connect again: the link is live"),
    ],
)
async def test_what_cannot_be_done_says_why(scene: str, key: str, why: str) -> None:
    app = console(scene)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await pilot.press(key)
        await until_shown(pilot, why)


async def test_a_failed_link_is_tried_again_by_hand() -> None:
    app = console("failed")
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await until_shown(pilot, "no key was accepted")
        await pilot.press("R")
        await until(pilot, lambda: asked(app, "retry") == [{}])


# --- Questions ---

HOST_KEY = {"kind": "host_key", "text": "gpu-host-1 has a new key", "fingerprint": "SHA256:abc", "again": False}


@pytest.mark.parametrize(("keys", "given"), [(["enter"], None), (["escape"], None), (["right", "enter"], "yes")])
async def test_a_host_key(keys: list[str], given: str | None) -> None:
    app = console("connecting")
    app.feed.scene["question"] = HOST_KEY  # type: ignore[attr-defined]
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await until_shown(pilot, "SHA256:abc")
        await pilot.press(*keys)
        await until(pilot, lambda: app.feed.given == [given], "answered")  # type: ignore[attr-defined]


async def test_a_password_is_not_shown() -> None:
    app = console("connecting")
    app.feed.scene["question"] = {"kind": "password", "text": "password of me@gpu", "fingerprint": None, "again": True}  # type: ignore[attr-defined]
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await until_shown(pilot, "That was not it.")
        await pilot.press(*"hunter2")
        await pilot.pause()
        assert "hunter2" not in shown(app)
        await pilot.press("enter")
        await until(pilot, lambda: app.feed.given == ["hunter2"])  # type: ignore[attr-defined]


# --- Looks ---


async def test_themes_go_round() -> None:
    app = console()
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        seen = [app.theme]
        for _ in range(4):
            await pilot.press("T")
            await pilot.pause()
            seen.append(app.theme)
        assert sorted(seen[:4]) == ["layertap-ansi", "layertap-colourblind", "layertap-dark", "layertap-light"]
        assert seen[0] == seen[4]


async def test_a_theme_that_is_not_there_is_said() -> None:
    app = console(config=ConsoleConfig(theme="mauve"))
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await until_shown(pilot, "there is no theme 'mauve'")


async def test_a_user_s_theme_is_taken_up_as_it_changes(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("console.themes.folder", lambda: tmp_path)
    monkeypatch.setattr("console.tui.app.THEME_SECONDS", 0.05)
    (tmp_path / "mauve.toml").write_text('primary = "#887788"\ndark = true\n')
    app = console(config=ConsoleConfig(theme="mauve"))
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await until(pilot, lambda: app.theme == "mauve")
        (tmp_path / "mauve.toml").write_text('primary = "#998899"\ndark = true\n')
        await until(pilot, lambda: app.current_theme.primary == "#998899", "the new colour")
        (tmp_path / "mauve.toml").write_text('primary = "mauvish"\n')
        await until_shown(pilot, "'mauvish'")  # one word: the sentence breaks where the file's path ends
        assert app.current_theme.primary == "#998899"


async def test_without_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every state is a word and a sign, so that nothing is lost."""
    monkeypatch.setenv("NO_COLOR", "1")
    app = console("throttled")
    async with app.run_test(size=(120, 40)) as pilot:
        for text in ("+ READY", "! thermal", "! XID 79", "! 7  GPU is lost", "failed 2"):
            await until_shown(pilot, text)
        colours = {
            segment.style.color.triplet
            for strip in app.screen._compositor.render_strips()
            for segment in strip
            if segment.style and segment.style.color and segment.style.color.triplet
        }
        assert all(len({one.red, one.green, one.blue}) == 1 for one in colours)


async def test_keys_of_the_user() -> None:
    app = console(answers={"all": []}, config=ConsoleConfig(keymap={"view.runs": "f5"}))
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await pilot.press("f5")
        await until(pilot, lambda: "RunsScreen" in titles(app))


async def test_a_picture(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    app = console()
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await until_shown(pilot, "READY")
        await pilot.press("ctrl+s")
        await until(pilot, lambda: list(tmp_path.glob("layertap-*.svg")), "written")
        (picture,) = tmp_path.glob("layertap-*.svg")
        assert "READY" in picture.read_text()
    assert ignored(picture.name)


# --- Hosts and leaving ---


async def test_another_host() -> None:
    app = console()
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        before = app.feed
        await pilot.press("o")
        await until_shown(pilot, "2 x H200")
        await pilot.press("enter")  # the first of the table is `local`
        await until(pilot, lambda: app.feed.name == "local", "changed")
        assert before.closed  # type: ignore[attr-defined]
        await until_shown(pilot, "READY")


async def test_a_console_ends_with_its_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [True]
    monkeypatch.setattr(tui, "has_terminal", lambda: there[0])
    monkeypatch.setattr(tui, "TERMINAL_SECONDS", 0.05)
    app = console(answers=ANSWERS)
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: len(app.screen_stack) == 2)
        await pilot.pause(0.2)
        assert app.is_running and app.return_code is None
        there[0] = False
        await until(pilot, lambda: app._exit)


async def test_a_timer_that_ticks_once_more_while_the_console_is_left() -> None:
    app = console(answers=ANSWERS)
    async with app.run_test(size=SIZE):
        pass
    assert app.screen_stack == []
    app.show_now()
    app._renew_themes()


async def test_leaving_stops_nothing_and_says_how_to_come_back() -> None:
    app = console()
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await until_shown(pilot, "READY")
        await pilot.press("ctrl+q")
        await until(pilot, lambda: not app.is_running, "left")
    assert app.parting == ["server-20261129-135548-a1b2 goes on; `layertap --host gpu-host-1` comes back to it"]
    assert app.feed.asked == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("scene", SCENES)
async def test_every_state_of_the_world_fits_a_small_terminal(scene: str) -> None:
    app = console(scene)
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await until_shown(pilot, "Layertap")
        for row in shown(app).splitlines():
            assert len(row) <= 80


@pytest.mark.parametrize("size", [(80, 40), (100, 45), (120, 40), (160, 45)])
async def test_the_dashboard_cuts_nothing_where_there_is_room_below(
    monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    monkeypatch.setitem(SCENES, "made", snapshot(dumps=dumps(slot_wait_seconds=75.0)))
    app = console("made")
    async with app.run_test(size=size) as pilot:
        await until_shown(pilot, "Last 15 min")
        await until_settled(pilot)
        text = shown(app)
    assert "…" not in text
    for said in (
        "native + specforge",
        "waiting 4,019 · sent 48",
        "(boundaries 3, 31, 59)",
        "waited 75 s for slots",
        "430 MB/s",
    ):
        assert said in text
