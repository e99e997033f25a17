"""Themes: ours are whole, the user's come after them, and a bad one is said and left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from console import themes


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "themes"
    folder.mkdir()
    monkeypatch.setattr(themes, "folder", lambda: folder)
    return folder


def test_ours(mine: Path) -> None:
    found, faults = themes.load()
    names = [theme.name for theme in found]
    assert names == ["layertap-ansi", "layertap-colourblind", "layertap-dark", "layertap-light"]
    assert faults == []
    for theme in found:
        assert theme.to_color_system().generate()["text-error"]


def test_a_theme_of_one_s_own(mine: Path) -> None:
    (mine / "mauve.toml").write_text('primary = "#887788"\ndark = true\n[variables]\nborder = "red 35%"\n')
    found, faults = themes.load()
    assert (found[-1].name, found[-1].primary, faults) == ("mauve", "#887788", [])


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('primary = "mauvish"', "primary = 'mauvish' is no colour"),
        ('primary = "red"\nprimry = "red"', "unknown key 'primry'"),
        ('name = "x"\nprimary = "red"', "unknown key 'name'"),
        ("primary = 3", "Expected `str`, got `int` - at `$.primary`"),
        ('dark = true', "missing required field `primary`"),
        ('primary = "red"\n[variables]\nborder = "nope"', "border = 'nope' is no colour"),
        ("primary", "(at end of document)"),
    ],
)  # fmt: skip
def test_a_bad_one_is_said_and_left_out(mine: Path, text: str, fault: str) -> None:
    (mine / "bad.toml").write_text(text)
    found, faults = themes.load()
    assert "bad" not in [theme.name for theme in found]
    (said,) = faults
    assert said.startswith(f"{mine}/bad.toml: ")
    assert fault in said


def test_a_change_is_noticed(mine: Path) -> None:
    before = themes.stamp()
    (mine / "new.toml").write_text('primary = "red"')
    assert themes.stamp() != before
