"""What the tap does to a model's forward, with a small module in the model's place: nothing that a caller could see."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from capture.layers import FLAG, Layers, boundaries_of
from capture.tap.forward import Tap, forward_tokens

STATES = [torch.full((3, 4), float(i)) for i in range(3)]


class Fused(nn.Module):
    """Adds to the residual and scales by it, in place, as SGLang's fused norm."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        residual += x
        torch.mul(residual, 3, out=x)
        return x, residual


class Inner(nn.Module):
    """Collects what enters layers as SGLang's models do; `packed` as some of them do from 0.5.23 on, `silent` as none should.

    `flags`: it looks at a flag of each layer, as Qwen3-MoE and others do.
    """

    def __init__(self, packed: bool, silent: bool, flags: bool) -> None:
        super().__init__()
        self.packed, self.silent, self.flags, self.layers_to_capture = packed, silent, flags, []
        self.layers = nn.ModuleList([nn.Identity() for _ in range(3)])
        self.norm: nn.Module = nn.Identity()

    def forward(self, forward_batch: Any) -> Any:
        if isinstance(self.norm, Fused):
            hidden, _ = self.norm(torch.ones(3, 4), residual=torch.full((3, 4), 5.0))
        else:
            hidden = self.norm(torch.ones(3, 4))
        final = hidden * 2
        flagged = [i for i, layer in enumerate(self.layers) if getattr(layer, FLAG, False)]
        aux = [STATES[layer] for layer in (flagged if self.flags else self.layers_to_capture)]
        if self.silent or not aux:
            return final
        return final, torch.cat(aux, dim=-1) if self.packed else aux


class Keeper:
    def __init__(self) -> None:
        self.taken: list[list[torch.Tensor]] = []
        self.refused: list[str] = []
        self.counted: list[list[bool]] = []

    def before_forward(self, _batch: Any, ours: list[bool]) -> None:
        self.counted.append(ours)

    def take(self, _batch: Any, states: list[torch.Tensor]) -> None:
        self.taken.append(states)

    def refuse(self, _batch: Any, reason: str) -> None:
        self.refused.append(reason)


def batch(rid: str = "secret.x.0.0.3", lengths: list[int] | None = None, extend: bool = True) -> Any:
    mode = SimpleNamespace(is_extend=lambda: extend)
    return SimpleNamespace(forward_mode=mode, rids=[rid], extend_seq_lens_cpu=[3] if lengths is None else lengths)


def tapped(packed: bool = False, silent: bool = False, flags: bool = False) -> tuple[Inner, Keeper]:
    tap: Any = object.__new__(Tap)
    tap.inner, tap.keeper, tap.pre_norm = Inner(packed, silent, flags), Keeper(), None
    tap.layers = Layers([1, 2], [0, 1], [0, 1], [], "")
    tap.settings = SimpleNamespace(secret="secret")
    tap.rank_sums = SimpleNamespace(take=lambda _batch, _states: None)
    tap.wrap()
    return tap.inner, tap.keeper


@pytest.mark.parametrize(("packed", "flags"), [(False, False), (True, False), (False, True)])
def test_the_caller_gets_a_plain_forward_and_the_keeper_the_states(packed: bool, flags: bool) -> None:
    inner, keeper = tapped(packed, flags=flags)
    result = inner.forward(forward_batch=batch())
    assert torch.equal(result, torch.full((3, 4), 2.0))
    (states,) = keeper.taken
    expected = [STATES[1], STATES[2], torch.full((3, 4), 2.0), torch.ones(3, 4)]
    assert all(torch.equal(state, other) for state, other in zip(states, expected, strict=True))
    assert inner.layers_to_capture == []
    assert len(inner.norm._forward_hooks) == 0
    assert torch.equal(inner.forward(forward_batch=batch("stranger")), torch.full((3, 4), 2.0))  # no flag is left


def test_of_a_norm_that_overwrites_what_it_is_given_the_sum_is_kept() -> None:
    inner, keeper = tapped()
    inner.norm = Fused()
    inner.forward(forward_batch=batch())
    (states,) = keeper.taken
    assert torch.equal(states[-1], torch.full((3, 4), 6.0))
    assert torch.equal(states[-2], torch.full((3, 4), 36.0))


def test_asking_a_setter_that_flags_layers_leaves_none_flagged() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.capture_aux_hidden_states = Inner(False, False, True), False

        def set_eagle3_layers_to_capture(self, layer_ids: list[int]) -> None:
            self.capture_aux_hidden_states = True
            self.model.layers_to_capture = [one + 1 for one in layer_ids]
            for one in self.model.layers_to_capture:
                setattr(self.model.layers[one], FLAG, True)

    model = Model()
    assert boundaries_of(model, [0, 1]) == [1, 2]
    assert torch.equal(model.model(batch()), torch.full((3, 4), 2.0))
    assert (model.capture_aux_hidden_states, model.model.layers_to_capture) == (False, [])


@pytest.mark.parametrize(
    "other", [batch("stranger"), batch("secretly.x.0.0.3"), batch(extend=False)], ids=["stranger", "alike", "decode"]
)
def test_what_is_not_ours_runs_through(other: Any) -> None:
    inner, keeper = tapped()
    assert torch.equal(inner.forward(forward_batch=other), torch.full((3, 4), 2.0))
    assert (keeper.taken, keeper.refused) == ([], [])


def test_a_forward_without_lengths_runs_through() -> None:
    inner, keeper = tapped()
    speculating = batch()
    speculating.extend_seq_lens_cpu = None
    assert torch.equal(inner.forward(forward_batch=speculating), torch.full((3, 4), 2.0))
    assert keeper.taken == []


def test_a_forward_of_nobody_runs_through() -> None:
    """As SGLang makes them to capture graphs and to tune kernels: with lengths, without requests."""
    inner, keeper = tapped()
    made = batch()
    made.rids = None
    assert torch.equal(inner.forward(forward_batch=made), torch.full((3, 4), 2.0))
    assert keeper.counted == []


def test_sglangs_own_capture_keeps_its_result_and_the_request_fails() -> None:
    inner, keeper = tapped()
    inner.layers_to_capture = [0]
    final, aux = inner.forward(forward_batch=batch())
    assert torch.equal(final, torch.full((3, 4), 2.0)) and torch.equal(aux[0], STATES[0])
    assert inner.layers_to_capture == [0]
    assert keeper.refused == ["SGLang's own hidden state capture is on; start the server without it"]


def test_a_forward_that_raises_leaves_the_model_as_it_was() -> None:
    inner, _ = tapped()
    inner.layers_to_capture = []
    inner.norm.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        inner.forward(forward_batch=batch())
    assert inner.layers_to_capture == []
    assert len(inner.norm._forward_hooks) == 0


def test_a_model_that_gives_no_states_fails_the_request_and_not_the_server() -> None:
    inner, keeper = tapped(silent=True)
    assert torch.equal(inner.forward(forward_batch=batch()), torch.full((3, 4), 2.0))
    assert keeper.refused == ["the model's forward gave no states of its layers"]


@pytest.mark.parametrize(
    ("prefill", "context", "chunk", "pool", "rows"),
    [
        (8192, 4096, -1, None, 8192),
        (8192, 131072, None, None, 131072),  # one prompt that is longer than the budget
        (8192, 131072, 2048, None, 2048),
        (8192, 131072, -1, 65536, 65536),  # no forward has more tokens than the KV cache
    ],
)
def test_a_slot_holds_the_largest_forward(
    prefill: int, context: int, chunk: int | None, pool: int | None, rows: int
) -> None:
    args = SimpleNamespace(max_prefill_tokens=prefill, chunked_prefill_size=chunk, max_total_tokens=pool)
    assert forward_tokens(args, context) == rows
