"""The manifest: what must not change over a dataset's life, and where a dataset may lie."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tmpfs import fill, small_tmpfs
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from capture.dataset import manifest
from capture.dataset.manifest import Manifest, ManifestError, Settings
from capture.layers import Layers, ServeIds

LAYERS = Layers([3, 31, 59], [2, 30, 58], [3, 31, 59], [ServeIds([2, 30, 58], ">=0.5.9,<0.5.13")], "outputs 2, 30, 58")
SETTINGS = Settings(
    model="/models/kimi",
    model_config="ab" * 32,
    weights="89" * 32,
    tokenizer="cd" * 32,
    chat_template="ef" * 32,
    layers=LAYERS,
    hidden=7168,
    dtype="bfloat16",
    max_length=4096,
    overlong="skip",
    last_turn_only=False,
    formats=["native", "specforge"],
)
MANIFEST = Manifest(
    settings=SETTINGS,
    norms={"aux_0": "before the final norm", "final": "after the final norm"},
    input="rows.jsonl",
    input_hash="01" * 32,
    sglang="0.5.23",
    layertap="0.1.0",
    profile="embedded-kimi-k2_5",
    server={"tp_size": 1},
    counts={"written": 3},
    created=1.5,
    updated=2.5,
)
OTHER_LAYERS = Layers([2, 30, 58], [1, 29, 57], [1, 29, 57], [], "outputs 1, 29, 57")
DIFFERENCES: dict[str, tuple[Any, str]] = {
    "model_config": ("12" * 32, "the model's config.json was abababababab…, now 121212121212…"),
    "weights": ("12" * 32, "the model (its weights) was 898989898989…, now 121212121212…"),
    "tokenizer": ("12" * 32, "the tokenizer was cdcdcdcdcdcd…, now 121212121212…"),
    "chat_template": ("12" * 32, "the chat template was efefefefefef…, now 121212121212…"),
    "layers": (
        OTHER_LAYERS,
        "the layers were outputs of layers 2, 30, 58 (boundaries 3, 31, 59), "
        "now outputs of layers 1, 29, 57 (boundaries 2, 30, 58)",
    ),
    "hidden": (2048, "the hidden size was 7168, now 2048"),
    "dtype": ("float32", "the dtype of the states was bfloat16, now float32"),
    "max_length": (None, "--max-length was 4096, now None"),
    "overlong": ("truncate", "--overlong was skip, now truncate"),
    "last_turn_only": (True, "--last-turn-only was False, now True"),
    "prompt_column": ("question", "--prompt-column was None, now question"),
    "response_column": ("answer", "--response-column was None, now answer"),
    "formats": (["native"], "--format was native, specforge, now native"),
}


def with_setting(name: str) -> Settings:
    return msgspec.structs.replace(SETTINGS, **{name: DIFFERENCES[name][0]})


# --- The same settings ---


def test_every_setting_is_compared() -> None:
    """All but the model's path: a folder may move, what is in it may not change."""
    assert ["model", *DIFFERENCES] == list(Settings.__struct_fields__)


def test_a_model_that_moved_is_the_same_and_other_weights_are_not(tmp_path: Path) -> None:
    for name, last in (("a", b"\0"), ("moved", b"\0"), ("tuned", b"\1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(bytes(300_000) + last)
    kept, moved, tuned = (manifest.hash_weights(tmp_path / name) for name in ("a", "moved", "tuned"))
    assert kept == moved != tuned
    (tmp_path / "moved" / "model-2.safetensors").touch()
    assert manifest.hash_weights(tmp_path / "moved") != kept
    manifest.require_same(SETTINGS, msgspec.structs.replace(SETTINGS, model="/moved"), Path("/data/out"))


def test_the_same_settings_pass() -> None:
    manifest.require_same(SETTINGS, msgspec.structs.replace(SETTINGS), Path("/data/out"))


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_setting_that_differs_is_named(name: str) -> None:
    with pytest.raises(ManifestError) as refused:
        manifest.require_same(SETTINGS, with_setting(name), Path("/data/out"))
    assert str(refused.value) == (
        f"/data/out was made with other settings: {DIFFERENCES[name][1]}. "
        "Ask for the same, or extract into a new folder"
    )


def test_all_that_differ_are_named() -> None:
    other = Settings(model="/moved/kimi", **{name: value for name, (value, _) in DIFFERENCES.items()})
    with pytest.raises(ManifestError) as refused:
        manifest.require_same(SETTINGS, other, Path("/data/out"))
    assert [words for _, words in DIFFERENCES.values() if words not in str(refused.value)] == []


def test_another_sglang_may_call_the_same_layers_otherwise() -> None:
    """Boundaries say which layers; ids to serve with go with the version."""
    elsewhere = Layers([3, 31, 59], [2, 30, 58], [2, 30, 58], [], "boundaries 3, 31, 59")
    manifest.require_same(SETTINGS, msgspec.structs.replace(SETTINGS, layers=elsewhere), Path("/data/out"))


# --- The file ---


def test_a_manifest_comes_back_as_it_was_written(tmp_path: Path) -> None:
    manifest.write_manifest(tmp_path, MANIFEST)
    assert manifest.read_manifest(tmp_path) == MANIFEST
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
    assert stat.S_IMODE((tmp_path / "manifest.json").stat().st_mode) == 0o600


def test_what_samples_were_drawn_from_is_kept() -> None:
    """Of each server that a run went on with; one that is asked again, as it was, is named once."""
    made = msgspec.structs.replace(MANIFEST, probe={"run": "one"})
    made.draw_from(manifest.Drawn(sglang="0.5.23", layertap="0.1.0", profile="a", server={}, probe={"run": "one"}))
    assert (made.earlier, made.profile) == ([], "a")
    now = manifest.Drawn(
        sglang="0.5.24", layertap="0.2.0", profile="b", server={"x": 1}, probe={"run": "two"}, gpus=["H"]
    )
    made.draw_from(now)
    assert [(one.sglang, one.profile, one.probe) for one in made.earlier] == [("0.5.23", "a", {"run": "one"})]
    assert (made.sglang, made.layertap, made.profile, made.server) == ("0.5.24", "0.2.0", "b", {"x": 1})
    assert (made.probe, made.gpus, made.counts, made.created) == ({"run": "two"}, ["H"], {"written": 3}, 1.5)
    assert msgspec.json.decode(msgspec.json.encode(made), type=Manifest) == made
    made.draw_from(msgspec.structs.replace(now, beside=[manifest.Beside("three", "b", {})]))
    assert [one.probe for one in made.earlier] == [{"run": "one"}, {"run": "two"}]


def test_what_is_not_known_yet_is_null(tmp_path: Path) -> None:
    manifest.write_manifest(tmp_path, MANIFEST)
    written = json.loads((tmp_path / "manifest.json").read_text())
    assert (written["format"], written["probe"], written["gpus"]) == (1, None, [])
    assert written["settings"]["layers"]["serve_ids"] == [3, 31, 59]


def test_no_manifest_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(ManifestError) as refused:
        manifest.read_manifest(tmp_path)
    assert str(refused.value) == f"{tmp_path} is no dataset: it has no manifest.json"
    with pytest.raises(ManifestError) as refused:
        manifest.read_manifest(tmp_path / "none")
    assert str(refused.value) == f"{tmp_path}/none is no dataset: there is no such folder"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", ": Input data was truncated"),
        (b"{", ": Input data was truncated"),
        (b"[]", ": Expected `object`, got `array`"),
        (b"\xff", ": JSON is malformed: invalid character (byte 0)"),
        (b'{"format": 1}', ": Object missing required field `sglang`"),
        (msgspec.json.encode(msgspec.structs.replace(MANIFEST, format=2)), " has format 2, this version reads 1"),
    ],
)
def test_an_unreadable_manifest_is_named(tmp_path: Path, text: bytes, why: str) -> None:
    (tmp_path / "manifest.json").write_bytes(text)
    with pytest.raises(ManifestError) as refused:
        manifest.read_manifest(tmp_path)
    assert str(refused.value) == f"{tmp_path / 'manifest.json'}{why}"


def test_a_folder_in_its_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(ManifestError, match=r"manifest\.json: .*Is a directory"):
        manifest.read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("there", "fits"),
    [
        ([], True),
        ([".lock"], True),
        ([".lock", ".manifest.json.4242"], True),  # a run that was killed as it wrote its first manifest
        ([".lock", "manifest.json", ".manifest.json.4242"], True),
        ([".manifest.json.bak"], False),
        (["rows.jsonl"], False),
        ([".lock", ".manifest.json.4242", "rows.jsonl"], False),
    ],
)
def test_a_folder_for_a_dataset(tmp_path: Path, there: list[str], fits: bool) -> None:
    for name in there:
        (tmp_path / name).touch()
    if fits:
        manifest.take_folder(tmp_path, True, lambda _: None)
    else:
        with pytest.raises(ManifestError, match="is not empty and holds no dataset; give a new or empty folder"):
            manifest.take_folder(tmp_path, True, lambda _: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(there)


def test_a_folder_of_somebody_elses_is_none_for_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may write everywhere
    with pytest.raises(ManifestError, match="is a folder that we may not write to; choose another one"):
        manifest.take_folder(tmp_path, True, lambda _: None)


def test_a_full_disk_leaves_the_old_manifest(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "small", "64k") as small:
        manifest.write_manifest(small, MANIFEST)
        fill(small)
        with pytest.raises(OSError, match="No space left on device"):
            manifest.write_manifest(small, msgspec.structs.replace(MANIFEST, profile="x" * 9000))
        assert manifest.read_manifest(small) == MANIFEST


# --- Hashes ---


def tokenizer(*, added: str | None = None, byte_level: bool = True) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    if byte_level:
        made.pre_tokenizer = pre_tokenizers.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?")
    if added:
        fast.add_special_tokens({"additional_special_tokens": [added]})
    return fast


def test_a_tokenizer_is_known_by_what_it_does_to_text() -> None:
    same = manifest.hash_tokenizer(tokenizer())
    assert same == manifest.hash_tokenizer(tokenizer())
    others = [tokenizer(added="<|im_end|>"), tokenizer(added="<|eot|>"), tokenizer(byte_level=False)]
    assert len({same, *map(manifest.hash_tokenizer, others)}) == 4


def test_hashes_are_sha256(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"abc")
    of_abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert manifest.hash_file(tmp_path / "config.json") == of_abc
    assert manifest.hash_text("abc") == of_abc
    assert manifest.hash_text({"b": 1, "a": 2}) == manifest.hash_text({"a": 2, "b": 1})


# --- Where a dataset may lie ---


def test_memory_is_volatile(tmp_path: Path) -> None:
    assert manifest.volatile(Path("/dev/shm"))
    assert manifest.volatile(Path("/dev/shm/not/made/yet"))
    (tmp_path / "link").symlink_to("/dev/shm")
    assert manifest.volatile(tmp_path / "link" / "out")


def test_a_disk_is_not_volatile() -> None:
    here = Path(__file__).parent
    kind = subprocess.run(["stat", "-f", "-c", "%T", here], capture_output=True, text=True, check=True).stdout.strip()
    if kind in ("tmpfs", "ramfs"):
        pytest.skip("the tests themselves lie in memory")
    assert not manifest.volatile(here)
    assert not manifest.volatile(here / "not" / "made" / "yet")


def test_the_innermost_mount_decides(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "with space", "64k") as small:
        (small / "out").mkdir()
        assert manifest.volatile(small / "out")
        assert not manifest.on_network(small / "out")
    assert manifest.volatile(tmp_path / "with space" / "out") == manifest.volatile(tmp_path)


def test_of_two_mounts_in_one_place_the_later_decides(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    with small_tmpfs(tmp_path / "small", "64k") as small:
        subprocess.run(["mount", "--bind", tmp_path / "disk", small], check=True)
        try:
            assert manifest.volatile(small) == manifest.volatile(tmp_path / "disk")
        finally:
            subprocess.run(["umount", small], check=True)
        assert manifest.volatile(small)
