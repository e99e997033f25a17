"""Ports that are chosen."""

from __future__ import annotations

import pytest

from backends import ports


def test_a_chosen_port_leaves_room_for_one_that_sglang_puts_far_above(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang 0.5.14 does not start on a port over 55,535."""
    assert 1 <= ports.free_port() <= 55_535

    class Socket:
        given = iter([60_999, 55_536, 55_535])

        def __enter__(self) -> Socket:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def bind(self, _address: object) -> None:
            pass

        def getsockname(self) -> tuple[str, int]:
            return "127.0.0.1", next(self.given)

    monkeypatch.setattr(ports.socket, "socket", Socket)
    assert ports.free_port() == 55_535
