"""Copying a dataset to this machine: all of it or some, once or in several goes, and never a byte that is wrong."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers import until
from made_dataset import SETTINGS, make_dataset, require_copy, write
from xxhash import xxh3_64_hexdigest

import backends.datasets
from backends.errors import ConnectionFailed, Locked, UsageError
from backends.host import Host, LocalHost
from capture.dataset.ledger import Ledger, WrittenFile
from capture.dataset.manifest import Finished, read_manifest, write_manifest
from console import cli
from console.pull import Failure, Outcome, Progress, files, parse_samples, pull, tokens
from console.pull import source as pull_source
from console.words import of_run

LAYERTAP = Path(sys.executable).with_name("layertap")
ALL = list(range(8))


class Meddling:
    """A host, and what happens as it is read: `meddle` gets path, offset and the number of the read."""

    def __init__(self, host: Host, meddle: Callable[[str, int, int], None]) -> None:
        self.host, self.meddle = host, meddle
        self.name, self.ended, self.reads = host.name, host.ended, 0

    @property
    def state(self) -> Any:
        return self.host.state

    def request(self, method: str, /, **parameters: Any) -> Any:
        return self.host.request(method, **parameters)

    def read(self, path: str, offset: int, most: int = 1 << 20, **rotating: Any) -> tuple[dict[str, Any], bytes]:
        self.reads += 1
        self.meddle(path, offset, self.reads)
        return self.host.read(path, offset, most, **rotating)

    def close(self) -> None:
        self.host.close()


@pytest.fixture
def host(home: Path) -> Iterator[LocalHost]:
    link = LocalHost(sys.executable)
    yield link
    link.close()


@pytest.fixture
def source(home: Path) -> Path:
    return make_dataset(home / "source")


@pytest.fixture
def target(home: Path) -> Path:
    return home / "data" / "target"


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything goes in small parts, and one file after the other."""
    monkeypatch.setattr(pull_source, "CHUNK", 1000)
    monkeypatch.setattr(tokens, "STRETCH", 12)
    monkeypatch.setattr(files, "BATCH", 3)
    monkeypatch.setattr(files, "AT_ONCE", 1)


def bytes_of(source: Path, *numbers: int) -> int:
    with Ledger(source, read_only=True) as ledger:
        return sum(file.bytes for number in numbers for file in ledger.files(number))


def tokens_of(source: Path, *numbers: int) -> int:
    with Ledger(source, read_only=True) as ledger:
        return 5 * sum(ledger.sample(number).tokens for number in numbers)


# --- What comes over ---


def test_a_whole_dataset(host: LocalHost, source: Path, target: Path, chunks: None) -> None:
    shown: list[Progress] = []
    made = pull(host, str(source), target, show=lambda now: shown.append(msgspec.structs.replace(now)))
    size = bytes_of(source, *ALL)
    assert made == Outcome(1, str(source), str(target), 8, 16, size, size + tokens_of(source, *ALL), 0, [])
    require_copy(target, source, ALL)
    assert [now.phase for now in shown[:2]] == ["listing", "tokens"]
    assert (shown[-1].phase, shown[-1].files_done, shown[-1].bytes_done) == ("files", 16, size)
    assert (shown[-1].files, shown[-1].bytes, shown[-1].link) == (16, size, None)


@pytest.fixture
def beside(source: Path) -> list[WrittenFile]:
    """What a trainer wants beside the samples' files; the dataset then has it."""
    made = []
    for name in ("state.json", "token_freq.pt"):
        path = source / "specforge" / name
        path.write_bytes(name.encode() * 500)
        made.append(
            WrittenFile("specforge", f"specforge/{name}", path.stat().st_size, xxh3_64_hexdigest(path.read_bytes()))
        )
    write_manifest(source, msgspec.structs.replace(read_manifest(source), finished={"specforge": Finished(8, made)}))
    return made


def test_what_lies_beside_the_samples_comes_with_all_of_them(
    host: LocalHost, source: Path, target: Path, beside: list[WrittenFile], chunks: None
) -> None:
    part = pull(host, str(source), target, [(0, 3)])
    assert (part.samples, part.failed, read_manifest(target).finished) == (4, [], {})
    assert not (target / beside[0].path).exists()
    shown: list[Progress] = []
    whole = pull(host, str(source), target, show=lambda now: shown.append(msgspec.structs.replace(now)))
    assert (whole.samples, whole.failed) == (8, [])
    size = bytes_of(source, *ALL) + sum(file.bytes for file in beside)
    assert (shown[-1].files_done, shown[-1].bytes_done, shown[-1].bytes) == (18, size, size)
    assert read_manifest(target).finished == read_manifest(source).finished
    for file in beside:
        assert (target / file.path).read_bytes() == (source / file.path).read_bytes()
    assert pull(host, str(source), target).fetched_bytes == 0


def test_what_lies_beside_the_samples_is_changed(
    host: LocalHost, source: Path, target: Path, beside: list[WrittenFile]
) -> None:
    (source / beside[1].path).write_bytes(b"x" * beside[1].bytes)
    made = pull(host, str(source), target)
    why = "its checksum is not the one that was recorded when it was written"
    assert (made.samples, made.failed) == (8, [Failure(None, beside[1].path, why)])
    assert read_manifest(target).finished == {}


def test_again_nothing_is_fetched(host: LocalHost, source: Path, target: Path) -> None:
    pull(host, str(source), target)
    made = pull(host, str(source), target)
    assert (made.files, made.skipped_files, made.fetched_bytes) == (16, 16, 0)
    require_copy(target, source, ALL)


def test_a_partial_dataset_and_the_rest_of_it_later(host: LocalHost, home: Path, target: Path) -> None:
    source = make_dataset(home / "partial", written=3)
    assert pull(host, str(source), target).samples == 3
    require_copy(target, source, [0, 1, 2])
    write(source, range(3, 8))
    made = pull(host, str(source), target)
    assert (made.samples, made.skipped_files) == (8, 6)
    require_copy(target, source, ALL)


def test_a_dataset_that_is_being_written(host: LocalHost, home: Path, target: Path) -> None:
    source = make_dataset(home / "live", written=5)
    with Ledger(source) as driver:
        driver.db.execute("BEGIN IMMEDIATE")
        driver.db.execute("UPDATE samples SET state = 'sent' WHERE sample = 5")
        pull(host, str(source), target)
        driver.db.execute("ROLLBACK")
    require_copy(target, source, [0, 1, 2, 3, 4])


def test_chosen_samples_and_more_of_them(host: LocalHost, source: Path, target: Path, chunks: None) -> None:
    made = pull(host, str(source), target, parse_samples("6,1-2"))
    assert made.fetched_bytes == bytes_of(source, 1, 2, 6) + tokens_of(source, 1, 2, 6)
    require_copy(target, source, [1, 2, 6])
    made = pull(host, str(source), target, parse_samples("2,4"))
    assert (made.samples, made.skipped_files) == (4, 6)
    assert made.fetched_bytes == bytes_of(source, 4) + tokens_of(source, 4)
    require_copy(target, source, [1, 2, 4, 6])


def test_more_samples_than_one_page_has(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends.datasets, "MOST", 3)

    def numbers(after: int, ranges: Any = None) -> list[int]:
        return [sample.number for sample in backends.datasets.written(str(source), after, ranges)]

    assert [numbers(-1), numbers(2), numbers(5), numbers(7)] == [[0, 1, 2], [3, 4, 5], [6, 7], []]
    assert [numbers(-1, [[1, 2], [4, 9]]), numbers(4, [[1, 2], [4, 9]])] == [[1, 2, 4], [5, 6, 7]]


def test_words_for_samples() -> None:
    assert parse_samples("3,7,10-20") == [(3, 3), (7, 7), (10, 20)]
    assert parse_samples("5, 4,1-2,2-3,9") == [(1, 5), (9, 9)]
    for text in ("", "a", "1-", "-1", "3,,4", "1-2-3", "7-3", "99999999999999999999"):
        with pytest.raises(UsageError, match="--samples"):
            parse_samples(text)


# --- Progress ---


class Shown(list[Progress]):
    """What was shown; `bytes_done` never falls, and never says more than there is."""

    def __call__(self, now: Progress) -> None:
        if self:
            assert now.bytes_done >= self[-1].bytes_done
            assert now.files_done >= self[-1].files_done
        assert now.bytes_done <= now.bytes
        self.append(msgspec.structs.replace(now))

    def done(self, phase: str = "files") -> list[int]:
        return [now.bytes_done for now in self if now.phase == phase]


def test_progress_moves_inside_a_large_file(
    host: LocalHost, home: Path, target: Path, chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "SHOWN_SECONDS", 0.01)
    source, shown = make_dataset(home / "large", samples=1, size=20_000), Shown()

    def wait(path: str, offset: int, reads: int) -> None:
        if path.endswith("native/rows_0-2000/0.bin") and offset in (1000, 7000):
            until(lambda: offset in shown.done(), f"{offset} bytes of it are shown")

    pull(Meddling(host, wait), str(source), target, show=shown)  # type: ignore[arg-type]
    assert (shown[-1].files_done, shown[-1].bytes_done, shown[-1].bytes) == (2, 40_000, 40_000)
    require_copy(target, source, [0])


def test_what_is_here_counts_from_the_start(host: LocalHost, source: Path, target: Path, chunks: None) -> None:
    def interrupt(path: str, offset: int, reads: int) -> None:
        if path.endswith("native/rows_0-2000/2.bin") and offset == 3000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(Meddling(host, interrupt), str(source), target)  # type: ignore[arg-type]
    until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("layertap-pull")])
    assert (target / "native/rows_0-2000/2.bin.part").stat().st_size == 3000
    here = sum(path.stat().st_size for path in target.glob("*/rows_*/*"))
    shown = Shown()
    made = pull(host, str(source), target, show=shown)
    assert shown.done("checking")[0] > 0
    assert shown.done()[0] >= here
    assert shown.done()[-1] == made.bytes
    assert made.fetched_bytes == made.bytes - here


@pytest.mark.parametrize("left", [b"wrong" * 200, b"too long" * 5000])
def test_a_byte_that_is_fetched_again_counts_once(
    host: LocalHost, source: Path, target: Path, chunks: None, monkeypatch: pytest.MonkeyPatch, left: bytes
) -> None:
    monkeypatch.setattr(files, "SHOWN_SECONDS", 0.001)
    pull(host, str(source), target, [(0, 1)])
    (target / "native/rows_0-2000/2.bin.part").write_bytes(left)
    changed = source / "native/rows_0-2000/3.bin"
    changed.write_bytes(bytes(changed.stat().st_size))
    gone = source / "native/rows_0-2000/4.bin"
    gone.unlink()
    shown = Shown()
    made = pull(host, str(source), target, show=shown)
    assert [failure.sample for failure in made.failed] == [3, 4]
    assert (shown[-1].files_done, shown[-1].bytes_done) == (14, bytes_of(source, *ALL) - 5004)


# --- Going on ---


@pytest.mark.parametrize("at", [1, 9, 30, 50])
def test_killed_on_the_way(host: LocalHost, source: Path, target: Path, chunks: None, at: int) -> None:
    def kill(path: str, offset: int, reads: int) -> None:
        if reads == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(Meddling(host, kill), str(source), target)  # type: ignore[arg-type]
    assert not (target / "ledger.sqlite").exists()
    for path in target.glob("*/rows_*/*.bin"):
        assert path.read_bytes() == (source / path.relative_to(target)).read_bytes()
    there = sum(path.stat().st_size for path in target.glob("*/rows_*/*"))
    made = pull(host, str(source), target)
    assert made.fetched_bytes <= bytes_of(source, *ALL) - there + tokens_of(source, *ALL)
    require_copy(target, source, ALL)


def test_a_part_is_gone_on_with(host: LocalHost, source: Path, target: Path, chunks: None) -> None:
    offsets: list[int] = []

    def remember(path: str, offset: int, reads: int) -> None:
        if path.endswith("native/rows_0-2000/4.bin"):
            offsets.append(offset)
            if offset == 3000 and len(offsets) == 4:
                raise KeyboardInterrupt

    meddling = Meddling(host, remember)
    with pytest.raises(KeyboardInterrupt):
        pull(meddling, str(source), target)  # type: ignore[arg-type]
    assert (target / "native/rows_0-2000/4.bin.part").stat().st_size == 3000
    pull(meddling, str(source), target)  # type: ignore[arg-type]
    assert offsets == [0, 1000, 2000, 3000, 3000, 4000, 5000]
    require_copy(target, source, ALL)


@pytest.mark.parametrize("left", [b"wrong" * 200, b"too long" * 5000])
def test_a_part_that_is_wrong(host: LocalHost, source: Path, target: Path, left: bytes) -> None:
    part = target / "native/rows_0-2000/2.bin.part"
    pull(host, str(source), target, [(0, 1)])
    part.write_bytes(left)
    assert pull(host, str(source), target).failed == []
    require_copy(target, source, ALL)


def test_a_local_file_that_was_changed(host: LocalHost, source: Path, target: Path) -> None:
    pull(host, str(source), target)
    path = target / "native/rows_0-2000/2.bin"
    path.write_bytes(bytes(path.stat().st_size))
    (target / "specforge/rows_0-2000/5.bin").unlink()
    (target / "tokens/ids.bin").write_bytes(b"")
    made = pull(host, str(source), target)
    assert made.skipped_files == 14
    require_copy(target, source, ALL)


# --- What is wrong on the host ---


def test_a_changed_file(host: LocalHost, source: Path, target: Path) -> None:
    path = source / "native/rows_0-2000/2.bin"
    path.write_bytes(bytes(path.stat().st_size))
    read: list[str] = []
    made = pull(Meddling(host, lambda path, *_: read.append(path)), str(source), target)  # type: ignore[arg-type]
    assert read.count(str(path)) == 2
    assert [(failure.sample, failure.path, failure.reason) for failure in made.failed] == [
        (2, "native/rows_0-2000/2.bin", "its checksum is not the one that was recorded when it was written")
    ]
    assert (made.samples, made.files) == (7, 14)
    require_copy(target, source, [0, 1, 3, 4, 5, 6, 7])


def test_a_file_of_another_size_and_one_that_is_gone(host: LocalHost, source: Path, target: Path) -> None:
    (source / "native/rows_0-2000/2.bin").write_bytes(b"short")
    (source / "native/rows_0-2000/3.bin").unlink()
    with (source / "native/rows_0-2000/5.bin").open("ab") as longer:
        longer.write(b"x")
    made = pull(host, str(source), target)
    assert [failure.sample for failure in made.failed] == [2, 3, 5]
    assert made.failed[0].reason == "it has 5 bytes on the host, 5,002 were written"
    assert made.failed[1].reason.endswith("3.bin: No such file or directory")
    assert made.failed[2].reason == "it has 5,006 bytes on the host, 5,005 were written"
    require_copy(target, source, [0, 1, 4, 6, 7])


def test_tokens_that_were_changed(host: LocalHost, source: Path, target: Path) -> None:
    mask = bytearray((source / "tokens/mask.bin").read_bytes())
    mask[5] ^= 1  # the first token of sample 1
    (source / "tokens/mask.bin").write_bytes(mask)
    made = pull(host, str(source), target)
    assert [(failure.sample, failure.path) for failure in made.failed] == [(1, "tokens")]
    require_copy(target, source, [0, 2, 3, 4, 5, 6, 7])


@pytest.mark.parametrize("path", ["../out", "/out/of/it", "native/../../out", "tokens/ids.bin", "manifest.json"])
def test_a_ledger_that_leads_elsewhere(host: LocalHost, source: Path, target: Path, path: str) -> None:
    with sqlite3.connect(source / "ledger.sqlite") as db:
        db.execute("UPDATE files SET path = ? WHERE sample = 3 AND format = 'native'", (path,))
    with pytest.raises(UsageError, match="names a file outside the dataset"):
        pull(host, str(source), target)
    assert not target.exists()


# --- What is refused ---


def refused(host: Host, source: Path, target: Path, *chosen: tuple[int, int]) -> str:
    with pytest.raises(UsageError) as error:
        pull(host, str(source), target, chosen or None)
    return str(error.value)


def test_a_disk_that_is_short(host: LocalHost, source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = bytes_of(source, *ALL) + tokens_of(source, *ALL)
    usage = shutil.disk_usage(source)._replace(free=needed - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert refused(host, source, target).startswith(
        f"{target} has {needed - 1:,} bytes free, {needed:,} are still to be fetched"
    )
    assert not target.exists()
    assert pull(host, str(source), target, [(1, 7)]).samples == 7
    free = bytes_of(source, 0) - 1000
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free + tokens_of(source, *ALL)))
    assert "are still to be fetched" in refused(host, source, target)
    part = target / "native/rows_0-2000/0.bin.part"
    part.write_bytes((source / "native/rows_0-2000/0.bin").read_bytes()[:1000])
    assert pull(host, str(source), target).samples == 8  # what is here already needs no room, nor does half a file
    require_copy(target, source, ALL)


@pytest.mark.parametrize(
    ("known", "why"),
    [
        ({"settings": msgspec.structs.replace(SETTINGS, hidden=16)}, "the hidden size was 16, now 8"),
        ({"created": 999.0, "input": "others.jsonl"}, "it was begun at another time, from others.jsonl"),
    ],
)
def test_another_dataset_is_in_the_way(
    host: LocalHost, source: Path, target: Path, home: Path, known: dict[str, Any], why: str
) -> None:
    other = make_dataset(home / "other", **known)
    assert refused(host, source, other) == f"{other} holds another dataset: {why}. Pull into a new folder"
    pull(host, str(other), target)
    assert refused(host, source, target) == f"{target} holds another dataset: {why}. Pull into a new folder"
    require_copy(target, other, ALL)


def test_a_dataset_is_not_pulled_into_itself(host: LocalHost, source: Path) -> None:
    assert refused(host, source, source).startswith(f"{source} is this dataset itself, or a copy that `pull` did not")


def test_other_things_are_in_the_way(host: LocalHost, source: Path, home: Path) -> None:
    (home / "notes").mkdir()
    (home / "notes" / "text").touch()
    assert refused(host, source, home / "notes").startswith(f"{home}/notes is not empty and holds no dataset")
    assert [path.name for path in (home / "notes").iterdir()] == ["text"]
    assert "Not a directory" in refused(host, source, home / "notes" / "text")


def test_no_dataset_no_sample_and_samples_that_are_not_written(host: LocalHost, home: Path, target: Path) -> None:
    assert refused(host, home, target) == f"{home} is no dataset: it has no manifest.json"
    empty, partial = make_dataset(home / "empty", written=0), make_dataset(home / "partial", written=3)
    assert refused(host, empty, target) == f"{empty} has no written sample yet"
    assert refused(host, partial, target, (0, 0), (2, 5)).startswith(
        f"sample 3 is not written in {partial}, which has 3"
    )
    assert not target.exists()


def test_a_target_that_somebody_writes_to(host: LocalHost, source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    with (target / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Locked, match="something else writes to"):
            pull(host, str(source), target)
    pull(host, str(source), target)
    require_copy(target, source, ALL)


# --- The link ---


def test_an_answer_that_does_not_come_is_asked_for_again(host: LocalHost, source: Path, target: Path) -> None:
    def lose(path: str, offset: int, reads: int) -> None:
        if reads % 2:
            raise ConnectionFailed("no answer")

    assert pull(Meddling(host, lose), str(source), target).failed == []  # type: ignore[arg-type]
    require_copy(target, source, ALL)


def test_a_link_that_is_over(host: LocalHost, source: Path, target: Path) -> None:
    def end(path: str, offset: int, reads: int) -> None:
        if reads == 6:
            host.close()
            host.ended.wait(30)

    with pytest.raises(ConnectionFailed):
        pull(Meddling(host, end), str(source), target)  # type: ignore[arg-type]
    assert not (target / "ledger.sqlite").exists()


# --- The command ---


def test_the_command(home: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("LAYERTAP_PYTHON", sys.executable)
    monkeypatch.chdir(home)

    def run(*argv: str) -> Any:
        return cli.app(["pull", *argv], result_action="return_value")

    assert run("source", "target", "--samples", "1-3", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert list(made) == [
        "schema",
        "dataset",
        "target",
        "samples",
        "files",
        "bytes",
        "fetched_bytes",
        "skipped_files",
        "failed",
    ]
    assert (made["dataset"], made["target"], made["samples"]) == (str(source), f"{home}/target", 3)
    (source / "native/rows_0-2000/7.bin").unlink()
    assert run("source", "target") == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("7 samples · 14 files · 70 kB in ") and first.endswith("fetched · 6 files were here")
    assert second.startswith("  sample 7 native/rows_0-2000/7.bin: ")
    require_copy(home / "target", source, ALL[:7])


def test_ctrl_c(home: Path, source: Path) -> None:
    stuck = source / "native/rows_0-2000/0.bin"
    kept = stuck.rename(source / "kept")
    os.mkfifo(stuck)  # cannot be opened before somebody writes to it
    command = [LAYERTAP, "pull", source, home / "target"]
    env = os.environ | {"LAYERTAP_PYTHON": sys.executable}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    until((home / "target/native/rows_0-2000/0.bin.part").exists, "it is on its way")
    process.send_signal(signal.SIGINT)
    printed, said = process.communicate(timeout=60)
    assert (process.returncode, printed) == (130, "")
    assert said.strip() == "what was fetched stays; the same command goes on with the rest"
    kept.replace(stuck)
    subprocess.run(command, env=env, check=True, capture_output=True, timeout=60)
    require_copy(home / "target", source, ALL)


def test_progress_in_words() -> None:
    now = Progress("files", 3, 10, 2_000_000, 10_000_000, 4_000_000.0)
    assert of_run.pulling(msgspec.structs.asdict(now)) == "3 / 10 files · 2 MB / 10 MB · 4 MB/s · 2 s left"
    now = Progress("checking", 3, 10, 2_000_000, 10_000_000, link="reconnecting")
    assert of_run.pulling(msgspec.structs.asdict(now)) == (
        "checking what is here · 3 / 10 files · 2 MB / 10 MB · link reconnecting"
    )
    assert of_run.pulling(msgspec.structs.asdict(Progress("listing"))) == "listing …"
