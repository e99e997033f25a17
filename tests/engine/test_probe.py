"""The probe on real servers: what passes, and that a state which is one rank's partial sum does not."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from engines import Engine, Engines, plugin

from capture import gate, probe
from capture.dumps import dump
from capture.rows.chat import InputError

TWO_RANKS = {"tp_size": 2, "ENV_SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
# What #28343 was in DeepSeek's model file: the state is taken before the ranks' parts of one layer are added up,
# and only in forwards that all-reduce fusion takes.
PARTIAL = """
from sglang.srt.models.llama import LlamaForCausalLM, LlamaModel

MOST, LAYER, STATE = 2048, 3, 1  # output of layer 3, of the outputs 1, 3, 4


def register():
    init, forward, lacking = LlamaForCausalLM.__init__, LlamaModel.forward, []

    def init_and_look(self, *args, **kwargs):
        init(self, *args, **kwargs)
        down = self.model.layers[LAYER].mlp.down_proj
        whole_of = down.forward

        def see_what_the_others_add(x, *more, **named):
            whole, bias = whole_of(x, *more, **named)
            down.reduce_results = False
            try:
                partial, _ = whole_of(x, *more, **named)
            finally:
                down.reduce_results = True
            lacking[:] = [whole - partial]
            return whole, bias

        down.forward = see_what_the_others_add

    def forward_and_leave_out(self, *args, **kwargs):
        result = forward(self, *args, **kwargs)
        if isinstance(result, tuple) and len(result[0]) <= MOST:
            hidden, aux = result
            aux = list(aux)
            aux[STATE] = aux[STATE] - lacking[0]
            return hidden, aux
        return result

    LlamaForCausalLM.__init__, LlamaModel.forward = init_and_look, forward_and_leave_out
"""


def left(engine: Engine) -> list[str]:
    return sorted(path.name for path in engine.dump_dir.iterdir() if path.name.startswith(("req_", "rank_")))


@pytest.fixture
def llama(engines: Engines) -> Engine:
    return engines.get("embedded-llama")


def test_a_sound_server_passes_and_the_result_is_kept(llama: Engine, tmp_path: Path) -> None:
    code, made = llama.probe(tmp_path)
    assert (code, made.passed, made.failures) == (0, True, [])
    assert made.lengths == [3, 64, 1500, 2049]  # the server takes no 2,500
    assert made.shared_forwards > 0
    assert [(one.tokens, one.state) for one in made.compared] == [
        (tokens, state) for tokens in made.lengths for state in ("aux_0", "aux_1", "aux_2", "final", "last")
    ]
    assert min(one.least for one in made.compared) > 0.999
    assert made.layers == llama.tap.layers
    assert left(llama) == []
    assert probe.kept(llama.server, llama.tap, 2049) == made
    assert probe.kept(llama.server, llama.tap, 2050) is None
    assert probe.kept(llama.server, msgspec.structs.replace(llama.tap, pid=1), 3) is None
    progress = json.loads((tmp_path / "progress.json").read_text())
    assert progress == {"schema": 1, "what": "4 prompts together"}


def test_a_hugging_face_forward_agrees(llama: Engine, tmp_path: Path) -> None:
    code, made = llama.probe(tmp_path, against_hf=True)
    assert (code, made.failures) == (0, [])
    assert made.against_hf is not None
    assert [(one.tokens, one.state, one.boundary, one.nearest) for one in made.against_hf] == [
        (tokens, state, boundary, boundary)
        for tokens in (3, 64, 1500)
        for state, boundary in (("aux_0", 2), ("aux_1", 4), ("aux_2", 5), ("final", 8), ("last", 8))
    ]
    assert min(one.least for one in made.against_hf) > 0.999
    assert all(abs(one.scale - 1) < 0.005 for one in made.against_hf)


def test_a_norm_too_many_is_noticed(llama: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare = probe.against_hf.compare

    def swap(model: Path, drawn: list[tuple[list[int], dict[str, torch.Tensor]]], *more: object) -> object:
        return compare(model, [(ids, states | {"last": states["final"]}) for ids, states in drawn], *more)  # type: ignore[arg-type]

    monkeypatch.setattr(probe.against_hf, "compare", swap)
    code, made = llama.probe(tmp_path, against_hf=True)
    assert code == 6
    assert all("last (before the final norm) is " in failure for failure in made.failures)
    assert made.failures[0].endswith("times as large as Hugging Face's: a norm was applied or left out")


def test_states_of_another_layer_are_told_from_those_that_were_asked_for(
    llama: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hugging Face's numbering shifted by one stands for a capture that is off by one."""
    compare = probe.against_hf.compare
    monkeypatch.setattr(
        probe.against_hf, "compare", lambda model, drawn, at, trust: compare(model, drawn, [b + 1 for b in at], trust)
    )
    code, made = llama.probe(tmp_path, against_hf=True)
    assert code == 6
    assert made.failures[0] == (
        "3 tokens: aux_0 (output of layer 1) should be Hugging Face's hidden_states[3], and is nearer to "
        "hidden_states[2]"
    )
    assert probe.kept(llama.server, llama.tap, 3) is None  # a failure is not kept as passed


def test_a_model_too_large_for_a_hugging_face_forward_is_refused_before_anything_is_drawn(
    llama: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = llama.tap.seen["ours"]
    monkeypatch.setattr(probe.against_hf.memory, "available", lambda: 1_000_000)
    with pytest.raises(InputError, match=r"takes 0\.0 GB of memory in float32, 0\.0 GB are free here; probe without"):
        llama.probe(tmp_path, against_hf=True)
    assert llama.tap.seen["ours"] == before


def test_a_server_that_the_gate_refuses_is_not_probed(
    llama: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "code_hash", lambda: "other")
    with pytest.raises(gate.NotSafe, match="the server runs the tap of another version"):
        llama.probe(tmp_path)


def test_a_state_that_is_changed_on_its_way_is_noticed(
    llama: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = probe.verify.read_dump

    def bend(*args: object) -> dict[str, torch.Tensor]:
        states = read(*args)  # type: ignore[arg-type]
        if len(states["last"]) == 64:
            states["last"][5, 7] *= 1.01
        return states

    monkeypatch.setattr(probe.verify, "read_dump", bend)
    code, made = llama.probe(tmp_path)
    assert code == 6
    assert made.failures == [
        f"64 tokens {how}: last (before the final norm) was changed between the model and its dump"
        for how in ("alone", "together")
    ]


@pytest.mark.slow
def test_ranks_that_agree_pass(engines: Engines, tmp_path: Path) -> None:
    engine = engines.get("embedded-llama", **TWO_RANKS)
    assert engine.tap.ranks == 2
    code, made = engine.probe(tmp_path)
    assert (code, made.failures, made.ranks) == (0, [], 2)
    assert left(engine) == []


@pytest.mark.slow
def test_one_ranks_partial_sum_fails_by_length_layer_and_ranks(
    engines: Engines, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("plugin")
    engine = engines.get(
        "embedded-llama",
        **TWO_RANKS,
        ENV_PYTHONPATH=plugin(folder, "partial", PARTIAL),
        ENV_SGLANG_PLUGINS="layertap,layertap_cpu,partial",
    )
    code, made = engine.probe(folder)
    assert code == 6
    wrong = [
        f"{tokens:,} tokens {how}: aux_1 (output of layer 3) differs between rank 0 and rank 1: it was taken before "
        "the ranks' parts were added up (as under all-reduce fusion), or the ranks do not compute the same"
        for tokens, how in ((3, "alone"), (64, "alone"), (1500, "alone"))
    ]
    assert [failure for failure in made.failures if "alone:" in failure] == wrong  # 2,049 tokens are not fused
    assert all("aux_1" in failure for failure in made.failures)
    assert made.refusal() is not None and made.refusal().startswith(f"the probe failed: {wrong[0]}")  # type: ignore[union-attr]
    assert left(engine) == []
    assert dump.read_tap(engine.dump_dir).failed == 0  # type: ignore[union-attr]
