"""Folders of dumps: the tap's, and those that others wrote with torch.save."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from capture.dumps import dump
from capture.dumps.verify_folder import is_dumps, verify_dumps

TOKENS, HIDDEN = 6, 32
REQUESTS = 5


def make_states(seed: int, layers: int = 3, last: bool = True) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    names = [*(f"aux_{i}" for i in range(layers)), "final", *(["last"] if last else [])]
    return {name: torch.randn(TOKENS, HIDDEN, generator=generator).to(torch.bfloat16) for name in names}


def write_own(folder: Path, number: int, seed: int | None = None) -> None:
    meta = dump.Meta(
        format=1,
        rid=f"s.x.{number}.1.6",
        ids=[number, 1, 2, 3, 4, 5],
        tokens=TOKENS,
        hidden=HIDDEN,
        dtype="bfloat16",
        boundaries=[3, 31, 59],
        files={},
        model="/models/kimi",
        sglang="0.5.23",
        tap="00112233",
    )
    dump.write_done(folder / f"req_{number}", make_states(number if seed is None else seed), meta)


def write_other(folder: Path, number: int, meta: Any = None, **kind: Any) -> None:
    """As a first patch does it: torch.save in the forward."""
    place = folder / f"req_{number}"
    place.mkdir()
    for name, state in make_states(number, last=False, **kind).items():
        torch.save(state, place / f"{name}.pt")
    if meta is not None:
        (place / "meta.json").write_text(json.dumps(meta))


@pytest.fixture
def own(tmp_path: Path) -> Path:
    for number in range(REQUESTS):
        write_own(tmp_path, number)
    (tmp_path / "tap.json").write_text("{}")
    (tmp_path / "dumps.jsonl").write_text("")
    return tmp_path


@pytest.fixture
def other(tmp_path: Path) -> Path:
    for number in range(REQUESTS):
        write_other(tmp_path, number)
    return tmp_path


def failures(folder: Path) -> list[tuple[int | None, str]]:
    report = verify_dumps(folder)
    assert all(failure.format is None for failure in report.failures)
    assert report.samples == report.verified + report.failed == report.total
    return [(failure.sample, failure.reason) for failure in report.failures]


def flip(path: Path, where: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(where * len(data))] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("made", ["own", "other"])
def test_whole_dumps(request: pytest.FixtureRequest, made: str) -> None:
    folder = request.getfixturevalue(made)
    told: list[tuple[int, int, int]] = []
    report = verify_dumps(folder, lambda *now: told.append(now))
    assert (report.samples, report.verified, report.failures) == (REQUESTS, REQUESTS, [])
    assert report.bytes == sum(path.stat().st_size for path in folder.rglob("*.pt"))
    assert told[-1] == (REQUESTS, REQUESTS, report.bytes)
    assert is_dumps(folder)
    assert not is_dumps(folder / "req_0")


def test_some_of_them(other: Path) -> None:
    report = verify_dumps(other, most=2)
    assert (report.samples, report.verified, report.total) == (2, 2, REQUESTS)
    assert verify_dumps(other, most=99).samples == REQUESTS


META = {"input_ids": [1, 2, 3, 4, 5, 6], "num_tokens": 6, "hidden_size": HIDDEN, "dtype": "torch.bfloat16"}


def test_a_meta_of_others(tmp_path: Path) -> None:
    for number in range(3):
        write_other(tmp_path, number, META | {"layers": [2, 30, 58], "rid": f"abc{number}", "time": 1.5})
    assert failures(tmp_path) == []


@pytest.mark.parametrize(
    ("meta", "why"),
    [
        ({"num_tokens": 7}, "meta.json says num_tokens = 7, the states have 6"),
        ({"hidden_size": 64}, "meta.json says hidden_size = 64, the states have 32"),
        ({"token_ids": [1, 2]}, "meta.json holds 2 token ids, the states have 6 rows"),
        ({"layers": [2, 30]}, "meta.json says layers = [2, 30], there are 3 aux states"),
        ({"dtype": "float16"}, "meta.json says dtype = float16, the states are bfloat16"),
        ([1, 2], "meta.json holds no object"),
    ],
)
def test_a_meta_that_says_otherwise(other: Path, meta: Any, why: str) -> None:
    (other / "req_2" / "meta.json").write_text(json.dumps(meta))
    assert failures(other) == [(2, why)]


def test_a_meta_that_is_cut(own: Path) -> None:
    meta = own / "req_2" / "meta.json"
    meta.write_bytes(meta.read_bytes()[:-20])
    ((sample, why),) = failures(own)
    assert sample == 2 and why.startswith("meta.json: ")


def test_dumps_of_the_tap_without_their_meta(own: Path) -> None:
    """They keep no CRC-32; what can be seen without it is."""
    for path in own.glob("req_*/meta.json"):
        path.unlink()
    assert failures(own) == []
    os.truncate(own / "req_1" / "last.pt", 300)
    ((sample, why),) = failures(own)
    assert sample == 1 and why.startswith("last.pt is cut or damaged (")


DAMAGE: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "flipped bit": (
        lambda req: flip(req / "aux_1.pt", 0.5),
        "req_2/aux_1.pt was changed after it was written: its checksum differs",
        "aux_1.pt was changed after it was written: Bad CRC-32 for file",
    ),
    "truncated": (
        lambda req: os.truncate(req / "final.pt", 500),
        "req_2/final.pt has 500 bytes, ",
        "final.pt is cut or damaged (",
    ),
    "empty": (
        lambda req: os.truncate(req / "final.pt", 0),
        "req_2/final.pt has 0 bytes, ",
        "final.pt is cut or damaged (",
    ),
    "missing state": (
        lambda req: (req / "aux_0.pt").unlink(),
        "req_2/aux_0.pt: No such file or directory",
        "aux_0.pt is missing",
    ),
    "missing final": (
        lambda req: (req / "final.pt").unlink(),
        "req_2/final.pt: No such file or directory",
        "final.pt is missing",
    ),
    "extra file": (
        lambda req: (req / "aux_1 (copy).pt").write_bytes(b"x"),
        "aux_1 (copy).pt does not belong to it",
        "aux_1 (copy).pt does not belong to it",
    ),
    "failed": (
        lambda req: (req / "failed").write_text('{"reason": "no slot came free"}'),
        "req_2 failed: no slot came free",
        "req_2 failed: no slot came free",
    ),
    "another's state": (
        lambda req: shutil.copy(req.parent / "req_4" / "aux_1.pt", req / "aux_1.pt"),
        "req_2/aux_1.pt was changed after it was written: its checksum differs",
        "",  # nothing tells, without a meta.json that has checksums
    ),
    "states exchanged": (
        lambda req: (
            shutil.move(req / "aux_0.pt", req / "x"),
            shutil.move(req / "aux_1.pt", req / "aux_0.pt"),
            shutil.move(req / "x", req / "aux_1.pt"),
        ),
        "req_2/aux_0.pt was changed after it was written: its checksum differs",
        "",
    ),
    "copied": (
        lambda req: (shutil.rmtree(req), shutil.copytree(req.parent / "req_1", req)),
        "",  # the same prompt may be there twice; its meta.json says that it is
        "its states are those of req_1, a copy, or the same prompt again",
    ),
    "nothing": (lambda req: [path.unlink() for path in req.iterdir()], "it holds no aux_<i>.pt", "it holds no aux_<i>.pt"),
}  # fmt: skip


@pytest.mark.parametrize("made", ["own", "other"])
@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(request: pytest.FixtureRequest, made: str, kind: str) -> None:
    folder = request.getfixturevalue(made)
    damage, *expected = DAMAGE[kind]
    damage(folder / "req_2")
    found, why = failures(folder), expected[made == "other"]
    if why:
        ((sample, reason),) = found
        assert sample == 2 and reason.startswith(why)
    else:
        assert found == []


def test_tokens_of_one_and_states_of_another(own: Path) -> None:
    shutil.rmtree(own / "req_3")
    write_own(own, 3, seed=1)
    assert failures(own) == [(3, "its states are those of req_1, though their tokens differ")]


def test_a_request_that_is_missing(own: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The tap's dumps go once they are in a dataset; in a folder of others a gap is a loss."""
    shutil.rmtree(own / "req_1")
    assert failures(own) == []
    (own / "tap.json").unlink()
    report = verify_dumps(own)
    assert [(one.sample, one.reason) for one in report.failures] == [(1, "req_1 is missing between req_0 and req_4")]
    assert (report.samples, report.verified, report.failed) == (4, 4, 0)


def test_a_request_unlike_the_others(other: Path) -> None:
    shutil.rmtree(other / "req_3")
    write_other(other, 3, layers=2)
    assert failures(other) == [
        (3, "it holds 2 aux states [tokens, 32] of bfloat16, most others 3 [tokens, 32] of bfloat16")
    ]


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16), "aux_1 row 0 is 0.0 throughout"),
        (torch.full((TOKENS, HIDDEN), float("nan")), "aux_1 is torch.float32, expected bfloat16"),
        (torch.full((TOKENS, HIDDEN), float("nan"), dtype=torch.bfloat16), "aux_1 holds values that are not finite"),
        (torch.ones(TOKENS - 1, HIDDEN, dtype=torch.bfloat16), "aux_1 has shape [5, 32], expected [6, 32]"),
        ([1, 2], "aux_1.pt holds a list, not a tensor"),
    ],
)
def test_states_that_are_not_sound(other: Path, state: Any, why: str) -> None:
    torch.save(state, other / "req_2" / "aux_1.pt")
    ((sample, reason),) = failures(other)
    assert sample == 2 and reason.startswith(why)


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (torch.zeros(0, HIDDEN), "its states are [0, 32]: they hold nothing"),
        (torch.zeros(TOKENS, 0), "its states are [6, 0]: they hold nothing"),
        (
            torch.ones(TOKENS, HIDDEN).to(torch.float8_e4m3fn),
            "its states are float8_e4m3fn; bfloat16, float16, float32, float64 can be verified, convert them to one",
        ),
        (torch.ones(TOKENS, HIDDEN, dtype=torch.bool), "its states are bool; bfloat16, "),
        (torch.ones(TOKENS, HIDDEN, dtype=torch.complex64), "its states are complex64; bfloat16, "),
        (torch.ones(TOKENS, HIDDEN).to_sparse(), "aux_0.pt holds a sparse tensor, not a dense one"),
    ],
)
def test_states_that_cannot_be_verified(other: Path, state: torch.Tensor, why: str) -> None:
    for path in (other / "req_2").iterdir():
        torch.save(state, path)
    ((sample, reason),) = failures(other)
    assert sample == 2 and reason.startswith(why)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tokens": 0, "ids": []}, "its states are [0, 32]: they hold nothing"),
        ({"hidden": -1}, "its states are [6, -1]: they hold nothing"),
        ({"dtype": "float8_e4m3fn"}, "its states are float8_e4m3fn; bfloat16, "),
        ({"dtype": "device"}, "its states are device; bfloat16, "),
    ],
)
def test_a_meta_of_states_that_cannot_be_verified(own: Path, change: dict[str, Any], why: str) -> None:
    meta = own / "req_2" / "meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | change))
    ((sample, reason),) = failures(own)
    assert sample == 2 and reason.startswith(why)


def test_numbers_that_are_filled_up_with_zeros(other: Path) -> None:
    for number in range(REQUESTS):
        (other / f"req_{number}").rename(other / f"req_{number:04}")
    assert failures(other) == []
    shutil.copy(other / "req_0001" / "final.pt", other / "req_0003" / "final.pt")
    (other / "req_0002" / "final.pt").unlink()
    assert failures(other) == [(2, "final.pt is missing")]
    shutil.rmtree(other / "req_0002")
    shutil.copytree(other / "req_0001", other / "req_0004", dirs_exist_ok=True)
    why = "its states are those of req_0001, a copy, or the same prompt again"
    missing = "req_2 is missing between req_0000 and req_0004"
    report = verify_dumps(other)
    assert [(failure.sample, failure.reason) for failure in report.failures] == [(2, missing), (4, why)]


def test_two_folders_of_one_number(other: Path) -> None:
    write_other(other, 9)
    (other / "req_9").rename(other / "req_02")
    assert failures(other) == [(2, "req_2 has the number of req_02; rename one")]


def test_torchs_older_format(other: Path) -> None:
    torch.save(make_states(2)["aux_1"], other / "req_2" / "aux_1.pt", _use_new_zipfile_serialization=False)
    assert failures(other) == []


def test_verifying_changes_nothing(other: Path) -> None:
    before = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}
    verify_dumps(other)
    assert {path: path.read_bytes() for path in other.rglob("*") if path.is_file()} == before
