"""The ledger: which samples there are, whatever happens to the input, the process and the disk."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tmpfs import small_tmpfs

from capture.dataset.ledger import Change, Ledger, LedgerError, Sample, WrittenFile
from capture.rows.tokenise import BadRow, Row, Skipped

ROOT = Path(__file__).resolve().parents[2]
FILE = "rows.jsonl"


def row(line: int, *ids: int) -> Row:
    """A row whose mask covers all but the first token."""
    return Row(FILE, line, list(ids), [0] + [1] * (len(ids) - 1), False)


A, B, C, D = row(1, 5, 6, 7), row(2, 8), row(3, 70_000, 2**31 - 1), row(4, 9, 9, 9, 9, 9)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path) as made:
        yield made


def numbers(ledger: Ledger, *states: Any) -> list[int]:
    return [sample.number for sample in ledger.samples(*states)]


def content(ledger: Ledger) -> list[tuple[list[int], list[int]]]:
    return [ledger.tokens(sample) for sample in ledger.samples()]


def everything(output: Path) -> tuple[list[str], bytes, bytes]:
    """All that a dataset's ledger holds, read by SQLite itself."""
    db = sqlite3.connect(output / "ledger.sqlite")
    try:
        rows = list(db.iterdump())
    finally:
        db.close()
    return rows, (output / "tokens" / "ids.bin").read_bytes(), (output / "tokens" / "mask.bin").read_bytes()


# --- Input -> samples ---


def test_rows_become_samples_in_their_order(ledger: Ledger) -> None:
    assert ledger.add([A, B, C]) == 3
    assert list(ledger.samples()) == [
        Sample(0, FILE, 1, 0, 3, "pending", 0, None),
        Sample(1, FILE, 2, 3, 1, "pending", 0, None),
        Sample(2, FILE, 3, 4, 2, "pending", 0, None),
    ]
    assert content(ledger) == [([5, 6, 7], [0, 1, 1]), ([8], [0]), ([70_000, 2**31 - 1], [0, 1])]
    assert ledger.sample(2).line == 3
    with pytest.raises(LedgerError, match="no sample 3 in "):
        ledger.sample(3)


@pytest.mark.parametrize("how", [Path.unlink, lambda path: path.write_bytes(b"")], ids=["lost", "emptied"])
@pytest.mark.parametrize("begun", [True, False])
def test_a_dataset_without_its_ledger_is_left_as_it_is(tmp_path: Path, begun: bool, how: Any) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.add([A, B, C])
    how(ledger.path)
    before = everything(tmp_path)
    for _ in range(2):
        with pytest.raises(LedgerError, match="has lost its ledger"):
            Ledger(tmp_path, begun=begun)
        assert everything(tmp_path) == before


def test_a_dataset_that_has_begun_without_a_sample_has_a_ledger_too(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="has lost its ledger"):
        Ledger(tmp_path, begun=True)
    with Ledger(tmp_path) as ledger:
        ledger.add([])
    with Ledger(tmp_path, begun=True) as ledger:
        assert list(ledger.samples()) == []


def test_the_same_input_adds_nothing(ledger: Ledger, tmp_path: Path) -> None:
    ledger.add([A, B, C])
    before = everything(tmp_path)
    assert ledger.add([A, B, C]) == 0
    assert everything(tmp_path) == before


def test_new_rows_are_appended_wherever_they_stand(ledger: Ledger) -> None:
    ledger.add([A, B])
    ledger.settle([Change(0, "written", 1), Change(1, "failed", 3, "no dump came")])
    assert ledger.add([D, A, C, B]) == 2
    assert [(sample.number, sample.line, sample.state) for sample in ledger.samples()] == [
        (0, 1, "written"), (1, 2, "failed"), (2, 4, "pending"), (3, 3, "pending"),
    ]  # fmt: skip
    assert [ids for ids, _ in content(ledger)] == [[5, 6, 7], [8], [9, 9, 9, 9, 9], [70_000, 2**31 - 1]]


def test_equal_rows_are_samples_of_their_own(ledger: Ledger) -> None:
    assert ledger.add([A, row(2, 5, 6, 7), B, row(4, 5, 6, 7)]) == 4
    assert [sample.line for sample in ledger.samples()] == [1, 2, 2, 4]
    assert ledger.add([A, row(2, 5, 6, 7), B, row(4, 5, 6, 7), row(5, 5, 6, 7)]) == 1
    with pytest.raises(LedgerError, match=r"1 rows of the earlier input .* the first was rows\.jsonl:5;"):
        ledger.add([A, row(2, 5, 6, 7), B, row(4, 5, 6, 7)])


def test_the_mask_tells_rows_apart(ledger: Ledger) -> None:
    assert ledger.add([Row(FILE, 1, [1, 2], [0, 1], False), Row(FILE, 2, [1, 2], [1, 1], False)]) == 2
    assert content(ledger) == [([1, 2], [0, 1]), ([1, 2], [1, 1])]


@pytest.mark.parametrize(
    ("now", "count", "first"),
    [
        ([A, C], 1, "rows.jsonl:2"),
        ([], 3, "rows.jsonl:1"),
        ([A, B, row(3, 70_000, 1), D], 1, "rows.jsonl:3"),
        ([A, Row(FILE, 2, [8], [1], False), C], 1, "rows.jsonl:2"),
        ([D, A, C], 1, "rows.jsonl:2"),
        ([A, BadRow(FILE, 2, "not JSON"), C], 1, "rows.jsonl:2"),
        ([A, B, Skipped(FILE, 3, 2)], 1, "rows.jsonl:3"),
    ],
    ids=["lost", "emptied", "changed", "other mask", "lost and grown", "broken", "too long now"],
)
def test_an_input_that_lost_a_row_changes_nothing(
    ledger: Ledger, tmp_path: Path, now: list[Any], count: int, first: str
) -> None:
    ledger.add([A, B, C, BadRow(FILE, 9, "no chat")])
    ledger.settle([Change(0, "written", 1, None, [WrittenFile("native", "native/0", 7, "00")])])
    before = everything(tmp_path)
    with pytest.raises(LedgerError) as refused:
        ledger.add(now)
    assert str(refused.value) == (
        f"{count} rows of the earlier input are not there any more or read differently now, the first was {first}; "
        "an input may only grow: restore it, or extract into a new folder"
    )
    assert everything(tmp_path) == before


def test_an_input_that_breaks_off_changes_nothing(ledger: Ledger, tmp_path: Path) -> None:
    def rows() -> Iterator[Row]:
        yield from (A, B, D)
        raise ValueError("the array cannot be read on")

    ledger.add([A])
    before = everything(tmp_path)
    with pytest.raises(ValueError, match="cannot be read on"):
        ledger.add(rows())
    assert everything(tmp_path) == before
    assert ledger.add([A, B, D]) == 2


def test_rows_without_a_sample_are_kept_with_their_reason(ledger: Ledger) -> None:
    ledger.add([BadRow(FILE, 2, "not JSON"), A, Skipped(FILE, 3, 9000), BadRow("earlier.jsonl", 7, "no chat")])
    assert ledger.unused("bad") == [("earlier.jsonl", 7, "no chat"), (FILE, 2, "not JSON")]
    assert ledger.unused("overlong") == [(FILE, 3, "9000 tokens")]
    ledger.add([A, B, Skipped(FILE, 3, 9000)])  # the input was repaired
    assert ledger.unused("bad") == []
    assert ledger.unused("overlong") == [(FILE, 3, "9000 tokens")]


# --- States ---


def test_what_became_of_samples(ledger: Ledger) -> None:
    ledger.add([A, B, C, D])
    assert ledger.counts() == {"pending": 4, "sent": 0, "written": 0, "failed": 0}
    files = [WrittenFile("native", "native/rows_0-2000/0.safetensors", 700, "ab"), WrittenFile("x", "x/0", 11, "cd")]
    ledger.settle([Change(0, "written", 1, None, files), Change(1, "sent", 2), Change(2, "failed", 3, "no dump came")])
    assert ledger.counts() == {"pending": 1, "sent": 1, "written": 1, "failed": 1}
    assert ledger.sample(2) == Sample(2, FILE, 3, 4, 2, "failed", 3, "no dump came")
    assert ledger.files(0) == files
    assert ledger.files(2) == []
    assert ledger.bytes_written() == 711
    assert (ledger.total(), ledger.total("written"), ledger.total("sent", "failed")) == (11, 3, 3)
    assert ledger.longest() == 5
    assert [numbers(ledger, *states) for states in [("pending",), ("sent", "failed"), ()]] == [
        [3], [1, 2], [0, 1, 2, 3],
    ]  # fmt: skip


def test_nothing_in_it_yet(ledger: Ledger) -> None:
    assert ledger.counts() == {"pending": 0, "sent": 0, "written": 0, "failed": 0}
    assert (ledger.longest(), ledger.total(), ledger.bytes_written(), numbers(ledger)) == (0, 0, 0, [])


def test_a_sample_that_is_written_again_has_its_new_files(ledger: Ledger) -> None:
    ledger.add([A])
    for checksum in ("aa", "bb"):
        ledger.settle([Change(0, "written", 1, None, [WrittenFile("native", "native/0", 7, checksum)])])
    assert ledger.files(0) == [WrittenFile("native", "native/0", 7, "bb")]
    assert ledger.bytes_written() == 7


def test_the_next_run_takes_up_what_was_left(ledger: Ledger) -> None:
    ledger.add([A, B, C, D])
    ledger.settle([Change(0, "written", 1), Change(1, "sent", 2), Change(2, "failed", 3, "no dump came")])
    ledger.reopen()
    assert [(sample.state, sample.attempts, sample.reason) for sample in ledger.samples()] == [
        ("written", 1, None), ("pending", 2, None), ("pending", 3, None), ("pending", 0, None),
    ]  # fmt: skip


def test_a_batch_of_changes_is_all_or_nothing(ledger: Ledger, tmp_path: Path) -> None:
    ledger.add([A, B])
    before = everything(tmp_path)
    broken = WrittenFile("native", "native/1", 7, None)  # type: ignore[arg-type]
    with pytest.raises(sqlite3.IntegrityError):
        ledger.settle([Change(0, "written", 1), Change(1, "written", 1, None, [broken])])
    assert everything(tmp_path) == before
    ledger.settle([Change(0, "written", 1)])
    assert ledger.counts()["written"] == 1


def test_states_may_change_while_samples_are_gone_through(ledger: Ledger) -> None:
    """As the driver does it: what it draws becomes sent, then written, while it goes on."""
    ledger.add(row(line, line, line % 7) for line in range(3750))
    ledger.settle(Change(number, "written", 1) for number in range(0, 3750, 3))
    seen, changes = [], []
    for sample in ledger.samples("pending"):
        seen.append(sample.number)
        changes.append(Change(sample.number, "sent", 1) if sample.number % 2 else Change(sample.number, "written", 1))
        if len(changes) == 300:
            ledger.settle(changes)
            changes = []
    ledger.settle(changes)
    assert seen == [number for number in range(3750) if number % 3]
    assert ledger.counts() == {"pending": 0, "sent": 1250, "written": 2500, "failed": 0}


@pytest.mark.parametrize("walk", ["samples", "all_files", "written_keys"])
def test_a_driver_writes_while_a_reader_is_half_through(ledger: Ledger, tmp_path: Path, walk: str) -> None:
    """However long the reader takes over each row: verification reads the samples' files meanwhile."""
    ledger.add(row(line, line) for line in range(2500))
    ledger.db.execute("PRAGMA busy_timeout = 1")

    def changes(run: str) -> list[Change]:
        files = [WrittenFile(name, f"{name}/{run}", 1, run) for name in ("native", "specforge")]
        return [Change(number, "written", 1, None, files) for number in range(2500)]

    ledger.settle(changes("first"))
    with Ledger(tmp_path, read_only=True) as reader:
        rows = iter(getattr(reader, walk)())
        seen = [next(rows)]
        ledger.settle(changes("again"))
        seen += rows
    if walk == "all_files":
        assert [number for number, _ in seen] == [number for number in range(2500) for _ in range(2)]
        assert {file.format for _, file in seen} == {"native", "specforge"} and seen[-1][1].xxh3 == "again"
    else:
        assert len(seen) == 2500 and len(set(seen)) == 2500


# --- Killed, damaged, full ---

TOKENISING = """
import sys
from pathlib import Path
from capture.dataset.ledger import Ledger
from capture.rows.tokenise import Row

def rows():
    yield Row("rows.jsonl", 1, [5, 6, 7], [0, 1, 1], False)
    for line in range(2, 40_002):
        yield Row("rows.jsonl", line, [line, 1, 2], [0, 1, 1], False)
    print("half-way", flush=True)
    sys.stdin.read()

Ledger(Path(sys.argv[1])).add(rows())
"""


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A dataset of one written sample whose driver was killed while it tokenised 40,000 new rows."""
    with Ledger(tmp_path) as ledger:
        ledger.add([A])
        ledger.settle([Change(0, "written", 1)])
    driver = subprocess.Popen(
        [sys.executable, "-c", TOKENISING, tmp_path],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert driver.stdout is not None
    assert driver.stdout.readline() == b"half-way\n"
    driver.kill()
    driver.wait()
    assert (tmp_path / "tokens" / "ids.bin").stat().st_size > 12
    assert (tmp_path / "ledger.sqlite-journal").stat().st_size > 0  # SQLite has to roll back
    return tmp_path


def test_a_driver_killed_while_tokenising_leaves_the_earlier_samples(killed: Path) -> None:
    with Ledger(killed) as ledger:
        assert list(ledger.samples()) == [Sample(0, FILE, 1, 0, 3, "written", 1, None)]
        assert (killed / "tokens" / "ids.bin").stat().st_size == 12
        assert (killed / "tokens" / "mask.bin").stat().st_size == 3
        assert ledger.add([A, B]) == 1
        assert content(ledger) == [([5, 6, 7], [0, 1, 1]), ([8], [0])]


def test_a_reader_after_a_kill_needs_no_driver_first(killed: Path) -> None:
    longer = (killed / "tokens" / "ids.bin").stat().st_size
    with Ledger(killed, read_only=True) as ledger:
        assert ledger.counts() == {"pending": 0, "sent": 0, "written": 1, "failed": 0}
        assert content(ledger) == [([5, 6, 7], [0, 1, 1])]
    assert (killed / "tokens" / "ids.bin").stat().st_size == longer  # cutting is the driver's


def test_a_reader_writes_nothing(ledger: Ledger, tmp_path: Path) -> None:
    ledger.add([A, B])
    before = everything(tmp_path)
    with Ledger(tmp_path, read_only=True) as reader:
        assert content(reader) == [([5, 6, 7], [0, 1, 1]), ([8], [0])]
        for change in (lambda: reader.settle([Change(0, "failed", 1)]), reader.reopen, lambda: reader.add([A, B, C])):
            with pytest.raises(sqlite3.OperationalError, match="readonly database"):
                change()
    assert everything(tmp_path) == before


def test_a_reader_of_a_read_only_file_system(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "small", "1m") as small:
        with Ledger(small) as ledger:
            ledger.add([A])
        subprocess.run(["mount", "-o", "remount,ro", small], check=True)
        with Ledger(small, read_only=True) as reader:
            assert content(reader) == [([5, 6, 7], [0, 1, 1])]


def test_a_reader_meets_a_driver_that_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: connect(*a, **k, timeout=0.01))
    with Ledger(tmp_path) as ledger:
        ledger.add([A])
        ledger.db.execute("BEGIN EXCLUSIVE")  # what SQLite does by itself in a long transaction
        with pytest.raises(LedgerError) as refused:
            Ledger(tmp_path, read_only=True)
    assert str(refused.value) == (
        f"{tmp_path / 'ledger.sqlite'}: database is locked; an extraction is writing to it; try again in a moment"
    )


def test_no_dataset_is_told_and_left_alone(tmp_path: Path) -> None:
    with pytest.raises(LedgerError) as refused:
        Ledger(tmp_path, read_only=True)
    assert str(refused.value) == f"{tmp_path} is no dataset: it has no ledger.sqlite"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["data #1", "a?mode=memory", "50%41", "räksmörgås"])
def test_a_folder_may_have_any_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with Ledger(tmp_path / name) as ledger:
        ledger.add([A])
    with Ledger(tmp_path / name, read_only=True) as ledger:
        assert numbers(ledger) == [0]
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert sorted(path.name for path in (tmp_path / name).iterdir()) == ["ledger.sqlite", "tokens"]


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("damage", ["text", "header", "cut", "other tables"])
def test_a_damaged_ledger_is_named(tmp_path: Path, damage: str, read_only: bool) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.add(row(line, line) for line in range(1000))
    path = tmp_path / "ledger.sqlite"
    if damage == "text":
        path.write_text("not a database at all, but long enough to have been one. " * 20)
    elif damage == "header":
        path.write_bytes(b"\0" * 100 + path.read_bytes()[100:])
    elif damage == "cut":
        os.truncate(path, path.stat().st_size // 2)
    else:
        path.unlink()
        with sqlite3.connect(path) as db:
            db.execute("CREATE TABLE samples (id INTEGER)")
        db.close()
    before = path.read_bytes(), (tmp_path / "tokens" / "ids.bin").read_bytes()
    with pytest.raises(LedgerError) as refused:
        Ledger(tmp_path, read_only=read_only)
    assert str(refused.value).startswith(f"{path}: ")
    assert str(refused.value).endswith("; restore it from a copy, or start in a new folder")
    if damage != "other tables":
        assert (path.read_bytes(), (tmp_path / "tokens" / "ids.bin").read_bytes()) == before


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("name", ["ids.bin", "mask.bin"])
@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_tokens_that_are_lost_are_named(tmp_path: Path, name: str, damage: str, read_only: bool) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.add([A, B])
    path = tmp_path / "tokens" / name
    if damage == "cut":
        os.truncate(path, path.stat().st_size - 1)
    else:
        path.unlink()
    with pytest.raises(LedgerError) as refused:
        Ledger(tmp_path, read_only=read_only)
    assert str(refused.value) == f"{path} is shorter than the ledger says; restore it, or start in a new folder"


def test_a_full_disk_while_tokenising_changes_nothing(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "small", "256k") as small, Ledger(small) as ledger:
        ledger.add([A])
        before = everything(small)
        with pytest.raises((OSError, sqlite3.OperationalError), match=r"No space left|disk is full"):
            ledger.add([A, *(row(line, *range(40)) for line in range(5000))])
        assert everything(small) == before
        assert ledger.add([A, B]) == 1


def test_a_full_disk_while_settling_changes_nothing(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "small", "256k") as small, Ledger(small) as ledger:
        ledger.add(row(line, line) for line in range(100))
        filler = small / "filler"
        filler.write_bytes(bytes(shutil.disk_usage(small).free))
        before = everything(small)
        changes = [Change(n, "written", 1, None, [WrittenFile("native", "x" * 900, 1, "00")]) for n in range(100)]
        with pytest.raises(sqlite3.OperationalError, match="disk is full"):
            ledger.settle(changes)
        assert everything(small) == before
        filler.unlink()
        ledger.settle(changes)
        assert ledger.counts()["written"] == 100
