"""A server as a job sees it: it answers, or it is gone."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from capture.server import Process, Server, ServerGone


@pytest.fixture
def answering() -> Iterator[Callable[[bytes], Server]]:
    """A server on loopback that sends these bytes to one who asks, and hangs up."""
    listener = socket.create_server(("127.0.0.1", 0))
    threads = []

    def answer(data: bytes) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(data)

    def start(data: bytes) -> Server:
        threads.append(threading.Thread(target=answer, args=(data,)))
        threads[0].start()
        url, own = f"http://127.0.0.1:{listener.getsockname()[1]}", Process.of(os.getpid())
        return Server(run="r", url=url, dump_dir="", secret="s", process=own, model="m", profile="p")

    with listener:
        yield start
        for thread in threads:
            thread.join()


def test_what_a_server_is_started_with(answering: Callable[[bytes], Server]) -> None:
    server = answering(b'HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n{"tp_size":2}')
    assert server.info() == {"tp_size": 2}


def test_no_proxy_is_asked_for_it(answering: Callable[[bytes], Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    test_what_a_server_is_started_with(answering)


@pytest.mark.parametrize(
    "data",
    [
        b'HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n{"tp_',
        b"HTTP/1.1 200 OK\r\nContent-Len",
        b'HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n{"tp_',
        b"no HTTP at all\r\n\r\n",
        b"",
    ],
)
def test_a_server_that_dies_in_its_answer(answering: Callable[[bytes], Server], data: bytes) -> None:
    server = answering(data)
    with pytest.raises(ServerGone, match="/server_info does not answer: "):
        server.info()
