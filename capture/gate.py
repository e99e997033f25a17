"""The gate: is this server safe to draw from? Its resolved arguments and the tap's own word decide.

Each rule names a way in which states would be missing, partial or other than in serving (see the reasons below).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from capture import code_hash
from capture.dumps.dump import TapState, read_tap
from capture.server import Server

TESTED = ((0, 5, 11), (0, 5, 23))


class NotSafe(Exception):
    """The gate or the probe refuses a server."""


class Finding(msgspec.Struct, frozen=True):
    """Something that the gate found: `fatal` refuses, else it is only said. `remedy` says what to do."""

    id: str
    fatal: bool
    what: str
    remedy: str


class Expected(msgspec.Struct, frozen=True):
    """What the caller relies on: the capture code's hash, the model's folder, the longest prompt in tokens."""

    code: str
    model: str | None = None
    longest: int | None = None


# Flags of /server_info that must be off, why, and how to turn each off.
OFF = (
    ("enable_torch_compile", "torch.compile traces the tap away", "start without --enable-torch-compile"),
    (
        "enable_two_batch_overlap",
        "with two-batch overlap layers run in another loop, which does not capture",
        "start without --enable-two-batch-overlap",
    ),
    ("enable_mixed_chunk", "mixed chunks put decoding tokens into prefill", "start without --enable-mixed-chunk"),
    ("enable_dp_attention", "with attention DP the states are spread over ranks", "start without attention DP"),
    (
        "enable_hierarchical_cache",
        "a hierarchical cache serves prefixes that are then not computed",
        "start without --enable-hierarchical-cache",
    ),
    (
        "enable_return_aux_hidden_states",
        "SGLang's own capture is on, and the tap leaves such a server alone",
        "start without --enable-return-aux-hidden-states",
    ),
    ("enable_prefill_cp", "context parallelism splits prompts over ranks", "start without context parallelism"),
)
# Sizes that must be 1, why, and how to say so.
ONE = (
    ("pp_size", "pipeline stages each see a part of the layers", "--pp-size 1"),
    ("attn_dp_size", "with attention DP the states are spread over ranks", "--attn-dp-size 1"),
    ("attn_cp_size", "context parallelism splits prompts over ranks", "--attn-cp-size 1"),
    ("dcp_size", "context parallelism splits prompts over ranks", "--dcp-size 1"),
)


def check(info: dict[str, Any], tap: TapState | None, expected: Expected) -> list[Finding]:
    """All findings for a server with these resolved arguments (`/server_info`) and this tap; empty is safe."""
    return [*_tap(info, tap, expected), *_arguments(info), *_lengths(info, expected), *_notes(info)]


def look(
    server: Server, longest: int | None = None, seconds: float = 30.0
) -> tuple[dict[str, Any], TapState | None, list[Finding]]:
    """A server's resolved arguments and tap, and what `check` finds for a prompt of `longest` tokens.

    Raises ServerGone where it does not answer in `seconds`, DumpError.
    """
    tap, info = read_tap(Path(server.dump_dir)), server.info(seconds)
    return info, tap, check(info, tap, Expected(code_hash(), server.model, longest))


def refusal(findings: list[Finding]) -> str | None:
    """The fatal findings in words, None where there are none."""
    fatal = [finding for finding in findings if finding.fatal]
    if not fatal:
        return None
    return "not safe to draw from: " + "; ".join(f"{finding.what} ({finding.remedy})" for finding in fatal)


def _fatal(name: str, what: str, remedy: str) -> Finding:
    return Finding(name, True, what, remedy)


def _tap(info: dict[str, Any], tap: TapState | None, expected: Expected) -> Iterator[Finding]:
    if tap is None or not tap.inside:
        yield _fatal("tap_absent", "the tap is not in the server", "start it with `layertap launch`")
        return
    if tap.code != expected.code:
        yield _fatal(
            "tap_code",
            f"the server runs the tap of another version of Layertap (code {tap.code}, ours is {expected.code})",
            "stop it and launch it again",
        )
    replicas = info.get("dp_size") or 1
    if tap.replicas != replicas and not info.get("enable_dp_attention"):
        yield _fatal(
            "replicas",
            f"the server has {replicas} replicas, the tap knows of {tap.replicas}",
            "start it with `layertap launch`",
        )
    if expected.model is not None and tap.model != expected.model:
        yield _fatal(
            "wrong_model", f"the server runs {tap.model}, asked for is {expected.model}", "launch the other model"
        )


def _arguments(info: dict[str, Any]) -> Iterator[Finding]:
    version = _version(info.get("version", ""))
    if version is not None and not TESTED[0] <= version <= TESTED[1]:
        yield Finding(
            "version",
            version < TESTED[0],
            f"SGLang {info['version']} is outside the tested range 0.5.11 to 0.5.23",
            "use a version in that range, or compare with `layertap probe` first",
        )
    if not info.get("disable_radix_cache"):
        yield _fatal(
            "radix",
            "the prefix cache is on, so shared prefixes would not be computed",
            "start with --disable-radix-cache",
        )
    for phase in ("prefill", "decode"):
        if not _graphs_off(info, phase):
            yield _fatal(
                f"graphs_{phase}",
                f"CUDA graphs are on for {phase}, and a replay skips the tap",
                "start with --disable-cuda-graph",
            )
    if info.get("flashinfer_allreduce_fusion_backend") or info.get("enable_flashinfer_allreduce_fusion"):
        yield _fatal(
            "fusion",
            "all-reduce fusion is on, so small forwards would give one rank's partial sum",
            "start with --enforce-disable-flashinfer-allreduce-fusion",
        )
    if info.get("speculative_algorithm"):
        yield _fatal("speculative", "speculative decoding is on", "start without --speculative-algorithm")
    if info.get("moe_a2a_backend") not in (None, "none"):
        yield _fatal("moe_a2a", f"MoE all-to-all ({info['moe_a2a_backend']}) is on", "start without --moe-a2a-backend")
    if info.get("disaggregation_mode") not in (None, "null"):
        yield _fatal("disaggregation", "prefill and decode are disaggregated", "start without --disaggregation-mode")
    for flag, why, remedy in OFF:
        if info.get(flag):
            yield _fatal(flag, why, remedy)
    for size, why, remedy in ONE:
        if (info.get(size) or 1) != 1:
            yield _fatal(size, f"{size} is {info[size]}: {why}", f"start with {remedy}")


def _graphs_off(info: dict[str, Any], phase: str) -> bool:
    config = info.get("cuda_graph_config")
    if isinstance(config, dict) and isinstance(config.get(phase), dict):
        return bool(config[phase].get("backend") == "disabled")
    piecewise_off = phase == "decode" or bool(info.get("disable_piecewise_cuda_graph", True))
    return bool(info.get("disable_cuda_graph")) and piecewise_off  # 0.5.11 names


def _lengths(info: dict[str, Any], expected: Expected) -> Iterator[Finding]:
    if expected.longest is None:
        return
    limits = (
        ("max_total_num_tokens", "--max-total-tokens", info.get("max_total_num_tokens")),
        ("max_req_input_len", "--context-length", longest_prompt(info)),
    )
    for name, flag, limit in limits:
        if limit is not None and limit < expected.longest:
            yield _fatal(
                name,
                f"the longest row has {expected.longest:,} tokens, the server takes {limit:,} ({name})",
                f"raise {flag}, or lower --max-length",
            )


def longest_prompt(info: dict[str, Any]) -> int | None:
    """Most tokens that the server takes in one prompt, None where it does not say."""
    if info.get("max_req_input_len"):  # a prompt of that many tokens is already refused
        return int(info["max_req_input_len"]) - 1
    return int(info["context_length"]) - 7 if info.get("context_length") else None


def _notes(info: dict[str, Any]) -> Iterator[Finding]:
    dtype = info.get("kv_cache_dtype") or "auto"
    if dtype not in ("auto", "bf16", "bfloat16"):
        yield Finding(
            "kv_cache",
            False,
            f"the KV cache is {dtype}, so the states differ from those of a bf16 cache",
            "serve with the same KV cache as the drafter will be served with",
        )


def _version(text: str) -> tuple[int, ...] | None:
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else None
