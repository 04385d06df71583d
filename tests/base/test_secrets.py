"""These tests build planted secrets from parts, so that no scanner flags this file."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk_repro.base.secrets import (
    SECRET_PATTERNS,
    Scrubber,
    is_secret_name,
    looks_secret,
    scrub,
    scrub_argv,
    scrub_bytes,
)

HEX40 = "0123456789abcdef" * 2 + "01234567"
JWT = "eyJ" + "hbGciOiJIUzI1NiJ9" + "." + "eyJ" + "zdWIiOiIxMjM0In0" + "." + "c2lnbmF0dXJl"
PEM = "-----BEGIN RSA " + "PRIVATE KEY-----\nMIIEow\nIBAAKC\n-----END RSA " + "PRIVATE KEY-----"

PLANTED = {
    "huggingface-token": "hf_" + "aB3" * 11,
    "github-token": "ghp_" + "aB3" * 12,
    "github-token fine-grained": "github" + "_pat_" + "11ABC_" + "x9" * 20,
    "gitlab-token": "glpat" + "-" + "x9Y_" * 5,
    "nvidia-api-key": "nvapi" + "-" + "x9-Y" * 10,
    "api-key": "sk" + "-proj-" + "x9Y8" * 8,
    "aws-access-key": "AKIA" + "ABCDEFGH12345678",
    "aws-access-key session": "ASIA" + "ABCDEFGH12345678",
    "slack-token": "xoxb" + "-1234567890-abcdef",
    "jwt": JWT,
    "wandb-key": "wandb" + "_v1_" + "x9Y8" * 8,
    "private-key": PEM,
}
KEPT = {
    "wandb-key": ("wandb login --relogin ", HEX40),
    "bearer-token": ("Authorization: Bearer ", "x9Y8" * 5),
    "url-password": ("git clone https://me:", "not-a-word@example.com/x.git"),
    "password": ("password=", "correct-horse"),
    "named-secret": ("MY_API_KEY=", "x9Y8" * 5),
    "named-secret json": ('{"access_token": "', "x9Y8" * 5),
}
CHATTER = (
    "2026-11-20 12:34:56 [rank0] step 12: {'train/loss': 0.0123, 'perf/tokens_per_sec_per_gpu': 12345.6, "
    "'raw_reward': 0.55, 'path': '/data/models/Qwen3-30B-A3B/model-00001-of-00016.safetensors'}",
    "(VLLMEngine pid=1234) Avg prompt throughput: 1234.5 tokens/s, Running: 32 reqs, KV cache usage: 12.3%, hit 45.6%",
    "  tokenizer_type .................................. HuggingFaceTokenizer",
    "loss_per_token: 1.2345678901234567e-05, ms_per_token=0.12345678901234567890, eos_token='<|im_end|>'",
    f"vime at {HEX40}, sha256 {HEX40}{HEX40[:24]}",
    "hf_to_megatron conversion, task-0123456789-0123456789, --input-key prompt --label-key label",
    "wandb: Run data is saved locally, api_key=EMPTY, pad_token_id: 151643, max_tokens=8192",
)


@pytest.mark.parametrize("name", PLANTED)
def test_every_kind_of_secret_is_redacted_whole(name):
    kind = name.split()[0]
    assert scrub(f"before {PLANTED[name]} after") == f"before <redacted:{kind}> after"


@pytest.mark.parametrize("name", KEPT)
def test_the_text_before_a_secret_stays_readable(name):
    prefix, secret = KEPT[name]
    found = scrub(f"{prefix}{secret}")
    assert found.startswith(f"{prefix}<redacted:{name.split()[0]}>")
    assert secret.split("@")[0] not in found


@pytest.mark.parametrize("line", CHATTER)
def test_ordinary_lines_are_returned_as_they_are(line):
    assert scrub(line) == line


def test_scrubbing_twice_changes_nothing_more():
    once = scrub("\n".join([*PLANTED.values(), *(prefix + secret for prefix, secret in KEPT.values())]))
    assert scrub(once) == once


def test_lines_around_a_secret_keep_their_ends():
    token = PLANTED["huggingface-token"].encode()
    assert scrub_bytes(b"a\r\nb " + token + b"\rc\n") == b"a\r\nb <redacted:huggingface-token>\rc\n"


@pytest.mark.parametrize("pattern", SECRET_PATTERNS, ids=lambda pattern: pattern.hint.decode())
def test_a_hint_is_found_wherever_its_pattern_matches(pattern):
    # The scan looks for hints only, so it would never reach a pattern without its hint.
    @settings(max_examples=20, deadline=None)
    @given(st.from_regex(pattern.regex))
    def check(found: bytes) -> None:
        for match in pattern.regex.finditer(found):
            assert re.search(pattern.hint, match.group(0) + b"@"), found

    check()


@given(st.binary())
def test_any_bytes_can_be_scrubbed(data):
    assert scrub_bytes(scrub_bytes(data)) == scrub_bytes(data)


@given(st.text())
def test_any_text_can_be_scrubbed(text):
    Scrubber().text(text)


def test_known_values_are_removed_wherever_they_appear(monkeypatch):
    for name, value in {"DB_PASSWORD": "tulips", "HF_TOKEN": "short", "EDITOR": "vim-tiny", "A": ""}.items():
        monkeypatch.setenv(name, value)
    scrubber = Scrubber.from_environment()
    assert (
        scrubber.text("tulips: vim-tiny short xtulipsx")
        == "<redacted:known-value>: vim-tiny short x<redacted:known-value>x"
    )


def test_a_long_known_value_is_removed_before_its_own_beginning():
    assert Scrubber(["tulips", "tulips-and-roses"]).bytes(b"tulips-and-roses") == b"<redacted:known-value>"


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "hf-token",
        "hfToken",
        "AWS_SECRET_ACCESS_KEY",
        "WANDB_API_KEY",
        "apikey",
        "db_password",
        "NGC_CREDENTIALS",
    ],
)
def test_names_that_hold_a_secret(name):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        *("eos_token", "MAX_TOKENS", "TOKENIZERS_PARALLELISM", "stop_token_ids", "pad_token", "input_key", "from_env"),
        *("image_pull_secret", "imagePullSecrets", "secret_name", "AWS_SHARED_CREDENTIALS_FILE", "PATH"),
    ],
)
def test_names_that_only_sound_like_a_secret(name):
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("model", PLANTED["huggingface-token"], "huggingface-token"),
        ("WANDB_API_KEY", HEX40, "named like one"),
        ("commit", HEX40, None),
        ("HF_TOKEN", "", None),
        ("HF_TOKEN", "$HF_TOKEN", None),
        ("WANDB_API_KEY", "disabled", None),
        ("api_key_id", "12345678", None),
        ("secret", "/run/secrets/x", None),
    ],
)
def test_a_setting_is_judged_by_shape_and_by_name(name, value, reason):
    assert looks_secret(name, value) == reason


def test_a_command_line_keeps_its_flags_and_loses_its_secrets():
    token = PLANTED["huggingface-token"]
    argv = [
        "python",
        "train.py",
        "--api-key",
        HEX40,
        f"--wandb-key={token}",
        "--lr",
        "1e-6",
        "--eos-token",
        "<|end|>",
        token,
    ]
    assert scrub_argv(argv) == [
        *("python", "train.py", "--api-key", "<redacted:argument>", "--wandb-key=<redacted:argument>", "--lr", "1e-6"),
        *("--eos-token", "<|end|>", "<redacted:huggingface-token>"),
    ]
