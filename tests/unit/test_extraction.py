"""What an extraction is asked for, by a form or as an earlier one was."""

from __future__ import annotations

from typing import Any

import pytest

from backends.errors import UsageError
from console import VERSION
from console.extraction import again, going_on, job, live_port, trusted_model

OPTIONS = {
    "max_length": 100,
    "overlong": "truncate",
    "last_turn_only": True,
    "prompt_column": None,
    "response_column": None,
}
SERVER: dict[str, Any] = {
    "state": "running",
    "port": 30000,
    "argv": ["python", "--model-path", "/m", "--trust-remote-code"],
    "details": {"model": "/m"},
}


def test_the_same_job_again() -> None:
    asked = job("/rows.jsonl", "/data", ["native"], OPTIONS, allow_volatile=True, restart_server=2)
    assert asked == {
        "rows": "/rows.jsonl",
        "output": "/data",
        "formats": ["native"],
        "options": OPTIONS,
        "layertap": VERSION,
        "allow_volatile": True,
        "restart_server": 2,
        "beside_ports": [],
    }
    details = {key: value for key, value in asked.items() if key != "layertap"} | {"server": "server-1"}
    assert again({"id": "extract-1", "details": details}) == asked


def test_a_run_that_does_not_say_what_it_was_asked() -> None:
    with pytest.raises(UsageError) as failed:
        again({"id": "extract-1", "details": {"rows": "/rows.jsonl", "output": "/data"}})
    assert str(failed.value) == (
        "extract-1 does not say what it was asked for; start it anew with the same rows and folder"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [({"prompt_column": "q"}, "go together"), ({"max_length": 0}, "it must be at least 1 token")],
)
def test_options_that_do_not_go_together(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        job("/rows.jsonl", "/data", ["native"], options)


def test_a_server_is_not_launched_again_less_than_never() -> None:
    with pytest.raises(UsageError, match="--restart-server takes how often"):
        job("/rows.jsonl", "/data", ["native"], OPTIONS, restart_server=-1)


@pytest.mark.parametrize(("state", "port"), [("running", 30000), ("starting", 30000), ("exited", None), ("died", None)])
def test_the_port_of_a_server_that_runs(state: str, port: int | None) -> None:
    assert live_port(SERVER | {"state": state}) == port
    assert going_on(SERVER | {"state": state}) == (port is not None)
    assert live_port(None) is None


def test_whose_code_may_run() -> None:
    assert trusted_model(SERVER) == "/m"
    assert trusted_model(SERVER | {"argv": ["python"]}) is None
    assert trusted_model(SERVER | {"state": "exited"}) is None
    assert trusted_model(None) is None
