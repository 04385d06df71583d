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
from hypothesis import given
from hypothesis import strategies as st

from rlk_repro.agent.process import StopTimes
from rlk_repro.agent.stop import Stop
from rlk_repro.agent.trial import TrialWatch, run_command
from rlk_repro.base.secrets import Scrubber, is_secret_name, looks_secret, scrub, scrub_argv
from rlk_repro.rundir.paths import RunDir
from rlk_repro.workloads.api import Command
from tests import ROOT
from tests.security.secret_corpus import MIXED, NEAR_MISSES, SECRETS
from tests.support.job_examples import make_staged, run_example
from tests.support.slurm.examples import plan_for, run_dir_of

EVIDENCE = ROOT / "docs" / "evidence"
VALUE = "tulips/9&" + MIXED  # only its name reveals this value
AFTER = {
    "url with password": "@example.com/x.git",
    "url with token alone": "@example.com/x.git",
    "redis url": "@db:1/0",
}
RAY = "(RolloutManager pid=77) "


@pytest.mark.parametrize("name", SECRETS)
def test_every_form_of_secret_is_taken_out_of_a_line(name: str) -> None:
    prefix, secret = SECRETS[name]
    line = f"2026-11-20 12:00:00 {prefix}{secret}{AFTER.get(name, '')} and more"
    clean = scrub(line)
    assert secret not in clean
    assert "<redacted:" in clean
    assert clean.startswith("2026-11-20 12:00:00 ")
    assert scrub(clean) == clean


@pytest.mark.parametrize("line", NEAR_MISSES)
def test_text_that_only_looks_like_a_secret_stays(line: str) -> None:
    assert scrub(line) == line
    assert Scrubber([VALUE]).text(line) == line


@pytest.mark.parametrize(
    "name",
    ["PGPASSWORD", "MYSQL_PWD", "REDIS_AUTH", "REDISCLI_AUTH", "SSHPASS", "SMTP_PASS", "SENTRY_DSN", "GIT_CREDS",
     "DATABASE_URL", "redis-url", "CONNECTION_STRING", "azureStorageConnectionString", "WANDB_KEY", "wandb-key"],
)  # fmt: skip
def test_names_that_hold_a_secret(name: str) -> None:
    assert is_secret_name(name)
    assert looks_secret(name, "tulips9roses") == "named like one"


@pytest.mark.parametrize(
    ("name", "value"),
    [("PWD", "/home/me"), ("OLDPWD", "/home/me"), ("SSH_AUTH_SOCK", "/tmp/x"), ("COMPASS", "tulips9roses"),
     ("forward", "bypass-it"), ("XAUTHORITY", "tulips9roses"), ("author", "tulips9roses"), ("log_passrate", "tulips9"),
     ("DATABASE_URL", "postgres://db:5432/x"), ("sort_key", "tulips9roses"), ("dsn_path", "tulips9roses")],
)  # fmt: skip
def test_names_that_only_sound_like_a_secret(name: str, value: str) -> None:
    assert looks_secret(name, value) is None


def test_values_that_stand_alone_in_a_command_line() -> None:
    words = ["curl", "-u", "someone:tulips9roses", "--password", "tulips9roses", "--wandb-key", MIXED]
    login = ["docker", "login", "-p", "tulips9roses", "registry.example", "--port", "-p", "8000:8000"]
    assert "tulips9roses" not in " ".join(scrub_argv(words))
    assert MIXED not in " ".join(scrub_argv(words))
    assert scrub_argv(login)[2:5] == ["-p", "<redacted:argument>", "registry.example"]
    harmless = ["python", "-p", "0.95x7y", "docker", "run", "-p", "127.0.0.1:8000:8000", "-u", "1000:1000"]
    assert scrub_argv(harmless) == harmless


def run_and_read(folder: Path, program: str) -> str:
    """Return what a real process leaves in its log, with a secret that the profile passes on by name."""
    command = Command(argv=(sys.executable, "-c", program), env={}, from_env={"TOLD": "OF_NO_TELLING_NAME"})
    limits = StopTimes(time_limit_s=60)
    run_command(command, folder / "log", RunDir(folder), limits=limits, stop=Stop(), watch=TrialWatch())
    return (folder / "log").read_text()


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_NO_TELLING_NAME", VALUE)


def encode(value: str) -> dict[str, str]:
    data = value.encode()
    shifted = {f"base64 after {n}": base64.b64encode(b"user:"[:n] + data + b"!!").decode() for n in range(6)}
    return {
        **shifted,
        "base64 for addresses": base64.urlsafe_b64encode(b"\xff" + data).decode(),
        "hex": data.hex(),
        "HEX": data.hex().upper(),
        "percent": quote(value, safe=""),
        "percent, small": quote(value, safe="").replace("%2F", "%2f"),
        "json": json.dumps(value),
        "wrapped": "\n".join(value[i : i + 7] for i in range(0, len(value), 7)),
        "wrapped by Ray": f"\n{RAY}".join(value[i : i + 7] for i in range(0, len(value), 7)),
        "coloured": "\x1b[1m" + "\x1b[0m\x1b[32m".join(value[i : i + 5] for i in range(0, len(value), 5)) + "\x1b[0m",
        "linked": value[:4] + "\x1b]8;;https://x.example\x1b\\" + value[4:],
    }


@pytest.mark.parametrize("form", encode(VALUE))
def test_a_known_value_is_found_in_every_form_that_programs_write(tmp_path: Path, form: str) -> None:
    text = encode(VALUE)[form]
    log = run_and_read(tmp_path, f"print({'before ' + text + ' after'!r}); print('{{\\'train/loss\\': 0.5}}')")
    assert "<redacted:known-value>" in log
    assert "before " in log
    assert "{'train/loss': 0.5}" in log
    lines = re.sub(r"(?m)^\S+Z ", "", log)
    for piece in re.findall(r"[\w%+/=-]{12,}", text.replace(RAY, "")):
        assert piece[4:-4] not in lines
    assert log.count("\n") == text.count("\n") + 2


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 11, len(VALUE) - 6])
@pytest.mark.parametrize("end", ["\n", f"\n{RAY}"])
def test_a_value_that_is_broken_over_two_writes_is_found(tmp_path: Path, cut: int, end: str) -> None:
    program = f"""
import sys, time
sys.stdout.write({"token " + VALUE[:cut] + end!r}); sys.stdout.flush(); time.sleep(0.3)
sys.stdout.write({VALUE[cut:] + " done" + chr(10)!r}); sys.stdout.flush()
"""
    log = run_and_read(tmp_path, program)
    assert "token <redacted:known-value>" in log
    assert VALUE[cut:] not in log
    assert log.endswith(" done\n")


def test_the_last_line_is_not_held_back_for_ever(tmp_path: Path) -> None:
    log = run_and_read(tmp_path, f"print({'ends with ' + VALUE[:9]!r})")
    assert log.endswith(f"ends with {VALUE[:9]}\n")


def test_passwords_of_addresses_are_known_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://me:tulips9roses@proxy:3128")
    monkeypatch.setenv("X", "http://h:80/a@b")
    scrubber = Scrubber.from_environment()
    assert scrubber.text("auth failed for tulips9roses at h:80/a") == "auth failed for <redacted:known-value> at h:80/a"


numbers = st.one_of(
    st.floats(), st.integers(), st.sampled_from(["nan", "inf", "np.float64(0.5)", "tensor(1., device='cuda:0')"])
)
keys = st.from_regex(r"(?:train|rollout|perf|eval)/[a-z0-9_@-]{1,30}", fullmatch=True)
names = st.sampled_from(["step", "rollout", "perf", "eval", "critic-step"])


@given(
    names,
    st.integers(0, 10**6),
    st.dictionaries(keys, numbers),
    st.sampled_from(["", RAY, "\x1b[36m" + RAY + "\x1b[0m"]),
)
def test_lines_of_the_log_dialect_pass_unchanged(name: str, index: int, values: dict[str, object], prefix: str) -> None:
    line = f"{prefix}[2026-11-20 13:45:12] model.py:925 - {name} {index}: {values}\n"
    assert Scrubber([VALUE, "hf_" + MIXED]).text(line) == line


def test_the_logs_of_the_evidence_pass_unchanged() -> None:
    scrubber = Scrubber([VALUE])
    num_bytes = 0
    for bundle in sorted(EVIDENCE.glob("*.tgz")):
        with tarfile.open(bundle) as archive:
            for member in archive:
                if member.name.endswith("stdout.log"):
                    data = (archive.extractfile(member) or io.BytesIO()).read()
                    num_bytes += len(data)
                    assert scrubber.bytes(data) == data, member.name
    assert num_bytes > 15_000_000


def test_the_jobs_environment_goes_through_the_allow_list(tmp_path: Path) -> None:
    plan = plan_for(stack="host")
    from rlk_repro.clusters.slurm.script import render_sbatch

    script = render_sbatch(plan, run_dir_of(plan))
    begin, end = script.index("record() {"), script.index("\nif [[ -s $run_dir/scheduler/accounting-fields")
    lines = [line for line in script[begin:end].splitlines() if not re.match(r"record (?:job|nodes|mpi) ", line)]
    environment = {"SLURM_JOB_ID": "12", "SLURM_JOB_USER": "somebody", "SLURM_JOB_ACCOUNT": "lab-of-x",
                   "SLURM_SUBMIT_DIR": "/home/somebody", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7", "SLURM_NNODES": "2",
                   "SLURM_EXPORT_ENV": "ALL", "HF_TOKEN": "hf_" + MIXED, "PATH": "/usr/bin:/bin"}  # fmt: skip
    words = [
        "bash",
        "-c",
        "\n".join(["set -Eeuo pipefail", 'records=$1 allocation="12.0"', *lines]),
        "job",
        str(tmp_path),
    ]
    subprocess.run(words, env=environment, check=True)
    found = (tmp_path / "environment-12.0.txt").read_text().splitlines()
    assert found == ['declare -x SLURM_EXPORT_ENV="ALL"', 'declare -x SLURM_JOB_ID="12"', 'declare -x SLURM_NNODES="2"']


def test_slurms_text_about_a_job_is_scrubbed_before_sealing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", VALUE)
    _, run_dir = make_staged(tmp_path / "run")
    run_dir.scheduler.mkdir(exist_ok=True)
    token = "hf_" + MIXED
    told = f"JobId=12 Comment={VALUE}\n SubmitLine=sbatch --export=A={token}\n WorkDir={run_dir.root}\n Odd=\udcff\n"
    path = run_dir.scheduler / "job-12.0.txt"
    path.write_bytes(told.encode(errors="surrogateescape"))
    assert run_example(run_dir) == 0
    assert path.read_bytes() == (
        b"JobId=12 Comment=<redacted:known-value>\n SubmitLine=sbatch --export=A=<redacted:huggingface-token>\n"
        b" WorkDir={run_dir}\n Odd=\xff\n"
    )


def test_a_password_on_a_line_of_its_own_is_taken_out_of_a_netrc() -> None:
    assert scrub("+  password tulips9roses") == "+  password <redacted:password>"
