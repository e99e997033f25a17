"""Which layers are drawn: every way of naming them, through SGLang's own setters of real model classes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backends import payload
from capture.layers import (
    LayerChoice,
    LayerError,
    Layers,
    ServeIds,
    check,
    draft_ids,
    inner_model,
    serve_ids_by_version,
)

# Makes models of SGLang's real classes that are empty but for what the setters touch, and resolves choices on them.
SCRIPT = """
import json, sys
from types import SimpleNamespace
import msgspec
from torch import nn
from sglang.srt.models.deepseek_v2 import DeepseekV2ForCausalLM, DeepseekV3ForCausalLM
from sglang.srt.models.glm4_moe import GlmMoeDsaForCausalLM
from sglang.srt.models.kimi_k25 import KimiK25ForConditionalGeneration
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.version import __version__
from capture.layers import LayerChoice, LayerError, resolve

assert __version__ == "0.5.23", __version__

def empty(kind):
    model = kind.__new__(kind)
    nn.Module.__init__(model)
    return model

def causal(kind, count, flag=False, layers=()):
    model = empty(kind)
    model.pp_group = SimpleNamespace(is_last_rank=True)
    model.config = SimpleNamespace(num_hidden_layers=count)
    model.capture_aux_hidden_states = flag
    model.model = nn.Module()
    model.model.layers = nn.ModuleList(nn.Identity() for _ in range(count))
    model.model.layers_to_capture = list(layers)
    return model

kimi = empty(KimiK25ForConditionalGeneration)
kimi.vision_tower = nn.Identity()
kimi.language_model = causal(DeepseekV3ForCausalLM, 61)
models = {
    "llama": causal(LlamaForCausalLM, 32),
    "deepseek-v2": causal(DeepseekV2ForCausalLM, 27, True, [7]),
    "deepseek-v3": causal(DeepseekV3ForCausalLM, 61),
    "glm-5": causal(GlmMoeDsaForCausalLM, 78),
    "kimi": kimi,
}
answers = []
for name, choice in json.load(sys.stdin):
    model = models[name]
    causal_lm = getattr(model, "language_model", model)
    try:
        answer = msgspec.to_builtins(resolve(model, LayerChoice(**choice), __version__))
    except LayerError as error:
        answer = str(error)
    answers.append([answer, causal_lm.capture_aux_hidden_states, causal_lm.model.layers_to_capture])
print(json.dumps(answers))
"""

DRAFTS: dict[str, Any] = {
    "with-ids": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}},
    "without-ids": {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000},
}

# model, choice -> boundaries, serve_ids, in words
RESOLVED: list[tuple[str, dict[str, Any], list[int], list[int], str]] = [
    ("llama", {"boundaries": [3, 16, 29]}, [3, 16, 29], [2, 15, 28], "boundaries 3, 16, 29"),
    ("llama", {"outputs": [2, 15, 28]}, [3, 16, 29], [2, 15, 28], "outputs of layers 2, 15, 28"),
    ("llama", {"eagle_ids": [2, 15, 28]}, [3, 16, 29], [2, 15, 28], "EAGLE-3 ids 2, 15, 28"),
    ("llama", {"draft": "without-ids"}, [2, 16, 29], [1, 15, 28], "the layers of drafter without-ids"),
    ("llama", {"boundaries": [1, 31]}, [1, 31], [0, 30], "boundaries 1, 31"),
    ("llama", {"outputs": [7]}, [8], [7], "outputs of layers 7"),
    ("llama", {"boundaries": [29, 3, 16]}, [3, 16, 29], [2, 15, 28], "boundaries 29, 3, 16"),
    ("deepseek-v2", {"outputs": [1, 12, 23]}, [2, 13, 24], [1, 12, 23], "outputs of layers 1, 12, 23"),
    ("deepseek-v3", {"outputs": [2, 30, 58]}, [3, 31, 59], [3, 31, 59], "outputs of layers 2, 30, 58"),
    ("deepseek-v3", {"boundaries": [3, 31, 59]}, [3, 31, 59], [3, 31, 59], "boundaries 3, 31, 59"),
    ("deepseek-v3", {"eagle_ids": [2, 4, 5]}, [2, 4, 5], [1, 3, 4], "EAGLE-3 ids 2, 4, 5"),
    ("deepseek-v3", {"eagle_ids": [1, 3, 4]}, [2, 4, 5], [1, 3, 4], "EAGLE-3 ids 1, 3, 4"),
    ("deepseek-v3", {"draft": "with-ids"}, [2, 30, 58], [1, 29, 57], "the layers of drafter with-ids"),
    ("deepseek-v3", {"draft": "without-ids"}, [2, 30, 58], [1, 29, 57], "the layers of drafter without-ids"),
    ("glm-5", {"outputs": [2, 38, 74]}, [3, 39, 75], [3, 39, 75], "outputs of layers 2, 38, 74"),
    ("kimi", {"outputs": [2, 30, 58]}, [3, 31, 59], [3, 31, 59], "outputs of layers 2, 30, 58"),
    ("kimi", {"eagle_ids": [3, 31, 59]}, [3, 31, 59], [3, 31, 59], "EAGLE-3 ids 3, 31, 59"),
    ("kimi", {"draft": "without-ids"}, [2, 30, 58], [1, 29, 57], "the layers of drafter without-ids"),
]
LAST_HINT = "; what leaves the last layer, {last}, is always drawn, as `last` and, after the norm, as `final`"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "llama",
        {"outputs": [2, 31]},
        "outputs of layers 2, 31: boundary 32 is outside 1 to 31, the model has 32 layers" + LAST_HINT.format(last=31),
    ),
    (
        "kimi",
        {"eagle_ids": [3, 61]},
        "EAGLE-3 ids 3, 61: boundary 61 is outside 1 to 60, the model has 61 layers" + LAST_HINT.format(last=60),
    ),
    ("llama", {"boundaries": [0, 5]}, "boundaries 0, 5: boundary 0 is outside 1 to 31, the model has 32 layers"),
    ("llama", {"outputs": [-2]}, "outputs of layers -2: boundary -1 is outside 1 to 31, the model has 32 layers"),
    (
        "llama",
        {"boundaries": [3, 33, 40]},
        "boundaries 3, 33, 40: boundary 33, 40 is outside 1 to 31, the model has 32 layers",
    ),
    (
        "deepseek-v3",
        {"outputs": [0, 30]},
        "no EAGLE-3 ids make SGLang's DeepseekV3ForCausalLM capture boundaries 1, 31, so no drafter could be served "
        "with them; choose other layers",
    ),
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What SGLang's setters made of every choice above, and how each left the model: one process for all of them."""
    folder = tmp_path_factory.mktemp("payload")
    for name, data in payload.files().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    for name, config in DRAFTS.items():
        (folder / name).write_text(json.dumps(config))
    asked = [(model, choice) for model, choice, *_ in [*RESOLVED, *REFUSED]]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps(asked),
        env={
            **os.environ,
            "PYTHONPATH": f"{folder / 'engine'}{os.pathsep}{folder / 'embedded'}",
            "SGLANG_PLATFORM": "layertap_cpu",
            "SGLANG_PLUGINS": "layertap_cpu",
        },
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout.splitlines()[-1])
    return {repr(question): answer for question, answer in zip(asked, made, strict=True)}


def case(entry: tuple[Any, ...]) -> str:
    return f"{entry[0]} {entry[1]}"


@pytest.mark.parametrize("entry", RESOLVED, ids=case)
def test_a_choice_becomes_boundaries(entry: tuple[Any, ...], answers: dict[str, Any]) -> None:
    model, choice, boundaries, serve_ids, asked = entry
    layers = msgspec.convert(answers[repr((model, choice))][0], Layers)
    assert layers.boundaries == boundaries
    assert layers.outputs == [boundary - 1 for boundary in boundaries]
    assert layers.serve_ids == serve_ids
    assert layers.asked == f"{asked}, resolved by SGLang 0.5.23"


@pytest.mark.parametrize("entry", RESOLVED, ids=case)
def test_the_setter_agrees_with_what_is_known_of_its_version(entry: tuple[Any, ...], answers: dict[str, Any]) -> None:
    layers = msgspec.convert(answers[repr((entry[0], entry[1]))][0], Layers)
    versions = ">=0.5.9" if entry[0] == "llama" else ">=0.5.13"
    assert layers.serve_ids_elsewhere[-1] == ServeIds(layers.serve_ids, versions)


@pytest.mark.parametrize("entry", REFUSED, ids=case)
def test_layers_that_cannot_be_drawn_are_refused(entry: tuple[Any, ...], answers: dict[str, Any]) -> None:
    assert answers[repr((entry[0], entry[1]))][0] == entry[2]


def test_the_model_is_left_as_it_was(answers: dict[str, Any]) -> None:
    """Also where the choice is refused: a flag left on makes SGLang unpack every forward's result."""
    left = {question: (flag, layers) for question, (_, flag, layers) in answers.items()}
    assert left == {question: (True, [7]) if "deepseek-v2" in question else (False, []) for question in answers}


@pytest.mark.parametrize(
    ("model_class", "boundaries", "expected"),
    [
        ("LlamaForCausalLM", [3, 31, 59], [([2, 30, 58], ">=0.5.9")]),
        ("Qwen3MoeForCausalLM", [1, 5], [([0, 4], ">=0.5.9")]),
        ("DeepseekV3ForCausalLM", [3, 31, 59], [([2, 30, 58], ">=0.5.9,<0.5.13"), ([3, 31, 59], ">=0.5.13")]),
        ("KimiK25ForConditionalGeneration", [3, 9], [([2, 8], ">=0.5.9,<0.5.13"), ([3, 9], ">=0.5.13")]),
        ("Glm4MoeLiteForCausalLM", [5], [([4], ">=0.5.9,<0.5.13"), ([5], ">=0.5.13")]),
        # From 0.5.13 on a first id of 1 means outputs, so [1, 3, 4] is right in every version ...
        ("DeepseekV2ForCausalLM", [2, 4, 5], [([1, 3, 4], ">=0.5.9,<0.5.13"), ([1, 3, 4], ">=0.5.13")]),
        # ... and nothing names what enters layer 1.
        ("DeepseekV3ForCausalLM", [1, 4], [([0, 3], ">=0.5.9,<0.5.13")]),
    ],
)
def test_ids_to_serve_with_by_version(model_class: str, boundaries: list[int], expected: list[Any]) -> None:
    found = serve_ids_by_version(type(model_class, (), {}), boundaries)
    assert found == [ServeIds(ids, versions) for ids, versions in expected]


def test_a_class_that_inherits_has_its_parents_ids() -> None:
    deepseek = type("DeepseekV3ForCausalLM", (), {})
    assert [ids.ids for ids in serve_ids_by_version(type("MistralLarge3ForCausalLM", (deepseek,), {}), [3, 9])] == [
        [2, 8],
        [3, 9],
    ]


def test_both_ways_of_counting_are_said() -> None:
    layers = Layers([3, 31, 59], [2, 30, 58], [3, 31, 59], [], "boundaries 3, 31, 59")
    assert layers.words() == "outputs of layers 2, 30, 58 (boundaries 3, 31, 59)"


@pytest.mark.parametrize(
    ("said", "refusal"),
    [
        (
            {},
            "name the layers in one way, as boundaries, outputs, eagle_ids or draft; given: none of them",
        ),
        (
            {"outputs": [2], "eagle_ids": [2]},
            "name the layers in one way, as boundaries, outputs, eagle_ids or draft; given: outputs, eagle_ids",
        ),
        ({"boundaries": []}, "boundaries = []: at least one layer, and none twice"),
        ({"outputs": [2, 30, 2]}, "outputs = [2, 30, 2]: at least one layer, and none twice"),
        ({"eagle_ids": [1, 1]}, "eagle_ids = [1, 1]: at least one layer, and none twice"),
    ],
)
def test_a_choice_is_said_in_one_way(said: dict[str, Any], refusal: str) -> None:
    with pytest.raises(ValueError) as refused:
        LayerChoice(**said)
    assert str(refused.value) == refusal


DEFAULT = {"architectures": ["LlamaForCausalLMEagle3"]}


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 29, 57]}}, [1, 29, 57]),
        ({"eagle_config": {"use_aux_hidden_state": True}}, None),
        ({"draft_vocab_size": 32000}, None),
        (DEFAULT, None),
        (DEFAULT | {"eagle_config": None}, None),
        (DEFAULT | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": None}}, None),
    ],
)
def test_a_drafters_ids(tmp_path: Path, config: dict[str, Any], ids: list[int] | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert draft_ids(str(tmp_path / "config.json")) == ids


NO_LIST = "eagle_aux_hidden_state_layer_ids = {} is no list of layer ids, none twice"
NO_DRAFTER = "is no EAGLE-3 drafter's config.json; give the drafter's, not the model's"


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("{", "Expecting property name enclosed in double quotes"),
        ("\xff", "codec can't decode byte 0xff"),
        ("[1, 2]", NO_DRAFTER),
        ('{"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32}', NO_DRAFTER),
        ('{"eagle_config": [1, 2]}', NO_DRAFTER),
        (
            '{"eagle_config": {"use_aux_hidden_state": false}}',
            "says use_aux_hidden_state = false, so SGLang feeds it no layers",
        ),
        (
            '{"draft_vocab_size": 9, "eagle_aux_hidden_state_layer_ids": [1, 2]}',
            "holds eagle_aux_hidden_state_layer_ids at its top level, where SGLang does not read it; move it into "
            "eagle_config, or name the layers as boundaries or outputs",
        ),
        ('{"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}', NO_LIST.format("[]")),
        ('{"eagle_config": {"eagle_aux_hidden_state_layer_ids": 3}}', NO_LIST.format("3")),
        ('{"eagle_config": {"eagle_aux_hidden_state_layer_ids": [true]}}', NO_LIST.format("[True]")),
        ('{"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["2"]}}', NO_LIST.format("['2']")),
        ('{"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 2]}}', NO_LIST.format("[2, 2]")),
    ],
)
def test_no_drafter_no_layers(tmp_path: Path, text: str, refusal: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(LayerError) as refused:
        draft_ids(str(path))
    assert str(path) in str(refused.value)
    assert refusal in str(refused.value)


KIMI = 61


@pytest.mark.parametrize(
    ("said", "count", "refusal"),
    [
        ({"boundaries": [1, 60]}, KIMI, None),
        ({"outputs": [0, 59]}, KIMI, None),
        ({"eagle_ids": [0, 60]}, KIMI, None),  # a boundary in some versions and models, an output in others
        ({"outputs": [1, 2, 99]}, None, None),
        ({"boundaries": [9]}, 8, "boundaries 9: boundary 9 is outside 1 to 7, the model has 8 layers"),
        (
            {"outputs": [1, 2, 99]},
            8,
            "outputs of layers 1, 2, 99: boundary 100 is outside 1 to 7, the model has 8 layers",
        ),
        ({"eagle_ids": [3, 61]}, KIMI, "EAGLE-3 ids 3, 61: id 61 is outside 0 to 60, the model has 61 layers"),
        ({"eagle_ids": [-1]}, KIMI, "EAGLE-3 ids -1: id -1 is outside 0 to 60, the model has 61 layers"),
    ],
)
def test_what_is_seen_before_a_model_is_loaded(said: dict[str, Any], count: int | None, refusal: str | None) -> None:
    try:
        check(LayerChoice(**said), count)
    except LayerError as error:
        assert str(error) == refusal
    else:
        assert refusal is None


def test_a_drafter_is_read_before_a_model_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    choice = LayerChoice(draft=str(path))
    for count in (None, 8):
        with pytest.raises(LayerError) as refused:
            check(choice, count)
        assert str(refused.value) == (
            f"drafter config {path}: No such file or directory; give the file's path on the host"
        )
    path.write_text('{"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 8]}}')
    check(choice, None)
    with pytest.raises(LayerError, match="id 8 is outside 0 to 7, the model has 8 layers"):
        check(choice, 8)


def test_a_drafter_that_is_not_there(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "config.json", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(LayerError, match=why):
            draft_ids(str(path))


def test_a_model_without_capture_is_refused() -> None:
    from torch import nn

    class BertModel(nn.Module):
        pass

    with pytest.raises(LayerError) as refused:
        inner_model(BertModel())
    assert str(refused.value) == "SGLang's BertModel has no EAGLE-3 capture; Layertap cannot draw from it"
