"""One prompt, one dump: what becomes of a dump whose prompt fails all the same."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from capture import draw
from capture.draw import Drawer, DrawError
from capture.dumps import dump


@pytest.mark.parametrize("fault", [DrawError("/generate: ServerDisconnectedError"), asyncio.CancelledError()])
def test_a_dump_that_came_before_its_answer_was_lost_is_removed(tmp_path: Path, fault: BaseException) -> None:
    """Nobody else would before the server stops, and tmpfs would fill up."""
    folder = dump.request_folder(tmp_path, 5)
    folder.mkdir()
    (folder / "aux_0.pt").write_bytes(b"states")
    drawer: Any = object.__new__(Drawer)
    drawer.dump_dir, drawer.waiting, drawer.broken, drawer.name = tmp_path, {}, None, "n"
    drawer.server = SimpleNamespace(secret="s", run="server-1", replica=None)

    async def answer(rid: str, ids: list[int]) -> None:
        drawer._deliver(dump.Line(5, rid, "done", 1))
        raise fault

    drawer._generate = answer
    with pytest.raises(type(fault)):
        asyncio.run(drawer.draw(1, 1, [1]))
    assert (list(tmp_path.iterdir()), drawer.waiting) == ([], {})


def test_one_that_comes_later_is_removed_as_it_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "DUMP_SECONDS", 0.01)
    drawer: Any = object.__new__(Drawer)
    drawer.dump_dir, drawer.waiting, drawer.broken, drawer.name = tmp_path, {}, None, "n"
    drawer.server = SimpleNamespace(secret="s", run="server-1", replica=None)
    drawer.check_alive = lambda: None
    rids: list[str] = []

    async def answer(rid: str, ids: list[int]) -> None:
        rids.append(rid)

    drawer._generate = answer
    with pytest.raises(DrawError, match="no dump came within"):
        asyncio.run(drawer.draw(1, 1, [1]))
    folder = dump.request_folder(tmp_path, 6)
    folder.mkdir()
    drawer._deliver(dump.Line(6, rids[0], "done", 1))
    assert list(tmp_path.iterdir()) == []
