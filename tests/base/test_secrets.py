"""Secrets are removed before a record is written: logs, command lines, the environment, the scheduler's texts."""

from __future__ import annotations

import base64
import io
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk_repro.agent.process import StopTimes
from rlk_repro.agent.trial import TrialWatch, run_command
from rlk_repro.base import places
from rlk_repro.base.logwriter import LogWriter
from rlk_repro.base.places import hide_places
from rlk_repro.base.secrets import (
    SECRET_PATTERNS,
    Scrubber,
    is_secret_name,
    looks_secret,
    scrub,
    scrub_argv,
    scrub_bytes,
)
from rlk_repro.base.stop import Stop
from rlk_repro.clusters.slurm.script import render_sbatch
from rlk_repro.rundir.paths import RunDir
from rlk_repro.workloads.api import Command
from tests import ROOT
from tests.support.job_examples import make_staged, run_example
from tests.support.slurm.examples import plan_for, run_dir_of

# Lines that hold a secret, and lines that only look like it.  The secrets are built from parts, for scanners.

HEX32 = "0123456789abcdef" * 2
MIXED = "aB3x9Y8kQ2mZ7wE5rT1u"
AZURE = "k7Jx" * 21 + "pQ=="
BASIC = base64.b64encode(b"someone:tulips-and-9").decode()

SECRETS = {
    # The shape that the issuer chose shows these secrets.
    "google api key": ("call https://maps.example/json?key=", "AI" + "za" + "Sy" + MIXED + "dEf45gHi6jKlm"),
    "google oauth": ("got ", "ya" + "29." + "a0AfB_" + MIXED + "-" + MIXED),
    "stripe": ("charge with ", "sk_" + "live_" + MIXED),
    "stripe restricted": ("charge with ", "rk_" + "live_" + MIXED),
    "npm": ("//registry.example/:_authToken=", "np" + "m_" + MIXED + "4vB6nM8aS2dF3gH5"),
    "pypi": ("twine upload -u __token__ ", "py" + "pi-AgEIcHlwaS5vcmc" + MIXED * 3),
    "databricks": ("connect with ", "da" + "pi" + HEX32),
    "slack webhook": ("post to ", "https://hooks.sl" + "ack.com/services/" + "T0AB12CD3/B0EF45GH6/" + MIXED + "4vB6"),
    "hugging face": ("login ", "hf" + "_" + "aB3" * 11),
    "hugging face organisation": ("login ", "api" + "_org_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZaBcDeFgH"),
    "github": ("clone with ", "gh" + "p_" + "aB3" * 12),
    "gitlab": ("clone with ", "gl" + "pat-" + MIXED),
    "nvidia": ("ngc ", "nv" + "api-" + MIXED * 2),
    "openai": ("ask ", "sk" + "-proj-" + MIXED * 2),
    "anthropic": ("ask ", "sk" + "-ant-api03-" + MIXED * 3),
    "aws id": ("as ", "AK" + "IA" + "ABCDEFGH12345678"),
    "slack": ("bot ", "xo" + "xb-" + "1234567890-1234567890123-" + MIXED),
    "jwt": ("session ", "ey" + "JhbGciOiJIUzI1NiJ9.ey" + "JzdWIiOiIxMjM0In0." + MIXED),
    "wandb": ("WANDB_API_KEY=", HEX32 + "01234567"),
    "digitalocean": ("doctl ", "do" + "p_v1_" + HEX32 * 2),
    "docker hub": ("docker login ", "dc" + "kr_pat_" + MIXED + "abcdefg"),
    "sendgrid": ("mail by ", "S" + "G." + MIXED + "ab." + MIXED * 2 + "abc"),
    "azure storage": ("DefaultEndpointsProtocol=https;AccountName=a;Account" + "Key=", AZURE),
    "azure sas": ("GET https://a.blob.example/c/f?sv=2024-11-04&se=2026-12-01&si" + "g=", "aB3%2Fx9Y8kQ2mZ7wE5rT1u%3D"),
    "private key": ("", "-----BEGIN RSA " + "PRIVATE KEY-----\nMIIEow\nIBAAKC\n-----END RSA " + "PRIVATE KEY-----"),
    "pgp key": ("", "-----BEGIN PGP " + "PRIVATE KEY BLOCK-----\nlQIG\n-----END PGP " + "PRIVATE KEY BLOCK-----"),
    "vault": ("vault login ", "hv" + "s.CAES" + MIXED),
    "groq": ("ask ", "gs" + "k_" + MIXED * 2),
    "xai": ("ask ", "xa" + "i-" + MIXED * 2),
    "replicate": ("ask ", "r8" + "_" + MIXED * 2),
    "tailscale": ("up ", "ts" + "key-auth-" + MIXED),
    "age": ("", "AGE-SECRET" + "-KEY-1" + "Q7JX" * 14),
    "discord webhook": ("post to https://discord.com/api/webhooks/", "123456789012345678/" + MIXED * 3),
    "github fine-grained": ("clone with ", "github" + "_pat_" + "11ABC_" + "x9" * 20),
    "aws session": ("as ", "AS" + "IA" + "ABCDEFGH12345678"),
    "wandb of its own form": ("wandb ", "wandb" + "_v1_" + MIXED * 2),
    # The text around these secrets shows them.
    "kubeconfig key": ("+    client-key-data: ", base64.b64encode(b"-----BEGIN EC KEY-----" * 3).decode()),
    "docker auth": ('+\t\t\t"auth": "', BASIC),
    "netrc": ("+machine api.example login someone password ", "tulips9roses"),
    "cookie": ("Cookie: session=", MIXED * 2),
    "basic header": ("Authorization: Basic ", BASIC),
    "basic header of curl": ("curl -H 'authorization: basic ", BASIC),
    "bearer header": ("Authorization: Bearer ", MIXED),
    "url with password": ("git clone https://me:", "not-a-word-9"),
    "url with token alone": ("git clone https://", MIXED + "4vB6nM8aS2"),
    "redis url": ("redis://:", "tulips-and-9"),
    "word password": ("mysql --host db --password ", "tulips9roses"),
    "word token": ("hf auth login --token ", MIXED),
    "word api key": ("vllm serve --api-key ", MIXED),
    "word passphrase": ("unlock --passphrase ", "tulips9roses"),
    "equals password": ("mysql --password=", "tulips9roses"),
    "curl user": ("curl --user someone:", "tulips9roses"),
    "assigned pgpassword": ("PGPASSWORD=", "tulips9roses"),
    "assigned mysql": ("MYSQL_PWD=", "tulips9roses"),
    "assigned redis": ("REDIS_AUTH=", "tulips9roses"),
    "assigned pass": ("export DB_PASS=", "tulips9roses"),
    "assigned client secret": ('{"client_secret": "', MIXED),
    "assigned json password": ('{"password": "', "tulips9roses"),
    "assigned api key": ("MY_API_KEY=", MIXED),
    "assigned json token": ('{"access_token": "', MIXED),
    "aws secret": ("aws_secret_access_key = ", MIXED * 2),
}

NEAR_MISSES = (
    "AIzaSyTooShort ya29 sk_live_ sk_live_short rk_live npm_config_cache npm_lifecycle_event=test pypi-server dapi",
    "dapi-v1",
    "dapi0123456789abcdef and dapixyz0123456789abcdef0123456789abcdeg,"
    " npm_package_dependencies_typescript_version_abcdefgh",
    "https://hooks.slack.com/services/ and https://api.slack.com/messaging/webhooks",
    "Basic statistics: 12345678 samples, Authorization: Basic realm, basic auth is off, basic_block_1234567890",
    "(RolloutManager pid=77) connect to http://10.0.0.3:8000 and tcp://127.0.0.1:29500, nccl://node-0@rack",
    "mail someone@example.com, ssh://git@github.com/x/y.git,"
    " git+https://github.com/x/y@0123456789abcdef0123456789abcdef01234567",
    "@torch.compile, A @ B, user@node-12, https://example.com/@scope/package@1.2.3,"
    " https://x.example/a?at=user@b.example",
    "docker run image@sha256:" + HEX32 * 2 + ", pip install 'x @ https://files.example/x-1.0.whl'",
    "--password-file /run/secrets/x --token-budget 4096 --max-tokens 8192 --eos-token '<|im_end|>'",
    "--pad-token-id 151643",
    "-p 8000 -p 0.95 mkdir -p /data/models/Qwen3-30B-A3B, top_p 0.95, docker run -p 127.0.0.1:8000:8000, -pthread",
    "--tokenizer Qwen/Qwen3-30B-A3B --token-parallel-size 16 --key-value-cache-dtype fp8_e4m3 --sort-key length",
    "options: --password TEXT, --token TOKEN, --api-key KEY, --password PASSWORD, --password <password>, --user NAME",
    "signature=none, sig=0.5, &sig=3, config=1234567890abcdefgh, big=abcdefghijklmnopqrstuvwx",
    "a password is needed, password protected",
    "AccountKey=none AccountName=storage0123456789",
    "perf 3: {'perf/tokens_per_sec': 12345.678901234567, 'rollout/pass_rate': 0.5, 'pass@1': 0.75, 'pass': 123456.0}",
    "passed=123456 compass=123456789 bypass=12345678 PASSED=1234567 multipass: 1234567, author=someone, AUTHOR=someone",
    "OAUTH=disabled, COMPASS=12345678, pass=forward, backward pass: 12345678 us, pass_at_k=0.123456,"
    " PASS: 123456 tests",
    "{'train/loss': 1.2345678901234567e-05, 'token': 151643, 'num_tokens': 1234567890123456789, 'key': 'value'}",
    "eos_token='<|im_end|>', pad_token: '<|endoftext|>', special_tokens_map.json, tokenizer.json, key.weight,"
    " api_key=EMPTY",
    "sk-learn-contrib-package-name, task-0123456789, hf_to_megatron_distributed_conversion, api_org_name, SG.weight",
    "vllm_config: NCCL_DEBUG=INFO PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, dtype=torch.bfloat16",
    "model-00001-of-00016.safetensors " + HEX32 + "01234567 " + HEX32 * 2 + " 550e8400-e29b-41d4-a716-446655440000",
    "\x1b[36m(MegatronTrainRayActor pid=99)\x1b[0m \x1b[32mstep 3\x1b[0m: {'train/loss': 0.125}",
)
HEX40 = HEX32 + "01234567"
TOKEN = SECRETS["hugging face"][1]
VALUE = "tulips/9&" + MIXED  # only its name reveals this value
AFTER = {
    "url with password": "@example.com/x.git",
    "url with token alone": "@example.com/x.git",
    "redis url": "@db:1/0",
}
KINDS = {
    "hugging face": "huggingface-token", "github": "github-token", "github fine-grained": "github-token",
    "gitlab": "gitlab-token", "nvidia": "nvidia-api-key", "openai": "api-key", "aws id": "aws-access-key",
    "aws session": "aws-access-key", "slack": "slack-token", "jwt": "jwt", "wandb of its own form": "wandb-key",
    "private key": "private-key", "bearer header": "bearer-token", "url with password": "url-password",
    "equals password": "password", "assigned api key": "named-secret", "assigned json token": "named-secret",
}  # fmt: skip
RAY = "(RolloutManager pid=77) "


def test_every_form_of_secret_is_taken_out_of_a_line() -> None:
    for name, (prefix, secret) in SECRETS.items():
        line = f"2026-11-20 12:00:00 {prefix}{secret}{AFTER.get(name, '')} and more"
        clean = scrub(line)
        assert (secret in clean, "<redacted:" in clean) == (False, True), name
        assert clean.startswith("2026-11-20 12:00:00 "), name
        assert scrub(clean) == clean, name
        if name in KINDS:
            assert f"{prefix}<redacted:{KINDS[name]}>{AFTER.get(name, '')} and more" in clean, name
    assert scrub("+  password tulips9roses") == "+  password <redacted:password>"  # of a netrc
    assert scrub_bytes(b"a\r\nb " + TOKEN.encode() + b"\rc\n") == b"a\r\nb <redacted:huggingface-token>\rc\n"


def test_text_that_only_looks_like_a_secret_stays() -> None:
    for line in NEAR_MISSES:
        assert scrub(line) == line
        assert Scrubber([VALUE]).text(line) == line


@pytest.mark.parametrize("pattern", SECRET_PATTERNS, ids=lambda pattern: f"{pattern.kind} {pattern.words}")
def test_a_word_is_found_wherever_its_pattern_matches(pattern) -> None:
    @settings(max_examples=20, deadline=None)
    @given(st.from_regex(pattern.regex))
    def check(found: bytes) -> None:
        for match in pattern.regex.finditer(found):
            assert pattern.may_match(match.group(0).lower() + b"@"), found

    check()


@given(st.binary(), st.text())
def test_any_bytes_and_text_can_be_scrubbed(data: bytes, text: str) -> None:
    assert scrub_bytes(scrub_bytes(data)) == scrub_bytes(data)
    Scrubber().text(text)


def test_a_setting_is_judged_by_its_name_and_its_shape() -> None:
    secret = ("PGPASSWORD", "MYSQL_PWD", "REDIS_AUTH", "REDISCLI_AUTH", "SSHPASS", "SMTP_PASS", "SENTRY_DSN", "hfToken",
              "GIT_CREDS", "DATABASE_URL", "redis-url", "CONNECTION_STRING", "azureStorageConnectionString", "hf-token",
              "WANDB_KEY", "wandb-key", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "apikey", "db_password",
              "NGC_CREDENTIALS")  # fmt: skip
    for name in secret:
        assert (is_secret_name(name), looks_secret(name, "tulips9roses")) == (True, "named like one"), name
    only_sounds = ("eos_token", "MAX_TOKENS", "TOKENIZERS_PARALLELISM", "stop_token_ids", "pad_token", "input_key",
                   "from_env", "image_pull_secret", "imagePullSecrets", "secret_name", "AWS_SHARED_CREDENTIALS_FILE",
                   "PATH")  # fmt: skip
    assert [name for name in only_sounds if is_secret_name(name)] == []
    harmless = {
        "PWD": "/home/me", "OLDPWD": "/home/me", "SSH_AUTH_SOCK": "/tmp/x", "COMPASS": "tulips9roses",
        "forward": "bypass-it", "XAUTHORITY": "tulips9roses", "author": "tulips9roses", "log_passrate": "tulips9",
        "DATABASE_URL": "postgres://db:5432/x", "sort_key": "tulips9roses", "dsn_path": "tulips9roses", "commit": HEX40,
        "HF_TOKEN": "$HF_TOKEN", "WANDB_API_KEY": "disabled", "api_key_id": "12345678", "secret": "/run/secrets/x",
        "GITHUB_TOKEN": "",
    }  # fmt: skip
    assert {name for name, value in harmless.items() if looks_secret(name, value) is not None} == set()
    assert looks_secret("model", TOKEN) == "huggingface-token"


def test_a_command_line_keeps_its_flags_and_loses_its_secrets() -> None:
    argv = ["python", "train.py", "--api-key", HEX40, f"--wandb-key={TOKEN}", "--lr", "1e-6", "--eos-token", "<|end|>",
            TOKEN, "-u", "someone:tulips9roses", "--password", "tulips9roses"]  # fmt: skip
    gone = "<redacted:argument>"
    clean = scrub_argv(argv)
    assert clean[:10] == ["python", "train.py", "--api-key", gone, f"--wandb-key={gone}", "--lr", "1e-6", "--eos-token",
                          "<|end|>", "<redacted:huggingface-token>"]  # fmt: skip
    assert "tulips9roses" not in " ".join(scrub_argv(["curl", *argv[10:]]))
    login = ["docker", "login", "-p", "tulips9roses", "registry.example", "--port", "-p", "8000:8000"]
    assert scrub_argv(login)[2:5] == ["-p", gone, "registry.example"]
    harmless = ["python", "-p", "0.95x7y", "docker", "run", "-p", "127.0.0.1:8000:8000", "-u", "1000:1000"]
    assert scrub_argv(harmless) == harmless


def test_known_values_are_removed_wherever_they_appear(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"DB_PASSWORD": "tulips", "HF_TOKEN": "short", "EDITOR": "vim-tiny", "A": "", "X": "http://h:80/a@b",
              "HTTPS_PROXY": "http://me:lilies9roses@proxy:3128"}  # fmt: skip
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    scrubber, gone = Scrubber.from_environment(), "<redacted:known-value>"
    assert scrubber.text("tulips: vim-tiny short xtulipsx") == f"{gone}: vim-tiny short x{gone}x"
    assert scrubber.text("auth failed for lilies9roses at h:80/a") == f"auth failed for {gone} at h:80/a"
    # a long value is removed before its own beginning
    assert Scrubber(["tulips", "tulips-and-roses"]).bytes(b"tulips-and-roses") == gone.encode()


def run_and_read(folder: Path, program: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what a real process leaves in its log, with a secret that the profile passes on by name."""
    monkeypatch.setenv("OF_NO_TELLING_NAME", VALUE)
    command = Command(argv=(sys.executable, "-c", program), env={}, from_env={"TOLD": "OF_NO_TELLING_NAME"})
    limits = StopTimes(time_limit_s=60)
    run_command(command, folder / "log", RunDir(folder), limits=limits, stop=Stop(), watch=TrialWatch())
    return (folder / "log").read_text()


def encode(value: str) -> dict[str, str]:
    data = value.encode()
    sevens = [value[i : i + 7] for i in range(0, len(value), 7)]
    shifted = {f"base64 after {n}": base64.b64encode(b"user:"[:n] + data + b"!!").decode() for n in range(6)}
    return {
        **shifted,
        "base64 for addresses": base64.urlsafe_b64encode(b"\xff" + data).decode(),
        "hex": data.hex(),
        "HEX": data.hex().upper(),
        "percent": quote(value, safe=""),
        "percent, small": quote(value, safe="").replace("%2F", "%2f"),
        "json": json.dumps(value),
        "wrapped": "\n".join(sevens),
        "wrapped by Ray": f"\n{RAY}".join(sevens),
        "coloured": "\x1b[1m" + "\x1b[0m\x1b[32m".join(value[i : i + 5] for i in range(0, len(value), 5)) + "\x1b[0m",
        "linked": value[:4] + "\x1b]8;;https://x.example\x1b\\" + value[4:],
    }


def test_a_known_value_is_found_in_every_form_that_programs_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forms = encode(VALUE)
    shown = "".join(f"before {text} after\n" for text in forms.values())
    log = run_and_read(tmp_path, f"print({shown!r} + 'ends with ' + {VALUE[:9]!r})", monkeypatch)
    assert log.endswith(f"ends with {VALUE[:9]}\n"), "the last line is not held back for ever"
    lines = re.sub(r"(?m)^\S+Z ", "", log)
    for form, text in forms.items():
        for piece in re.findall(r"[\w%+/=-]{12,}", text.replace(RAY, "")):
            assert piece[4:-4] not in lines, form
    assert lines.count("before ") == lines.count("<redacted:known-value>") == len(forms)
    assert log.count("\n") == shown.count("\n") + 1


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 11, len(VALUE) - 6])
@pytest.mark.parametrize("end", ["\n", f"\n{RAY}"])
def test_a_value_that_is_broken_over_two_writes_is_found(tmp_path: Path, cut: int, end: str) -> None:
    scrubber = Scrubber([VALUE])
    with LogWriter(tmp_path / "log", scrubber.bytes, lambda: "", scrubber.find_open) as writer:
        writer.feed(f"token {VALUE[:cut]}{end}".encode())
        writer.feed(f"{VALUE[cut:]} done\n".encode())
    log = (tmp_path / "log").read_text()
    assert "token <redacted:known-value>" in log
    assert VALUE[cut:] not in log
    assert log.endswith(" done\n")


def test_a_trials_log_waits_for_the_end_of_a_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = f"print({VALUE[:4]!r}, flush=True); import time; time.sleep(0.3); print({VALUE[4:]!r})"
    assert VALUE[4:] not in run_and_read(tmp_path, program, monkeypatch)


numbers = st.one_of(
    st.floats(), st.integers(), st.sampled_from(["nan", "inf", "np.float64(0.5)", "tensor(1., device='cuda:0')"])
)
keys = st.from_regex(r"(?:train|rollout|perf|eval)/[a-z0-9_@-]{1,30}", fullmatch=True)
names = st.sampled_from(["step", "rollout", "perf", "eval", "critic-step"])
prefixes = st.sampled_from(["", RAY, "\x1b[36m" + RAY + "\x1b[0m"])


@given(names, st.integers(0, 10**6), st.dictionaries(keys, numbers), prefixes)
def test_lines_of_the_log_dialect_pass_unchanged(name: str, index: int, values: dict[str, object], prefix: str) -> None:
    line = f"{prefix}[2026-11-20 13:45:12] model.py:925 - {name} {index}: {values}\n"
    assert Scrubber([VALUE, "hf_" + MIXED]).text(line) == line


def test_the_logs_of_the_evidence_pass_unchanged() -> None:
    scrubber = Scrubber([VALUE])
    num_bytes = 0
    for bundle in sorted((ROOT / "docs" / "evidence").glob("*.tgz"))[::3]:
        with tarfile.open(bundle) as archive:
            for member in archive:
                if member.name.endswith("stdout.log"):
                    data = (archive.extractfile(member) or io.BytesIO()).read()
                    num_bytes += len(data)
                    assert scrubber.bytes(data) == data, member.name
    assert num_bytes > 3_000_000


def test_the_jobs_environment_goes_through_the_allow_list(tmp_path: Path) -> None:
    script = render_sbatch(plan := plan_for(stack="host"), run_dir_of(plan))
    begin, end = script.index("record() {"), script.index("\nrecord accounting ")
    lines = [line for line in script[begin:end].splitlines() if not re.match(r"record (?:job|nodes|mpi) ", line)]
    environment = {"SLURM_JOB_ID": "12", "SLURM_JOB_USER": "somebody", "SLURM_JOB_ACCOUNT": "lab-of-x",
                   "SLURM_SUBMIT_DIR": "/home/somebody", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7", "SLURM_NNODES": "2",
                   "SLURM_EXPORT_ENV": "ALL", "HF_TOKEN": "hf_" + MIXED, "PATH": "/usr/bin:/bin"}  # fmt: skip
    program = "\n".join(["set -Eeuo pipefail", 'records=$1 allocation="12.0"', *lines])
    subprocess.run(["bash", "-c", program, "job", str(tmp_path)], env=environment, check=True)
    found = (tmp_path / "environment-12.0.txt").read_text().splitlines()
    assert found == ['declare -x SLURM_EXPORT_ENV="ALL"', 'declare -x SLURM_JOB_ID="12"', 'declare -x SLURM_NNODES="2"']


def test_slurms_text_about_a_job_is_scrubbed_before_sealing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", VALUE)
    _, run_dir = make_staged(tmp_path / "run")
    run_dir.scheduler.mkdir(exist_ok=True)
    told = f"JobId=12 Comment={VALUE}\n SubmitLine=sbatch --export=A={TOKEN}\n WorkDir={run_dir.root}\n Odd=\udcff\n"
    path = run_dir.scheduler / "job-12.0.txt"
    path.write_bytes(told.encode(errors="surrogateescape"))
    assert run_example(run_dir) == 0
    assert path.read_bytes() == (
        b"JobId=12 Comment=<redacted:known-value>\n SubmitLine=sbatch --export=A=<redacted:huggingface-token>\n"
        b" WorkDir={run_dir}\n Odd=\xff\n"
    )


# Records name folders of this machine by placeholders.


@pytest.fixture
def some_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setattr(sys, "prefix", "/home/ada/it's a venv")
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    monkeypatch.setattr(sys, "executable", "/home/ada/it's a venv/bin/python")
    monkeypatch.setattr(places, "_PACKAGES", Path("/home/ada/src"))
    monkeypatch.setenv("VIME_SRC", "/data/vime")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/home/ada/it's a venv/bin/python", "{python}"),
        ("/home/ada/it's a venv/bin/python3.11", "{prefix}/bin/python3.11"),
        ('File "/home/ada/src/rlk_repro/x.py", line 3', 'File "{packages}/rlk_repro/x.py", line 3'),
        ("--x=/home/ada/data,/home/ada/more", "--x=~/data,~/more"),
        ("/home/ada", "~"),
        ("/home/adam /home/ada.old /home/ada-2", "/home/adam /home/ada.old /home/ada-2"),
        ("/home/ada/runs/a/trials and /home/ada/runs/a2", "{run_dir}/trials and ~/runs/a2"),
        ("/usr/bin/env /opt/x", "/usr/bin/env /opt/x"),
        ("/data/vime/vime/loss.py /data/vimes", "{vime_src}/vime/loss.py /data/vimes"),
    ],
)
def test_folders_are_replaced_by_names(some_machine: None, text: str, expected: str) -> None:
    assert hide_places(text, Path("/home/ada/runs/a")) == expected


def test_a_log_keeps_bytes_that_are_not_text(some_machine: None) -> None:
    hide = places.make_hider(Path("/home/ada/runs/a"))
    trace = b'  File "/data/vime/vime/loss.py", line 3\xff\n  File "/home/ada/runs/a/x"\n'
    assert hide(trace) == b'  File "{vime_src}/vime/loss.py", line 3\xff\n  File "{run_dir}/x"\n'


def test_a_folder_behind_a_link_is_hidden_by_both_its_paths(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    found = hide_places(f"{tmp_path}/real/x {tmp_path}/link/x", tmp_path / "link")
    assert found == "{run_dir}/x {run_dir}/x"


def test_a_shared_home_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/")
    assert hide_places("/x /") == "/x /"
