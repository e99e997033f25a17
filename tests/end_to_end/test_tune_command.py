"""`layertap tune`: what it prints and writes, that it outlives its console, and that Ctrl+C ends it with what is known."""

from __future__ import annotations

import signal

import pytest
from command import Layertap, until

TUNE = ("tune", "embedded-llama", "--set", "max-prefill-tokens=512", "--only", "prefill-1k", "--seconds", "0.5")


def live(layertap: Layertap) -> list[str]:
    """The kinds of what runs for tuning: the run itself and its server."""
    running = [run for run in layertap.runs() if run["state"] == "running"]
    return sorted(run["kind"] for run in running if run["kind"] == "tune" or "tune" in run["details"])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_fastest_becomes_a_profile(layertap: Layertap) -> None:
    config = layertap.folder / "tuned.toml"
    config.write_text("# mine\n")
    made = layertap.json(*TUNE, "--write", "--config", config)
    assert sorted(trial["name"] for trial in made["trials"]) == ["embedded-llama", "prefill-1k"]
    speeds = [trial["tokens_per_second"] for trial in made["trials"]]
    assert speeds == sorted(speeds, reverse=True) and speeds[-1] > 0
    run = layertap.run_of("tune")
    again = layertap.json("tune", "--run", run["id"], "--config", config, "--name", "other")
    assert again["trials"] == made["trials"]
    table = layertap("tune", "--run", run["id"], "--config", config)
    assert f"* {made['best']} " in table
    assert live(layertap) == []
    if made["changes"]:
        assert made["written"] == str(config)
        text = config.read_text()
        assert text == f"# mine\n\n{made['profile_toml']}"
        (merged,) = [layertap.json("launch", "embedded-llama-tuned", "--config", config, "--dry-run")]
        assert ["max-prefill-tokens", "1024"] in [line[:2] for line in merged["args"]]
        layertap(*TUNE, "--write", "--config", config, code=2)
        assert "there is a profile embedded-llama-tuned already" in layertap.narration
        assert config.read_text() == text
    else:
        assert (made["best"], made["written"], config.read_text()) == ("embedded-llama", None, "# mine\n")
        assert "nothing is faster than embedded-llama as it is" in table


@pytest.mark.slow
def test_it_outlives_its_console_and_ends_with_ctrl_c(layertap: Layertap) -> None:
    first = layertap.start(*TUNE)
    until(lambda: live(layertap) == ["server", "tune"])
    run = layertap.run_of("tune")
    first.kill()
    first.communicate()
    second = layertap.start(*TUNE)
    assert second.stderr is not None
    assert second.stderr.readline() == f"attached to {run['id']}, which tunes embedded-llama already\n"
    second.send_signal(signal.SIGINT)
    table, said = second.communicate(timeout=180)
    assert second.returncode == 130, said
    assert "    it was stopped (`layertap logs server-" in table
    assert "ended early: it was asked to stop" in table.splitlines()
    assert live(layertap) == []


@pytest.mark.slow
def test_ctrl_c_before_anything_was_tried(layertap: Layertap) -> None:
    console = layertap.start(*TUNE)
    assert console.stderr is not None
    assert console.stderr.readline().startswith("started tune-")
    console.send_signal(signal.SIGINT)
    _, said = console.communicate(timeout=180)
    assert console.returncode == 130, said
    assert "Traceback" not in said
    assert live(layertap) == []
