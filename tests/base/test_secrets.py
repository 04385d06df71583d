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
from tests.base.secret_corpus import HEX32, MIXED, NEAR_MISSES, SECRETS
from tests.support.job_examples import make_staged, run_example
from tests.support.slurm.examples import plan_for, run_dir_of

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


@pytest.mark.parametrize("pattern", SECRET_PATTERNS, ids=lambda pattern: pattern.hint.decode())
def test_a_hint_is_found_wherever_its_pattern_matches(pattern) -> None:
    # The scan looks for hints only, so it would never reach a pattern without its hint.
    @settings(max_examples=20, deadline=None)
    @given(st.from_regex(pattern.regex))
    def check(found: bytes) -> None:
        for match in pattern.regex.finditer(found):
            assert re.search(pattern.hint, match.group(0) + b"@"), found

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


@pytest.mark.parametrize("form", encode(VALUE))
def test_a_known_value_is_found_in_every_form_that_programs_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    text = encode(VALUE)[form]
    program = f"print({'before ' + text + ' after'!r}); print('{{\\'train/loss\\': 0.5}}')"
    log = run_and_read(tmp_path, program, monkeypatch)
    for expected in ("<redacted:known-value>", "before ", "{'train/loss': 0.5}"):
        assert expected in log
    lines = re.sub(r"(?m)^\S+Z ", "", log)
    for piece in re.findall(r"[\w%+/=-]{12,}", text.replace(RAY, "")):
        assert piece[4:-4] not in lines
    assert log.count("\n") == text.count("\n") + 2


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 11, len(VALUE) - 6])
@pytest.mark.parametrize("end", ["\n", f"\n{RAY}"])
def test_a_value_that_is_broken_over_two_writes_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int, end: str
) -> None:
    program = f"""
import sys, time
sys.stdout.write({"token " + VALUE[:cut] + end!r}); sys.stdout.flush(); time.sleep(0.3)
sys.stdout.write({VALUE[cut:] + " done" + chr(10)!r}); sys.stdout.flush()
"""
    log = run_and_read(tmp_path, program, monkeypatch)
    assert "token <redacted:known-value>" in log
    assert VALUE[cut:] not in log
    assert log.endswith(" done\n")


def test_the_last_line_is_not_held_back_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = run_and_read(tmp_path, f"print({'ends with ' + VALUE[:9]!r})", monkeypatch)
    assert log.endswith(f"ends with {VALUE[:9]}\n")


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
    for bundle in sorted((ROOT / "docs" / "evidence").glob("*.tgz")):
        with tarfile.open(bundle) as archive:
            for member in archive:
                if member.name.endswith("stdout.log"):
                    data = (archive.extractfile(member) or io.BytesIO()).read()
                    num_bytes += len(data)
                    assert scrubber.bytes(data) == data, member.name
    assert num_bytes > 15_000_000


def test_the_jobs_environment_goes_through_the_allow_list(tmp_path: Path) -> None:
    script = render_sbatch(plan := plan_for(stack="host"), run_dir_of(plan))
    begin, end = script.index("record() {"), script.index("\nif [[ -s $run_dir/scheduler/accounting-fields")
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
