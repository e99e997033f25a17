"""The Extraction screen: watching one, going on with it, and asking for another."""

from __future__ import annotations

from typing import Any

import pytest
from consoles import shown, until, until_settled, until_shown
from scenes import extraction, server
from screens_shown import AGAIN, OUTPUT, PLAN, ROWS, MadeJobs, ended, made_console, quick, with_extraction
from textual.widgets import Button, Checkbox, Input

from backends.errors import ConnectionFailed, Locked, UsageError
from console.tui.screens.extract import BEFORE_PLAN, ExtractScreen
from console.tui.widgets.planned import IN_LOSS, plan_lines

SIZE = (120, 40)
ROOT = {"path": "/data", "left_out": 0, "entries": [
    {"name": ".cache", "folder": True, "bytes": None},
    {"name": "hs", "folder": True, "bytes": None},
    {"name": "rows", "folder": True, "bytes": None},
    {"name": "read.me", "folder": False, "bytes": 10},
]}  # fmt: skip
IN_ROWS = {"path": "/data/rows", "left_out": 3, "entries": [
    {"name": "gsm-mix.jsonl", "folder": False, "bytes": 168_000},
    {"name": "other.jsonl", "folder": False, "bytes": None},
]}  # fmt: skip

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("quick")]
__all__ = ["quick"]


def folder(path: str) -> dict[str, Any]:
    return {"": ROOT, "/data": ROOT, "/data/rows": IN_ROWS}[path]


def value(app: Any, name: str) -> str:
    return app.screen.query_one(f"#{name}", Input).value


def start_enabled(app: Any) -> bool:
    return not app.screen.query_one("#start", Button).disabled


async def open_screen(app: Any, pilot: Any, text: str) -> None:
    """To the Extraction screen, until this is on it."""
    await until_shown(pilot, "READY")
    await pilot.press("x")
    await until(pilot, lambda: isinstance(app.screen, ExtractScreen))
    await until_shown(pilot, text)


async def open_form(app: Any, pilot: Any) -> None:
    """To a form that has rows and a folder in it."""
    await open_screen(app, pilot, "New extraction")
    app.screen.query_one("#rows", Input).value = ROWS
    app.screen.query_one("#output", Input).value = OUTPUT
    await pilot.pause()


async def planned(app: Any, pilot: Any) -> None:
    """To a plan of it."""
    await open_form(app, pilot)
    app.screen.query_one("#output", Input).focus()
    await pilot.press("enter")
    await until_shown(pilot, "24 good")


# --- An extraction that runs ---


async def test_a_run_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    with_extraction(monkeypatch, extraction())
    app = made_console(MadeJobs())
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await open_screen(app, pilot, "5,931 / 10,000")
        text = shown(app)
        assert "~ RUNNING   gsm-mix.jsonl -> /data/hs/kimi-v3  native + specforge" in text
        assert "! sample   4,412  aux_1 has NaN in row 17" in text
        assert "and 1 more: a shows them all" in text
        assert "from server-20261129-135548-a1b2" in text
        assert "X Stop" in text
        assert "f Go on" not in text
        await pilot.press("X")
        await until_shown(pilot, "the same rows and folder go on later")
        await pilot.press("escape")


async def test_a_server_that_is_launched_again_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with_extraction(monkeypatch, extraction(progress={"phase": "relaunching"}))
    app = made_console(MadeJobs())
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await open_screen(app, pilot, "~ the server died and is launched again …")
        assert "5,931 / 10,000" in shown(app)


async def test_what_it_was_asked_for_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {
        "max_length": 4096,
        "overlong": "skip",
        "last_turn_only": True,
        "prompt_column": "q",
        "response_column": "a",
    }
    run = extraction()
    with_extraction(monkeypatch, run | {"details": run["details"] | {"options": options}})
    app = made_console(MadeJobs())
    async with app.run_test(size=(200, 60), notifications=True) as pilot:
        await open_screen(app, pilot, "longest 4,096 tokens, longer ones skip")
        assert "only the last turn in the loss · columns q, a" in shown(app)


# --- One that has ended ---


async def test_failed_samples_are_drawn_again_by_the_same_job(monkeypatch: pytest.MonkeyPatch) -> None:
    with_extraction(monkeypatch, ended(pending=0, sent=0, written=9_998))
    jobs = MadeJobs()
    app = made_console(jobs)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await open_screen(app, pilot, "-> f draws the 2 failed samples again")
        assert "! ENDED" in shown(app)
        await pilot.press("f")
        await until(pilot, lambda: jobs.started)
        assert jobs.started == [("extract", AGAIN, 30000)]
        await until_shown(pilot, "started extract-1")


@pytest.mark.parametrize(
    ("progress", "said"),
    [
        ({"failed": 0, "failures": []}, "-> f goes on: what is written stays"),
        ({"failed": 0, "failures": [], "written": 10_000, "bad_rows": 3}, "and l names the 3 bad rows"),
    ],
)
async def test_what_can_be_done_next(monkeypatch: pytest.MonkeyPatch, progress: dict[str, Any], said: str) -> None:
    with_extraction(monkeypatch, ended(**progress))
    app = made_console(MadeJobs())
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await open_screen(app, pilot, said)


async def test_one_that_ended_early_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ended(phase="preparing") | {"result": {"error": "not safe to draw from: the tap is not in"}}
    with_extraction(monkeypatch, run)
    app = made_console(MadeJobs())
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await open_screen(app, pilot, "! not safe to draw from: the tap is not in")
        assert "preparing" not in shown(app)
        assert "f goes on" not in shown(app)  # the same would end the same
        assert "-> once that is put right, f starts it again" in shown(app)


@pytest.mark.parametrize(
    "error", [Locked("an extraction into /data runs already"), UsageError("servers run on ports 1, 2")]
)
async def test_what_keeps_it_from_starting_is_one_sentence(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    with_extraction(monkeypatch, ended())
    app = made_console(MadeJobs(extract=error))
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await open_screen(app, pilot, "f draws")
        await pilot.press("f")
        await until_shown(pilot, f"! {error}")


async def test_a_run_of_an_older_version_is_not_guessed_at(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ended()
    with_extraction(monkeypatch, run | {"details": {"rows": ROWS, "output": OUTPUT}})
    jobs = MadeJobs()
    app = made_console(jobs)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await open_screen(app, pilot, "f draws")
        await pilot.press("f")
        await until_shown(pilot, "does not say what it was asked for")
        assert jobs.started == []


# --- The form ---


async def test_without_an_extraction_there_is_the_form(monkeypatch: pytest.MonkeyPatch) -> None:
    with_extraction(monkeypatch, None)
    app = made_console(MadeJobs())
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await open_screen(app, pilot, "New extraction")
        text = shown(app)
        assert "outputs of layers 2, 30, 58 (boundaries 3, 31, 59)  bfloat16, hidden 7,168" in text
        assert "[x] native           [ ] specforge" in text
        assert app.focused.id == "rows"
        assert not start_enabled(app)
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, ExtractScreen))


async def test_a_new_one_is_asked_for_as_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    with_extraction(monkeypatch, ended())
    app = made_console(MadeJobs())
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await open_screen(app, pilot, "f draws")
        await pilot.press("n")
        await until_shown(pilot, "[x] native           [x] specforge")
        assert (value(app, "rows"), value(app, "output")) == (ROWS, "")
        assert app.focused.id == "output"
        await pilot.press("escape")
        await until_shown(pilot, "f draws")


async def test_a_letter_that_misses_its_field_does_not_leave_the_form(monkeypatch: pytest.MonkeyPatch) -> None:
    with_extraction(monkeypatch, None)
    app = made_console(MadeJobs())
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await open_form(app, pilot)
        box = app.screen.query_one("#format-specforge", Checkbox)
        box.focus()
        await pilot.press("t", "s", "l", "space")
        await until_shown(pilot, "[x] specforge")
        assert isinstance(app.screen, ExtractScreen)
        assert value(app, "rows") == ROWS


async def test_a_plan_shows_mask_sizes_and_bad_rows_and_then_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with_extraction(monkeypatch, None)
    jobs = MadeJobs(plan=PLAN)
    jobs.held.add("plan")
    app = made_console(jobs)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await open_form(app, pilot)
        app.screen.query_one("#max-length", Input).value = "4096"
        app.screen.query_one("#truncate", Checkbox).value = True
        app.screen.query_one("#output", Input).focus()
        await pilot.press("enter")
        await until_shown(pilot, "~ planning: 500 rows read, ")
        assert not start_enabled(app)
        jobs.held.clear()
        await until_shown(pilot, "24 good")
        text = shown(app)
        assert "native: 71.7 kB a token -> 110 MB" in text
        assert f"! {ROWS}:4: messages is a string, not a list of messages" in text
        assert "? 1 row: nothing is in the loss; leave these rows out" in text
        assert f"{ROWS}:7: 12 tokens" in text
        assert "<|user|>a [list]?<|assistant|>[42<|end|>]" in text
        options = {
            "prompt_column": None,
            "response_column": None,
            "max_length": 4096,
            "overlong": "truncate",
            "last_turn_only": False,
            "allow_ignored_roles": False,
        }
        asked = {"rows": ROWS, "output": OUTPUT, "formats": ["native"], "options": options}
        assert jobs.started == [
            ("plan", asked | {"model": None, "layers": 3, "trust_remote_code": False}, 30000),
        ]
        await until(pilot, lambda: start_enabled(app))
        assert app.focused.id == "start"
        await pilot.press("enter")
        await until_shown(pilot, "started extract-1")
        assert jobs.started[1:] == [
            (
                "extract",
                asked | {"layertap": "0.1.0", "allow_volatile": False, "restart_server": 0, "beside_ports": []},
                30000,
            )
        ]


async def test_further_servers_and_a_base_models_template_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with_extraction(monkeypatch, None)
    jobs = MadeJobs(plan=PLAN)
    app = made_console(jobs)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await open_form(app, pilot)
        app.screen.query_one("#output", Input).value = OUTPUT
        app.screen.query_one("#allow-ignored-roles", Checkbox).value = True
        ports = app.screen.query_one("#beside-ports", Input)
        ports.value = "30001 gpu2"
        ports.focus()
        await pilot.press("enter")
        await until_shown(pilot, "! ports: expected a positive whole number, such as 30001 30002, and not 'gpu2'")
        assert jobs.started == []
        ports.value = "30001, 30002"
        await pilot.press("enter")
        await until(pilot, lambda: start_enabled(app))
        await pilot.press("enter")
        await until_shown(pilot, "started extract-1")
        kind, asked, port = jobs.started[-1]
        assert (kind, asked["beside_ports"], port) == ("extract", [30001, 30002], 30000)
        assert asked["options"]["allow_ignored_roles"] is True


async def test_a_plan_is_for_what_was_asked_then(monkeypatch: pytest.MonkeyPatch) -> None:
    with_extraction(monkeypatch, None)
    app = made_console(MadeJobs(plan=PLAN))
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await planned(app, pilot)
        await until(pilot, lambda: start_enabled(app))
        app.screen.query_one("#max-length", Input).value = "100"
        await until_shown(pilot, "what is asked for has changed; Enter plans it anew")
        assert not start_enabled(app)


async def test_a_new_form_says_nothing_of_an_earlier_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    with_extraction(monkeypatch, ended())
    app = made_console(MadeJobs(plan=PLAN))
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await open_screen(app, pilot, "f draws")
        await pilot.press("n")
        await until(pilot, lambda: app.screen.asking)
        app.screen.query_one("#output", Input).value = OUTPUT
        await pilot.press("ctrl+r")
        await until(pilot, lambda: start_enabled(app))
        await pilot.press("escape")
        await until(pilot, lambda: not app.screen.asking)
        await pilot.press("n")
        await until_shown(pilot, BEFORE_PLAN[:40])
        await until_settled(pilot)
        assert BEFORE_PLAN[:40] in shown(app)
        assert not start_enabled(app)


async def test_what_changes_while_it_is_planned_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    with_extraction(monkeypatch, None)
    jobs = MadeJobs(plan=PLAN)
    jobs.held.add("plan")
    app = made_console(jobs)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await open_form(app, pilot)
        await pilot.press("ctrl+r")
        await until_shown(pilot, "~ planning")
        app.screen.query_one("#output", Input).value = "/data/hs/another"
        jobs.held.clear()
        await until_shown(pilot, "24 good")
        assert not start_enabled(app)


async def test_a_plan_without_good_rows_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with_extraction(monkeypatch, None)
    none = PLAN | {"samples": 0, "preview": None, "histogram": [], "total_bytes": {}, "free_bytes": None, "rows": 2}
    app = made_console(MadeJobs(plan=none))
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await open_form(app, pilot)
        await pilot.press("ctrl+r")
        await until_shown(pilot, "2 rows · 0 good")
        assert not start_enabled(app)


async def test_what_does_not_fit_is_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    with_extraction(monkeypatch, None)
    jobs = MadeJobs(plan=PLAN | {"fits": False})
    app = made_console(jobs)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await planned(app, pilot)
        await until_shown(pilot, "3.9 TB free: DOES NOT FIT")
        await pilot.press("ctrl+l")
        await until_shown(pilot, "It would stop once the disk is full.")
        await pilot.press("enter")  # Cancel
        await until(pilot, lambda: isinstance(app.screen, ExtractScreen))
        await pilot.press("ctrl+l")
        await until_shown(pilot, "Start it anyway")
        await pilot.click("#yes")
        await until(pilot, lambda: len(jobs.started) == 2)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"error": "/data/rows/gsm-mix.jsonl is empty: give a file with at least one row"}, "is empty: give a file"),
        (ConnectionFailed("gpu-host-1: no answer"), "! gpu-host-1: no answer"),
    ],
)
async def test_what_keeps_a_plan_from_being_made(monkeypatch: pytest.MonkeyPatch, plan: Any, said: str) -> None:
    with_extraction(monkeypatch, None)
    app = made_console(MadeJobs(plan=plan))
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await open_form(app, pilot)
        await pilot.press("ctrl+r")
        await until_shown(pilot, said)
        assert not start_enabled(app)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rows": "", "output": ""}, "give a rows file and a folder for the dataset"),
        ({"rows": ""}, "give a rows file"),
        ({"output": " "}, "give a folder for the dataset"),
        ({"max-length": "-5"}, "max length: expected a positive whole number, such as 4096, and not '-5'"),
        ({"max-length": "0"}, "max length: expected a positive whole number, such as 4096, and not '0'"),
        ({"prompt-column": "q"}, "prompt_column and response_column go together"),
        ({"max-length": "-"}, "max length: expected a positive whole number, such as 4096, and not '-'"),
        ({"max-length": "1_"}, "max length: expected a positive whole number, such as 4096, and not '1_'"),
        ({"restart-server": "-"}, "launch it again: expected a whole number, 0 or more, such as 2, and not '-'"),
        (
            {"restart-server": "9" * 5000},
            "launch it again: expected a whole number, 0 or more, such as 2, and not '9999999",
        ),
    ],
)
async def test_a_form_that_cannot_be_planned(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, str], said: str
) -> None:
    with_extraction(monkeypatch, None)
    jobs = MadeJobs(plan=PLAN)
    app = made_console(jobs)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await open_form(app, pilot)
        for name, text in change.items():
            app.screen.query_one(f"#{name}", Input).value = text
        await pilot.press("ctrl+r")
        await until_shown(pilot, f"! {said}")
        assert jobs.started == []


@pytest.mark.parametrize(
    ("known", "said"),
    [
        ({"server": None}, "no server runs; s launches one"),
        ({"server": server(state="exited")}, "no server runs; s launches one"),
        ({"server": server(tap=None)}, "the tap is not in the server yet; s shows why"),
    ],
)
async def test_without_a_server_that_gives_tensors(monkeypatch: pytest.MonkeyPatch, known: Any, said: str) -> None:
    with_extraction(monkeypatch, None, **known)
    app = made_console(MadeJobs())
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await until_shown(pilot, "x Extract")
        await pilot.press("x")
        await until_shown(pilot, f"tensors       ! {said}")


async def test_a_format_that_does_not_take_these_states(monkeypatch: pytest.MonkeyPatch) -> None:
    tap = server()["tap"] | {"dtype": "float32"}
    with_extraction(monkeypatch, None, server=server(tap=tap))
    app = made_console(MadeJobs())
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await open_form(app, pilot)
        app.screen.query_one("#format-specforge", Checkbox).value = True
        await pilot.press("ctrl+r")
        await until_shown(pilot, "! specforge takes bfloat16 states, the server computes in float32")


async def test_the_models_own_code_runs_where_the_server_was_launched_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with_extraction(monkeypatch, None, server=server(argv=["python", "--trust-remote-code"]))
    jobs = MadeJobs(plan=PLAN)
    app = made_console(jobs)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await planned(app, pilot)
        assert jobs.started[0][1]["trust_remote_code"] is True


async def test_read_only_plans_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with_extraction(monkeypatch, None)
    jobs = MadeJobs(plan=PLAN)
    app = made_console(jobs, read_only=True)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await open_form(app, pilot)
        await pilot.press("ctrl+r")
        await until_shown(pilot, "--read-only")
    assert jobs.started == []


async def test_a_plan_that_nobody_waits_for_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    with_extraction(monkeypatch, None)
    jobs = MadeJobs(plan=PLAN)
    jobs.held.add("plan")
    app = made_console(jobs)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await open_form(app, pilot)
        await pilot.press("ctrl+r")
        await until_shown(pilot, "~ planning")
        await pilot.press("escape")
        stop = ("stop", {"run_id": "plan-1", "why": "the console needs it no more"})
        await until(pilot, lambda: stop in app.feed.asked)


async def test_read_only_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with_extraction(monkeypatch, ended())
    jobs = MadeJobs(plan=PLAN)
    app = made_console(jobs, read_only=True)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await open_screen(app, pilot, "f draws")
        await pilot.press("f")
        await until_shown(pilot, "started with --read-only")
        assert jobs.started == []


# --- Choosing a file ---


async def test_a_rows_file_is_chosen_among_the_hosts_files(monkeypatch: pytest.MonkeyPatch) -> None:
    with_extraction(monkeypatch, None)
    app = made_console(MadeJobs(), {"folder": folder})
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await open_screen(app, pilot, "New extraction")
        await pilot.press("ctrl+o")
        await until_shown(pilot, "hs/")
        text = shown(app)
        assert text.index("hs/") < text.index("rows/") < text.index(".cache/") < text.index("read.me")
        await pilot.press("j", "enter")
        await until_shown(pilot, "168 kB  gsm-mix.jsonl")
        assert "and 3 more that are not listed" in shown(app)
        await pilot.press("slash", *"mix", "enter")
        await until(pilot, lambda: "other.jsonl" not in shown(app))
        await pilot.press("enter")
        await until(pilot, lambda: value(app, "rows") == ROWS)


async def test_the_browser_begins_where_the_file_lies_and_goes_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with_extraction(monkeypatch, None)
    app = made_console(MadeJobs(), {"folder": folder})
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await open_form(app, pilot)
        await pilot.press("ctrl+o")
        await until_shown(pilot, "gsm-mix.jsonl")
        await pilot.press("backspace")
        await until_shown(pilot, "read.me")
        await pilot.press("enter")  # the cursor is on the folder one came from
        await until_shown(pilot, "gsm-mix.jsonl")
        await pilot.press("escape")
        await until(pilot, lambda: isinstance(app.screen, ExtractScreen))
        assert value(app, "rows") == ROWS


async def test_a_folder_that_cannot_be_read_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: str) -> Any:
        raise UsageError("/root: Permission denied")

    with_extraction(monkeypatch, None)
    app = made_console(MadeJobs(), {"folder": refused})
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await open_screen(app, pilot, "New extraction")
        await pilot.press("ctrl+o")
        await until_shown(pilot, "! /root: Permission denied")


# --- The plan in lines ---


async def test_what_is_in_the_loss_has_a_style_beside_its_brackets() -> None:
    preview = plan_lines(PLAN)[-1]
    assert preview.plain == PLAN["preview"]["text"]
    (span,) = [span for span in preview.spans if span.style == IN_LOSS]
    assert preview.plain[span.start : span.end] == "[42<|end|>]"


async def test_bad_rows_beyond_those_that_are_named_are_counted() -> None:
    assert "! and 40 more bad rows" in [line.plain for line in plan_lines(PLAN | {"bad": 42})]
