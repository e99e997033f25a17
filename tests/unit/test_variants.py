"""What tuning tries: only what the host, the model and SGLang can use, and nothing twice."""

from __future__ import annotations

from typing import Any

import pytest

from backends.errors import UsageError
from backends.sglang import Launch, Overrides, load_profiles, resolve
from backends.situation import Situation
from backends.tune import variants
from backends.tune.variants import STAGES, choose, load_variants

KIMI = {
    "architecture": "KimiK25ForConditionalGeneration",
    "mla": True,
    "moe": True,
    "quantization": "compressed-tensors",
}
PRO_6000 = Situation(gpus=8, cc="12.0", vram_gib=95.6, nvlink=False, **KIMI)
B200 = Situation(gpus=8, cc="10.0", vram_gib=179.0, nvlink=True, **KIMI)
DENSE = Situation(gpus=1, cc="9.0", vram_gib=140.4, nvlink=True, mla=False, moe=False, quantization="none")


@pytest.fixture(autouse=True)
def every_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants.importlib.util, "find_spec", lambda name: object())  # type: ignore[attr-defined]


def launch(profile: str = "base", version: str = "0.5.23", **args: Any) -> Launch:
    overrides = Overrides(args={name.replace("_", "-"): value for name, value in args.items()})
    model = None if profile.startswith("embedded") else "/m"
    return resolve(profile, load_profiles(), version=version, model=model, port=1, overrides=overrides)


def names(situation: Situation, merged: Launch, *only: str) -> list[str]:
    return [variant.name for variant in choose(only, situation, merged)]


def test_every_variant_of_the_file_belongs_to_a_stage_and_changes_something() -> None:
    found = load_variants()
    assert {variant.stage for variant in found} == set(STAGES)
    assert all(variant.args or variant.env for variant in found)
    assert len({tuple(variant.words()) for variant in found}) == len(found)


def test_the_first_case() -> None:
    found = names(PRO_6000, launch("kimi-k2_5-int4-8x-rtxpro6000"))
    assert found == [
        "attention-triton",
        "attention-flashinfer",
        "moe-triton",
        "moe-marlin",
        "prefill-4k",
        "prefill-8k",
        "prefill-16k",
        "overlap",
        "nccl-p2p-everywhere",
        "nccl-8-channels",
        "nccl-16-channels",
        "nccl-no-p2p",
    ]
    assert "moe-marlin" not in names(PRO_6000, launch("kimi-k2_5-int4-8x-rtxpro6000", "0.5.12"))


def test_nccl_is_tried_only_over_several_ranks_and_by_the_links() -> None:
    assert not [name for name in names(PRO_6000, launch()) if name.startswith("nccl")]
    assert [name for name in names(B200, launch(tp=8)) if name.startswith("nccl")] == [
        "nccl-16-channels",
        "nccl-nvls",
        "nccl-symmetric-memory",
    ]


def test_a_dense_model_on_one_gpu() -> None:
    assert names(DENSE, launch()) == [
        "attention-triton", "attention-flashinfer", "attention-fa3", "prefill-4k", "prefill-8k", "prefill-16k", "overlap",
    ]  # fmt: skip


def test_a_backend_whose_package_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    assert names(DENSE, launch(), "attention") == ["attention-triton"]


def test_the_embedded_engine() -> None:
    found = names(Situation(mla=False, moe=False, quantization="none"), launch("embedded-llama"))
    assert found == ["prefill-1k", "prefill-2k", "prefill-4k", "overlap"]


def test_variants_are_chosen_by_name_or_stage() -> None:
    assert names(DENSE, launch(), "overlap", "prefill-4k") == ["prefill-4k", "overlap"]
    assert names(DENSE, launch(), "prefill") == ["prefill-4k", "prefill-8k", "prefill-16k"]
    with pytest.raises(UsageError, match="no variant or stage is called 'prefil'; here there are attention-triton, "):
        choose(["prefil"], DENSE, launch())
    with pytest.raises(UsageError, match="moe-triton cannot be used with this host, model and SGLang; here there are "):
        choose(["overlap", "moe-triton"], DENSE, launch())


def find(name: str) -> variants.Variant:
    return next(variant for variant in load_variants() if variant.name == name)


@pytest.mark.parametrize(
    ("name", "args", "effective", "nothing"),
    [
        ("prefill-8k", {}, {}, True),  # base says 8192
        ("prefill-4k", {}, {}, False),
        ("attention-fa3", {}, {"attention_backend": "fa3"}, True),  # SGLang's own choice
        ("attention-fa3", {}, {"attention_backend": "triton"}, False),
        ("attention-fa3", {"attention-backend": "triton"}, {"attention_backend": "fa3"}, False),
        ("overlap", {}, {}, False),
        ("overlap", {"disable-overlap-schedule": "unset"}, {"disable_overlap_schedule": False}, True),
    ],
)
def test_a_variant_that_changes_nothing(
    name: str, args: dict[str, Any], effective: dict[str, Any], nothing: bool
) -> None:
    assert find(name).changes_nothing(launch(**args), effective) is nothing


def test_a_variant_applied() -> None:
    before = launch("kimi-k2_5-int4-8x-rtxpro6000")
    after = find("nccl-no-p2p").applied(before)
    assert "NCCL_P2P_LEVEL" not in after.environ() and "NCCL_P2P_LEVEL" in before.environ()
    assert (after.environ()["NCCL_P2P_DISABLE"], after.environ()["NCCL_MIN_NCHANNELS"]) == ("1", "16")
    assert after.argv("python") == before.argv("python")
    argv = find("overlap").applied(before).argv("python")
    assert set(before.argv("python")) - set(argv) == {"--disable-overlap-schedule"}
