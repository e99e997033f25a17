"""Looking at a dataset's samples, a page at a time, and at what the logs say of one of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import until
from made_dataset import make_dataset

from backends import datasets
from backends.agent import Agent
from backends.errors import UsageError
from backends.runs import Run
from capture.dataset.ledger import Change, Ledger


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Ten samples: 0-5 written, 6 sent, 7 failed, 8 and 9 pending."""
    place = make_dataset(tmp_path / "data", samples=10, written=6)
    with Ledger(place) as ledger:
        ledger.settle([Change(6, "sent", 1), Change(7, "failed", 3, "the server answered 500")])
    return place


def numbers(page: datasets.Page) -> list[int]:
    return [sample.number for sample in page.samples]


def test_samples_by_number(dataset: Path) -> None:
    page = datasets.samples(str(dataset), most=4)
    assert (page.path, page.model) == (str(dataset), "/models/tiny")
    assert page.counts == {"pending": 2, "sent": 1, "written": 6, "failed": 1}
    assert (numbers(page), page.before) == ([0, 1, 2, 3], 0)
    page = datasets.samples(str(dataset), after=3, most=4)
    assert (numbers(page), page.before) == ([4, 5, 6, 7], 4)
    page = datasets.samples(str(dataset), after=7, most=4)
    assert (numbers(page), page.before) == ([8, 9], 8)
    for none in (9, datasets.LAST, 10**20):
        assert numbers(datasets.samples(str(dataset), after=none)) == []
    assert numbers(datasets.samples(str(dataset), before=10**20, most=1)) == [9]


def test_samples_before_a_number(dataset: Path) -> None:
    page = datasets.samples(str(dataset), before=datasets.LAST, most=3)
    assert (numbers(page), page.before) == ([7, 8, 9], 7)
    page = datasets.samples(str(dataset), before=7, most=3)
    assert (numbers(page), page.before) == ([4, 5, 6], 4)
    page = datasets.samples(str(dataset), before=2, most=3)
    assert (numbers(page), page.before) == ([0, 1], 0)


def test_samples_in_one_state(dataset: Path) -> None:
    page = datasets.samples(str(dataset), state="failed")
    (failed,) = page.samples
    assert (failed.number, failed.attempts, failed.reason) == (7, 3, "the server answered 500")
    assert (failed.file, failed.line, failed.tokens) == ("rows.jsonl", 8, 19)
    assert (page.before, page.counts["failed"]) == (0, 1)
    page = datasets.samples(str(dataset), state="pending", before=datasets.LAST, most=1)
    assert (numbers(page), page.before) == ([9], 1)


def test_a_relative_path_starts_at_the_home_folder(home: Path) -> None:
    make_dataset(home / "data", samples=3)
    assert datasets.describe("data").path == datasets.samples("data").path == f"{home}/data"
    assert [sample.number for sample in datasets.written("data", -1)] == [0, 1, 2]


def test_samples_of_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as failed:
        datasets.samples(str(tmp_path))
    assert str(failed.value) == f"{tmp_path} is no dataset: it has no manifest.json"


# --- What the logs say of a sample ---


def log(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "extract.log"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_lines_that_name_a_sample_with_those_around(tmp_path: Path) -> None:
    lines = [*(f"before {n}" for n in range(5)), "sample 7 is drawn again: x", *(f"after {n}" for n in range(5))]
    found = datasets.log_of_sample("extract-1", log(tmp_path, *lines), 7)
    assert [(line.line, line.text, line.named) for line in found.lines] == [
        (4, "before 3", False),
        (5, "before 4", False),
        (6, "sample 7 is drawn again: x", True),
        (7, "after 0", False),
        (8, "after 1", False),
    ]
    assert (found.run, found.log, found.left_out) == ("extract-1", f"{tmp_path}/extract.log", 0)


def test_no_line_is_told_twice_and_no_other_sample_is_meant(tmp_path: Path) -> None:
    path = log(tmp_path, "sample 17 x", "sample 7 a", "b", "sample 7 (rows.jsonl:8) failed: c", "sample 70 x")
    assert [line.line for line in datasets.log_of_sample("", path, 7).lines] == [1, 2, 3, 4, 5]
    assert [line.line for line in datasets.log_of_sample("", path, 7).lines if line.named] == [2, 4]
    assert datasets.log_of_sample("", path, 1).lines == []


def test_the_newest_lines_of_many(tmp_path: Path) -> None:
    found = datasets.log_of_sample("", log(tmp_path, *["sample 7 again"] * 250), 7)
    assert (len(found.lines), found.lines[-1].line, found.left_out) == (200, 250, 50)


def test_a_log_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        datasets.log_of_sample("", tmp_path / "extract.log", 7)


def test_the_logs_of_every_extraction_into_the_dataset(
    home: Path, payload_folder: Path, start: Callable[..., Run]
) -> None:
    def ran(output: str, said: str) -> Run:
        run = start("extract", ["/bin/echo", said], details={"output": output})
        until(lambda: run.exit)
        return run

    first, _, second = (
        ran("/data", "sample 7 is drawn again: early"),
        ran("/other", "sample 7 is another's"),
        ran("/data", "sample 7 failed: late"),
    )
    ran("/data", "sample 8 failed")
    found = Agent(payload_folder).sample_log("/data", 7)
    assert [(log.run, [line.text for line in log.lines]) for log in found] == [
        (second.id, ["sample 7 failed: late"]),
        (first.id, ["sample 7 is drawn again: early"]),
    ]
