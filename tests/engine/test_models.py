"""The embedded engine's tiny models: the same bytes every time, and what SGLang and trainers find in them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from backends.embedded import models
from capture.rows.tokenise import Row, RowOptions, load_tokenizer, tokenise

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["deepseek-v3", "kimi-k2_5", "llama"]
BUILD_ALL = "import sys; from pathlib import Path; from backends.embedded import models\n" + (
    "for name in models.MODELS: models.build(name, Path(sys.argv[1]) / name)"
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """All models built twice, at the same time, by processes that hash and spread their work otherwise."""
    folders = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    settings = (
        {"PYTHONHASHSEED": "1", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        {"PYTHONHASHSEED": "2", "RAYON_NUM_THREADS": "3", "OMP_NUM_THREADS": "2"},
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", BUILD_ALL, folder],
            env={**os.environ, "PYTHONPATH": str(ROOT), **own},
            stderr=subprocess.PIPE,
        )
        for folder, own in zip(folders, settings, strict=True)
    ]
    for process in running:
        said = process.communicate(timeout=300)[1].decode()
        assert process.returncode == 0, said
    return folders


def tree(folder: Path) -> dict[str, str]:
    """Every file below `folder` with its hash."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_every_model_is_built() -> None:
    assert sorted(models.MODELS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_the_same_bytes_every_time(built: tuple[Path, Path], name: str) -> None:
    one, two = (tree(folder / name) for folder in built)
    assert one == two
    files = ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    if name == "kimi-k2_5":
        files += ["preprocessor_config.json", *(f"text/{file}" for file in files)]
    assert sorted(one) == sorted(files)


@pytest.mark.parametrize(
    ("name", "architecture", "layers", "hidden"),
    [
        ("llama", "LlamaForCausalLM", 8, 128),
        ("deepseek-v3", "DeepseekV3ForCausalLM", 8, 128),
        ("kimi-k2_5", "KimiK25ForConditionalGeneration", 61, 128),
    ],
)
def test_the_shape_of_a_model(built: tuple[Path, Path], name: str, architecture: str, layers: int, hidden: int) -> None:
    config = json.loads((built[0] / name / "config.json").read_text())
    text = config.get("text_config", config)
    assert config["architectures"] == [architecture]
    assert (text["num_hidden_layers"], text["hidden_size"], text["vocab_size"]) == (layers, hidden, 1024)
    with safe_open(built[0] / name / "model.safetensors", "pt") as file:
        embedding = next(key for key in file.keys() if key.endswith("embed_tokens.weight"))  # noqa: SIM118
        assert file.get_slice(embedding).get_shape() == [1024, 128]
        assert file.get_slice(embedding).get_dtype() == "BF16"


def test_kimis_text_model_is_the_one_inside_it(built: tuple[Path, Path]) -> None:
    """What parity with Hugging Face rests on."""
    whole = load_file(built[0] / "kimi-k2_5" / "model.safetensors")
    text = load_file(built[0] / "kimi-k2_5" / "text" / "model.safetensors")
    assert set(whole) == {f"language_model.{name}" for name in text}
    assert all(torch.equal(whole[f"language_model.{name}"], weight) for name, weight in text.items())
    assert len({weight.view(torch.uint8).sum().item() for name, weight in text.items() if "q_a_proj" in name}) > 50


@pytest.mark.parametrize("name", ["llama", "deepseek-v3", "kimi-k2_5", "kimi-k2_5/text"])
def test_the_chat_template(built: tuple[Path, Path], name: str) -> None:
    tokenizer = load_tokenizer(built[0] / name)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    asked = "<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>user<|im_middle|>Hi<|im_end|>"
    assert tokenizer.apply_chat_template(chat, tokenize=False) == asked
    opened = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert opened == asked + "<|im_assistant|>assistant<|im_middle|>"
    ids = tokenizer(opened, add_special_tokens=False)["input_ids"]
    assert [number for number in ids if number < 9] == [3, 6, 7, 4, 6, 7, 5, 6]  # a token each
    assert tokenizer.decode(ids) == opened
    assert len(tokenizer) == 1024


def test_a_chat_becomes_a_row(built: tuple[Path, Path], tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello räksmörgås ✓"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": chat}))
    tokenizer = load_tokenizer(built[0] / "llama")
    (row,) = tokenise(tmp_path / "rows.jsonl", tokenizer, RowOptions())
    assert isinstance(row, Row)
    masked = [number for number, inside in zip(row.ids, row.mask, strict=True) if inside]
    assert tokenizer.decode(masked) == "Hello räksmörgås ✓<|im_end|>"
    assert max(row.ids) < 1024


# --- Building ---


def test_a_model_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    assert models.build("llama", tmp_path / "llama") == tmp_path / "llama"
    assert list((tmp_path / "llama").iterdir()) == []


def test_no_such_model(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        models.build("gpt-5", tmp_path / "gpt-5")
    assert list(tmp_path.iterdir()) == []


def test_builders_that_finish_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each makes it whole; one of them puts it in place, and neither minds."""
    together, folder = threading.Barrier(3, timeout=60), tmp_path / "deep" / "model"

    def make(scratch: Path) -> None:
        (scratch / "weights").write_text("the same bytes")
        together.wait()

    monkeypatch.setitem(models.MODELS, "llama", make)
    made: list[Path] = []
    builders = [threading.Thread(target=lambda: made.append(models.build("llama", folder))) for _ in range(3)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join(60)
    assert made == [folder] * 3
    assert tree(folder.parent) == {"model/weights": hashlib.sha256(b"the same bytes").hexdigest()}
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_a_build_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(scratch: Path) -> None:
        (scratch / "weights").write_text("half")
        raise OSError("No space left on device")

    monkeypatch.setitem(models.MODELS, "llama", make)
    with pytest.raises(OSError, match="No space left on device"):
        models.build("llama", tmp_path / "llama")
    assert list(tmp_path.iterdir()) == []


def test_the_code_hash_names_what_the_models_are_made_from(monkeypatch: pytest.MonkeyPatch) -> None:
    before = models.code_hash()
    assert before == models.code_hash()
    assert len(before) == 12

    class Changed:
        def joinpath(self, name: str) -> Changed:
            return self

        def read_bytes(self) -> bytes:
            return b"other conversations"

    monkeypatch.setattr(models.resources, "files", lambda _: Changed())
    assert models.code_hash() != before
