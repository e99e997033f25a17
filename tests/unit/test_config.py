"""layertap.toml: what it sets, and every mistake named with its file and key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from backends.errors import UsageError
from backends.sglang import ProfileError, load_profiles
from console.config import Config, ExtractConfig, HostConfig, load

Written = Callable[[str], Path]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    def write(text: str) -> Path:
        path = tmp_path / "layertap.toml"
        path.write_text(text)
        return path

    return write


def refused(path: Path) -> str:
    with pytest.raises(UsageError) as failed:
        load(path)
    assert failed.value.exit_code == 2
    return str(failed.value)


def test_a_whole_file(written: Written) -> None:
    path = written("""
        [host.local]
        python = "~/sglang/bin/python"
        dump_dir = "/dev/shm/states"

        [profile.mine]
        extends = "base"
        model = "/models/mine"

        [extract]
        format = ["native", "specforge"]
        max-length = 4096
        overlong = "truncate"
    """)
    assert load(path) == Config(
        host={"local": HostConfig(python="~/sglang/bin/python", dump_dir="/dev/shm/states")},
        profile={"mine": {"extends": "base", "model": "/models/mine"}},
        extract=ExtractConfig(format=["native", "specforge"], max_length=4096, overlong="truncate"),
    )


def test_without_a_file_there_are_defaults(home: Path) -> None:
    assert load(None) == Config()
    assert Config().extract == ExtractConfig(format=["native"], max_length=None, overlong="skip")


def test_the_users_own_file_is_found(home: Path) -> None:
    (home / "config" / "layertap").mkdir(parents=True)
    (home / "config" / "layertap" / "layertap.toml").write_text('[host.local]\npython = "/p"\n')
    assert load(None).host == {"local": HostConfig(python="/p")}


def test_a_file_that_is_asked_for_must_be_there(tmp_path: Path) -> None:
    assert refused(tmp_path / "none.toml") == f"{tmp_path}/none.toml: there is no such file"


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    assert refused(tmp_path) == f"{tmp_path} cannot be read: Is a directory; give a file like layertap.toml"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[hosts.local]", "Object contains unknown field `hosts`; did you mean `host`?"),
        (
            '[host.gpu]\npython = "/p"\n[host.local]\npyhton = "/p"',
            "Object contains unknown field `pyhton` - at `$.host.local`; did you mean `python`?",
        ),
        (
            "[extract]\nmax_length = 1",
            "Object contains unknown field `max_length` - at `$.extract`; did you mean `max-length`?",
        ),
        ("[extract]\npython = 1", "Object contains unknown field `python` - at `$.extract`"),
        ("[zzz]", "Object contains unknown field `zzz`"),
        ("[host.local]\npython = 3", "Expected `str | null`, got `int` - at `$.host.local.python`"),
        ('[extract]\nformat = "native"', "Expected `array`, got `str` - at `$.extract.format`"),
        ('[extract]\nmax-length = "long"', "Expected `int | null`, got `str` - at `$.extract.max-length`"),
        ('[extract]\noverlong = "drop"', "Invalid enum value 'drop' - at `$.extract.overlong`"),
        ("profile = 1", "Expected `object`, got `int` - at `$.profile`"),
    ],
)
def test_a_mistake_is_named_with_file_and_key(written: Written, text: str, said: str) -> None:
    path = written(text)
    assert refused(path) == f"{path}: {said}"


def test_broken_toml_is_named_with_file_and_line(written: Written) -> None:
    path = written("[extract]\nformat = [\n")
    assert refused(path) == f"{path}: Invalid value (at end of document)"
    path = written("[extract]\nformat native\n")
    assert refused(path) == f"{path}: Expected '=' after a key in a key/value pair (at line 2, column 8)"
    path.write_bytes(b"# \xff\n")
    assert refused(path).startswith(f"{path}: 'utf-8' codec can't decode byte 0xff in position 2")


def test_profiles_of_the_file_come_beside_the_built_in_ones(written: Written) -> None:
    profiles = load_profiles(load(written('[profile.mine]\nmodel = "/m"\nargs = { tp = 2 }')).profile)
    assert profiles["mine"].model == "/m"
    assert profiles["mine"].args["tp-size"].value == 2
    assert "base" in profiles


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[profile.mine]\nmodle = "/m"', "profile mine: unknown key modle; did you mean model?"),
        ("[profile.mine]\nmodel = 3", "profile mine: Expected `str | null`, got `int` - at `$.model`"),
        ('[profile.mine]\nextends = "bse"', "profile mine extends bse, which does not exist; did you mean base?"),
        (
            "[profile.base]",
            'profile base is built in: give yours another name, with extends = "base" to start from it',
        ),
    ],
)
def test_a_mistake_in_a_profile_is_named(written: Written, text: str, said: str) -> None:
    loaded = load(written(text))
    with pytest.raises(ProfileError) as failed:
        load_profiles(loaded.profile)
    assert str(failed.value) == said
