"""Several writers on one arena: who gets which request, and what one of them that dies or hangs costs."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from test_writer import NAMES, SHAPE, Prompt, Tap, until

from capture.dumps import dump
from capture.tap import writer_link, writers
from capture.tap.writer import Fail, Piece
from capture.tap.writers import Writers, default_count


@pytest.fixture
def tap(tmp_path: Path) -> Tap:
    return Tap(tmp_path)


@pytest.fixture
def three(tap: Tap) -> Iterator[Writers]:
    made = Writers(3, SHAPE.slots, tap.settings)
    until(lambda: all(link.ready for link in made.links))
    yield made
    for link in made.links:
        link.lock.acquire()  # what becomes of its process is no longer of interest
        if link.pid is not None:
            os.kill(link.pid, signal.SIGKILL)


def forward(writers: Writers, tap: Tap, *rows: tuple[Prompt, int, int]) -> int:
    """Fill a slot with rows `prefix … prefix + length` of each prompt and hand it over; returns the slot."""
    slot = writers.take_slot(30)
    assert slot is not None
    writers.send_forward(slot, tap.forward(slot, *rows).pieces)
    return slot


def settled(tap: Tap, count: int) -> None:
    until(lambda: len(tap.journal()) == count)


def test_a_forward_is_dealt_out_by_rows(three: Writers) -> None:
    """Longest first, each to who has least."""
    lengths = [1, 20, 5, 8, 9, 3, 18]
    pieces = [Piece(n, f"s.x.{n}.1.{length}", 0, length, 0, length) for n, length in enumerate(lengths)]
    parts = three._deal(pieces)
    assert sorted(sum(piece.length for piece in part) for _, part in parts) == [21, 21, 22]
    assert sorted(piece.number for _, part in parts for piece in part) == list(range(7))


def test_all_of_them_work_on_one_slot_and_it_is_free_after_the_last(three: Writers, tap: Tap) -> None:
    prompts = [Prompt(number, 7) for number in range(9)]
    stopped = three.links[1]
    os.kill(stopped.pid, signal.SIGSTOP)
    slot = forward(three, tap, *((prompt, 0, 7) for prompt in prompts))
    settled(tap, 6)
    until(lambda: [link.load for link in three.links] == [0, 21, 0])
    assert three.free.qsize() == SHAPE.slots - 1 and three.readers[slot] == 1
    os.kill(stopped.pid, signal.SIGCONT)
    settled(tap, 9)
    until(lambda: three.free.qsize() == SHAPE.slots)
    tap.assert_dumped(*prompts)


@pytest.mark.parametrize("seed", range(3))
def test_chunks_of_a_prompt_meet_in_one_writer(three: Writers, tap: Tap, seed: int) -> None:
    """Cut anywhere, several prompts a forward, whole ones among them, nothing waited for between forwards."""
    dice = random.Random(seed)
    prompts = [Prompt(number, dice.randint(1, 150)) for number in range(30)]
    at = dict.fromkeys(prompts, 0)
    while coming := [prompt for prompt in prompts if at[prompt] < prompt.total]:
        rows, room = [], 64
        for prompt in dice.sample(coming, min(len(coming), dice.randint(1, 6))):
            length = min(dice.randint(1, 40), prompt.total - at[prompt], room)
            if length:
                rows.append((prompt, at[prompt], length))
                at[prompt], room = at[prompt] + length, room - length
        forward(three, tap, *rows)
    settled(tap, 30)
    tap.assert_dumped(*prompts)
    assert sorted(line.n for line in tap.journal()) == list(range(30))
    assert three.begun == {}


def test_lines_of_several_writers_stay_whole(three: Writers, tap: Tap) -> None:
    prompts = [Prompt(number, 1) for number in range(1200)]
    for at in range(0, 1200, 40):
        forward(three, tap, *((prompt, 0, 1) for prompt in prompts[at : at + 40]))
    settled(tap, 1200)
    assert Counter(line.state for line in tap.journal()) == {"done": 1200}
    assert sorted(line.n for line in tap.journal()) == list(range(1200))


def test_one_that_is_killed_loses_its_part_only(three: Writers, tap: Tap) -> None:
    prompts = [Prompt(number, 7) for number in range(9)]
    link = three.links[0]
    killed = link.pid
    os.kill(killed, signal.SIGSTOP)
    forward(three, tap, *((prompt, 0, 7) for prompt in prompts))
    os.kill(killed, signal.SIGKILL)
    settled(tap, 9)
    failed = [line for line in tap.journal() if line.state == "failed"]
    assert len(failed) == 3
    reason = f"the writer process {killed} ended (signal 9) before its dump was whole"
    assert [(line.reason, line.busy) for line in failed] == [(reason, False)] * 3
    tap.assert_dumped(*(prompt for prompt in prompts if prompt.number not in {line.n for line in failed}))
    until(lambda: three.free.qsize() == SHAPE.slots and link.ready)
    assert (link.lost, link.load, sum(other.lost for other in three.links)) == (1, 0, 1)
    later = [Prompt(number, 7) for number in range(9, 18)]
    forward(three, tap, *((prompt, 0, 7) for prompt in later))
    settled(tap, 18)
    tap.assert_dumped(*later)


def test_one_that_hangs_is_passed_by_then_killed(three: Writers, tap: Tap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "SLOW_SECONDS", 0.2)
    monkeypatch.setattr(writer_link, "HUNG_SECONDS", 5.0)
    monkeypatch.setattr(writer_link, "LOOK_MILLISECONDS", 50)
    link = three.links[2]
    hung = psutil.Process(link.pid)
    os.kill(hung.pid, signal.SIGSTOP)
    first = [Prompt(number, 7) for number in range(3)]
    forward(three, tap, *((prompt, 0, 7) for prompt in first))
    until(lambda: link.silent > 0.2)
    later = [Prompt(number, 2) for number in range(3, 60)]
    for prompt in later:  # in the two other slots
        forward(three, tap, (prompt, 0, 2))
    settled(tap, 2 + len(later))
    tap.assert_dumped(*later)
    settled(tap, 3 + len(later))
    (lost,) = (line for line in tap.journal() if line.state == "failed")
    assert lost.reason == f"the writer process {hung.pid} ended (signal 9) before its dump was whole"
    assert not hung.is_running() or hung.status() == psutil.STATUS_ZOMBIE
    until(lambda: three.free.qsize() == SHAPE.slots and link.ready)


def test_a_writer_has_the_longer_the_more_it_has_to_write(three: Writers, tap: Tap) -> None:
    link = three.links[0]
    until(lambda: link.ready)
    assert link.patience == writer_link.HUNG_SECONDS
    link.load = 262_144  # a prompt of Kimi's, that one writer has alone
    per_token = SHAPE.bytes_per_token
    assert link.patience == writer_link.HUNG_SECONDS + 262_144 * per_token / writer_link.SLOW_BYTES
    link.load = 0


def test_one_that_never_comes_up_is_killed(tap: Tap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_link, "START_SECONDS", 0.5)
    monkeypatch.setattr(writer_link, "LOOK_MILLISECONDS", 50)
    start, started = subprocess.Popen, []

    def instead(argv: list[str], **options: Any) -> subprocess.Popen[bytes]:
        """The first one sleeps, as on a disk that has stalled."""
        monkeypatch.setattr(writer_link, "START_SECONDS", 60.0 if started else 0.5)
        started.append(start(argv if started else ["sleep", "600"], **options))
        return started[-1]

    monkeypatch.setattr(writer_link.subprocess, "Popen", instead)
    made = Writers(1, SHAPE.slots, tap.settings)
    try:
        prompt = Prompt(0, 7)
        forward(made, tap, (prompt, 0, 7))
        settled(tap, 1)
        reason = f"the writer process {started[0].pid} ended (signal 9) before its dump was whole"
        assert [(line.state, line.reason) for line in tap.journal()] == [("failed", reason)]
        until(lambda: made.free.qsize() == SHAPE.slots and made.links[0].ready)
        forward(made, tap, (Prompt(1, 7), 0, 7))
        settled(tap, 2)
        tap.assert_dumped(Prompt(1, 7))
    finally:
        made.links[0].lock.acquire()
        started[-1].kill()


def test_a_prompt_given_up_half_way_is_failed_by_who_has_its_beginning(three: Writers, tap: Tap) -> None:
    prompts = [Prompt(number, 8) for number in range(6)]
    until(lambda: all(link.ready for link in three.links))
    forward(three, tap, *((prompt, 0, 4) for prompt in prompts))
    assert set(three.begun.values()) == set(three.links)
    for prompt in prompts:
        three.send_fail(Fail(prompt.number, prompt.rid, "no further chunk came"))
    settled(tap, 6)
    assert {line.reason for line in tap.journal()} == {"no further chunk came"}
    assert three.begun == {}
    until(lambda: not any(link.unsettled for link in three.links))


def test_time_waited_for_slots_is_counted(three: Writers) -> None:
    """No more than went by, and where nothing comes free all of what was allowed."""
    begun = time.monotonic()
    slots = [three.take_slot(1) for _ in range(SHAPE.slots)]
    assert sorted(slot for slot in slots if slot is not None) == list(range(SHAPE.slots))
    free = three.waited
    assert three.take_slot(0.3) is None
    assert three.waited - free >= 0.3
    earlier = three.waited
    threading.Timer(0.2, three.put_back, [1]).start()
    assert three.take_slot(10) == 1
    assert three.waited - earlier > 0
    assert three.waited <= time.monotonic() - begun


@pytest.mark.parametrize(
    ("cores", "ranks", "count"), [(1, 1, 1), (2, 1, 1), (16, 1, 11), (16, 4, 9), (64, 8, 12), (4, 8, 1)]
)
def test_as_many_as_the_cores_that_the_ranks_leave(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int, count: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(cores)))
    assert default_count(ranks) == count


def test_files_that_are_filled_again_while_others_are_read(tmp_path: Path) -> None:
    """Three writers, dumps of a megabyte a state, read by two threads and deleted: each is what was sent."""
    shape = msgspec.structs.replace(SHAPE, slots=3, slot_tokens=256, hidden=4096)
    tap = Tap(tmp_path, shape)
    pool = Writers(3, shape.slots, msgspec.structs.replace(tap.settings, spare_bytes=90 << 20))
    made: dict[int, Prompt] = {}
    wrong: list[int] = []

    def check(numbers: range) -> None:
        buffer, left = dump.Buffer(), set(numbers)
        while left:
            for line in tap.journal():
                if line.n not in left:
                    continue
                left.remove(line.n)
                folder = dump.request_folder(tmp_path, line.n)
                states = dump.read_states(folder, dump.read_meta(folder), buffer)
                if not all(torch.equal(states[name], made[line.n].states[i]) for i, name in enumerate(NAMES)):
                    wrong.append(line.n)
                dump.remove(folder)
                del made[line.n]

    readers = [threading.Thread(target=check, args=(range(start, 120, 2),)) for start in (0, 1)]
    for reader in readers:
        reader.start()
    try:
        for number in range(0, 120, 2):
            prompts = [Prompt(n, 128 - (n % 7), hidden=4096) for n in (number, number + 1)]
            made |= {prompt.number: prompt for prompt in prompts}
            forward(pool, tap, *((prompt, 0, prompt.total) for prompt in prompts))
        for reader in readers:
            reader.join(60)
        assert (wrong, made) == ([], {})
        names = {path.stat().st_ino for path in tmp_path.glob("spare_*")}
        assert 0 < len(names) < 5 * 120 / 2  # far fewer files than states were written
    finally:
        for link in pool.links:
            link.lock.acquire()
            os.kill(link.pid, signal.SIGKILL)
