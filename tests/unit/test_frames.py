"""Frames: two lengths, a JSON head, a body; anything else is refused with what came instead."""

from __future__ import annotations

import io

import pytest

from backends.frames import LENGTHS, MOST, FrameError, pack, read_frame


class Dribble(io.RawIOBase):
    """A stream that gives one byte a read, as a slow link may."""

    def __init__(self, data: bytes) -> None:
        self.data = io.BytesIO(data)

    def read(self, size: int = -1) -> bytes:
        return self.data.read(min(size, 1))


def test_a_frame_on_the_wire() -> None:
    assert pack({"id": 7}, b"xy") == b"\x00\x00\x00\x08\x00\x00\x00\x02" + b'{"id":7}' + b"xy"


@pytest.mark.parametrize("stream", [io.BytesIO, Dribble])
def test_frames_come_out_as_they_went_in(stream: type) -> None:
    sent = [({"id": 0}, b""), ({"id": 1, "text": "zwölf\n"}, bytes(range(256)) * 300), ({}, b"\x00")]
    link = stream(b"".join(pack(head, body) for head, body in sent))
    assert [read_frame(link) for _ in sent] == sent
    assert read_frame(link) is None


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        (1, "expected a frame, got b'\\x00' and the end"),
        (7, "expected a frame, got b'\\x00\\x00\\x00\\x08\\x00\\x00\\x00' and the end"),
        (8, "a frame of 10 bytes ended after 0"),
        (12, "a frame of 10 bytes ended after 4"),
        (17, "a frame of 10 bytes ended after 9"),
    ],
)
def test_a_stream_that_ends_inside_a_frame(kept: int, said: str) -> None:
    with pytest.raises(FrameError) as failed:
        read_frame(io.BytesIO(pack({"id": 7}, b"xy")[:kept]))
    assert str(failed.value) == said


def test_a_banner_is_no_frame() -> None:
    with pytest.raises(FrameError, match="expected a frame, got b'Welcome '"):
        read_frame(io.BytesIO(b"Welcome to gpu-7\nLast login: today\n"))


def test_a_frame_that_is_too_large_is_not_read() -> None:
    stream = io.BytesIO(LENGTHS.pack(2, MOST - 1) + b"{}")
    with pytest.raises(FrameError, match="expected a frame, got"):
        read_frame(stream)
    assert stream.tell() == LENGTHS.size


@pytest.mark.parametrize("head", [b"", b"{", b"[]", b"7", b"\xff\xff"])
def test_a_head_that_is_no_json_object(head: bytes) -> None:
    with pytest.raises(FrameError, match="expected a frame's JSON head, got"):
        read_frame(io.BytesIO(LENGTHS.pack(len(head), 0) + head))


@pytest.mark.parametrize("head", [{"path": "\udcff"}, {"value": object()}])
def test_what_json_cannot_say_is_an_error_of_the_sender(head: dict) -> None:
    with pytest.raises((TypeError, ValueError)):
        pack(head)
