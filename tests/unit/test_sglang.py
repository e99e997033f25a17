"""Profiles, the command lines and environments they become, and what is masked where those are shown."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from backends.sglang import (
    Launch,
    Overrides,
    ProfileError,
    holds_secret,
    is_secret,
    load_profiles,
    mask_argv,
    mask_text,
    masked,
    matches,
    parse_version,
    resolve,
)

FIRST_CASE = "kimi-k2_5-int4-8x-rtxpro6000"
ENGINE_PYTHON = Path(__file__).parents[2] / ".venv-engine" / "bin" / "python"


def launch(profile: str, version: str = "0.5.23", extra: dict | None = None, **options) -> Launch:
    options.setdefault("model", "/models/kimi")
    return resolve(profile, load_profiles(extra), version=version, port=30000, **options)


# --- The first case, word for word ---

SHARED_BASE = (
    "py -m sglang.launch_server --model-path /models/kimi --host 127.0.0.1 --port 30000 --chunked-prefill-size -1 "
    "--max-prefill-tokens 8192 --max-running-requests 128 --disable-radix-cache --disable-cuda-graph "
    "--disable-overlap-schedule --enforce-disable-flashinfer-allreduce-fusion --schedule-policy fcfs "
    "--kv-cache-dtype auto --watchdog-timeout 1800 --random-seed 0 --enable-metrics --sleep-on-idle"
)
SHARED_END = (
    "--mem-fraction-static 0.88 --max-total-tokens 65536 --context-length 8200 --disable-custom-all-reduce "
    "--disable-flashinfer-autotune --model-loader-extra-config"
)
LOADER = '{"enable_multithread_load": true, "num_threads": 16}'


@pytest.mark.parametrize(
    ("version", "own"),
    [
        (
            "0.5.11",
            "--disable-piecewise-cuda-graph --tp-size 8 --trust-remote-code --attention-backend triton",
        ),
        ("0.5.16", "--tp-size 8 --trust-remote-code --attention-backend triton --moe-runner-backend marlin"),
        ("0.5.23", "--tp-size 8 --trust-remote-code --attention-backend triton --moe-runner-backend marlin"),
    ],
)
def test_command_line_of_the_first_case(version: str, own: str) -> None:
    assert launch(FIRST_CASE, version).argv("py") == [*f"{SHARED_BASE} {own} {SHARED_END}".split(), LOADER]


def test_environment_of_the_first_case() -> None:
    assert launch(FIRST_CASE).environ() == {
        "SGLANG_PLUGINS": "layertap",
        "OMP_NUM_THREADS": "8",
        "NCCL_DEBUG": "WARN",
        "SGLANG_EXPOSE_OWN_ENV_VARS": "1",
        "NCCL_P2P_LEVEL": "SYS",
        "NCCL_MIN_NCHANNELS": "8",
        "NCCL_IB_DISABLE": "1",
        "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }


def test_the_variant_without_p2p_extends_the_first_case() -> None:
    plain, variant = launch(FIRST_CASE), launch(f"{FIRST_CASE}-nop2p")
    assert variant.args == plain.args
    assert variant.layers == {"outputs": [2, 30, 58]}
    changed = dict(variant.environ().items() - plain.environ().items())
    assert changed == {
        "NCCL_P2P_DISABLE": "1",
        "NCCL_MIN_NCHANNELS": "16",
        "NCCL_MAX_NCHANNELS": "32",
        "NCCL_BUFFSIZE": "33554432",
    }
    assert "NCCL_P2P_LEVEL" not in variant.environ()


# --- The built-in profiles ---


def test_every_built_in_line_has_a_reason_and_a_source() -> None:
    for name in load_profiles():
        result = launch(name)
        for line in [*result.args[3:], *result.env]:
            assert line.why, f"{name}: {line.name}"
            assert line.source in load_profiles()


@pytest.mark.parametrize(
    ("name", "outputs"),
    [
        ("embedded-kimi-k2_5", [2, 30, 58]),
        ("embedded-deepseek-v3", [1, 3, 4]),
        ("embedded-llama", [1, 3, 4]),
    ],
)
def test_embedded_profiles(name: str, outputs: list[int]) -> None:
    result = launch(name)
    assert result.embedded
    assert launch(name, model=None).model == name.replace("embedded-", "embedded:")
    assert result.layers == {"outputs": outputs}
    assert result.environ() == {
        "SGLANG_PLUGINS": "layertap,layertap_cpu",
        "NCCL_DEBUG": "WARN",
        "SGLANG_EXPOSE_OWN_ENV_VARS": "1",
        "SGLANG_PLATFORM": "layertap_cpu",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
    }
    words = " ".join(result.argv("py"))
    assert "--device cpu --attention-backend torch_native --context-length 2056 --max-total-tokens 16384" in words
    assert "--max-prefill-tokens 4096" in words


def test_no_profile_for_gpus_chooses_layers_but_the_first_case() -> None:
    chosen = {name for name in load_profiles() if launch(name).layers and not launch(name).embedded}
    assert chosen == {FIRST_CASE, f"{FIRST_CASE}-nop2p"}


def test_every_profile_turns_graphs_and_fusion_off() -> None:
    for name in load_profiles():
        words = launch(name).argv("py")
        assert "--disable-cuda-graph" in words
        assert "--enforce-disable-flashinfer-allreduce-fusion" in words
        assert not any("piecewise" in word for word in words)


PARSE = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
for words in json.load(sys.stdin):
    parser.parse_args(words)
print("parsed")
"""


@pytest.mark.skipif(not ENGINE_PYTHON.exists(), reason="no .venv-engine: SGLang's own parser is not asked")
def test_sglang_parses_every_built_in_profile(tmp_path: Path) -> None:
    command_lines = [launch(name).argv("py")[3:] for name in load_profiles()]
    done = subprocess.run(
        [ENGINE_PYTHON, "-c", PARSE],
        input=json.dumps(command_lines),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        timeout=500,
    )
    assert done.stdout.strip().endswith("parsed"), done.stderr[-2000:]


# --- A user's profiles and the command line ---


def test_a_user_profile_extends_a_built_in_one() -> None:
    extra = {
        "mine": {
            "extends": FIRST_CASE,
            "model": "/data/kimi",
            "args": {"tp": 4, "skip_tokenizer_init": True, "disable-radix-cache": False, "schedule-policy": "unset"},
            "args_if": {">=0.5.20": {"enable-nccl-nvls": {"value": True, "why": "to bench"}}},
            "env": {"NCCL_IB_DISABLE": "unset", "MY_LIMIT": 3, "MY_SWITCH": True},
            "unset": ["NCCL_DEBUG", "max-total-tokens"],
        }
    }
    result = launch("mine", extra=extra, model=None)
    lines = {line.name: line for line in result.args}
    assert result.model == "/data/kimi"
    assert (lines["tp-size"].value, lines["tp-size"].why, lines["tp-size"].source) == (4, "layertap.toml", "mine")
    assert (lines["enable-nccl-nvls"].value, lines["enable-nccl-nvls"].why) == (True, "to bench")
    assert lines["mem-fraction-static"].source == FIRST_CASE
    assert lines["random-seed"].source == "base"
    words = result.argv("py")
    assert "--skip-tokenizer-init" in words
    assert "--disable-radix-cache" not in words
    assert lines.keys().isdisjoint({"schedule-policy", "max-total-tokens"})
    environ = result.environ()
    assert (environ["MY_LIMIT"], environ["MY_SWITCH"]) == ("3", "1")
    assert environ.keys().isdisjoint({"NCCL_IB_DISABLE", "NCCL_DEBUG"})
    assert "--enable-nccl-nvls" not in launch("mine", "0.5.16", extra).argv("py")


def test_several_parents_apply_in_their_order() -> None:
    extra = {"a": {"args": {"tp-size": 1, "x": 1}}, "b": {"args": {"tp-size": 2}}, "c": {"extends": ["a", "b"]}}
    values = {line.name: line.value for line in launch("c", extra=extra).args}
    assert (values["tp-size"], values["x"], values["random-seed"]) == (2, 1, 0)


def test_the_command_line_wins() -> None:
    overrides = Overrides(
        args={"max-prefill-tokens": 4096, "served_model_name": ["a", "b"], "enable-metrics": None},
        env={"NCCL_DEBUG": "INFO"},
    )
    result = launch(FIRST_CASE, overrides=overrides)
    words = " ".join(result.argv("py"))
    assert "--max-prefill-tokens 4096" in words
    assert "--served-model-name a b" in words
    assert "--enable-metrics" not in words
    assert result.environ()["NCCL_DEBUG"] == "INFO"
    assert next(line for line in result.args if line.name == "max-prefill-tokens").source == "command line"


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"modle": "/m"}, "profile mine: unknown key modle; did you mean model?"),
        ({"qqq": 1}, "profile mine: unknown key qqq"),
        ({"extends": "bsae"}, "profile mine extends bsae, which does not exist; did you mean base?"),
        ({"extends": "mine"}, "profiles extend each other in a circle: mine -> mine"),
        ({"summary": 3}, "profile mine: Expected `str`, got `int` - at `$.summary`"),
        ({"args": 3}, "profile mine: args must be a table"),
        ({"args": {"tp-size": {"value": 1, "wyh": "x"}}}, "profile mine: args.tp-size: Object contains unknown field"),
        ({"layers": {"outputs": [1], "boundaries": [2]}}, "layers takes exactly one of boundaries, outputs"),
        ({"layers": {"output": [1]}}, "layers takes exactly one of boundaries, outputs"),
        ({"requires_sglang": "0.5.11+"}, "version specification '0.5.11+' cannot be read"),
    ],
)
def test_what_is_wrong_with_a_user_profile_is_said(table: dict, sentence: str) -> None:
    with pytest.raises(ProfileError) as error:
        load_profiles({"mine": table})
    assert sentence in str(error.value)


def test_a_circle_of_two_is_named() -> None:
    with pytest.raises(ProfileError, match="a -> b -> a"):
        load_profiles({"a": {"extends": "b"}, "b": {"extends": "a"}})


def test_a_built_in_name_cannot_be_redefined() -> None:
    with pytest.raises(ProfileError, match=r"profile base is built in: .* extends = \"base\""):
        load_profiles({"base": {}})


@pytest.mark.parametrize("version", ["0.5.9", "0.5.10.post2"])
def test_versions_without_plugins_are_refused(version: str) -> None:
    with pytest.raises(ProfileError, match="has no plugins, which the tap needs"):
        launch("base", version)


@pytest.mark.parametrize(
    ("profile", "version", "sentence"),
    [
        ("base", "0.5.24", "profile base is for SGLang >=0.5.11,<=0.5.23, and the host has 0.5.24"),
        ("gpt-oss-120b-or-glm-moe-nvlink", "0.5.11", "is for SGLang >=0.5.14, and the host has 0.5.11"),
        ("embedded-llama", "0.5.16", "profile embedded-llama is for SGLang >=0.5.23"),
        ("bass", "0.5.23", "profile bass does not exist; did you mean base?"),
        ("nosuch", "0.5.23", f"profile nosuch does not exist; there are {', '.join(load_profiles())}"),
        ("base", "main", "SGLang version 'main' cannot be read"),
    ],
)
def test_what_cannot_be_resolved_is_said(profile: str, version: str, sentence: str) -> None:
    with pytest.raises(ProfileError) as error:
        launch(profile, version)
    assert sentence in str(error.value)
    assert error.value.exit_code == 2


def test_a_model_is_needed() -> None:
    with pytest.raises(ProfileError, match="profile base names no model"):
        launch("base", model=None)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_hosts(host: str) -> None:
    words = launch("base", host=host).argv("py")
    assert words[words.index("--host") + 1] == host
    assert launch("base", overrides=Overrides(args={"host": host})).argv("py") == words


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "gpu-host-1", ""])
def test_other_hosts_are_refused(host: str) -> None:
    with pytest.raises(ProfileError, match="is not loopback"):
        launch("base", overrides=Overrides(args={"host": host}))


@pytest.mark.parametrize("name", ["port", "model", "model-path"])
def test_arguments_that_layertap_sets_itself(name: str) -> None:
    with pytest.raises(ProfileError, match=r"command line: args cannot hold (port|model-path); give --"):
        launch("base", overrides=Overrides(args={name: "1"}))


def test_old_graph_names_never_reach_a_new_sglang() -> None:
    overrides = Overrides(args={"disable-piecewise-cuda-graph": True})
    assert "--disable-piecewise-cuda-graph" in launch("base", "0.5.18", overrides=overrides).argv("py")
    with pytest.raises(ProfileError, match=r"SGLang 0\.5\.20 has no disable-piecewise-cuda-graph"):
        launch("base", "0.5.20", overrides=overrides)


# --- Versions ---


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0.5.23", (0, 5, 23)),
        ("v0.5.11.post1", (0, 5, 11)),
        ("0.5.16rc1", (0, 5, 16)),
        ("0.5.21.dev12+g0a1b2c3", (0, 5, 21)),
    ],
)
def test_parse_version(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_version(text) == numbers


@pytest.mark.parametrize(
    ("version", "spec", "result"),
    [
        ("0.5.9", ">=0.5.11", False),
        ("0.5.11", ">=0.5.11,<=0.5.23", True),
        ("0.5.23.post1", "<=0.5.23", True),
        ("0.6", ">0.5.23, <1", True),
        ("0.5.14", "<0.5.14", False),
        ("0.5", "==0.5.0", True),
        ("0.5.16", "!=0.5.16", False),
    ],
)
def test_matches(version: str, spec: str, result: bool) -> None:
    assert matches(version, spec) is result


# --- Secrets ---


@pytest.mark.parametrize(
    "name",
    [
        "api-key",
        "--admin-api-key",
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "ssl-keyfile-password",
        "MY_API_KEY",
        "SGLANG_API_KEYS",
        "api-keys",
        "apikeys",
        "HF_TOKENS",
        "access-tokens",
        "CLIENT_SECRETS",
        "SECRETS_OF_MINE",
        "DB_PASSWORDS",
        "GITHUB_PAT",
    ],
)
def test_secrets(name: str) -> None:
    assert is_secret(name)
    assert masked(name, "s3cret") == "***"
    assert holds_secret(name, "s3cret")


@pytest.mark.parametrize(
    "name",
    [
        "max-total-tokens",
        "max-prefill-tokens",
        "max_total_num_tokens",
        "num-key-value-heads",
        "num_reserved_decode_tokens",
        "speculative-num-draft-tokens",
        "piecewise-cuda-graph-tokens",
        "prompt-tokens-buckets",
        "SGLANG_MAX_THINK_TOKENS",
        "SGLANG_MLA_DEDUP_CHUNK_TOKENS",
        "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK",
        "SGLANG_USE_AITER_FP8_PER_TOKEN",
        "bytes_per_token",
        "tokens",
        "keys",
        "missing_keys",
        "tokenizer-path",
        "skip-tokenizer-init",
        "tokenizer-worker-num",
        "speculative-token-map",
        "bucket-time-to-first-token",
        "ssl-keyfile",
        "TOKENIZERS_PARALLELISM",
        "LD_LIBRARY_PATH",
        "kv-cache-dtype",
    ],
)
def test_what_only_sounds_like_a_secret(name: str) -> None:
    assert not is_secret(name)
    assert masked(name, 7) == "7"
    assert not holds_secret(name, 7)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("http://me:hunter22@proxy:3128", "http://***@proxy:3128"),
        ("http://me:p@ss@proxy:3128,http://127.0.0.1:9", "http://***@proxy:3128,http://127.0.0.1:9"),
        ("https://hf_abcdefghijklmnopqrstuvwx:@hub.example", "https://***@hub.example"),
        ("http://proxy:3128", "http://proxy:3128"),
        ({"headers": "Authorization: Bearer abc.def"}, '{"headers": "Authorization: Bearer ***"}'),
    ],
)
def test_a_secret_within_a_value_of_another_name(value: Any, shown: str) -> None:
    assert masked("HTTPS_PROXY", value) == shown
    assert holds_secret("HTTPS_PROXY", value) is ("***" in shown)


def test_mask_argv() -> None:
    argv = ["py", "--api-key", "s3cret", "--admin-api-key=s3cret", "--max-total-tokens", "5", "--api-key", "--odd"]
    assert mask_argv(argv) == [
        *("py", "--api-key", "***", "--admin-api-key=***", "--max-total-tokens", "5", "--api-key", "***")
    ]
    argv = ["--api-keys", "s3", "s4", "--port", "1", "--proxy", "http://me:s5@proxy", "--proxy=http://me:s6@proxy"]
    assert mask_argv(argv) == [
        *("--api-keys", "***", "***", "--port", "1", "--proxy", "http://***@proxy", "--proxy=http://***@proxy")
    ]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("server_args=ServerArgs(port=1, api_key='s3', x=2)", "server_args=ServerArgs(port=1, api_key='***', x=2)"),
        (
            "server_args={'api_key': 's3', 'admin_api_key': None}",
            "server_args={'api_key': '***', 'admin_api_key': None}",
        ),
        ('{"api_key": "s3", "tp_size": 8}', '{"api_key": "***", "tp_size": 8}'),
        ("using http://me:s3@proxy:3128 for https://x.org/a", "using http://***@proxy:3128 for https://x.org/a"),
        ("'Authorization': 'Basic bWU6czM='", "'Authorization': 'Basic ***'"),
        ("mail me@example.org at http://127.0.0.1:30000/x", "mail me@example.org at http://127.0.0.1:30000/x"),
        ("python -m sglang --api-key s3 --tp 8", "python -m sglang --api-key *** --tp 8"),
        ("python -m sglang --admin-api-key=s3", "python -m sglang --admin-api-key=***"),
        ("['--api-key', 's3', '--tp', '8']", "['--api-key', '***', '--tp', '8']"),
        ("HF_TOKEN=hf_x NCCL_DEBUG=WARN", "HF_TOKEN=*** NCCL_DEBUG=WARN"),
        ("SGLANG_API_KEYS=s3 --api-keys s4", "SGLANG_API_KEYS=*** --api-keys ***"),
        ('{"proxy":"http://h:1","mail":"me@x.org"}', '{"proxy":"http://h:1","mail":"me@x.org"}'),
        ("Authorization: Bearer abc.def-1", "Authorization: Bearer ***"),
        ("401 for token hf_abcdefghijklmnopqrstuvwx", "401 for token hf_***"),
        ("Prefill batch, #new-token: 81, token usage: 0.5", "Prefill batch, #new-token: 81, token usage: 0.5"),
        ("api_key=None, ssl_keyfile=None", "api_key=None, ssl_keyfile=None"),
    ],
)
def test_mask_text(text: str, shown: str) -> None:
    assert mask_text(text) == shown


def test_mask_text_hides_given_secrets_anywhere() -> None:
    assert mask_text("a hunter2 b", ["hunter2", ""]) == "a *** b"


# --- The tap's own settings ---


@pytest.mark.parametrize(
    ("said", "count"),
    [
        (51539607552, 48 << 30),
        ("51539607552", 48 << 30),
        ("48 GiB", 48 << 30),
        ("1.5gb", 1_500_000_000),
        ("64 MiB", 64 << 20),
    ],
)
def test_memory_of_the_tap_in_bytes_or_words(said: int | str, count: int) -> None:
    profiles = load_profiles({"mine": {"tap": {"memory": {"value": said, "why": "as measured"}}}})
    merged = resolve("mine", profiles, version="0.5.23", model="/m", port=1)
    assert merged.tap_settings() == {"memory": count}
    assert merged.tap[0].why == "as measured"


def test_the_command_line_wins_over_a_profile_s_tap() -> None:
    profiles = load_profiles({"mine": {"tap": {"memory": "1 GiB", "writers": 3}}, "child": {"extends": "mine"}})
    overrides = Overrides(tap={"writers": 4})
    merged = resolve("child", profiles, version="0.5.23", model="/m", port=1, overrides=overrides)
    assert merged.tap_settings() == {"memory": 1 << 30, "writers": 4}
    without = resolve(
        "child", profiles, version="0.5.23", model="/m", port=1, overrides=Overrides(tap={"memory": "unset"})
    )
    assert without.tap_settings() == {"writers": 3}


@pytest.mark.parametrize(
    ("tap", "said"),
    [
        ({"memory": "48 horses"}, "mine: memory '48 horses': expected bytes, or a size such as 48 GiB"),
        ({"memory": "-1"}, "mine: memory '-1': expected bytes, or a size such as 48 GiB"),
        ({"memory": 0}, "mine: memory 0: expected at least 1"),
        ({"writers": "many"}, "mine: writers 'many': "),
        ({"readers": 1}, "profile mine: tap takes memory and writers, not readers"),
        ({"writers": {"value": 1, "way": "x"}}, "profile mine: tap.writers: "),
    ],
)
def test_settings_of_the_tap_that_cannot_be_read(tap: dict[str, Any], said: str) -> None:
    with pytest.raises(ProfileError, match=re.escape(said)):
        resolve("mine", load_profiles({"mine": {"tap": tap}}), version="0.5.23", model="/m", port=1)


def test_what_a_profile_is_for_is_inherited() -> None:
    merged = resolve("kimi-k2_5-int4-8x-rtxpro6000-nop2p", load_profiles(), version="0.5.23", model="/m", port=1)
    assert merged.match is not None and (merged.match.cc, merged.match.gpus) == ("12.0", 8)
    with pytest.raises(ProfileError, match="profile mine: Object contains unknown field `gpu`"):
        load_profiles({"mine": {"match": {"gpu": 8}}})
