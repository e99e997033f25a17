"""The gate: which servers are safe to draw from, told by `/server_info` and the tap."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from capture.dumps.dump import TapState
from capture.gate import Expected, check, longest_prompt, refusal

TAP = TapState(
    code="00112233", pid=42, sglang="0.5.23", model="/models/kimi", model_class="KimiK25ForConditionalGeneration"
)
EXPECTED = Expected(code="00112233", model="/models/kimi", longest=2048)

# What a server that `layertap launch` started says, of what the gate reads.
SAFE: dict[str, Any] = {
    "version": "0.5.23",
    "disable_radix_cache": True,
    "disable_cuda_graph": True,
    "cuda_graph_config": {"decode": {"backend": "disabled", "max_bs": 32}, "prefill": {"backend": "disabled"}},
    "enable_flashinfer_allreduce_fusion": False,
    "flashinfer_allreduce_fusion_backend": None,
    "speculative_algorithm": None,
    "moe_a2a_backend": "none",
    "disaggregation_mode": "null",
    "enable_torch_compile": False,
    "enable_two_batch_overlap": False,
    "enable_mixed_chunk": False,
    "enable_dp_attention": False,
    "enable_hierarchical_cache": False,
    "enable_return_aux_hidden_states": False,
    "enable_prefill_cp": False,
    "pp_size": 1,
    "dp_size": 1,
    "attn_dp_size": 1,
    "attn_cp_size": 1,
    "dcp_size": 1,
    "kv_cache_dtype": "auto",
    "context_length": 2056,
    "max_total_num_tokens": 16384,
    "max_req_input_len": 2050,
}
# 0.5.11 has no phases of CUDA graphs and other names.
SAFE_0_5_11 = {
    "version": "0.5.11",
    "disable_radix_cache": True,
    "disable_cuda_graph": True,
    "disable_piecewise_cuda_graph": True,
    "enable_flashinfer_allreduce_fusion": False,
    "speculative_algorithm": None,
    "moe_a2a_backend": "none",
    "disaggregation_mode": "null",
    "enable_torch_compile": False,
    "enable_two_batch_overlap": False,
    "enable_mixed_chunk": False,
    "enable_dp_attention": False,
    "enable_hierarchical_cache": False,
    "pp_size": 1,
    "dp_size": 1,
    "kv_cache_dtype": "auto",
    "max_total_num_tokens": 16384,
    "max_req_input_len": 2050,
}


def graphs(**backends: str) -> dict[str, Any]:
    return {"cuda_graph_config": {phase: {"backend": backend} for phase, backend in backends.items()}}


FUSION = (
    "fusion",
    "all-reduce fusion is on, so small forwards would give one rank's partial sum",
    "start with --enforce-disable-flashinfer-allreduce-fusion",
)
# what differs from a safe server, the finding, what it says, what to do
UNSAFE: list[tuple[dict[str, Any], str, str, str]] = [
    (
        {"disable_radix_cache": False},
        "radix",
        "the prefix cache is on, so shared prefixes would not be computed",
        "start with --disable-radix-cache",
    ),
    (
        graphs(prefill="breakable", decode="disabled"),
        "graphs_prefill",
        "CUDA graphs are on for prefill, and a replay skips the tap",
        "start with --disable-cuda-graph",
    ),
    (
        graphs(prefill="disabled", decode="full"),
        "graphs_decode",
        "CUDA graphs are on for decode, and a replay skips the tap",
        "start with --disable-cuda-graph",
    ),
    ({"flashinfer_allreduce_fusion_backend": "auto"}, *FUSION),
    ({"enable_flashinfer_allreduce_fusion": True}, *FUSION),
    (
        {"speculative_algorithm": "EAGLE3"},
        "speculative",
        "speculative decoding is on",
        "start without --speculative-algorithm",
    ),
    (
        {"moe_a2a_backend": "deepep"},
        "moe_a2a",
        "MoE all-to-all (deepep) is on",
        "start without --moe-a2a-backend",
    ),
    (
        {"disaggregation_mode": "prefill"},
        "disaggregation",
        "prefill and decode are disaggregated",
        "start without --disaggregation-mode",
    ),
    (
        {"enable_torch_compile": True},
        "enable_torch_compile",
        "torch.compile traces the tap away",
        "start without --enable-torch-compile",
    ),
    (
        {"enable_two_batch_overlap": True},
        "enable_two_batch_overlap",
        "with two-batch overlap layers run in another loop, which does not capture",
        "start without --enable-two-batch-overlap",
    ),
    (
        {"enable_mixed_chunk": True},
        "enable_mixed_chunk",
        "mixed chunks put decoding tokens into prefill",
        "start without --enable-mixed-chunk",
    ),
    (
        {"enable_dp_attention": True},
        "enable_dp_attention",
        "with attention DP the states are spread over ranks",
        "start without attention DP",
    ),
    (
        {"enable_hierarchical_cache": True},
        "enable_hierarchical_cache",
        "a hierarchical cache serves prefixes that are then not computed",
        "start without --enable-hierarchical-cache",
    ),
    (
        {"enable_return_aux_hidden_states": True},
        "enable_return_aux_hidden_states",
        "SGLang's own capture is on, and the tap leaves such a server alone",
        "start without --enable-return-aux-hidden-states",
    ),
    (
        {"enable_prefill_cp": True},
        "enable_prefill_cp",
        "context parallelism splits prompts over ranks",
        "start without context parallelism",
    ),
    (
        {"pp_size": 2},
        "pp_size",
        "pp_size is 2: pipeline stages each see a part of the layers",
        "start with --pp-size 1",
    ),
    (
        {"dp_size": 4},
        "replicas",
        "the server has 4 replicas, the tap knows of 1",
        "start it with `layertap launch`",
    ),
    (
        {"attn_dp_size": 8},
        "attn_dp_size",
        "attn_dp_size is 8: with attention DP the states are spread over ranks",
        "start with --attn-dp-size 1",
    ),
    (
        {"attn_cp_size": 2},
        "attn_cp_size",
        "attn_cp_size is 2: context parallelism splits prompts over ranks",
        "start with --attn-cp-size 1",
    ),
    (
        {"dcp_size": 2},
        "dcp_size",
        "dcp_size is 2: context parallelism splits prompts over ranks",
        "start with --dcp-size 1",
    ),
    (
        {"max_total_num_tokens": 2047},
        "max_total_num_tokens",
        "the longest row has 2,048 tokens, the server takes 2,047 (max_total_num_tokens)",
        "raise --max-total-tokens, or lower --max-length",
    ),
    (
        {"max_req_input_len": 2048},
        "max_req_input_len",
        "the longest row has 2,048 tokens, the server takes 2,047 (max_req_input_len)",
        "raise --context-length, or lower --max-length",
    ),
    (
        {"version": "0.5.10"},
        "version",
        "SGLang 0.5.10 is outside the tested range 0.5.11 to 0.5.23",
        "use a version in that range, or compare with `layertap probe` first",
    ),
]


@pytest.mark.parametrize("info", [SAFE, SAFE_0_5_11], ids=["0.5.23", "0.5.11"])
def test_a_safe_server(info: dict[str, Any]) -> None:
    assert check(info, TAP, EXPECTED) == []
    assert refusal([]) is None


@pytest.mark.parametrize(("differs", "name", "what", "remedy"), UNSAFE, ids=lambda value: str(value)[:30])
def test_each_danger_is_refused_alone(differs: dict[str, Any], name: str, what: str, remedy: str) -> None:
    (finding,) = check(SAFE | differs, TAP, EXPECTED)
    assert (finding.id, finding.fatal, finding.what, finding.remedy) == (name, True, what, remedy)
    assert refusal([finding]) == f"not safe to draw from: {what} ({remedy})"


def test_every_field_of_the_safe_server_matters() -> None:
    """Each is covered above, or only makes a note, or is the fallback of another one."""
    covered = {field for differs, *_ in UNSAFE for field in differs}
    assert set(SAFE) - covered == {"disable_cuda_graph", "kv_cache_dtype", "context_length"}


def test_replicas_that_all_have_a_tap_are_safe() -> None:
    assert check(SAFE | {"dp_size": 4}, msgspec.structs.replace(TAP, replicas=4), EXPECTED) == []


@pytest.mark.parametrize("size", [None, 0, 1])
def test_a_size_that_is_not_set_is_one(size: int | None) -> None:
    sizes = dict.fromkeys(("pp_size", "dp_size", "attn_dp_size", "attn_cp_size", "dcp_size"), size)
    assert check(SAFE | sizes, TAP, EXPECTED) == []


@pytest.mark.parametrize(
    ("differs", "names"),
    [
        ({"disable_cuda_graph": False}, ["graphs_prefill", "graphs_decode"]),
        ({"disable_piecewise_cuda_graph": False}, ["graphs_prefill"]),
        ({"enable_flashinfer_allreduce_fusion": True}, ["fusion"]),
    ],
)
def test_the_names_of_0_5_11(differs: dict[str, Any], names: list[str]) -> None:
    assert [finding.id for finding in check(SAFE_0_5_11 | differs, TAP, EXPECTED)] == names


def test_what_a_server_does_not_say_is_not_taken_for_safe() -> None:
    assert {finding.id for finding in check({}, TAP, EXPECTED)} == {"radix", "graphs_prefill", "graphs_decode"}


# --- The tap ---


@pytest.mark.parametrize("tap", [None, msgspec.structs.replace(TAP, inside=False)], ids=["no tap.json", "not inside"])
def test_a_server_without_the_tap(tap: TapState | None) -> None:
    (finding,) = check(SAFE, tap, EXPECTED)
    assert (finding.id, finding.fatal, finding.what) == ("tap_absent", True, "the tap is not in the server")
    assert finding.remedy == "start it with `layertap launch`"


def test_a_tap_of_other_code() -> None:
    (finding,) = check(SAFE, msgspec.structs.replace(TAP, code="ffffffff"), EXPECTED)
    assert (finding.id, finding.fatal) == ("tap_code", True)
    assert finding.what == ("the server runs the tap of another version of Layertap (code ffffffff, ours is 00112233)")


def test_another_model() -> None:
    other = msgspec.structs.replace(TAP, model="/models/llama")
    (finding,) = check(SAFE, other, EXPECTED)
    assert (finding.id, finding.fatal) == ("wrong_model", True)
    assert finding.what == "the server runs /models/llama, asked for is /models/kimi"
    assert check(SAFE, other, Expected("00112233")) == []


# --- Lengths ---


@pytest.mark.parametrize("longest", [None, 1, 2049])
def test_rows_that_the_server_takes(longest: int | None) -> None:
    assert check(SAFE, TAP, Expected("00112233", longest=longest)) == []


def test_a_row_of_as_many_tokens_as_sglang_names_is_one_too_long() -> None:
    """SGLang refuses a prompt of `max_req_input_len` tokens: it takes fewer."""
    found = check(SAFE, TAP, Expected("00112233", longest=2050))
    assert [finding.id for finding in found] == ["max_req_input_len"]


@pytest.mark.parametrize(
    ("info", "longest"),
    [
        ({"max_req_input_len": 2050, "context_length": 4096}, 2049),
        ({"context_length": 2056}, 2049),  # 0.5.11 to 0.5.23 make max_req_input_len of it, less 6
        ({"context_length": None}, None),
        ({}, None),
    ],
)
def test_the_longest_prompt(info: dict[str, Any], longest: int | None) -> None:
    assert longest_prompt(info) == longest


# --- What is only said ---


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2", "mxfp8", "nvfp4", "fp4_mx_block16"])
def test_a_narrow_kv_cache_is_said(dtype: str) -> None:
    (finding,) = check(SAFE | {"kv_cache_dtype": dtype}, TAP, EXPECTED)
    assert (finding.id, finding.fatal) == ("kv_cache", False)
    assert finding.what == f"the KV cache is {dtype}, so the states differ from those of a bf16 cache"
    assert refusal([finding]) is None


@pytest.mark.parametrize("dtype", ["auto", "bf16", "bfloat16", None])
def test_a_bf16_kv_cache_is_not(dtype: str | None) -> None:
    assert check(SAFE | {"kv_cache_dtype": dtype}, TAP, EXPECTED) == []


@pytest.mark.parametrize("version", ["0.5.24", "0.6.0", "1.0.0rc1"])
def test_a_newer_sglang_is_said(version: str) -> None:
    (finding,) = check(SAFE | {"version": version}, TAP, EXPECTED)
    assert (finding.id, finding.fatal) == ("version", False)
    assert finding.what == f"SGLang {version} is outside the tested range 0.5.11 to 0.5.23"
    assert refusal([finding]) is None


@pytest.mark.parametrize("version", ["0.5.10.post2", "0.4.9", "0.5.9rc11"])
def test_an_older_sglang_is_refused(version: str) -> None:
    (finding,) = check(SAFE | {"version": version}, TAP, EXPECTED)
    assert (finding.id, finding.fatal) == ("version", True)


@pytest.mark.parametrize("version", ["0.5.11", "0.5.16.post1", "0.5.23rc2", "0.5.23+cu129", "", "main"])
def test_a_tested_sglang_or_one_that_does_not_say(version: str) -> None:
    assert check(SAFE | {"version": version}, TAP, EXPECTED) == []


def test_all_dangers_are_said_at_once_and_notes_are_not() -> None:
    found = check(
        SAFE | {"pp_size": 2, "disable_radix_cache": False, "kv_cache_dtype": "fp8_e4m3"},
        None,
        EXPECTED,
    )
    assert [finding.id for finding in found] == ["tap_absent", "radix", "pp_size", "kv_cache"]
    assert refusal(found) == (
        "not safe to draw from: the tap is not in the server (start it with `layertap launch`); the prefix cache is "
        "on, so shared prefixes would not be computed (start with --disable-radix-cache); pp_size is 2: pipeline "
        "stages each see a part of the layers (start with --pp-size 1)"
    )
