"""What a profile meets on a host, and in what that differs from what the profile is for."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import Card, FakeNvml

from backends.sglang import candidates, load_profiles
from backends.situation import Match, Situation, read_situation

FIRST_CASE = "kimi-k2_5-int4-8x-rtxpro6000"
PRO_6000 = Situation(
    gpus=8, cc="12.0", vram_gib=95.6, nvlink=False, architecture="KimiK25ForConditionalGeneration", mla=True, moe=True
)
H200 = Situation(gpus=8, cc="9.0", vram_gib=140.4, nvlink=True, architecture="DeepseekV3ForCausalLM")


@pytest.mark.parametrize(
    ("wanted", "found", "differs"),
    [
        ({}, PRO_6000, []),
        ({"gpus": 8, "cc": "12.0", "vram_gib_min": 90, "nvlink": False}, PRO_6000, []),
        ({"gpus": 4}, PRO_6000, []),
        ({"gpus": 16}, PRO_6000, ["it is for 16 GPUs, and here are 8"]),
        ({"gpus": 2}, Situation(gpus=1), ["it is for 2 GPUs, and here is 1"]),
        ({"gpus": 2, "cc": "9.0", "nvlink": True}, Situation(), ["it is for 2 GPUs, and here are none"]),
        ({"cc": "10.0"}, PRO_6000, ["it is for compute capability 10.0, and here is 12.0"]),
        ({"cc": "10.0"}, Situation(gpus=2), ["it is for compute capability 10.0, and here is more than one"]),
        ({"vram_gib_min": 135}, PRO_6000, ["it is for 135 GiB a GPU, and here are 96"]),
        ({"nvlink": True}, PRO_6000, ["it is for GPUs with NVLink, and these are not"]),
        ({"architectures": ["A", "B"]}, H200, ["it is for A or B, and the model is DeepseekV3ForCausalLM"]),
        ({"architectures": ["A"]}, Situation(gpus=1), []),
    ],
)
def test_what_differs(wanted: dict[str, Any], found: Situation, differs: list[str]) -> None:
    assert Match(**wanted).differs(found) == differs


def test_the_profiles_for_a_host_and_a_model_come_first() -> None:
    profiles = load_profiles({"mine": {"summary": "of mine"}})
    suit = {one.name for one in candidates(profiles, "0.5.23", PRO_6000) if not one.differs}
    assert suit == {FIRST_CASE, f"{FIRST_CASE}-nop2p", "mine"}
    listed = candidates(profiles, "0.5.23", H200)
    assert {one.name for one in listed if not one.differs} == {"deepseek-r1-fp8-8x-h200", "mine"}
    assert [bool(one.differs) for one in listed] == sorted(bool(one.differs) for one in listed)
    old = {one.name: one.differs for one in candidates(profiles, "0.5.11", Situation())}
    assert old["embedded-llama"] == ["it is for SGLang >=0.5.23, and here is 0.5.11"]


def test_the_gpus_and_the_model_of_a_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(Card(0), Card(1)))
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "text_config": {
            "num_hidden_layers": 61,
            "hidden_size": 7168,
            "kv_lora_rank": 512,
            "n_routed_experts": 384,
            "quantization_config": {"quant_method": "compressed-tensors"},
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_situation(tmp_path)
    assert (found.gpus, found.cc, found.nvlink) == (2, "12.0", False)
    assert found.vram_gib == pytest.approx(95.6, abs=0.1)
    assert (found.architecture, found.layers, found.hidden) == ("KimiK25ForConditionalGeneration", 61, 7168)
    assert (found.mla, found.moe, found.quantization) == (True, True, "compressed-tensors")


def test_gpus_with_nvlink(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [Card(0, nvlink_links={2}), Card(1, nvlink_links={0})]
    nvml = FakeNvml(*cards)

    def state(handle: Any, link: int) -> int:
        return int(link in nvml.cards[handle.contents.value].values["nvlink_links"])

    monkeypatch.setattr(nvml, "nvmlDeviceGetNvLinkState", state, raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert read_situation().nvlink is True
    cards[1].values["nvlink_links"] = set()
    assert read_situation().nvlink is False


def test_a_host_without_gpus_and_a_model_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    assert read_situation(tmp_path) == Situation()
