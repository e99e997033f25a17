"""Which payloads stay on a host."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from backends import payloads
from backends.runs import Run, Runs, Spec, write_json

OLD = time.time() - payloads.UNUSED_SECONDS - 60


def test_old_payloads_go_and_those_in_use_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(tmp_path / "state")
    states = {"lives": "running", "elsewhere": "elsewhere", "ended": "exited"}
    for code in states:
        folder = runs.folder / f"server-{code}"
        folder.mkdir()
        write_json(folder / "spec.json", Spec(id=folder.name, kind="server", argv=[], code=code, created=OLD))
    monkeypatch.setattr(Run, "state", lambda run: states[run.spec.code])
    cache = tmp_path / "payload"
    for name in ("mine", "lives", "elsewhere", "ended", "forgotten", ".payload-half"):
        (cache / name).mkdir(parents=True)
        os.utime(cache / name, (OLD, OLD))
    (cache / "young").mkdir()
    payloads.prune(cache / "mine", runs)
    assert sorted(path.name for path in cache.iterdir()) == ["elsewhere", "lives", "mine", "young"]
    assert (cache / "mine").stat().st_mtime > OLD
