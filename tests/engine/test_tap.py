"""The tap in a real server: whose requests it takes, what it leaves, and what it survives."""

from __future__ import annotations

import json
import os
import signal
import stat
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from engines import Engine, Engines

from capture import code_hash
from capture.dumps import dump
from capture.tap.settings import Rid

IDS = [20, 30, 40, 50, 60, 70]


@pytest.fixture
def engine(engines: Engines) -> Engine:
    return engines.get("embedded-kimi-k2_5")


def until(true: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.05)


def send(engine: Engine, name: str, ids: list[int] = IDS) -> str:
    """Have a prompt of ours prefilled; returns its rid, without waiting for its dump."""
    rid = str(Rid(engine.server.secret, name, 0, 0, len(ids)))
    engine.post("/generate", {"input_ids": ids, "rid": rid, "sampling_params": {"max_new_tokens": 0}})
    return rid


def settled(engine: Engine, rid: str) -> dump.Line:
    """The line of a request in dumps.jsonl, once it is there."""
    found: list[dump.Line] = []

    def look() -> bool:
        found[:] = [line for line in dump.Journal(engine.dump_dir).read() if line.rid == rid]
        return bool(found)

    until(look)
    return found[-1]


def test_the_first_cases_layers_in_words(engine: Engine) -> None:
    tap = engine.tap
    assert tap.inside
    assert tap.code == code_hash()
    assert tap.model_class == "KimiK25ForConditionalGeneration"
    assert tap.layers is not None
    assert tap.layers.words() == "outputs of layers 2, 30, 58 (boundaries 3, 31, 59)"
    by_version = [(ids.ids, ids.sglang) for ids in tap.layers.serve_ids_elsewhere]
    assert by_version == [([2, 30, 58], ">=0.5.9,<0.5.13"), ([3, 31, 59], ">=0.5.13")]
    assert (tap.hidden, tap.dtype, tap.ranks) == (128, "bfloat16", 1)
    assert tap.bytes_per_token == 8 + 5 * 128 * 2


def test_warm_up_health_and_strangers_are_counted_and_not_dumped(engine: Engine) -> None:
    before = engine.tap.seen
    assert before["warm_up"] == 1  # the image chat that SGLang sends itself
    lines = len(list(dump.Journal(engine.dump_dir).read()))
    engine.post("/generate", {"input_ids": IDS, "sampling_params": {"max_new_tokens": 3}})
    engine.post("/generate", {"input_ids": IDS, "rid": "x.try.0.0.6", "sampling_params": {"max_new_tokens": 1}})
    urllib.request.urlopen(engine.server.url + "/health", timeout=60).read()
    until(lambda: engine.tap.seen["stranger"] == before["stranger"] + 2)
    until(lambda: engine.tap.seen["health"] > before["health"])
    assert engine.tap.seen["ours"] == before["ours"]
    assert engine.tap.seen["warm_up"] == 1
    engine.draw([IDS])
    until(lambda: engine.tap.seen["ours"] == before["ours"] + 1)
    assert len(list(dump.Journal(engine.dump_dir).read())) == lines + 1


def test_a_prompt_of_one_token_and_the_longest(engine: Engine) -> None:
    longest = [(5 * i * i) % 1000 + 9 for i in range(2048)]
    one, most = engine.draw([[42], longest], together=False)
    assert {name: tuple(state.shape) for name, state in one.items()} == dict.fromkeys(
        ("aux_0", "aux_1", "aux_2", "final", "last"), (1, 128)
    )
    assert most["aux_2"].shape == (2048, 128)
    assert all(state.isfinite().all() and state.dtype == torch.bfloat16 for state in most.values())


def test_a_dump_is_private_and_stands_alone(engine: Engine) -> None:
    folder = dump.request_folder(engine.dump_dir, settled(engine, send(engine, "private")).n)
    assert sorted(path.name for path in folder.iterdir()) == [
        "aux_0.pt", "aux_1.pt", "aux_2.pt", "done", "final.pt", "last.pt", "meta.json",
    ]  # fmt: skip
    for path in [engine.dump_dir.parent, engine.dump_dir, folder, *folder.iterdir(), *engine.dump_dir.glob("*.json*")]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    state = torch.load(folder / "aux_0.pt", weights_only=True)
    assert state.untyped_storage().nbytes() == state.numel() * 2  # a storage of its own, not the arena's
    dump.remove(folder)
    assert not folder.exists()


def test_more_tokens_than_the_rid_names_fail_with_a_reason(engine: Engine) -> None:
    rid = str(Rid(engine.server.secret, "short", 0, 0, 3))
    engine.post("/generate", {"input_ids": IDS, "rid": rid, "sampling_params": {"max_new_tokens": 0}})
    line = settled(engine, rid)
    assert (line.state, line.bytes) == ("failed", 0)
    assert line.reason == "it has more than the 3 tokens that its rid names"
    folder = dump.request_folder(engine.dump_dir, line.n)
    assert [path.name for path in folder.iterdir()] == ["failed"]
    assert json.loads((folder / "failed").read_text()) == {"reason": line.reason}
    with pytest.raises(dump.DumpError, match="more than the 3 tokens"):
        dump.read_meta(folder)


def test_a_killed_writer_is_said_and_replaced(engine: Engine) -> None:
    before, expected = engine.tap, engine.draw([IDS])[0]
    (writer,) = before.writer_pids
    os.kill(writer, signal.SIGSTOP)  # what it is sent from now on, it dies with
    rid = send(engine, "killed")
    os.kill(writer, signal.SIGKILL)
    line = settled(engine, rid)
    assert line.state == "failed"
    assert line.reason == f"the writer process {writer} ended (signal 9) before its dump was whole"
    until(lambda: engine.tap.writers_lost == before.writers_lost + 1 and engine.tap.writer_pids not in ([], [writer]))
    assert f"writer {writer} ended (signal 9); starting another" in engine.log()
    again = engine.draw([IDS])[0]
    assert all(torch.equal(again[name], expected[name]) for name in expected)
    assert urllib.request.urlopen(engine.server.url + "/health", timeout=60).status == 200


def test_a_writer_that_hangs_costs_requests_and_not_the_server(engine: Engine) -> None:
    until(lambda: engine.tap.slots_free == engine.tap.slots)
    (writer,) = engine.tap.writer_pids
    waited = engine.tap.slot_wait_seconds
    os.kill(writer, signal.SIGSTOP)
    try:
        rids = [send(engine, f"hung{i}") for i in range(engine.tap.slots + 2)]
        assert urllib.request.urlopen(engine.server.url + "/health", timeout=60).status == 200
    finally:
        os.kill(writer, signal.SIGCONT)
    lines = [settled(engine, rid) for rid in rids]
    assert [line.state for line in lines] == ["done"] * engine.tap.slots + ["failed"] * 2
    assert lines[-1].reason == "no arena slot came free within 2 s: the writers are too slow"
    assert [line.busy for line in lines] == [False] * engine.tap.slots + [True] * 2
    assert 4 <= engine.tap.slot_wait_seconds - waited < 5  # both waited their time, and no longer
    until(lambda: engine.tap.slots_free == engine.tap.slots)
    assert engine.tap.writer_pids == [writer]


def test_a_dump_that_cannot_be_written_fails_alone(engine: Engine) -> None:
    number = max(line.n for line in dump.Journal(engine.dump_dir).read()) + 1
    place = dump.request_folder(engine.dump_dir, number)
    place.write_text("in the way")
    line = settled(engine, send(engine, "taken"))
    assert (line.n, line.state) == (number, "failed")
    assert line.reason is not None and line.reason.startswith("the dump could not be written: ")
    place.unlink()
    engine.draw([IDS])


def test_nothing_of_ours_outlives_the_server(engines: Engines, engine: Engine) -> None:
    """Last in this file: it stops the server."""
    writer = psutil.Process(engine.tap.writer_pids[0])
    dump_dir = Path(engine.dump_dir)
    processes = engine.run.processes()
    assert writer.pid in {process.pid for process in processes} and len(processes) >= 4
    engines.stop(next(key for key, alive in engines.alive.items() if alive is engine))
    assert not any(process.is_running() and process.status() != "zombie" for process in [writer, *processes])
    assert not dump_dir.exists()
