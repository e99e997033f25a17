"""Following a log: no byte is lost that is still there, and whatever becomes of the file is told. The files are real."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from backends.logs import TAIL, LogCursor, PartHead, Step, read_part


class Follower:
    """Follows a log as the console does, and keeps what came."""

    def __init__(self, path: Path, cursor: LogCursor | None = None, most: int = 1 << 20) -> None:
        self.path = path
        self.cursor = cursor or LogCursor()
        self.most = most
        self.came = b""
        self.told: list[tuple[str, int | None]] = []

    def look(self) -> Follower:
        """Read until nothing more comes."""
        while True:
            head, data = read_part(str(self.path), most=self.most, **self.cursor.asks)
            step = self.cursor.advance(head, data)
            self.came += step.data
            if step.kind != "continue":
                self.told.append((step.kind, step.lost))
            elif not step.data:
                return self


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "server.log"
    path.write_bytes(b"one\ntwo\n")
    return path


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


# --- It grows ---


def test_a_log_that_grows(log: Path) -> None:
    follower = Follower(log).look()
    append(log, b"thr")
    follower.look()
    append(log, b"ee\n")
    follower.look().look()
    assert (follower.came, follower.told) == (b"one\ntwo\nthree\n", [])
    assert follower.cursor == LogCursor(log.stat().st_ino, 14, b"one\ntwo\nthree\n")


def test_a_line_of_a_megabyte_and_binary_bytes_in_small_parts(log: Path) -> None:
    whole = b"one\ntwo\n" + b"x" * (1 << 20) + b"\n" + bytes(range(256)) * 100 + b"\0" * 500 + "…\n".encode()
    log.write_bytes(whole)
    follower = Follower(log, most=1000).look()
    append(log, b"\xff\xfe\n")
    assert follower.look().came == whole + b"\xff\xfe\n"
    assert follower.told == []


def test_a_cursor_that_is_kept_goes_on_where_it_was(log: Path) -> None:
    first = Follower(log).look()
    kept = json.dumps(msgspec.to_builtins(first.cursor))
    append(log, b"three\n")
    second = Follower(log, msgspec.json.decode(kept, type=LogCursor)).look()
    assert (second.came, second.told) == (b"three\n", [])


def test_a_cursor_that_knows_only_an_offset(log: Path) -> None:
    follower = Follower(log, LogCursor(log.stat().st_ino, 4)).look()
    assert (follower.came, follower.told) == (b"two\n", [])


def test_no_more_is_read_than_was_asked_for(log: Path) -> None:
    inode = log.stat().st_ino
    assert read_part(str(log), 2, 3) == (PartHead(8, inode), b"e\nt")
    assert read_part(str(log), 2, 3, inode, 1) == (PartHead(8, inode), b"ne\nt")
    assert read_part(str(log), 8, 3, inode) == (PartHead(8, inode), b"")
    assert read_part(str(log), 0, 0) == (PartHead(8, inode), b"")


# --- It is renamed and begun anew ---


def test_a_rotated_log_loses_nothing(log: Path) -> None:
    follower = Follower(log).look()
    append(log, b"three\n")
    log.rename(log.with_name("server.log.1"))
    log.write_bytes(b"four\n")
    follower.look()
    assert (follower.came, follower.told) == (b"one\ntwo\nthree\nfour\n", [("rotated", 0)])


def test_whoever_writes_it_may_go_on_in_the_renamed_file(log: Path) -> None:
    """As the server does, which never opens its log again."""
    follower = Follower(log)
    with log.open("ab") as writer:
        log.rename(log.with_name("server.log.1"))
        writer.write(b"three\n")
        writer.flush()
        follower.cursor = LogCursor(os.fstat(writer.fileno()).st_ino, 8)
        follower.look()
        log.touch()
        writer.write(b"four\n")
    follower.look()
    assert (follower.came, follower.told) == (b"three\nfour\n", [])
    append(log, b"five\n")
    follower.look()
    assert (follower.came, follower.told) == (b"three\nfour\nfive\n", [("rotated", 0)])


def test_a_log_that_is_gone_with_what_was_not_read(log: Path) -> None:
    follower = Follower(log).look()
    append(log, b"three\n")
    (log.parent / "archive").mkdir()
    log.rename(log.parent / "archive" / "server.log")
    log.write_bytes(b"four\n")
    follower.look()
    assert (follower.came, follower.told) == (b"one\ntwo\nfour\n", [("rotated", None)])


def rotate_twice(log: Path, name: str) -> None:
    """What is between the two is called `name` in the end."""
    log.rename(log.with_name("server.log.2"))
    log.with_name(name).write_bytes(b"three\n")
    log.write_bytes(b"four\n")
    for seconds, path in enumerate([log.with_name("server.log.2"), log.with_name(name), log]):
        os.utime(path, (1000 + seconds, 1000 + seconds))


def test_two_rotations_between_two_looks(log: Path) -> None:
    follower = Follower(log).look()
    append(log, b"last\n")
    rotate_twice(log, "server.log.1")
    follower.look()
    assert follower.came == b"one\ntwo\nlast\nthree\nfour\n"
    assert follower.told == [("rotated", 0), ("rotated", 0)]


def test_a_log_that_was_compressed_before_it_was_read(log: Path) -> None:
    follower = Follower(log).look()
    rotate_twice(log, "server.log.1.gz")
    follower.look()
    assert (follower.came, follower.told) == (b"one\ntwo\nfour\n", [("rotated", None)])


def test_a_log_that_is_not_there(log: Path) -> None:
    follower = Follower(log).look()
    log.unlink()
    with pytest.raises(FileNotFoundError):
        follower.look()
    log.write_bytes(b"one\ntwo\nthree\n")  # it may well get the same inode, and then it is the same log, grown
    follower.look()
    assert follower.came in (b"one\ntwo\nthree\n", b"one\ntwo\none\ntwo\nthree\n")
    assert follower.told in ([], [("rotated", None)])


# --- It is cut ---


def test_a_log_that_was_copied_and_cut(log: Path) -> None:
    follower = Follower(log).look()
    with log.open("ab") as writer:
        log.with_name("server.log.1").write_bytes(log.read_bytes())
        os.truncate(log, 0)
        writer.write(b"new\n")
    follower.look()
    assert (follower.came, follower.told) == (b"one\ntwo\nnew\n", [("truncated", None)])


@pytest.mark.parametrize("grown", [0, 1, TAIL, 10_000])
def test_a_log_that_was_cut_and_has_grown_past_the_offset(log: Path, grown: int) -> None:
    """Neither size nor inode tells; its bytes do."""
    follower = Follower(log).look()
    os.truncate(log, 0)
    append(log, b"12345678" + b"x" * grown)
    follower.look()
    assert follower.came == b"one\ntwo\n12345678" + b"x" * grown
    assert follower.told == [("truncated", None)]


def test_a_log_that_was_emptied(log: Path) -> None:
    follower = Follower(log).look()
    os.truncate(log, 0)
    assert follower.look().told == [("truncated", None)]
    assert (follower.cursor.offset, follower.cursor.tail) == (0, b"")


# --- The cursor alone ---


def test_what_was_lost_is_told_where_it_is_known() -> None:
    cursor = LogCursor(7, 100, b"tail")
    assert cursor.advance(PartHead(size=50, inode=8, previous=130), b"x" * 50) == Step("rotated", b"", 30)
    assert cursor == LogCursor(8, 0, b"")


def test_a_log_that_was_cut_while_it_was_read() -> None:
    """The size is from before, the bytes from after."""
    cursor = LogCursor(7, 100, b"tail")
    assert cursor.advance(PartHead(size=100, inode=7), b"") == Step("truncated", b"", None)
