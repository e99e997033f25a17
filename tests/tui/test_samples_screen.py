"""The Samples screen over a made dataset and a real agent; the Sample screen over what a job answers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from consoles import shown, until, until_said, until_shown
from made_dataset import make_dataset
from scenes import SCENES, extraction
from screens_shown import AGAIN, REASON, MadeJobs, ended, made_console, quick, seen, with_extraction
from textual.widgets import DataTable

from backends.agent import Agent
from backends.errors import UsageError
from capture.dataset.ledger import Change, Ledger
from console.tui.screens import samples as samples_screen
from console.tui.screens.sample import SampleScreen
from console.tui.screens.samples import SamplesScreen
from console.tui.widgets import states as state_rows
from console.tui.widgets.sample_table import SampleTable

SIZE = (120, 40)

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("quick")]
__all__ = ["quick"]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Ten samples: 0-5 written, 6 sent, 7 failed, 8 and 9 pending."""
    place = make_dataset(tmp_path / "data", samples=10, written=6)
    with Ledger(place) as ledger:
        ledger.settle([Change(6, "sent", 1), Change(7, "failed", 3, REASON)])
    return place


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What an agent of this machine answers about datasets and folders, as it comes over the link."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    agent = Agent(tmp_path / "payload")

    def answer(method: str) -> Callable[..., Any]:
        return lambda **asked: msgspec.to_builtins(getattr(agent, method)(**asked))

    return {method: answer(method) for method in ("samples", "sample_log", "extraction", "folder")}


def of(dataset: Path, run: dict[str, Any]) -> dict[str, Any]:
    """The same run into another dataset."""
    return run | {"details": run["details"] | {"output": str(dataset)}}


def rows(app: Any) -> list[int]:
    return [sample["number"] for sample in app.screen.query_one(SampleTable).samples]


async def open_screen(app: Any, pilot: Any) -> None:
    await until_shown(pilot, "READY")
    await pilot.press("a")
    await until(pilot, lambda: isinstance(app.screen, SamplesScreen))


# --- Which samples there are ---


async def test_every_sample_with_its_state(monkeypatch: Any, dataset: Path, answers: dict[str, Any]) -> None:
    with_extraction(monkeypatch, of(dataset, ended()))
    app = made_console(MadeJobs(), answers)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await open_screen(app, pilot)
        await until_shown(pilot, "10 samples")
        text = shown(app)
        assert f" {dataset}   10 samples" in text
        assert "[0 all 10] 1 · pending 2  2 ~ sent 1  3 + written 6  4 ! failed 1" in text
        assert "         0  + written        5  rows.jsonl:1                1" in text
        assert "         9  · pending       23  rows.jsonl:10" in text
        await pilot.press("G")
        await until_shown(pilot, "· sample 9 pending")
        await pilot.press("k", "k")
        await until_shown(pilot, "! sample 7 failed · 19 tokens · rows.jsonl:8")
        assert " ".join(shown(app).split()).count(REASON) == 1  # in full and wrapped; the table's column cuts it
        await pilot.press("g")
        await until_shown(pilot, "+ sample 0 written")


async def test_only_those_in_one_state(monkeypatch: Any, dataset: Path, answers: dict[str, Any]) -> None:
    with_extraction(monkeypatch, of(dataset, ended()))
    app = made_console(MadeJobs(), answers)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await open_screen(app, pilot)
        for key, state, numbers in (("1", "pending", [8, 9]), ("2", "sent", [6]), ("4", "failed", [7])):
            await pilot.press(key)
            await until_shown(pilot, f"{len(numbers)} {state} samples")
            assert rows(app) == numbers
            assert f"[{key} " in shown(app)
        await pilot.press("0")
        await until(pilot, lambda: len(rows(app)) == 10)


async def test_a_page_at_a_time(monkeypatch: Any, dataset: Path, answers: dict[str, Any]) -> None:
    monkeypatch.setattr(samples_screen, "PAGE", 4)
    with_extraction(monkeypatch, of(dataset, ended()))
    app = made_console(MadeJobs(), answers)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await open_screen(app, pilot)
        await until_shown(pilot, "1 to 4 of 10 samples")
        await pilot.press("j", "j", "j", "j")
        await until_shown(pilot, "5 to 8 of 10 samples")
        await until_shown(pilot, "+ sample 4 written")
        await pilot.press("k")
        await until_shown(pilot, "1 to 4 of 10 samples")
        await until_shown(pilot, "+ sample 3 written")
        await pilot.press("G")
        await until_shown(pilot, "7 to 10 of 10 samples")
        await until_shown(pilot, "· sample 9 pending")
        await pilot.press("j")  # nothing comes after the last
        await pilot.press("g")
        await until_shown(pilot, "+ sample 0 written")
        await pilot.press("slash", "7", "enter")
        await until_shown(pilot, "8 to 10 of 10 samples")
        await until_shown(pilot, "! sample 7 failed")
        await pilot.press("slash", *"99999999999999999999", "enter")
        await until_shown(pilot, "sample: expected a whole number")


async def test_a_running_extraction_moves_them(monkeypatch: Any, dataset: Path, answers: dict[str, Any]) -> None:
    monkeypatch.setattr(samples_screen, "RENEW_SECONDS", 0.0)
    with_extraction(monkeypatch, of(dataset, extraction()))
    app = made_console(MadeJobs(), answers)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await open_screen(app, pilot)
        await until_shown(pilot, "3 + written 6")
        await pilot.press("G", "k")
        await until_shown(pilot, "· sample 8 pending")
        with Ledger(dataset) as ledger:
            ledger.settle([Change(8, "failed", 1, "a new reason")])
        await until_shown(pilot, "! sample 8 failed")  # the cursor stays
        assert "a new reason" in shown(app)


async def test_when_it_ends_it_is_looked_at_once_more(monkeypatch: Any, dataset: Path, answers: dict[str, Any]) -> None:
    monkeypatch.setattr(samples_screen, "RENEW_SECONDS", 1e9)
    with_extraction(monkeypatch, of(dataset, extraction()))
    app = made_console(MadeJobs(), answers)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await open_screen(app, pilot)
        await until_shown(pilot, "4 ! failed 1")
        await until(pilot, lambda: app.screen._written_to)
        with Ledger(dataset) as ledger:
            ledger.settle([Change(8, "failed", 1, "x")])
        app.feed.scene["extraction"] = of(dataset, ended())
        await until_shown(pilot, "4 ! failed 2")


async def test_a_folder_that_is_no_dataset_yet(monkeypatch: Any, tmp_path: Path, answers: dict[str, Any]) -> None:
    """However long its name is, what is wrong with it is said to the end."""
    with_extraction(monkeypatch, of(tmp_path / "none" / ("long" * 30), ended()))
    app = made_console(MadeJobs(), answers)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await open_screen(app, pilot)
        await until_said(pilot, "is no dataset: there is no such folder")


async def test_another_dataset_is_chosen(monkeypatch: Any, dataset: Path, answers: dict[str, Any]) -> None:
    with_extraction(monkeypatch, None)
    app = made_console(MadeJobs(), answers)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await open_screen(app, pilot)
        await until_shown(pilot, "nothing was extracted here yet; b chooses a dataset")
        await pilot.press("b")
        await until_shown(pilot, "this folder: choose it")
        await until_shown(pilot, "data/")
        await pilot.press("j", "j", "enter")
        await until_shown(pilot, "manifest.json")
        await pilot.press("g", "enter")
        await until_shown(pilot, "10 samples")


# --- One of them ---


async def test_what_the_logs_say_of_it(monkeypatch: Any, dataset: Path, answers: dict[str, Any]) -> None:
    line = {"line": 5, "text": "sample 7 is drawn again: no dump, api_key=sk-123", "named": True}
    log = {"run": "extract-1", "log": "/runs/extract-1/extract.log", "lines": [line], "left_out": 3}
    with_extraction(monkeypatch, of(dataset, ended()))
    app = made_console(MadeJobs(), answers | {"sample_log": [log]})
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await open_screen(app, pilot)
        await pilot.press("4")
        await until_shown(pilot, "! sample 7 failed")
        await pilot.press("l")
        await until_shown(pilot, "What the logs say of sample 7")
        assert "5  sample 7 is drawn again: no dump, api_key=***" in shown(app)
        assert "3 earlier lines are only in the file" in shown(app)
        assert ("sample_log", {"path": str(dataset), "number": 7}) in app.feed.asked
        await pilot.press("escape")
        await until(pilot, lambda: isinstance(app.screen, SamplesScreen))


async def test_a_sample_that_no_log_names(monkeypatch: Any, dataset: Path, answers: dict[str, Any]) -> None:
    with_extraction(monkeypatch, of(dataset, ended()))
    app = made_console(MadeJobs(), answers)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await open_screen(app, pilot)
        await until_shown(pilot, "+ sample 0 written")
        await pilot.press("l")
        await until_shown(pilot, "no log here names sample 0")


async def test_what_failed_is_drawn_again_by_the_same_job(
    monkeypatch: Any, dataset: Path, answers: dict[str, Any]
) -> None:
    run = of(dataset, ended())
    with_extraction(monkeypatch, run)
    jobs = MadeJobs()
    app = made_console(jobs, answers | {"extraction": run})
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await open_screen(app, pilot)
        await until_shown(pilot, "10 samples")
        await pilot.press("f")
        await until_shown(pilot, "started extract-1")
        assert jobs.started == [("extract", AGAIN | {"output": str(dataset)}, 30000)]


async def test_a_dataset_that_no_run_here_made(monkeypatch: Any, dataset: Path, answers: dict[str, Any]) -> None:
    with_extraction(monkeypatch, of(dataset, ended()))
    app = made_console(MadeJobs(), answers)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await open_screen(app, pilot)
        await until_shown(pilot, "10 samples")
        await pilot.press("f")
        await until_shown(pilot, "no run here tells how")


# --- Token by token ---


async def open_sample(app: Any, pilot: Any) -> None:
    await until_shown(pilot, "READY")
    app.push_screen(SampleScreen(app.feed, "/data/hs/kimi-v3", 7))


async def test_a_sample_token_by_token() -> None:
    jobs = MadeJobs(sample=seen())
    jobs.held.add("sample")
    app = made_console(jobs, scene="live")
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await open_sample(app, pilot)
        await until_shown(pilot, "reading sample 7 of /data/hs/kimi-v3")
        jobs.held.clear()
        await until_shown(pilot, "+ sample 7 written · a.jsonl:8 · 4 tokens, 2 in the loss")
        await until_shown(pilot, "'<|end|>'")
        text = shown(app)
        assert "+ verified in native 286 kB; the figures are of native" in text
        assert "States [4, 7168] bfloat16 · outputs of layers 2 (boundaries 3)" in text
        assert "aux_0  mean -0.0012  std 1.5  norm 0 to 4123   median 40" in text
        assert "! row 2 all zero · ? row 0 far off" in text
        assert "! wrong, ? norm more than 10 times off the median" in text
        spaced = " ".join(text.split())
        assert "0 10 - '<|user|>' ? 4123 88" in spaced
        assert "1 11 - ' [hi]\\n' 40 88.1" in spaced  # a text is not markup
        assert "2 12 yes ' 42' ! 0 88.2" in spaced
        assert "3 13 yes '<|end|>' 41.5 ?" in spaced
        assert jobs.started == [("sample", {"output": "/data/hs/kimi-v3", "number": 7, "trusted_model": None}, None)]


async def test_to_the_next_odd_row_and_the_next_sample() -> None:
    jobs = MadeJobs(sample=seen())
    app = made_console(jobs, scene="live")
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await open_sample(app, pilot)
        await until_shown(pilot, "'<|end|>'")
        table = app.screen.query_one(DataTable)
        for row in (2, 0, 2):
            await pilot.press("e")
            await until(pilot, lambda row=row: table.cursor_row == row, f"row {row}")
        await pilot.press("n")
        await until(pilot, lambda: len(jobs.started) == 2)
        assert jobs.started[1][1]["number"] == 8
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, SampleScreen))


async def test_a_sample_that_has_failed_shows_its_tokens_and_why() -> None:
    one = seen()["sample"] | {"state": "failed", "attempts": 3, "reason": REASON}
    why = [{"sample": 7, "format": None, "reason": f"it is not extracted, its state is failed: {REASON}"}]
    no_text = "/models/kimi-k2.5: no such model folder"
    tokens = [token | {"text": None} for token in seen()["tokens"]]
    known = {"sample": one, "failures": why, "states": {}, "files": [], "read": None, "left_out": 9, "tokens": tokens}
    app = made_console(MadeJobs(sample=seen(no_text=no_text, **known)), scene="live")
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await open_sample(app, pilot)
        await until_shown(pilot, "! sample 7 failed")
        text = " ".join(shown(app).split())
        assert f"! it is not extracted, its state is failed: {REASON}" in text
        assert f"no texts: {no_text}" in text
        assert "the first 4 tokens; 9 more are not shown" in text
        assert "States" not in text
        await pilot.press("e")
        await until_shown(pilot, "no row is odd")


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ({"error": "no sample 7 in /data/hs/kimi-v3/ledger.sqlite"}, "! no sample 7 in /data/hs/kimi-v3/ledger.sqlite"),
        (UsageError("no job is called 'sample'"), "! no job is called 'sample'"),
    ],
)
async def test_a_sample_that_cannot_be_read_says_why(result: Any, said: str) -> None:
    app = made_console(MadeJobs(sample=result), scene="live")
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await open_sample(app, pilot)
        await until_shown(pilot, said)


async def test_the_tokenizers_own_code_runs_where_the_server_was_launched_so(monkeypatch: Any) -> None:
    trusting = copy.deepcopy(SCENES["live"])
    trusting["server"]["argv"].append("--trust-remote-code")
    monkeypatch.setitem(SCENES, "made", trusting)
    jobs = MadeJobs(sample=seen())
    app = made_console(jobs)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await open_sample(app, pilot)
        await until(pilot, lambda: jobs.started)
        assert jobs.started[0][1]["trusted_model"] == "/models/kimi-k2.5"


# --- Plots ---


async def test_norms_are_plotted_over_their_span() -> None:
    assert state_rows.lifted([10.0, 20.0, None, 30.0]) == [0.0, 0.5, None, 1.0]
    assert state_rows.lifted([11.31, 11.32]) == pytest.approx([0.99, 1.0], abs=0.01)  # nearly the same looks so
    assert state_rows.lifted([0.0, 0.0]) == [1.0, 1.0]
    assert state_rows.lifted([None]) == [None]


async def test_fewer_tokens_than_cells_leave_no_gaps() -> None:
    assert state_rows.stretched([None, 1.0, None, None, 2.0]) == [None, 1.0, 1.0, 1.0, 2.0]


async def test_odd_rows_are_marked_under_the_plot_the_worse_sign_first() -> None:
    odd = [{"row": 99, "why": "all zero"}, {"row": 0, "why": "far off"}, {"row": 98, "why": "far off"}]
    assert state_rows.odd_marks({"norms": [1.0] * 100, "odd": odd}, 10) == "?        !"
