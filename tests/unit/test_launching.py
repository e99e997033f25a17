"""What is said to launch a server, and what another launch would change."""

from __future__ import annotations

import pytest

from backends.errors import UsageError
from capture.layers import LayerChoice
from console.launching import differences, flags, layer_choice, pairs, variables


def test_pairs() -> None:
    assert pairs(["a=1", "b", "c=true", "d=false", "e=x=y", "f=unset"], "--set") == {
        "a": "1", "b": True, "c": True, "d": False, "e": "x=y", "f": "unset",
    }  # fmt: skip
    with pytest.raises(UsageError, match="--set '=1': expected NAME=VALUE"):
        pairs(["=1"], "--set")


def test_variables_are_texts() -> None:
    assert variables(["A=1", "B=", "C=true", "D=x=y", "E=unset"], "--env") == {
        "A": "1", "B": "", "C": "true", "D": "x=y", "E": "unset",
    }  # fmt: skip
    for word in ("FOO", "=1"):
        with pytest.raises(UsageError, match=f"--env '{word}': expected NAME=VALUE"):
            variables([word], "--env")


def test_layers_that_were_said_come_before_the_profile_s() -> None:
    assert layer_choice({"outputs": [2]}, {"boundaries": [3]}) == LayerChoice(outputs=[2])
    assert layer_choice({}, {"boundaries": [3]}) == LayerChoice(boundaries=[3])
    with pytest.raises(UsageError, match="say which layers"):
        layer_choice({}, None)
    with pytest.raises(UsageError, match="name the layers in one way"):
        layer_choice({"outputs": [2], "boundaries": [3]}, None)


def test_flags_of_an_argv() -> None:
    argv = ["python", "-m", "sglang.launch_server", "--port", "1", "--trust-remote-code", "--a=b", "--ids", "1", "2"]
    assert flags(argv) == {"--port": "1", "--trust-remote-code": "", "--a": "b", "--ids": "1 2"}


def test_differences() -> None:
    before = ["--port", "1", "--old", "--same", "x"]
    after = ["--port", "2", "--same", "x", "--new", "3"]
    assert differences(before, after) == ["+ --new 3", "- --old", "~ --port 1 -> 2"]
    assert differences(before, before) == []
