"""The dump folder: who may own it, what a request leaves there, and how damage to it is told."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import msgspec
import pytest
import torch
from tmpfs import fill, small_tmpfs

from capture.dumps import dump
from capture.dumps.dump import DumpError, Journal, Line, Meta, TapState

IDS = [11, 12, 13]
NAMES = ["aux_0", "aux_1", "final", "last"]


def meta(**other: object) -> Meta:
    made = Meta(
        format=1,
        rid="secret.try.0.1.3",
        ids=IDS,
        tokens=3,
        hidden=4,
        dtype="bfloat16",
        boundaries=[2, 5],
        files={},
        model="/models/tiny",
        sglang="0.5.23",
        tap="00112233",
    )
    return msgspec.structs.replace(made, **other)


@pytest.fixture
def states() -> dict[str, torch.Tensor]:
    values = torch.arange(48, dtype=torch.float32).view(4, 3, 4).to(torch.bfloat16)
    return {name: values[i].clone() for i, name in enumerate(NAMES)}


@pytest.fixture
def folder(tmp_path: Path, states: dict[str, torch.Tensor]) -> Path:
    """The dump of a request that is done."""
    made = dump.request_folder(tmp_path, 7)
    dump.write_done(made, states, meta())
    return made


# --- Whose folder ---


def test_a_private_folder_is_made_and_taken_again(tmp_path: Path) -> None:
    root = tmp_path / "root"
    before = os.umask(0)
    try:
        assert dump.make_private(root) == root
    finally:
        os.umask(before)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    (root / "kept").touch()
    assert dump.make_private(root) == root
    assert (root / "kept").exists()


def test_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    for name, target in (("link", "real"), ("dangling", "nowhere")):
        (tmp_path / name).symlink_to(tmp_path / target)
        with pytest.raises(DumpError) as refused:
            dump.make_private(tmp_path / name)
        assert str(refused.value) == (
            f"{tmp_path / name} is not a folder (or is a symbolic link); remove it or choose another dump root"
        )
    assert not (tmp_path / "nowhere").exists()


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch(mode=0o600)
    with pytest.raises(DumpError, match="file is not a folder"):
        dump.make_private(tmp_path / "file")


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701, 0o770])
def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    with pytest.raises(DumpError) as refused:
        dump.make_private(tmp_path / "open")
    assert str(refused.value) == (
        f"{tmp_path / 'open'} is open to other users; chmod 700 it or choose another dump root"
    )
    assert stat.S_IMODE((tmp_path / "open").stat().st_mode) == mode


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to somebody else")
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    os.chown(tmp_path / "theirs", 65534, 65534)
    with pytest.raises(DumpError) as refused:
        dump.make_private(tmp_path / "theirs")
    assert str(refused.value) == f"{tmp_path / 'theirs'} belongs to user 65534, not to us; choose another dump root"


def test_a_missing_parent_is_named(tmp_path: Path) -> None:
    with pytest.raises(DumpError) as refused:
        dump.make_private(tmp_path / "no" / "root")
    assert str(refused.value) == f"{tmp_path / 'no' / 'root'}: No such file or directory"


# --- A request that is done ---


def test_a_dump_comes_back_as_it_was_written(folder: Path, states: dict[str, torch.Tensor]) -> None:
    found = dump.read_meta(folder)
    assert msgspec.structs.replace(found, files={}) == meta()
    read = dump.read_states(folder, found)
    assert list(read) == NAMES
    assert all(torch.equal(read[name], states[name]) and read[name].dtype == torch.bfloat16 for name in NAMES)


def test_a_dump_is_nothing_but_its_files(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == [
        "aux_0.pt", "aux_1.pt", "done", "final.pt", "last.pt", "meta.json",
    ]  # fmt: skip
    assert (folder / "done").read_bytes() == b""


def test_its_size_is_that_of_the_states(tmp_path: Path, states: dict[str, torch.Tensor]) -> None:
    size = dump.write_done(tmp_path / "req_0", states, meta())
    assert size == sum(path.stat().st_size for path in (tmp_path / "req_0").glob("*.pt"))


def test_anybody_can_load_a_state_and_it_stands_alone(folder: Path) -> None:
    state = torch.load(folder / "final.pt", weights_only=True)
    assert state.tolist() == [[24.0, 25.0, 26.0, 27.0], [28.0, 29.0, 30.0, 31.0], [32.0, 33.0, 34.0, 35.0]]
    assert state.is_contiguous()
    assert state.untyped_storage().nbytes() == 3 * 4 * 2


def test_a_full_file_system_is_an_oserror(tmp_path: Path, states: dict[str, torch.Tensor]) -> None:
    with small_tmpfs(tmp_path / "small", "64k") as small:
        fill(small, leaving=3 * 4096)
        with pytest.raises(OSError, match="No space left on device"):
            dump.write_done(small / "req_0", states, meta())
        assert not (small / "req_0" / "done").exists()


# --- A request that failed ---


def test_a_failed_request_leaves_its_reason_alone(folder: Path) -> None:
    dump.write_failed(folder, "no arena slot came free")
    assert [path.name for path in folder.iterdir()] == ["failed"]
    assert json.loads((folder / "failed").read_text()) == {"reason": "no arena slot came free"}
    with pytest.raises(DumpError) as refused:
        dump.read_meta(folder)
    assert str(refused.value) == "req_7 failed: no arena slot came free"


def test_a_request_fails_without_having_begun(tmp_path: Path) -> None:
    dump.write_failed(tmp_path / "req_1", "taken back")
    assert [path.name for path in (tmp_path / "req_1").iterdir()] == ["failed"]


def test_a_reason_that_there_was_no_room_for(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "small", "64k") as small:
        (small / "req_2").mkdir()
        fill(small)
        with pytest.raises(OSError, match="No space left on device"):
            dump.write_failed(small / "req_2", "why it failed")
        with pytest.raises(DumpError) as refused:
            dump.read_meta(small / "req_2")
    assert str(refused.value) == "req_2 failed: the reason is not there; there was no room for it"


# --- Damage ---


def test_a_dump_under_way_is_not_read(folder: Path) -> None:
    (folder / "done").unlink()
    with pytest.raises(DumpError) as refused:
        dump.read_meta(folder)
    assert str(refused.value) == "req_7 has no done mark"


@pytest.mark.parametrize("name", ["aux_0.pt", "aux_1.pt", "final.pt", "last.pt"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(DumpError) as refused:
        dump.read_states(folder, dump.read_meta(folder))
    assert str(refused.value) == f"req_7/{name}: No such file or directory"


@pytest.mark.parametrize("name", ["aux_0.pt", "aux_1.pt", "final.pt", "last.pt"])
def test_a_cut_file_is_named(folder: Path, name: str) -> None:
    size = (folder / name).stat().st_size
    os.truncate(folder / name, size - 1)
    with pytest.raises(DumpError) as refused:
        dump.read_states(folder, dump.read_meta(folder))
    assert str(refused.value) == f"req_7/{name} has {size - 1} bytes, {size} were written"


@pytest.mark.parametrize("name", ["aux_0.pt", "aux_1.pt", "final.pt", "last.pt"])
def test_a_flipped_bit_is_named(folder: Path, name: str) -> None:
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(DumpError) as refused:
        dump.read_states(folder, dump.read_meta(folder))
    assert str(refused.value) == f"req_7/{name} was changed after it was written: its checksum differs"


def test_exchanged_files_are_told(folder: Path) -> None:
    (folder / "aux_0.pt").rename(folder / "other")
    (folder / "aux_1.pt").rename(folder / "aux_0.pt")
    (folder / "other").rename(folder / "aux_1.pt")
    with pytest.raises(DumpError, match=r"req_7/aux_0\.pt was changed after it was written"):
        dump.read_states(folder, dump.read_meta(folder))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "req_7/meta.json: Input data was truncated"),
        (b'{"format":1,"rid":"x"', "req_7/meta.json: Input data was truncated"),
        (b'{"format":1}', "req_7/meta.json: Object missing required field `rid`"),
        (b'{"format":"1"}', "req_7/meta.json: Expected `int`, got `str` - at `$.format`"),
        (msgspec.json.encode(meta(format=2)), "req_7 has dump format 2, this version reads 1"),
    ],
)
def test_a_wrong_meta_is_named(folder: Path, text: bytes, reason: str) -> None:
    (folder / "meta.json").write_bytes(text)
    with pytest.raises(DumpError) as refused:
        dump.read_meta(folder)
    assert str(refused.value) == reason


def test_a_missing_meta_is_named(folder: Path) -> None:
    (folder / "meta.json").unlink()
    with pytest.raises(DumpError, match=r"req_7/meta\.json: .*No such file"):
        dump.read_meta(folder)


# --- Removing ---


def test_a_removed_request_is_gone(folder: Path) -> None:
    dump.remove(folder)
    assert not folder.exists()
    dump.remove(folder)  # somebody else was first


def test_a_half_removed_request_is_not_taken_for_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump.shutil, "rmtree", lambda *_, **__: None)  # as if killed there
    dump.remove(folder)
    with pytest.raises(DumpError, match="req_7 has no done mark"):
        dump.read_meta(folder)


# --- dumps.jsonl ---

FIRST = Line(0, "s.try.0.1.3", "done", 4096)
SECOND = Line(1, "s.try.1.1.3", "failed", 0, "a reason with\na new line")


def text(line: Line) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def test_no_journal_yet(tmp_path: Path) -> None:
    assert list(Journal(tmp_path).read()) == []


def test_each_line_comes_once(tmp_path: Path) -> None:
    journal, path = Journal(tmp_path), tmp_path / "dumps.jsonl"
    path.write_bytes(text(FIRST))
    assert list(journal.read()) == [FIRST]
    assert list(journal.read()) == []
    with path.open("ab") as file:
        file.write(text(SECOND))
    assert list(journal.read()) == [SECOND]
    assert list(Journal(tmp_path).read()) == [FIRST, SECOND]


@pytest.mark.parametrize("written", [1, 20, len(text(SECOND)) - 1])
def test_a_line_under_way_is_left_for_later(tmp_path: Path, written: int) -> None:
    journal, path = Journal(tmp_path), tmp_path / "dumps.jsonl"
    path.write_bytes(text(FIRST) + text(SECOND)[:written])
    assert list(journal.read()) == [FIRST]
    with path.open("ab") as file:
        file.write(text(SECOND)[written:])
    assert list(journal.read()) == [SECOND]


@pytest.mark.parametrize("written", [0, 20])
@pytest.mark.parametrize("tail", [10, 1 << 20])
def test_a_journal_from_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int, tail: int) -> None:
    monkeypatch.setattr(dump, "TAIL", len(text(FIRST)) + tail)
    journal, path = Journal(tmp_path), tmp_path / "dumps.jsonl"
    journal.skip()
    assert list(journal.read()) == []
    path.write_bytes(3 * text(FIRST) + text(SECOND)[:written])
    journal.skip()
    assert list(journal.read()) == []
    with path.open("ab") as file:
        file.write(text(SECOND)[written:])
    assert list(journal.read()) == [SECOND]


def test_what_has_come_to_an_end_is_removed_and_what_is_under_way_stays(tmp_path: Path) -> None:
    for number, names in enumerate((["done"], ["failed"], ["aux_0.pt"], ["aux_0.pt"])):
        folder = dump.request_folder(tmp_path, number)
        folder.mkdir()
        for name in names:
            (folder / name).touch()
    (tmp_path / "req_other").mkdir()
    # 0 is not in it yet; 2 was being deleted; 9 is long gone.
    lines = [Line(n, "s.a.0.1.3", "failed" if n == 1 else "done", 1) for n in (9, 1, 2)]
    (tmp_path / "dumps.jsonl").write_bytes(b"".join(map(text, lines)))
    dump.remove_settled(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dumps.jsonl", "req_3", "req_other"]


# --- tap.json ---

TAP = TapState(code="00112233", pid=42, sglang="0.5.23", model="/models/tiny", model_class="LlamaForCausalLM")


def test_tap_json_round_trip(tmp_path: Path) -> None:
    assert dump.read_tap(tmp_path) is None
    dump.write_json(tmp_path / "tap.json", TAP)
    assert dump.read_tap(tmp_path) == TAP
    dump.write_json(tmp_path / "tap.json", msgspec.structs.replace(TAP, failed=3))
    assert [path.name for path in tmp_path.iterdir()] == ["tap.json"]
    assert stat.S_IMODE((tmp_path / "tap.json").stat().st_mode) == 0o600
    assert dump.read_tap(tmp_path) == msgspec.structs.replace(TAP, failed=3)


def test_tap_json_of_another_version(tmp_path: Path) -> None:
    (tmp_path / "tap.json").write_text('{"code": 7}')
    with pytest.raises(DumpError) as refused:
        dump.read_tap(tmp_path)
    assert str(refused.value) == (
        f"{tmp_path / 'tap.json'}: Expected `str`, got `int` - at `$.code`; "
        "was the server started by another version of Layertap?"
    )


def test_a_full_file_system_leaves_the_old_json(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "small", "64k") as small:
        dump.write_json(small / "tap.json", TAP)
        fill(small)
        with pytest.raises(OSError, match="No space left on device"):
            dump.write_json(small / "tap.json", msgspec.structs.replace(TAP, model="x" * 9000))
        assert dump.read_tap(small) == TAP


def test_the_tap_of_a_server_of_replicas_is_there_once_all_of_them_are(tmp_path: Path) -> None:
    assert dump.tap_folders(tmp_path) == [tmp_path]
    seen = {"ours": 3, "health": 1}, {"ours": 3, "health": 1, "stranger": 2}
    for k in (0, 1):
        state = msgspec.structs.replace(
            TAP, pid=50 + k, replicas=2, slots=4, failed=k, seen=seen[k], writer_pids=[60 + k], shared_forwards=4 + k
        )
        (tmp_path / f"replica_{k}").mkdir()
        assert dump.read_tap(tmp_path) is None
        dump.write_json(tmp_path / f"replica_{k}" / "tap.json", state)
    whole = dump.read_tap(tmp_path)
    assert whole is not None
    assert (whole.pid, whole.slots, whole.failed, whole.writer_pids) == (50, 8, 1, [60, 61])
    assert whole.seen == {"ours": 6, "health": 2, "stranger": 2}
    assert whole.shared_forwards == 9
    absent = msgspec.structs.replace(TAP, inside=False, error="no such layer")
    dump.write_json(tmp_path / "tap.json", absent)
    assert dump.read_tap(tmp_path) == absent, "why one of them is not in goes before what the others are"
