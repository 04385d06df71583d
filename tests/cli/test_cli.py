from __future__ import annotations

import errno
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlk_repro.base import errors, procfs
from rlk_repro.base.errors import Problem, RlkReproError, SpecError
from rlk_repro.base.resources import list_names, run_folders
from rlk_repro.bundle.seal import pack, seal
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.store import remember
from tests import ROOT
from tests.submit.test_sending import make_submitted
from tests.support.make_run import Recipe, finish_run, make_run
from tests.support.waiting import wait_until

MENU = ", ".join(list_names(run_folders()))


@pytest.fixture
def sealed(tmp_path: Path) -> RunDir:
    run_dir = make_run(tmp_path / "runs" / "smoke" / "20261120T000000Z-made", Recipe(speedup=1.2))
    finish_run(run_dir)
    remember(run_dir)
    return run_dir


def test_an_error_is_two_lines_with_its_code(call) -> None:
    code, out, err = call("submit", "--run", "smoek", "--dry-run")
    assert (code, out) == (2, "")
    assert err == (
        f"rlk-repro: --run: no run of this name, got 'smoek', expected one of {MENU}\n  hint: did you mean 'smoke'?\n"
    )


def test_a_bug_is_one_line_and_a_crash_file(call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlk_repro.base.resources.list_names", lambda _: 1 / 0)
    code, _, err = call("runs", "list")
    assert code == 70
    assert err.startswith("rlk-repro: this is a bug: ZeroDivisionError")
    crash = Path(err.rstrip().rpartition(" ")[2])
    assert "Traceback" in crash.read_text()
    crash.unlink()


def test_a_folder_without_permission_is_named(call, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> list[str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/home/other")

    monkeypatch.setattr("rlk_repro.base.resources.list_names", refuse)
    code, _, err = call("runs", "list")
    assert (code, err) == (3, "rlk-repro: /home/other: cannot be read or written (Permission denied)\n")


def test_the_dry_run_shows_the_job_and_writes_nothing(call, tmp_path: Path) -> None:
    code, out, _ = call("submit", "--run", "smoke", "--dry-run", "--pairs", "8")
    assert code == 0
    assert "16 trials in 8 pairs and 0 control pairs" in out
    assert "--show-job" in out
    assert not (tmp_path / "runs").exists()
    assert "--- job/" in call("submit", "--run", "smoke", "--dry-run", "--show-job")[1]
    code, out, _ = call("submit", "--run", "smoke", "--dry-run", "--json")
    value = json.loads(out)
    assert value["summary"]["num_trials"] == 12
    assert value["plan"]["experiment"]["run"]["run"] == "smoke"


def test_a_secret_in_a_setting_never_reaches_the_screen(call) -> None:
    token = "hf_" + "q7" * 17
    code, out, err = call("submit", "--run", "smoke", "--dry-run", "--set", f"purpose={token}")
    assert code == 2
    assert token not in out + err


def test_verify_inspect_and_diff_speak_of_a_bundle(call, sealed: RunDir) -> None:
    bundle = str(sealed.bundle)
    code, out, _ = call("verify", bundle)
    assert (code, out.splitlines()[-1]) == (0, f"{bundle}: every file matches the seal")
    assert "20261120T000000Z-made" in call("inspect", bundle)[1]
    code, out, _ = call("diff", bundle, bundle)
    assert (code, out.splitlines()[-1]) == (0, "identical: plan, manifests and recorded code")
    assert "replay level: bitwise" in out
    (sealed.root / "extra").write_text("x")
    code, out, _ = call("verify", str(sealed.root))
    assert code == 1
    assert "extra" in out


def test_a_report_is_rebuilt_and_may_set_the_exit_code(call, sealed: RunDir, tmp_path: Path) -> None:
    code, out, _ = call("report", str(sealed.bundle), "-o", str(tmp_path / "out"))
    assert code == 0
    assert "faster" in out
    (record,) = json.loads(call("report", str(sealed.bundle), "--summary", "--json")[1])
    assert (record["verdict"], record["report"]) == ("faster", "")
    assert (tmp_path / "out" / "report.html").is_file()
    assert call("report", str(sealed.bundle), "-o", str(tmp_path / "out"), "--fail-on", "faster")[0] == 1
    assert call("report", str(sealed.bundle), "-o", str(tmp_path / "out"), "--fail-on", "slower,not-comparable")[0] == 0
    code, _, err = call("report", str(sealed.bundle), "--fail-on", "worse")
    assert (code, "--fail-on: no such verdict, got 'worse', expected any of faster" in err) == (2, True)
    assert call("report", str(sealed.bundle), "--fail-on", "")[0] == 2  # such as a shell's variable that is not set


def test_a_forged_verdict_is_not_reported(call, sealed: RunDir) -> None:
    sealed.analysis.write_text(sealed.analysis.read_text().replace('"word": "faster"', '"word": "slower"'))
    for command in (["report", str(sealed.root)], ["diff", str(sealed.root), str(sealed.bundle)]):
        code, out, err = call(*command)
        assert (code, out) == (1, "")
        assert "bundle: analysis/analysis.json: differs from what was sealed" in err


def test_a_verdict_forged_with_its_checksums_is_computed_again(call, sealed: RunDir, tmp_path: Path) -> None:
    sealed.analysis.write_text(sealed.analysis.read_text().replace('"word": "faster"', '"word": "slower"'))
    sealed.checksums.unlink()
    sealed.bundle.unlink()
    seal(sealed)
    bundle = str(pack(sealed))
    code, out, _ = call("report", bundle, "-o", str(tmp_path / "out"))
    assert code == 1
    assert "\nFASTER" in out
    assert "analysis.json: expected the values computed from the logs, as in this report" in " ".join(out.split())
    assert "Records of the bundle contradict each other" in " ".join(out.split())
    code, out, _ = call("diff", bundle, bundle)
    assert (code, "new verdict:      faster" in out) == (1, True)
    assert call("index", bundle, "-o", str(tmp_path / "site"))[0] == 1
    assert "records contradict each other" in (tmp_path / "site" / "index.html").read_text()
    assert "the values computed from the logs, as in this report" in (tmp_path / "out" / "report.md").read_text()


def test_a_run_is_found_by_its_beginning(call, sealed: RunDir) -> None:
    assert call("status", "20261120T")[1] == "20261120T000000Z-made: staged but not submitted\n"
    code, _, err = call("status", "2027")
    assert code == 2
    assert "no run directory has this id, got '2027', expected an id such as 20261120T000000Z-made (" in err


def test_an_error_prints_where_what_got_expected_and_hint_of_all_its_problems() -> None:
    problem = Problem("jobs/x.yaml:3: a.b", "wrong value", got="six", expected="a whole number", hint="write 6")
    assert str(SpecError(problem, Problem("x", "wrong value", got=None), Problem("y", "missing"))) == (
        "jobs/x.yaml:3: a.b: wrong value, got 'six', expected a whole number\n  hint: write 6\n"
        "x: wrong value, got None\ny: missing"
    )


def test_exit_codes_are_unique_and_documented() -> None:
    types = [value for value in vars(errors).values() if isinstance(value, type)]
    classes = [item for item in types if issubclass(item, RlkReproError) and item is not RlkReproError]
    codes = [item.exit_code for item in classes] + [errors.EXIT_BUG]
    assert len(set(codes)) == len(codes)
    text = (ROOT / "docs" / "commands.md").read_text()
    for item in classes:
        assert f"`{item.__name__}`" in text
        assert f"| {item.exit_code} |" in text


def test_a_run_is_named_with_or_without_a_flag(call) -> None:
    code, out, _ = call("submit", "smoke", "--dry-run")
    assert code == 0
    assert call("submit", "--run", "smoke", "--dry-run")[1].splitlines()[0] == out.splitlines()[0]
    code, _, err = call("submit", "smoke", "--run", "learn", "--dry-run")
    assert (code, "--run: names another run than the argument, got 'learn', expected smoke" in err) == (2, True)


def test_a_run_that_ended_without_its_agent_shows_the_end_of_its_output(tmp_path: Path) -> None:
    from rlk_repro.submit.finishing import MAX_SHOWN_LINES, _read_end

    log = tmp_path / "slurm.log"
    assert _read_end(log) == ()
    secret = "gh" + "p_" + "a" * 36
    log.write_text("".join(f"line {number}\n\n" for number in range(50)) + f"No module named rlk_repro {secret}\n")
    shown = _read_end(log)
    assert len(shown) == MAX_SHOWN_LINES
    assert shown[-1].startswith("No module named rlk_repro <redacted:")


# TAB and ``list`` offer names from the same folders.


@pytest.fixture
def press_tab(call, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Return what bash gets for a line with the cursor at its end."""

    def press(line: str) -> list[str]:
        words = {"_RLK_REPRO_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        for name, value in words.items():
            monkeypatch.setenv(name, value)
        out: str = call()[1]
        return out.split()

    return press


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("rlk-repro submit qwen3-30b-a3b-random-1", ["qwen3-30b-a3b-random-12l"]),
        ("rlk-repro submit smoke --hardware h", ["h100", "h200"]),
        ("rlk-repro prepare qwen3-4b --stack vime", ["vime-host", "vime-host-027c809"]),
        ("rlk-repro profile show generic-a", ["generic-a100"]),
        ("rlk-repro runs show smok", ["smoke"]),
        ("rlk-repro list h", ["hardware"]),
    ],
)
def test_tab_completes_names(press_tab, line: str, expected: list[str]) -> None:
    assert press_tab(line) == expected


@pytest.mark.parametrize("line", ["rlk-repro status 2", "rlk-repro submit --resume 2"])
def test_tab_completes_ids_of_submissions(press_tab, line: str) -> None:
    run_dir = make_submitted()
    assert press_tab(line) == [run_dir.run_id]


# The command line as a process of its own, without standard streams.


@pytest.fixture
def shell(tmp_path: Path) -> Callable[[str], subprocess.CompletedProcess[str]]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RLK_REPRO_RUNS": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}

    def run(words: str) -> subprocess.CompletedProcess[str]:
        argv = ["bash", "-c", f"{sys.executable} -m rlk_repro {words}"]
        return subprocess.run(argv, check=False, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)

    return run


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("submit smoke --dry-run >&-", 0),
        ("verify absent 2>&-", 2),
        ("profile init --cluster local -o made.yaml <&-", 0),
        ("status absent <&- >&- 2>&-", 2),
    ],
)
def test_a_command_with_closed_standard_streams_ends_as_usual(shell, words: str, code: int) -> None:
    assert shell(words).returncode == code


def test_a_run_of_a_command_without_standard_input_keeps_its_log(shell) -> None:
    answer = json.loads(shell("submit smoke --json <&-").stdout)
    pid = int(answer["submission"]["job_id"].partition(":")[0])
    try:
        assert Path(f"/proc/{pid}/fd/1").resolve() == (Path(answer["run_dir"]) / ".agent.log").resolve()
    finally:
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: (stat := procfs.read_stat(pid)) is None or not stat.is_running)


# What Python lacks on Windows; the standard library and typer are imported before it goes.
OTHER_SYSTEM = """
import asyncio, ctypes, getpass, multiprocessing, platform, shutil, subprocess, sysconfig, tarfile, types
import jinja2, os, pydantic, rich.console, shlex, signal, sys, typer, yaml
sysconfig.get_config_vars(); platform.platform()
fork, wait = os.fork, os.wait
for name in ("sched_getaffinity", "posix_fallocate", "posix_fadvise", "sendfile", "copy_file_range", "pidfd_open",
             "fork", "posix_spawnp", "killpg", "setsid", "getuid", "geteuid", "uname", "statvfs", "set_blocking",
             "sysconf", "O_NOFOLLOW", "O_DIRECTORY", "O_CLOEXEC", "O_NONBLOCK", "waitid", "pread"):
    delattr(os, name)
shutil._winapi = types.SimpleNamespace(NeedCurrentDirectoryForExePath=lambda _: False)
for name in ("SIGKILL", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGPIPE", "SIGALRM", "SIGCHLD", "SIGXFSZ"):
    delattr(signal, name)
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
sys.platform = "win32"
from rlk_repro.cli import main
import rlk_repro.replay.steps, rlk_repro.report.html, rlk_repro.submit.planning  # once for all lines
for line in sys.argv[1:]:  # each in a process of its own
    print("===", line, file=sys.stderr, flush=True)
    if not fork():
        sys.argv = ["rlk-repro", *shlex.split(line)]
        main()
    status = wait()[1]
    print("exit", status >> 8 or status, file=sys.stderr, flush=True)
"""
READ = ("verify B", "report B -o OUT", "replay B --analyze-only", "diff B B", "combine B", "profile show generic-h200",
        "submit smoke --cluster slurm --dry-run", "submit qwen3-4b --cluster k8s --stack example --dry-run",
        "doctor -h")  # fmt: skip
REFUSED = ("submit smoke", "replay B", "doctor", "env create DIR", "status")


def test_laptops_read_bundles_and_show_jobs_and_say_what_needs_linux(sealed: RunDir, tmp_path: Path) -> None:
    names = {"B": str(pack(sealed)), "OUT": str(tmp_path / "out"), "DIR": str(tmp_path / "env")}
    lines = [shlex.join(names.get(word, word) for word in line.split()) for line in READ + REFUSED]
    env = {"PATH": "/nowhere", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "RLK_REPRO_RUNS": str(tmp_path)}
    argv = [sys.executable, "-c", OTHER_SYSTEM, *lines]
    done = subprocess.run(argv, check=False, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    said = done.stderr.split("=== ")[1:]
    assert len(said) == len(lines), done.stderr
    for line, text in zip(READ + REFUSED, said, strict=True):
        assert text.endswith(f"exit {3 if line in REFUSED else 0}\n"), text
        assert ("needs Linux, got" in text) is (line in REFUSED), text
