"""Every screen as a picture, in every state of the world, at three sizes.

A change that was meant is taken over with `pytest tests/tui/test_pictures.py --snapshot-update`; look at the pictures.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from consoles import console, until_settled, until_shown
from scenes import AT, SCENES
from test_doctor_screen import CHECKS
from textual.pilot import Pilot

SIZES = [(80, 24), (120, 40), (200, 60)]
RUN = {
    "schema": 1,
    "kind": "extract",
    "folder": "/root/.local/state/layertap/runs/x",
    "log": "/root/.local/state/layertap/runs/x/extract.log",
    "dump_dir": None,
    "code": "0123",
    "sglang": None,
    "stop_asked": False,
    "argv": ["python", "-P", "-m", "capture.job", "extract"],
    "events": [{"at": AT - 1500.0, "event": "started", "supervisor": 1, "child": 2}],
    "progress": None,
    "result": None,
}
RUNS = [
    RUN | {"id": "extract-20261129-140200-e5f6", "state": "running", "port": None, "created": AT - 1500.0, "exit": None, "details": {"rows": "/data/rows/gsm-mix.jsonl", "output": "/data/hs/kimi-v3"}},
    RUN | {"id": "server-20261129-135548-a1b2", "kind": "server", "state": "running", "port": 30000, "created": AT - 8040.0, "exit": None, "details": {"profile": "kimi-k2_5-int4-8x"}},
    RUN | {"id": "extract-20261128-090000-0001", "state": "exited", "port": None, "created": AT - 90000.0, "exit": {"code": 1, "signal": None, "at": AT - 80000.0}, "details": {"output": "/data/hs/kimi-v2"}},
    RUN | {"id": "verify-20261127-090000-0002", "state": "exited", "port": None, "created": AT - 180000.0, "exit": {"code": None, "signal": 9, "at": AT - 179000.0}, "details": {"output": "/data/hs/kimi-v1"}},
]  # fmt: skip
ANSWERS: dict[str, Any] = {
    "doctor": lambda **_: {
        "schema": 1,
        "arrived": time.time(),
        "answered": time.time(),
        "checks": msgspec.to_builtins(CHECKS),
    },
    "gate": {"findings": [], "effective": {}, "probe": None},
    "all": RUNS,
    "run": lambda run_id: next(run for run in RUNS if run["id"] == run_id),
    "status": lambda run_id: SCENES["live"]["server"] | RUNS[1],
}


@pytest.fixture(autouse=True)
def fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the scenes."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    monkeypatch.setattr("console.tui.screens.runs.now", lambda: AT)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("scene", SCENES)
def test_the_dashboard(snap_compare: Any, scene: str, size: tuple[int, int]) -> None:
    assert snap_compare(console(scene), terminal_size=size, run_before=until_settled)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize(
    ("key", "text"),
    [("d", "make room"), ("l", "Prefill batch"), ("t", "a prompt"), ("s", "safe to draw from"), ("r", "verify-20261127"), ("o", "2 x H200"), ("question_mark", "Everywhere")],
    ids=["doctor", "logs", "try", "server", "runs", "hosts", "help"],
)  # fmt: skip
def test_a_screen(snap_compare: Any, key: str, text: str, size: tuple[int, int]) -> None:
    async def go(pilot: Pilot[Any]) -> None:
        await until_settled(pilot)  # it may be seen behind what comes
        await pilot.press(key)
        await until_shown(pilot, text)
        await until_settled(pilot)

    assert snap_compare(console("live", ANSWERS), terminal_size=size, run_before=go)


QUESTIONS = {
    "host-key": {
        "kind": "host_key",
        "text": "gpu-host-1 has the key, ssh-ed25519, that nobody here knows yet",
        "fingerprint": "SHA256:nThbg6kXUpJWGl7E1IGOCspRomTxdCARLviKw6E5SY8",
        "again": False,
    },
    "password": {"kind": "password", "text": "password of me@gpu-host-1", "fingerprint": None, "again": True},
}


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question(snap_compare: Any, name: str, size: tuple[int, int]) -> None:
    app = console("connecting")

    async def go(pilot: Pilot[Any]) -> None:
        await until_settled(pilot)
        app.feed.scene["question"] = QUESTIONS[name]  # type: ignore[attr-defined]
        await until_shown(pilot, "Cancel")
        await until_settled(pilot)

    assert snap_compare(app, terminal_size=size, run_before=go)


@pytest.mark.parametrize("theme", ["layertap-light", "layertap-colourblind", "layertap-ansi"])
def test_a_theme(snap_compare: Any, theme: str) -> None:
    from console.config import ConsoleConfig

    app = console("throttled", config=ConsoleConfig(theme=theme, animations=False))
    assert snap_compare(app, terminal_size=(120, 40), run_before=until_settled)
