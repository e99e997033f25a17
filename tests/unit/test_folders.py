"""Looking into folders."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from backends import folders
from backends.errors import UsageError
from backends.folders import Entry, read_folder


def test_folders_come_first(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text("{}\n")
    (tmp_path / "a.jsonl").write_text("")
    (tmp_path / "rows").mkdir()
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    found = read_folder(str(tmp_path))
    assert found.path == str(tmp_path)
    assert found.entries == [
        Entry("rows", True, None),
        Entry("a.jsonl", False, 0),
        Entry("b.jsonl", False, 3),
        Entry("gone", False, None),
    ]
    assert found.left_out == 0


def test_a_relative_path_starts_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "rows").mkdir()
    assert read_folder("rows").path == str(tmp_path / "rows")
    assert read_folder("~").path == str(tmp_path)


def test_what_is_left_out_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "MOST", 2)
    for number in range(5):
        (tmp_path / str(number)).touch()
    found = read_folder(str(tmp_path))
    assert ([entry.name for entry in found.entries], found.left_out) == (["0", "1"], 3)


def test_a_name_that_is_no_text_is_left_out(tmp_path: Path) -> None:
    for name in (b"caf\xe9.jsonl", "café.jsonl".encode()):
        (tmp_path / os.fsdecode(name)).touch()
    found = read_folder(str(tmp_path))
    assert ([entry.name for entry in found.entries], found.left_out) == (["café.jsonl"], 1)
    assert msgspec.json.encode(found)


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{tmp_path}/rows: No such file or directory"):
        read_folder(f"{tmp_path}/rows")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="Not a directory"):
        read_folder(f"{tmp_path}/file")
