"""What leaves a host holds no secret, in whatever form it stands; and what is no secret is still there."""

from __future__ import annotations

import json

import pytest

from backends.masking import Masker, environment, secrets_of_argv, secrets_of_env

S = "Zq7pLm2vXw9"  # a secret; each form holds it

FORMS = {
    "an argument": f"python -m sglang --api-key {S} --port 1",
    "an argument with =": f"--api-key={S}",
    "an argument in a list": f"['--api-key', '{S}']",
    "an argument in JSON": json.dumps({"argv": ["--admin-api-key", S]}),
    "ServerArgs": f"server_args=ServerArgs(port=1, api_key='{S}', tp_size=8)",
    "a dict of Python": f"server_args={{'api_key': '{S}'}}",
    "JSON": json.dumps({"api_key": S}),
    "JSON within JSON": json.dumps({"env": {"LAYERTAP_TAP": json.dumps({"secret": S})}}),
    "indented JSON": json.dumps({"hf_token": S}, indent=1),
    "a variable": f"export MY_SERVICE_TOKEN={S}; true",
    "a variable with another end": f"AWS_SECRET_ACCESS_KEY_ID={S}",
    "a variable in JSON": json.dumps({"DB_PASSWORD": S}),
    "a variable in an argument": f"--env MY_TOKEN={S} --x=y",
    "a name within a name": f"x=api_key={S}",
    "YAML": f"password: {S}",
    "a URL": f"cloning https://me:{S}@example.org/repo.git",
    "a proxy": f"HTTPS_PROXY=http://user:{S}@proxy:3128",
    "a URL with @ in its password": f"cloning https://me:p@{S}@example.org/repo.git",
    "a token for the name in a URL": f"cloning https://{S}:@example.org/repo.git",
    "several keys": f"SGLANG_API_KEYS={S}",
    "an access token": f"--github-pat {S}",
    "basic authorization": f"Authorization: Basic {S}==",
    "authorization in a dict": f"{{'Authorization': 'Basic {S}'}}",
    "authorization in JSON": json.dumps({"headers": {"authorization": f"Token {S}"}}),
    "a bearer": f'curl -H "Authorization: Bearer {S}.abc"',
    "a bearer alone": f"bearer {S}",
    "a Hugging Face token": f"using hf_{S}abcdefgh to download",
    "an API key": f"key sk-proj-{S}",
    "a query": f"GET /v1?api_key={S}&x=1",
    "a private key": f"-----BEGIN OPENSSH PRIVATE KEY-----\nabc{S}\n-----END OPENSSH PRIVATE KEY-----",
    "half a private key": f"-----BEGIN RSA PRIVATE KEY-----\n{S}",
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_secret_is_masked_by_its_form(form: str) -> None:
    masker = Masker({})
    shown = masker.text("a.log", FORMS[form])
    assert S not in shown and "***" in shown
    (one,) = masker.report()
    assert (one.file, one.count) == ("a.log", 1)
    assert S not in str(masker.report())


@pytest.mark.parametrize("form", [name for name in FORMS if "JSON" in name])
def test_json_stays_json(form: str) -> None:
    assert json.loads(Masker({}).text("a.json", FORMS[form]))


@pytest.mark.parametrize(
    "text",
    [
        "max_total_num_tokens=123456, chunked_prefill_size=-1, max_prefill_tokens=16384",
        "Prefill batch, #new-seq: 4, #new-token: 8190, #cached-token: 0, token usage: 0.99, #queue-req: 9",
        "--skip-tokenizer-init --tokenizer-path /models/kimi --max-total-tokens 4096",
        "ServerArgs(api_key=None, tokenizer_mode='auto', skip_tokenizer_init=False, hf_token=None)",
        '{"api_key": null, "tokens": 12, "bytes_per_token": 71680, "serve_ids": [3, 31, 59]}',
        "TOKENIZERS_PARALLELISM=false",
        "http://127.0.0.1:30000/server_info",
        "eos_token_id=163586, pad_token='***'",
        "missing keys: lm_head.weight, stop tokens: <|im_end|>, missing_keys='lm_head.weight'",
        "File /opt/sglang/keyfile.py, line 3",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    masker = Masker({})
    assert masker.text("a.log", text) == text
    assert masker.report() == []


@pytest.mark.parametrize("text", ["x", "--a-b", "a.", "a='", 'a="', "//a:", "a=", '"a": "b\\', "authorization="])
def test_a_line_of_any_length_is_masked(text: str) -> None:
    """In a time that grows with the line; a pattern that tries every place against every other never ends."""
    shown = Masker({}).text("a.log", text * 100_000 + f" api_key={S}")
    assert S not in shown


def test_a_known_value_is_masked_wherever_it_stands() -> None:
    masker = Masker({S: "argument --api-key", 'a"b<c&d': "variable X", "false": "variable Y", "ab": "variable Z"})
    shown = masker.text("a", f"x{S}y and {json.dumps(chr(97) + chr(34) + 'b<c&d')} and a&quot;b&lt;c&amp;d, false ab")
    assert shown == 'x***y and "***" and ***, false ab'
    assert [(one.kind, one.count) for one in masker.report()] == [("argument --api-key", 1), ("variable X", 2)]


def test_the_secrets_of_a_command_line_and_of_an_environment() -> None:
    argv = ["-m", "sglang", "--api-key", "one", "--port", "1", "--admin-api-key=two", "--api-keys", "five", "six"]
    assert secrets_of_argv(argv) == {
        "one": "argument --api-key",
        "two": "argument --admin-api-key",
        "five": "argument --api-keys",
        "six": "argument --api-keys",
    }
    env = {
        "HF_TOKEN": "three",
        "GITHUB_PAT": "seven",
        "HOME": "/root",
        "SSL_KEYFILE": "/etc/key.pem",
        "SSH_AUTH_SOCK": "/tmp/sock",
    }
    env["INDEX"] = "https://me:four@example.org"
    assert secrets_of_env(env) == {
        "three": "variable HF_TOKEN",
        "seven": "variable GITHUB_PAT",
        "four": "password in variable INDEX",
    }


def test_an_environment_shows_what_it_takes_to_judge_and_names_the_rest() -> None:
    masker = Masker({})
    env = {
        "NCCL_P2P_LEVEL": "SYS",
        "HF_TOKEN": "hf_x",
        "GITHUB_PAT": "ghp_x",
        "TOKENIZERS_PARALLELISM": "false",
        "EMPLOYER": "Ada's",
    }
    assert environment(env, ["NCCL_", "TOKEN"], masker, "env") == {
        "EMPLOYER": None,
        "GITHUB_PAT": "***",
        "HF_TOKEN": "***",
        "NCCL_P2P_LEVEL": "SYS",
        "TOKENIZERS_PARALLELISM": "false",
    }
    assert [(one.kind, one.count) for one in masker.report()] == [("variable GITHUB_PAT", 1), ("variable HF_TOKEN", 1)]
