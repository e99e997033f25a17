"""A server of two replicas (`--dp-size 2`): each has a tap and a folder of its own, and draws what it is asked for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from engines import Engine, Engines

from backends.jobs import sources
from capture import code_hash, gate
from capture.draw import Drawer
from capture.dumps import dump
from capture.server import Server

PROMPTS = [[5, 6, 7, 8], list(range(100, 180)), [9] * 40]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine(engines: Engines) -> Engine:
    return engines.get("embedded-llama", dp_size=2, ENV_SGLANG_CPU_OMP_THREADS_BIND="0|1")


@pytest.fixture(scope="module")
def replicas(engine: Engine, engines: Engines) -> list[Server]:
    told = sources(engines.runs, engine.run)
    assert len({source["lock"] for source in told}) == 1
    return [msgspec.convert(source["server"], Server) for source in told]


def draw(server: Server) -> list[dict[str, Any]]:
    async def go() -> list[dict[str, Any]]:
        tap = dump.read_tap(Path(server.dump_dir))
        assert tap is not None
        states = []
        async with Drawer(server, tap) as drawer:
            for row, ids in enumerate(PROMPTS):
                _, folder = await drawer.draw(row, 0, ids)
                assert folder.parent == Path(server.dump_dir)
                meta = dump.read_meta(folder)
                assert meta.ids == ids
                states.append(dump.read_states(folder, meta))
                dump.remove(folder)
        return states

    return asyncio.run(go())


def test_each_replica_has_a_folder_and_a_tap_in_a_process_of_its_own(engine: Engine, replicas: list[Server]) -> None:
    assert [Path(server.dump_dir) for server in replicas] == [engine.dump_dir / f"replica_{k}" for k in (0, 1)]
    taps = [dump.read_tap(Path(server.dump_dir)) for server in replicas]
    assert all(tap is not None and tap.inside and tap.replicas == 2 for tap in taps)
    assert len({tap.pid for tap in taps if tap}) == 2
    for server, tap in zip(replicas, taps, strict=True):
        assert gate.refusal(gate.check(server.info(), tap, gate.Expected(code_hash(), server.model))) is None


def test_each_replica_draws_what_it_is_asked_for_and_both_the_same(engine: Engine, replicas: list[Server]) -> None:
    before = engine.tap.seen["ours"]
    first, second = (draw(server) for server in replicas)
    for one, other in zip(first, second, strict=True):
        assert set(one) == set(other) == {"aux_0", "aux_1", "aux_2", "final", "last"}
        assert all(torch.equal(one[name], other[name]) for name in one)
    deadline = asyncio.run(_until(lambda: engine.tap.seen["ours"] == before + 2 * len(PROMPTS)))
    assert deadline, "the tap as a whole counts what all of them have seen"


async def _until(true: Any) -> bool:
    for _ in range(600):
        if true():
            return True
        await asyncio.sleep(0.1)
    return False
