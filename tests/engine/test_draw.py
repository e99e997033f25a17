"""Drawing without a server: what a drawer makes of dumps.jsonl and of folders that it finds."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from capture import draw
from capture.draw import Drawer, DrawError
from capture.dumps import dump
from capture.dumps.dump import Line, TapState
from capture.server import Process, Server


@pytest.fixture
def drawer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A drawer whose prompts are done at once: row 5 gives `req_5`."""
    own = Process.of(os.getpid())
    server = Server(
        run="r", url="http://localhost", dump_dir=str(tmp_path), secret="s", process=own, model="m", profile="p"
    )
    tap = TapState(code="0", pid=own.pid, sglang="0.5.23", model="m", model_class="M")

    async def generate(rid: str, ids: list[int]) -> None:
        settle(tmp_path, int(rid.split(".")[2]), rid)

    made = Drawer(server, tap)
    monkeypatch.setattr(made, "_generate", generate)
    return made


def settle(dump_dir: Path, number: int, rid: str) -> Path:
    folder = dump.request_folder(dump_dir, number)
    folder.mkdir(exist_ok=True)
    (folder / "done").touch()
    with (dump_dir / "dumps.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(Line(number, rid, "done", 1)) + b"\n")
    return folder


def test_what_was_drawn_before_is_not_gone_through_again(
    drawer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of thousands of lines, of dumps that are in a dataset, would hold up everything else."""
    for number in range(5):
        dump.remove(settle(tmp_path, number, f"s.earlier.{number}.1.3"))
    removed: list[Path] = []
    monkeypatch.setattr(dump, "remove", removed.append)

    async def go() -> None:
        async with drawer:
            assert (await drawer.draw(7, 1, [1, 2, 3]))[1] == tmp_path / "req_7"

    asyncio.run(go())
    assert removed == []


def test_what_an_earlier_drawer_left_is_deleted(drawer: Any, tmp_path: Path) -> None:
    there, late = settle(tmp_path, 0, "s.earlier.0.1.3"), tmp_path / "req_1"
    late.mkdir()

    async def go() -> None:
        async with drawer:
            assert not there.exists() and late.exists()
            settle(tmp_path, 1, "s.earlier.1.1.3")
            _, folder = await drawer.draw(7, 1, [1, 2, 3])
            assert folder.exists()
            while late.exists():
                await asyncio.sleep(0.01)

    asyncio.run(go())


def test_a_journal_that_cannot_be_read_is_told_to_who_draws(drawer: Any, tmp_path: Path) -> None:
    (tmp_path / "req_0").mkdir()
    (tmp_path / "dumps.jsonl").write_text("{}\n")

    async def go() -> None:
        async with drawer:
            with pytest.raises(DrawError, match=r"dumps.jsonl cannot be followed any more: .*required field `n`"):
                await drawer.draw(7, 1, [1, 2, 3])

    asyncio.run(go())


@pytest.mark.parametrize("fault", [DrawError("/generate: ServerDisconnectedError"), asyncio.CancelledError()])
def test_a_dump_that_came_before_its_answer_was_lost_is_removed(
    drawer: Any, tmp_path: Path, fault: BaseException
) -> None:
    """Nobody else would before the next drawer comes, and tmpfs would fill up."""

    async def lose(rid: str, ids: list[int]) -> None:
        settle(tmp_path, 5, rid)
        drawer._deliver(Line(5, rid, "done", 1))
        raise fault

    drawer._generate = lose
    with pytest.raises(type(fault)):
        asyncio.run(drawer.draw(5, 1, [1]))
    assert not (tmp_path / "req_5").exists()
    assert drawer.waiting == {}


def test_a_dump_that_comes_too_late_is_removed_as_it_comes(
    drawer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draw, "DUMP_SECONDS", 0.01)
    rids: list[str] = []

    async def answer(rid: str, ids: list[int]) -> None:
        rids.append(rid)

    drawer._generate = answer
    with pytest.raises(DrawError, match="no dump came within"):
        asyncio.run(drawer.draw(6, 1, [1]))
    settle(tmp_path, 6, rids[0])
    drawer._deliver(Line(6, rids[0], "done", 1))
    assert not (tmp_path / "req_6").exists()
