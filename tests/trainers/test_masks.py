"""Our loss masks against those that SpecForge 0.2.0 and speculators 0.9.0 make of the same rows.

Where they differ:

- SpecForge goes to the end of the text that its own table calls the end of a turn. For Qwen's that is `<|im_end|>`
  with the newline after it, so each of its turns has one token more. Ours ends where generation does, at `<|im_end|>`.
- SpecForge puts a system prompt of its own before a row that has none, so its ids are others. Ours are the row's.
- speculators makes a row of every assistant's turn, and goes to the end of the rendered text, newline included.
"""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from test_rows import CHATML, CHATML_MARKED, LLAMA3, LLAMA3_MARKED, make, real

from capture.rows.tokenise import Row, RowOptions, tokenise

pytestmark = pytest.mark.slow
PACKAGES = ("specforge==0.2.0", "speculators==0.9.0", "hs-connectors==0.9.0")
SYSTEM = {"role": "system", "content": "You answer."}


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with both trainers, which takes torch and the rest from SGLang's."""
    folder = tmp_path_factory.mktemp("trainers") / "environment"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=200)
    (packages,) = folder.glob("lib/*/site-packages")
    (packages / "engine.pth").write_text("\n".join(site.getsitepackages()))
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", *PACKAGES]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=400, check=False)
    if done.returncode:
        pytest.skip(f"{', '.join(PACKAGES)} cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    return python


def conversations() -> list[list[dict[str, str]]]:
    """Real chats of two turns, questions with answers, and ShareGPT's, as OpenAI has them."""
    turns = [json.loads(line)["messages"] for line in real("mtbench_messages.jsonl").read_text().splitlines()]
    for line in real("gsm8k_test.jsonl").read_text().splitlines()[:60]:
        row = json.loads(line)
        turns.append([{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}])
    roles = {"human": "user", "gpt": "assistant"}
    for row in json.loads(real("sharegpt_dummy.json").read_text())[:40]:
        turns.append([{"role": roles[said["from"]], "content": said["value"]} for said in row["conversations"]])
    return turns


def theirs(python: Path, trainer: str, tokenizer: Any, template: str, chats: list[Any], folder: Path) -> list[Any]:
    tokenizer.pad_token = "</s>"
    tokenizer.save_pretrained(folder / "tokenizer")
    done = subprocess.run(
        [python, Path(__file__).with_name("masks_of_trainers.py"), trainer],
        input=json.dumps({"tokenizer": str(folder / "tokenizer"), "template": template, "conversations": chats}),
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def ours(tokenizer: Any, chats: list[Any], folder: Path, **options: Any) -> list[Row]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    rows = list(tokenise(path, tokenizer, RowOptions(**options)))
    assert all(isinstance(row, Row) for row in rows)
    return rows


def with_newline_after_turns(row: Row, tokenizer: Any) -> list[int]:
    """Our mask, and the newline after each `<|im_end|>` that is in it."""
    end, newline = tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer("\n", add_special_tokens=False)["input_ids"]
    assert len(newline) == 1
    mask = list(row.mask)
    for k in range(1, len(mask)):
        if row.mask[k - 1] and row.ids[k - 1 : k + 1] == [end, *newline]:
            mask[k] = 1
    return mask


@pytest.mark.parametrize("marked", [False, True])
def test_specforge_with_llama_3_s_template_is_equal(python: Path, tmp_path: Path, marked: bool) -> None:
    chats = [[SYSTEM, *chat] for chat in conversations()]
    found = theirs(python, "specforge", make(LLAMA3), "llama3", chats, tmp_path)
    rows = ours(make(LLAMA3_MARKED if marked else LLAMA3), chats, tmp_path)
    assert len(found) == len(rows) == 130
    for row, (ids, mask) in zip(rows, found, strict=True):
        assert (row.ids, row.mask) == (ids, mask), row.line


@pytest.mark.parametrize("marked", [False, True])
def test_specforge_with_qwen_s_template_has_the_newline_too(python: Path, tmp_path: Path, marked: bool) -> None:
    chats, tokenizer = [[SYSTEM, *chat] for chat in conversations()], make(CHATML)
    found = theirs(python, "specforge", tokenizer, "qwen", chats, tmp_path)
    for row, (ids, mask) in zip(ours(make(CHATML_MARKED if marked else CHATML), chats, tmp_path), found, strict=True):
        turns = sum(bit and not before for bit, before in zip(row.mask, [0, *row.mask], strict=False))
        assert row.ids == ids
        assert sum(mask) == sum(row.mask) + turns
        assert mask == with_newline_after_turns(row, tokenizer), row.line


def test_specforge_adds_a_system_prompt_of_its_own(python: Path, tmp_path: Path) -> None:
    chats, tokenizer = conversations()[:1], make(CHATML)
    ((ids, _),) = theirs(python, "specforge", tokenizer, "qwen", chats, tmp_path)
    (row,) = ours(tokenizer, chats, tmp_path)
    assert "You are a helpful assistant." in tokenizer.decode(ids[: len(ids) - len(row.ids)])
    assert ids[len(ids) - len(row.ids) :] == row.ids


@pytest.mark.parametrize("template", [LLAMA3, CHATML], ids=["llama3", "qwen"])
def test_speculators_makes_a_row_of_every_turn_and_goes_to_the_end(python: Path, tmp_path: Path, template: str) -> None:
    chats, tokenizer = conversations(), make(template)
    through = [
        chat[: turn + 1] for chat in chats for turn, said in enumerate(chat) if turn and said["role"] == "assistant"
    ]
    found = theirs(python, "speculators", tokenizer, "", chats, tmp_path)
    rows = ours(tokenizer, through, tmp_path, last_turn_only=True)
    for row, (ids, mask) in zip(rows, found, strict=True):
        assert row.ids == ids
        assert mask == with_newline_after_turns(row, tokenizer), row.line
        assert mask[-1] == 1
