"""What a tuning run comes to: a table, and a profile that never takes another one's place."""

from __future__ import annotations

import json
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from backends.errors import UsageError
from backends.sglang import Overrides, load_profiles, resolve
from console import tuned
from console.words import of_run

AT = time.mktime((2026, 11, 30, 12, 0, 0, 0, 0, -1))


def trial(name: str, speed: float | None, **known: Any) -> dict[str, Any]:
    return {
        "name": name,
        "stage": "prefill",
        "base": "deepseek-r1-fp8-8x-h200",
        "changes": [],
        "risk": None,
        "server": "server-1",
        "tokens_per_second": speed,
        "rounds": [speed] * 3 if speed else [],
        "start_seconds": 300.0 if speed else None,
        "ceiling": None,
        "failure": None,
        **known,
    }


def result(**known: Any) -> dict[str, Any]:
    return {
        "schema": 1,
        "profile": "deepseek-r1-fp8-8x-h200",
        "model": "/models/r1",
        "sglang": "0.5.23",
        "at": AT,
        "given": {"model": "/models/r1", "layers": {"outputs": [2, 30, 58]}, "args": {}, "env": {}, "tap": {}},
        "situation": {
            "gpus": 8,
            "gpu_names": ["NVIDIA H200"] * 8,
            "cc": "9.0",
            "vram_gib": 140.4,
            "nvlink": True,
            "architecture": "DeepseekV3ForCausalLM",
        },
        "load": {"prompts": 60, "tokens": 65_000, "longest": 4_000},
        "trials": [
            trial("deepseek-r1-fp8-8x-h200", 20_000.0, base=None, ceiling=80_000.0),
            trial("moe-triton", None, changes=["moe-runner-backend=triton"], failure="CUDA ran out of memory; lower it"),
            trial("prefill-8k", 18_000.0, changes=["max-prefill-tokens=8192"], ceiling=80_000.0),
            trial("prefill-32k", 24_000.0, changes=["max-prefill-tokens=32768"], ceiling=80_000.0),
            trial("overlap", 25_000.0, changes=["disable-overlap-schedule unset"], risk="it hung", ceiling=80_000.0),
        ],
        "best": "prefill-32k",
        "changes": [
            {"kind": "args", "name": "max-prefill-tokens", "value": 32768, "after": 24_000.0, "before": 20_000.0},
            {"kind": "env", "name": "NCCL_P2P_LEVEL", "value": "unset", "after": 24_000.0, "before": None},
        ],
        "stopped": None,
        **known,
    }  # fmt: skip


def test_the_table_has_the_fastest_first() -> None:
    made = tuned.shown(result(), "fast")
    assert list(of_run.tuned(made))[:10] == [
        "one round: 60 prompts, 65,000 tokens, the longest 4,000",
        "  variant                  changes                            tok/s  of the bus    gain    start",
        "  overlap                  disable-overlap-schedule unset    25,000         31%    +25%  5 m 0 s",
        "    not taken into the profile: it hung",
        "* prefill-32k              max-prefill-tokens=32768          24,000         30%    +20%  5 m 0 s",
        "  deepseek-r1-fp8-8x-h200  -                                 20,000         25%       -  5 m 0 s",
        "  prefill-8k               max-prefill-tokens=8192           18,000         22%    -10%  5 m 0 s",
        "! moe-triton               moe-runner-backend=triton              -           -       -        -",
        "    CUDA ran out of memory; lower it (`layertap logs server-1`)",
        "# for layertap.toml:",
    ]
    one_gpu = result(trials=[trial("base", 5.0, base=None)], changes=[], best="base", profile="base")
    assert list(of_run.tuned(tuned.shown(one_gpu, "fast")))[1:] == [
        "  variant  changes     tok/s    gain    start",
        "* base     -               5       -  5 m 0 s",
        "nothing is faster than base as it is",
    ]


def test_a_run_that_was_stopped_says_what_is_known() -> None:
    made = result(trials=[trial("base", None, base=None, failure="it was stopped")], changes=[], best=None, load={})
    lines = list(of_run.tuned(tuned.shown(made | {"stopped": "it was asked to stop"}, "fast")))
    assert lines[1:] == [
        "! base     -               -       -        -",
        "    it was stopped (`layertap logs server-1`)",
        "ended early: it was asked to stop",
    ]


def test_the_profile_launches_what_was_fastest() -> None:
    text = tuned.profile_toml(result(), "fast")
    profiles = load_profiles(tomllib.loads(text)["profile"])
    merged = resolve("fast", profiles, version="0.5.23", model=None, port=1)
    assert merged.model == "/models/r1" and merged.layers == {"outputs": [2, 30, 58]}
    size = next(line for line in merged.args if line.name == "max-prefill-tokens")
    assert size.value == 32768
    assert size.why == "measured by tune on 2026-11-30: 24,000 tokens/s, 20,000 without it"
    assert profiles["fast"].summary == (
        "deepseek-r1-fp8-8x-h200, tuned on 2026-11-30: 24,000 of 80,000 tokens/s that the bus lets through"
    )
    assert profiles["fast"].match is not None
    assert profiles["fast"].match.cc == "9.0" and profiles["fast"].match.vram_gib_min == 140
    assert profiles["fast"].env["NCCL_P2P_LEVEL"].value == "unset"


def test_what_was_said_beside_the_profile_is_in_it_and_no_secret() -> None:
    overrides = Overrides(
        args={"tp-size": "4", "api-key": "sk-1", "trust-remote-code": True, "odd.name": 'say "x" \\ y'},
        env={"HF_TOKEN": "hf_2", "HTTPS_PROXY": "http://me:pw3@proxy:1"},
        tap={"memory": "48 GiB", "writers": 6},
    )
    said = tuned.given(None, {}, overrides)
    assert not any(secret in str(said) for secret in ("sk-1", "hf_2", "pw3"))
    text = tuned.profile_toml(result(given=said), "fast")
    table = tomllib.loads(text)["profile"]["fast"]
    assert table["args"]["odd.name"]["value"] == 'say "x" \\ y'
    assert table["args"]["trust-remote-code"]["value"] is True
    merged = resolve("fast", load_profiles({"fast": table}), version="0.5.23", model="/m", port=1)
    assert merged.tap_settings() == {"memory": 48 << 30, "writers": 6}


# --- Writing ---

TEXT = '[profile.fast]\nextends = "base"\n'


def test_a_profile_is_added_and_all_else_stays(tmp_path: Path) -> None:
    path = tmp_path / "layertap.toml"
    before = '# mine\n[host.gpu]\nssh = "me@gpu"\n\n[profile.slow]\nextends = "base"   # keep\n'
    path.write_text(before)
    path.chmod(0o640)
    tuned.write(path, "fast", TEXT)
    assert path.read_text() == f"{before}\n{TEXT}"
    assert path.stat().st_mode & 0o777 == 0o640
    assert [entry.name for entry in tmp_path.iterdir()] == ["layertap.toml"]


def test_the_first_profile_makes_the_file_and_a_link_stays_a_link(tmp_path: Path) -> None:
    tuned.write(tmp_path / "config" / "layertap.toml", "fast", TEXT)
    assert (tmp_path / "config" / "layertap.toml").read_text() == TEXT
    link = tmp_path / "link.toml"
    link.symlink_to(tmp_path / "kept.toml")
    tuned.write(link, "fast", TEXT)
    assert link.is_symlink() and (tmp_path / "kept.toml").read_text() == TEXT


@pytest.mark.parametrize(
    ("before", "name", "said"),
    [
        (TEXT, "fast", "there is a profile fast already; say another name with --name"),
        ("", "base", "there is a profile base already; say another name with --name"),
        ("[profile", "fast", "the profile was not written"),
        ('profile = { slow = { extends = "base" } }\n', "fast", "the profile was not written"),
    ],
)
def test_what_cannot_be_written_leaves_the_file_as_it_was(tmp_path: Path, before: str, name: str, said: str) -> None:
    path = tmp_path / "layertap.toml"
    path.write_text(before)
    with pytest.raises(UsageError, match=said):
        tuned.write(path, name, TEXT.replace("fast", name))
    assert path.read_text() == before


def test_the_result_is_json(tmp_path: Path) -> None:
    assert json.loads(json.dumps(tuned.shown(result(), "fast")))["profile_toml"].startswith("[profile.fast]\n")
