from __future__ import annotations

import errno
import json
import os
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


def test_with_json_an_error_is_one_object(call) -> None:
    code, _, err = call("submit", "--run", "smoek", "--dry-run", "--json")
    assert code == 2
    assert json.loads(err)["exit_code"] == 2


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


def test_other_files_are_refused_as_bundles_with_exit_code_5(call, tmp_path: Path) -> None:
    path = tmp_path / "x.tgz"
    path.write_bytes(b"no archive")
    for command in ("verify", "inspect", "report"):
        code, _, err = call(command, str(path))
        assert code == 5, command
        assert str(path) in err


def test_a_report_is_rebuilt_and_may_set_the_exit_code(call, sealed: RunDir, tmp_path: Path) -> None:
    code, out, _ = call("report", str(sealed.bundle), "-o", str(tmp_path / "out"))
    assert code == 0
    assert "faster" in out
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
    code, out, _ = call("diff", "--gate", bundle, bundle)
    assert (code, "gate closed: the results cannot be judged" in out) == (1, True)
    assert call("index", bundle, "-o", str(tmp_path / "site"))[0] == 1
    assert "records contradict each other" in (tmp_path / "site" / "index.html").read_text()
    assert "the values computed from the logs, as in this report" in (tmp_path / "out" / "report.md").read_text()


def test_a_run_is_found_by_its_beginning(call, sealed: RunDir) -> None:
    assert call("status", "20261120T")[1] == "20261120T000000Z-made: staged but not submitted\n"
    code, _, err = call("status", "2027")
    assert code == 2
    assert "no run directory has this id, got '2027', expected an id such as 20261120T000000Z-made (" in err


def test_a_problem_prints_where_what_got_expected_hint() -> None:
    problem = Problem("jobs/x.yaml:3: a.b", "wrong value", got="six", expected="a whole number", hint="write 6")
    assert str(problem) == "jobs/x.yaml:3: a.b: wrong value, got 'six', expected a whole number\n  hint: write 6"
    assert str(Problem("x", "missing")) == "x: missing"
    assert str(Problem("x", "wrong value", got=None)) == "x: wrong value, got None"


def test_an_error_prints_all_its_problems() -> None:
    assert str(SpecError(Problem("a", "missing"), Problem("b", "missing"))) == "a: missing\nb: missing"


def test_exit_codes_are_unique_and_documented() -> None:
    types = [value for value in vars(errors).values() if isinstance(value, type)]
    classes = [item for item in types if issubclass(item, RlkReproError) and item is not RlkReproError]
    codes = [item.exit_code for item in classes] + [errors.EXIT_BUG]
    assert len(set(codes)) == len(codes)
    text = (ROOT / "docs" / "commands.md").read_text()
    for item in classes:
        assert f"`{item.__name__}`" in text
        assert f"| {item.exit_code} |" in text


# TAB and ``list`` offer names from the same folders.


def press_tab(line: str) -> list[str]:
    """Return what bash gets for a line with the cursor at its end."""
    words = {"_RLK_REPRO_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    argv = [sys.executable, "-m", "rlk_repro"]
    done = subprocess.run(argv, cwd=ROOT, env={**os.environ, **words}, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("rlk-repro submit qwen3-30b-a3b-random-8", ["qwen3-30b-a3b-random-8l"]),
        ("rlk-repro submit smoke --hardware h", ["h100", "h200"]),
        ("rlk-repro prepare qwen3-4b --stack vime", ["vime-host", "vime-host-027c809"]),
        ("rlk-repro profile show generic-a", ["generic-a100"]),
        ("rlk-repro runs show smok", ["smoke"]),
        ("rlk-repro list h", ["hardware"]),
    ],
)
def test_tab_completes_names(line: str, expected: list[str]) -> None:
    assert press_tab(line) == expected


@pytest.mark.parametrize("line", ["rlk-repro status 2", "rlk-repro submit --resume 2"])
def test_tab_completes_ids_of_submissions(line: str) -> None:
    run_dir = make_submitted()
    assert press_tab(line) == [run_dir.run_id]


# The command line as a process of its own: in a user's script that calls ``main``, or without standard streams.


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
