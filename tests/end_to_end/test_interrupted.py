"""Whatever is killed, stopped or changed on the way: nothing is lost, and nothing is there twice."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from checks import check, history
from command import Layertap, until, write_rows


def test_the_driver_is_killed_and_the_same_command_finishes(
    layertap: Layertap, server: dict[str, Any], work: Path
) -> None:
    rows, output = write_rows(work / "rows.jsonl", 250), work / "out"
    console = layertap.start("extract", rows, "--output", output)
    layertap.until_under_way(output)
    os.kill(layertap.run_of("extract")["running"]["child"]["pid"], signal.SIGKILL)
    assert console.wait(60) == 9
    assert [event["event"] for event in history(layertap)] == ["started", "probed", "prepared", "ended"]
    assert history(layertap)[-1]["signal"] == signal.SIGKILL
    layertap("extract", rows, "--output", output)
    _, probed, prepared, finished, _ = history(layertap)
    assert (probed["passed"], probed["earlier"]) == (True, True)  # the killed run had it probed
    assert (prepared["resumed"], prepared["samples"], prepared["written"] > 0) == (True, 250, True)
    assert (finished["event"], finished["samples"], finished["written"]) == ("finished", 250, 250)
    check(layertap, output, 250)
    layertap("extract", rows, "--output", output)  # and once more: there is nothing to do
    check(layertap, output, 250)
    assert list(Path(server["dump_dir"]).glob("req_*")) == []


def test_the_writer_is_killed_and_the_run_goes_on(layertap: Layertap, server: dict[str, Any], work: Path) -> None:
    rows, output = write_rows(work / "rows.jsonl", 250), work / "out"
    console = layertap.start("extract", rows, "--output", output)
    layertap.until_under_way(output)
    before = layertap.json("status")["dumps"]
    os.kill(before["writer_pids"][0], signal.SIGKILL)
    assert console.wait(200) == 0
    assert layertap.json("status")["dumps"]["writers_lost"] == before["writers_lost"] + 1
    check(layertap, output, 250)


def test_ctrl_c_leaves_the_run_and_the_command_attaches_again(
    layertap: Layertap, server: dict[str, Any], work: Path
) -> None:
    rows, output = write_rows(work / "rows.jsonl", 250), work / "out"
    console = layertap.start("extract", rows, "--output", output)
    until(lambda: layertap.progress(output))
    console.send_signal(signal.SIGINT)
    _, narration = console.communicate(timeout=60)
    assert console.returncode == 130
    assert "goes on; the same command attaches to it again" in narration
    layertap("extract", rows, "--output", output)
    assert "attached to extract-" in layertap.narration or "started extract-" in layertap.narration
    check(layertap, output, 250)


def test_other_settings_are_refused_and_named(layertap: Layertap, server: dict[str, Any], work: Path) -> None:
    rows, output = write_rows(work / "rows.jsonl", 3), work / "out"
    layertap("extract", rows, "--output", output)
    layertap("extract", rows, "--output", output, "--max-length", "64", "--format", "specforge", code=2)
    assert f"{output} was made with other settings" in layertap.narration
    assert "--max-length was None, now 64" in layertap.narration
    assert "--format was native, now specforge" in layertap.narration
    check(layertap, output, 3)


def test_the_input_may_grow_and_may_not_shrink(layertap: Layertap, server: dict[str, Any], work: Path) -> None:
    rows, output = write_rows(work / "rows.jsonl", 5), work / "out"
    layertap("extract", rows, "--output", output)
    write_rows(rows, 8)
    layertap("extract", rows, "--output", output)
    check(layertap, output, 8)
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[2:]))
    layertap("extract", rows, "--output", output, code=2)
    assert f"2 rows of the earlier input are not there any more or read differently now, the first was {rows}:1" in (
        layertap.narration
    )
    check(layertap, output, 8)


def test_the_server_is_killed_launched_again_and_the_run_goes_on(
    layertap: Layertap, server: dict[str, Any], work: Path
) -> None:
    rows, output = write_rows(work / "rows.jsonl", 250), work / "out"
    console = layertap.start("extract", rows, "--output", output)
    layertap.until_under_way(output)
    tap = json.loads((Path(server["dump_dir"]) / "tap.json").read_text())
    os.kill(tap["pid"], signal.SIGKILL)
    _, narration = console.communicate(timeout=200)
    assert console.returncode == 9, narration
    assert "is dead; `layertap launch` it, then give the command again" in narration
    (lost,) = [event for event in history(layertap) if event["event"] == "server_lost"]
    assert "is dead; `layertap launch` it" in lost["reason"]
    layertap("extract", rows, "--output", output, code=None)  # refused in one way or another, and nothing is lost
    layertap("stop", server["id"])
    second = layertap.json("launch", "embedded-llama", "--port", server["port"])
    layertap("extract", rows, "--output", output)
    check(layertap, output, 250)
    drawn = json.loads((output / "manifest.json").read_text())
    assert [one["probe"]["run"] for one in (*drawn["earlier"], drawn)] == [server["id"], second["id"]]
