"""The writer: arena slots in, dumps and their journal out, alone and as the process that the tap starts."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tmpfs import fill, small_tmpfs

from capture.dumps import dump
from capture.dumps.dump import Journal, Line
from capture.tap.arena import Arena, ArenaShape
from capture.tap.writer import MESSAGE_BYTES, Ack, Fail, Forward, Piece, Writer, WriterSettings

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["aux_0", "aux_1", "aux_2", "final", "last"]
SHAPE = ArenaShape(slots=3, slot_tokens=64, states=5, hidden=16, dtype="bfloat16")
TOKEN_BYTES = 5 * 16 * 2


class Prompt:
    """A request of ours: its ids and the states that the model would have made of them, told apart by number."""

    def __init__(self, number: int, total: int, hidden: int = 16) -> None:
        self.number, self.total, self.rid = number, total, f"secret.x1.{number}.1.{total}"
        generator = torch.Generator().manual_seed(number)
        self.ids = torch.randint(0, 1000, (total,), generator=generator)
        self.states = torch.randn(5, total, hidden, generator=generator).to(torch.bfloat16)

    def line(self, size: int) -> Line:
        return Line(self.number, self.rid, "done", size)


class Tap:
    """The tap's side of an arena: copies rows of prompts into a slot, packed, as one forward."""

    def __init__(self, dump_dir: Path, shape: ArenaShape = SHAPE, reserve: int = 0) -> None:
        self.dump_dir, self.arena = dump_dir, Arena.create(dump_dir / "arena", shape)
        self.settings = WriterSettings(
            dump_dir=str(dump_dir),
            arena=shape,
            boundaries=[3, 31, 59],
            reserve=reserve,
            model="/models/tiny",
            sglang="0.5.23",
            tap="00112233",
        )

    def forward(self, slot: int, *rows: tuple[Prompt, int, int], last: bool = True) -> Forward:
        """Rows `prefix … prefix + length` of each prompt, in that order."""
        pieces, start = [], 0
        for prompt, prefix, length in rows:
            to, source = slice(start, start + length), slice(prefix, prefix + length)
            self.arena.ids(slot)[to] = prompt.ids[source]
            self.arena.states(slot)[:, to] = prompt.states[:, source]
            pieces.append(Piece(prompt.number, prompt.rid, start, length, prefix, prompt.total))
            start += length
        return Forward(slot, pieces, last)

    def wipe(self) -> None:
        """Write over every slot, as the next forwards do."""
        self.arena.bytes.fill_(255)

    def journal(self) -> list[Line]:
        return list(Journal(self.dump_dir).read())

    def folder(self, prompt: Prompt) -> Path:
        return dump.request_folder(self.dump_dir, prompt.number)

    def assert_dumped(self, *prompts: Prompt) -> None:
        for prompt in prompts:
            meta = dump.read_meta(self.folder(prompt))
            assert (meta.rid, meta.tokens, meta.ids) == (prompt.rid, prompt.total, prompt.ids.tolist())
            states = dump.read_states(self.folder(prompt), meta)
            assert list(states) == NAMES
            for name, expected in zip(NAMES, prompt.states, strict=True):
                assert torch.equal(states[name], expected), (prompt.number, name)


@pytest.fixture
def tap(tmp_path: Path) -> Tap:
    return Tap(tmp_path)


def size_of(tap: Tap, prompt: Prompt) -> int:
    return sum(path.stat().st_size for path in tap.folder(prompt).glob("*.pt"))


# --- Slicing ---


def test_each_prompt_of_a_forward_gets_its_own_rows(tap: Tap) -> None:
    prompts = [Prompt(0, 5), Prompt(1, 1), Prompt(2, 40), Prompt(3, 18)]  # the slot's 64 rows
    answer = Writer(tap.settings).forward(tap.forward(1, *((prompt, 0, prompt.total) for prompt in prompts)))
    tap.wipe()
    assert answer == Ack(1, [0, 1, 2, 3], 0)
    tap.assert_dumped(*prompts)
    assert tap.journal() == [prompt.line(size_of(tap, prompt)) for prompt in prompts]


def test_what_a_dump_says_of_itself(tap: Tap) -> None:
    prompt = Prompt(4, 6)
    Writer(tap.settings).forward(tap.forward(0, (prompt, 0, 6)))
    meta = dump.read_meta(tap.folder(prompt))
    assert msgspec.structs.replace(meta, files={}, ids=[]) == dump.Meta(
        format=1,
        rid="secret.x1.4.1.6",
        ids=[],
        tokens=6,
        hidden=16,
        dtype="bfloat16",
        boundaries=[3, 31, 59],
        files={},
        model="/models/tiny",
        sglang="0.5.23",
        tap="00112233",
    )
    state = torch.load(tap.folder(prompt) / "aux_1.pt", weights_only=True)
    assert state.untyped_storage().nbytes() == 6 * 16 * 2  # not the arena's


def test_states_in_float32(tmp_path: Path) -> None:
    tap = Tap(tmp_path, msgspec.structs.replace(SHAPE, dtype="float32"))
    prompt = Prompt(0, 9)
    prompt.states = torch.randn(5, 9, 16)
    Writer(tap.settings).forward(tap.forward(2, (prompt, 0, 9)))
    tap.assert_dumped(prompt)
    assert dump.read_meta(tap.folder(prompt)).dtype == "float32"


def test_a_slot_is_free_after_the_last_message_about_it(tap: Tap) -> None:
    writer, one, two = Writer(tap.settings), Prompt(0, 4), Prompt(1, 4)
    whole = tap.forward(2, (one, 0, 4), (two, 0, 4))
    assert writer.forward(Forward(2, whole.pieces[:1], last=False)) == Ack(None, [0], 0)
    assert writer.forward(Forward(2, whole.pieces[1:], last=True)) == Ack(2, [1], 0)
    tap.assert_dumped(one, two)


# --- Prompts that come in chunks ---


@pytest.mark.parametrize("seed", range(8))
def test_chunks_in_any_interleaving(tap: Tap, seed: int) -> None:
    """Prompts cut anywhere, several chunks a forward, other prompts' chunks between; whole ones among them."""
    dice, writer = random.Random(seed), Writer(tap.settings)
    prompts = [Prompt(number, dice.randint(1, 150)) for number in range(6)]
    at = dict.fromkeys(prompts, 0)
    settled = []
    for turn in range(10_000):
        coming = [prompt for prompt in prompts if at[prompt] < prompt.total]
        if not coming:
            break
        rows, room = [], 64
        for prompt in dice.sample(coming, dice.randint(1, len(coming))):
            length = min(dice.randint(1, 40), prompt.total - at[prompt], room)
            if length:
                rows.append((prompt, at[prompt], length))
                at[prompt], room = at[prompt] + length, room - length
        answer = writer.forward(tap.forward(turn % 3, *rows))
        tap.wipe()
        whole = [prompt.number for prompt, _, _ in rows if at[prompt] == prompt.total]
        assert answer == Ack(turn % 3, whole, 0)
        settled += whole
    assert sorted(settled) == [0, 1, 2, 3, 4, 5]
    tap.assert_dumped(*prompts)
    assert [line.n for line in tap.journal()] == settled
    assert writer.partial == {}


def test_a_prompt_that_sglang_starts_again_begins_anew(tap: Tap) -> None:
    writer, first, again = Writer(tap.settings), Prompt(0, 10), Prompt(0, 12)
    writer.forward(tap.forward(0, (first, 0, 7)))
    writer.forward(tap.forward(0, (again, 0, 5)))
    assert writer.forward(tap.forward(0, (again, 5, 7))) == Ack(0, [0], 0)
    tap.assert_dumped(again)


def test_the_rest_of_a_prompt_that_a_dead_writer_had(tap: Tap) -> None:
    prompt, other = Prompt(5, 30), Prompt(6, 3)
    Writer(tap.settings).forward(tap.forward(0, (prompt, 0, 10)))
    successor = Writer(tap.settings)
    assert successor.fail(Fail(5, prompt.rid, "the writer ended")) == Ack(None, [5], 1)
    assert successor.forward(tap.forward(1, (prompt, 10, 10))) == Ack(1, [5], 0)
    assert successor.forward(tap.forward(2, (prompt, 20, 10), (other, 0, 3))) == Ack(2, [5, 6], 0)
    tap.assert_dumped(other)
    assert [(line.n, line.state) for line in tap.journal()] == [(5, "failed"), (6, "done")]
    assert [path.name for path in tap.folder(prompt).iterdir()] == ["failed"]


# --- Requests that fail ---


def test_a_request_that_is_given_up(tap: Tap) -> None:
    answer = Writer(tap.settings).fail(Fail(3, "secret.x1.3.1.9", "no arena slot came free"))
    assert answer == Ack(None, [3], 1)
    assert tap.journal() == [Line(3, "secret.x1.3.1.9", "failed", 0, "no arena slot came free")]
    with pytest.raises(dump.DumpError, match="req_3 failed: no arena slot came free"):
        dump.read_meta(tap.dump_dir / "req_3")


def test_a_prompt_that_is_given_up_half_way(tap: Tap) -> None:
    writer, prompt = Writer(tap.settings), Prompt(0, 20)
    writer.forward(tap.forward(0, (prompt, 0, 10)))
    writer.fail(Fail(0, prompt.rid, "no further chunk"))
    assert writer.partial == {}
    assert writer.forward(tap.forward(0, (prompt, 10, 10))) == Ack(0, [0], 0)
    assert [path.name for path in tap.folder(prompt).iterdir()] == ["failed"]
    assert [line.state for line in tap.journal()] == ["failed"]


def test_what_a_writer_finished_before_it_died_is_done(tap: Tap) -> None:
    """It died between dump and journal: the tap gives the request up, the next writer knows better."""
    prompt = Prompt(8, 7)
    Writer(tap.settings).forward(tap.forward(0, (prompt, 0, 7)))
    (tap.dump_dir / "dumps.jsonl").unlink()
    assert Writer(tap.settings).fail(Fail(8, prompt.rid, "the writer ended")) == Ack(None, [8], 0)
    tap.assert_dumped(prompt)
    assert tap.journal() == [prompt.line(size_of(tap, prompt))]


@pytest.mark.parametrize("taken", [False, True], ids=["in use", "taken"])
def test_what_a_writer_journaled_before_it_died_is_left_alone(tap: Tap, taken: bool) -> None:
    """The driver may be reading that dump, or have deleted it; a second line would have it deleted, or failed."""
    prompt = Prompt(8, 7)
    Writer(tap.settings).forward(tap.forward(0, (prompt, 0, 7)))
    line = prompt.line(size_of(tap, prompt))
    if taken:
        dump.remove(tap.folder(prompt))
    assert Writer(tap.settings).fail(Fail(8, prompt.rid, "the writer ended")) == Ack(None, [8], 0)
    assert tap.journal() == [line]
    assert tap.folder(prompt).exists() != taken
    if not taken:
        tap.assert_dumped(prompt)


def test_a_line_that_a_writer_died_in_is_cut_off(tap: Tap) -> None:
    one, two, path = Prompt(0, 3), Prompt(1, 3), tap.dump_dir / "dumps.jsonl"
    Writer(tap.settings).forward(tap.forward(0, (one, 0, 3)))
    before = path.read_bytes()
    path.write_bytes(before + b'{"n":1,"rid":"secret.x1')
    writer = Writer(tap.settings)
    assert writer.journaled_before == {0}
    assert path.read_bytes() == before + b'{"n":1,"rid":"secret.x1'  # another writer may be at it
    writer.forward(tap.forward(0, (two, 0, 3)))
    assert [line.n for line in tap.journal()] == [0, 1]


def test_only_the_end_of_a_long_journal_is_read(tap: Tap) -> None:
    path = tap.dump_dir / "dumps.jsonl"
    lines = [msgspec.json.encode(Line(n, f"secret.x1.{n}.1.100", "done", 12345)) + b"\n" for n in range(30_000)]
    path.write_bytes(b"".join(lines) + b'{"n":')
    found = Writer(tap.settings).journaled_before
    assert found == set(range(30_000 - len(found), 30_000))
    assert 10_000 < len(found) < 20_000


# --- No room ---


def test_the_reserve_is_left_free(tmp_path: Path) -> None:
    """A request that would go into the reserve fails, and the reserve holds its reason."""
    with small_tmpfs(tmp_path / "small", "256k") as small:
        tap = Tap(small, reserve=64 << 10)
        one, two = Prompt(0, 64), Prompt(1, 64)
        fill(small, leaving=(64 << 10) + (20 << 10))
        writer = Writer(tap.settings)
        assert writer.forward(tap.forward(0, (one, 0, 64))) == Ack(0, [0], 0)
        assert writer.forward(tap.forward(1, (two, 0, 64))) == Ack(1, [1], 1)
        tap.assert_dumped(one)
        done, failed = tap.journal()
        assert (done.n, done.state) == (0, "done")
        assert (failed.n, failed.state, failed.bytes) == (1, "failed", 0)
        needed, free = 64 * TOKEN_BYTES, failed.reason.split(" are needed, ")[1].split(" are free")[0]
        assert failed.reason == (
            f"the dump could not be written: {needed:,} bytes are needed, {free} are free on {small}"
        )
        assert 0 <= int(free.replace(",", "")) < needed
        assert [path.name for path in tap.folder(two).iterdir()] == ["failed"]
        with pytest.raises(dump.DumpError, match="req_1 failed: the dump could not be written: 10,240 bytes are need"):
            dump.read_meta(tap.folder(two))


def test_memory_that_fills_up_under_a_dump(tmp_path: Path) -> None:
    """Somebody else took what was free a moment ago: the request fails, the writer lives, its pieces are removed."""
    with small_tmpfs(tmp_path / "small", "256k") as small:
        tap, prompt, later = Tap(small), Prompt(0, 64), Prompt(1, 2)
        writer = Writer(tap.settings)
        filler = fill(small, leaving=64 * TOKEN_BYTES + 4096)  # the states fit, their files do not
        assert writer.forward(tap.forward(0, (prompt, 0, 64))) == Ack(0, [0], 1)
        assert tap.journal() == [
            Line(0, prompt.rid, "failed", 0, "the dump could not be written: No space left on device", busy=True)
        ]
        assert [path.name for path in tap.folder(prompt).iterdir()] == ["failed"]
        filler.unlink()
        assert writer.forward(tap.forward(1, (later, 0, 2))) == Ack(1, [1], 0)
        tap.assert_dumped(later)


def test_a_line_without_room_comes_with_the_next(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "small", "256k") as small:
        tap, one, two = Tap(small), Prompt(0, 4), Prompt(1, 4)
        writer = Writer(tap.settings)
        filler = fill(small)
        assert writer.forward(tap.forward(0, (one, 0, 4))) == Ack(0, [0], 1)
        assert tap.journal() == []
        filler.unlink()
        assert writer.forward(tap.forward(0, (two, 0, 4))) == Ack(0, [1], 0)
        assert [(line.n, line.state) for line in tap.journal()] == [(0, "failed"), (1, "done")]
        assert tap.journal()[0].reason == f"the dump could not be written: 640 bytes are needed, 0 are free on {small}"


def test_half_a_line_is_taken_back(tmp_path: Path) -> None:
    """What is written of a journal line that does not fit is cut off again."""
    with small_tmpfs(tmp_path / "small", "256k") as small:
        tap = Tap(small)
        writer, path = Writer(tap.settings), small / "dumps.jsonl"
        first = Line(0, "x" * 4000, "done", 1)  # the journal's page has 40 bytes left, the file system none
        writer.journal([first])
        fill(small)
        before = path.read_bytes()
        writer.journal([Line(1, "y" * 200, "done", 1)])
        assert path.read_bytes() == before
        assert [line.n for line in writer.unwritten] == [1]


def test_an_arena_without_room_leaves_nothing(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "small", "16k") as small:
        with pytest.raises(OSError, match="No space left on device"):
            Arena.create(small / "arena", SHAPE)
        assert list(small.iterdir()) == []


# --- The process ---


class Running:
    """A writer as the tap starts it, and the tap's end of the socket."""

    def __init__(self, tap: Tap) -> None:
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.link.settimeout(60)
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "capture.tap.writer", str(theirs.fileno())),
                msgspec.json.encode(tap.settings).decode(),
            ],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        theirs.close()
        assert msgspec.json.decode(self.link.recv(MESSAGE_BYTES), type=Ack) == Ack(None)  # it is ready

    def send(self, message: Forward | Fail) -> None:
        self.link.send(msgspec.json.encode(message))

    def ask(self, message: Forward | Fail) -> Ack:
        self.send(message)
        return msgspec.json.decode(self.link.recv(MESSAGE_BYTES), type=Ack)

    def end(self) -> tuple[int, str]:
        """Close our end; the exit code and what it said."""
        self.link.close()
        said = self.process.communicate(timeout=60)[1].decode()
        return self.process.returncode, said


@contextlib.contextmanager
def running(tap: Tap) -> Iterator[Running]:
    writer = Running(tap)
    try:
        yield writer
    finally:
        writer.process.kill()
        writer.process.wait()


def until(true: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)


def test_the_process_settles_what_it_is_sent_and_ends_with_its_tap(tap: Tap) -> None:
    whole, other, chunked, given_up = Prompt(0, 50), Prompt(1, 14), Prompt(2, 80), Prompt(3, 9)
    with running(tap) as writer:
        assert writer.ask(tap.forward(0, (whole, 0, 50), (other, 0, 14))) == Ack(0, [0, 1], 0)
        assert writer.ask(tap.forward(1, (chunked, 0, 60))) == Ack(1, [], 0)
        writer.process.send_signal(signal.SIGTERM)  # the server's group is being stopped
        writer.process.send_signal(signal.SIGINT)
        assert writer.ask(Fail(3, given_up.rid, "why")) == Ack(None, [3], 1)
        assert writer.ask(tap.forward(2, (chunked, 60, 20))) == Ack(2, [2], 0)
        assert writer.end() == (0, "layertap writer: request secret.x1.3.1.9 is not dumped: why\n")
    tap.assert_dumped(whole, other, chunked)
    assert [(line.n, line.state) for line in tap.journal()] == [
        (0, "done"), (1, "done"), (3, "failed"), (2, "done"),
    ]  # fmt: skip
    for path in tap.dump_dir.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_what_is_in_flight_is_settled_before_the_process_ends(tap: Tap) -> None:
    prompts = [Prompt(number, 60) for number in range(3)]
    with running(tap) as writer:
        for slot, prompt in enumerate(prompts):
            writer.send(tap.forward(slot, (prompt, 0, 60)))
        writer.link.shutdown(socket.SHUT_WR)
        assert writer.process.wait(timeout=60) == 0
        assert writer.process.communicate()[1] == b""
    tap.assert_dumped(*prompts)


def test_a_tap_that_died_without_reading_the_answers(tap: Tap) -> None:
    prompt = Prompt(0, 4)
    with running(tap) as writer:
        writer.send(tap.forward(0, (prompt, 0, 4)))
        until(lambda: writer.link.recv(1, socket.MSG_PEEK))  # the answer lies there
        assert writer.end() == (0, "")


def test_a_line_without_room_needs_no_further_request(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "small", "256k") as small:
        tap, prompt = Tap(small), Prompt(0, 4)
        with running(tap) as writer:
            filler = fill(small)
            assert writer.ask(tap.forward(0, (prompt, 0, 4))) == Ack(0, [0], 1)
            assert tap.journal() == []
            filler.unlink()
            until(tap.journal)
            assert [(line.n, line.state) for line in tap.journal()] == [(0, "failed")]
            code, said = writer.end()
            assert code == 0
            assert said.count("dumps.jsonl: [Errno 28]") == 1
