"""The support bundle by its key: what the host gathers, with the screen as it is."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
from consoles import console, ignored, until, until_shown
from scenes import MadeSession

from backends.errors import LayertapError
from console import bundle

pytestmark = pytest.mark.asyncio


async def test_its_key_writes_the_screen_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def no_doctor(*_: Any) -> Any:
        raise LayertapError("not now")

    monkeypatch.setattr(bundle, "examine", no_doctor)
    monkeypatch.setattr(MadeSession, "state", {"link": "live"}, raising=False)
    app = console(answers={"bundle": {"files": {"log.txt": "ready"}, "masked": []}})
    async with app.run_test(size=(120, 40)) as pilot:
        await until_shown(pilot, "READY")
        await pilot.press("ctrl+b")
        await until(pilot, lambda: list(tmp_path.glob("layertap-bundle-*.tar.gz")), "written")
    (path,) = tmp_path.glob("layertap-bundle-*.tar.gz")
    assert ignored(path.name)
    with tarfile.open(path) as tar:
        assert sorted(name.rpartition("/")[2] for name in tar.getnames()) == ["log.txt", "masked.json"]
    ((_, parameters),) = [(name, given) for name, given in app.feed.asked if name == "bundle"]
    assert parameters["port"] == 30000  # the server that is shown
    assert parameters["extra"]["screen.svg"].startswith("<svg") and "READY" in parameters["extra"]["screen.svg"]
    assert {"console.json", "doctor.json"} < set(parameters["extra"])
