"""A pair is one agent's work in one allocation; anything else in a bundle is no pair and is reported."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.analysis.allocations import find_misfits
from rlk_repro.analysis.analyse import analyse
from rlk_repro.base.clock import format_utc, parse_utc
from rlk_repro.base.files import load_json, write_json, write_text
from rlk_repro.bundle.seal import unpack
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.results import PairStatus, VerdictWord
from tests import ROOT
from tests.support.job_examples import FakeWorkload, make_staged, run_example
from tests.support.make_run import Recipe, finish_run, make_run
from tests.support.verifying import verify_bundle
from tests.support.waiting import is_written, signal_when

DOCS = ROOT / "docs"
FASTER = DOCS / "evidence" / "module-qwen3-4b-pairs-h200.tgz"
BASELINE, ENABLED = "00-p1-baseline", "01-p1-enabled"
Change = Callable[[RunDir], None]


def edit_exit(run_dir: RunDir, name: str, **fields: Any) -> None:
    path = run_dir.trial(name).exit
    write_json(path, {key: value for key, value in {**load_json(path), **fields}.items() if value is not None})


def shift(run_dir: RunDir, name: str, seconds: float) -> None:
    record = load_json(run_dir.trial(name).exit)
    times = {key: format_utc(parse_utc(record[key]) + seconds) for key in ("started_at", "ended_at")}
    edit_exit(run_dir, name, **times)


def test_trials_of_two_runs_in_one_bundle_are_no_pairs(call, tmp_path: Path) -> None:
    """The bundle has one run's baseline trials, and the enabled trials of another, faster run."""

    def merge(run_dir: RunDir) -> None:
        other = make_run(tmp_path / "other", Recipe(speedup=1.2))
        for trial in run_dir.trial_dirs():
            if trial.name.endswith("enabled"):
                shutil.rmtree(trial.path)
                shutil.copytree(other.trial(trial.name).path, trial.path)
                edit_exit(run_dir, trial.name, allocation="b")

    bundle = finish_run(make_run(tmp_path / "id", Recipe(), merge))
    code, out, _ = call("report", str(bundle), "-o", str(tmp_path / "out"))
    text = " ".join(out.split())
    assert (code, "INCONCLUSIVE" in out) == (0, True)
    assert "0 scored, 6 void" in text
    assert "01-p1-enabled: the agent's log has no allocation b" in text


def merge_logs(run_dir: RunDir) -> None:
    """Merge both agents' logs, so that each allocation is known."""
    edit_exit(run_dir, ENABLED, allocation="b")
    lines = run_dir.agent_log.read_text()
    write_text(run_dir.agent_log, lines + lines.replace('"allocation":"a"', '"allocation":"b"'))


def drop_log(run_dir: RunDir) -> None:
    run_dir.agent_log.unlink()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (merge_logs, "its trials ran in two allocations, a and b"),
        (lambda run_dir: edit_exit(run_dir, ENABLED, allocation="other"), "the agent's log has no allocation other"),
        (drop_log, "the agent's log has no allocation a"),
        (lambda run_dir: write_text(run_dir.agent_log, "{}\n[]\n{\n"), "the agent's log has no allocation a"),
        (
            lambda run_dir: edit_exit(run_dir, ENABLED, allocation=None),
            "its exit record has no consistent allocation and times",
        ),
        (
            lambda run_dir: edit_exit(run_dir, ENABLED, started_at=None),
            "its exit record has no consistent allocation and times",
        ),
        (
            lambda run_dir: edit_exit(run_dir, ENABLED, ended_at="soon"),
            "its exit record has no consistent allocation and times",
        ),
        (
            lambda run_dir: edit_exit(run_dir, ENABLED, duration_s=100.0),
            "its exit record has no consistent allocation and times",
        ),
        (lambda run_dir: shift(run_dir, ENABLED, 86400), "01-p1-enabled: ran from "),
        (lambda run_dir: shift(run_dir, BASELINE, -86400), "00-p1-baseline: ran from "),
        (lambda run_dir: shift(run_dir, ENABLED, -20), "01-p1-enabled: began before 00-p1-baseline had ended"),
    ],
)
def test_a_pair_needs_one_agent_in_one_allocation(tmp_path: Path, change: Change, reason: str) -> None:
    analysis = analyse(make_run(tmp_path / "id", Recipe(speedup=1.2), change))
    assert analysis.pairs[0].status is PairStatus.VOID
    assert reason in analysis.pairs[0].reason
    assert "void: p1" in analysis.verdict.headline


def test_a_copied_pair_and_its_original_are_void(tmp_path: Path) -> None:
    def copy(run_dir: RunDir) -> None:
        for source, target in ((ENABLED, "02-p2-enabled"), (BASELINE, "03-p2-baseline")):
            shutil.rmtree(run_dir.trial(target).path)
            shutil.copytree(run_dir.trial(source).path, run_dir.trial(target).path)

    analysis = analyse(make_run(tmp_path / "id", Recipe(speedup=1.2), copy))
    # nothing tells the copy from the original
    assert [pair.status for pair in analysis.pairs[:3]] == [PairStatus.VOID, PairStatus.VOID, PairStatus.SCORED]


def test_another_allocation_in_a_bundle_of_the_evidence_voids_its_pairs(tmp_path: Path) -> None:
    run_dir = unpack(FASTER, tmp_path / "id")
    assert analyse(run_dir).verdict.word is VerdictWord.FASTER
    for trial in run_dir.trial_dirs():
        if trial.name.endswith("enabled"):
            edit_exit(run_dir, trial.name, allocation="other")
    analysis = analyse(run_dir)
    assert {pair.status for pair in analysis.pairs} == {PairStatus.VOID}
    assert analysis.verdict.word is VerdictWord.INCONCLUSIVE


def test_folders_of_no_planned_trial_are_findings(tmp_path: Path) -> None:
    def add(run_dir: RunDir) -> None:
        shutil.copytree(run_dir.trial(ENABLED).path, run_dir.trials / "12-p7-enabled")
        (run_dir.trials / "note\x1b.txt").write_text("x")

    findings = {str(item) for item in analyse(make_run(tmp_path / "id", change=add)).findings}
    expected = "expected only trials of the plan, found not in the plan"
    assert findings == {
        f"warning: trials/12-p7-enabled: {expected}",
        f"warning: trials/note\\x1b.txt: {expected}",
    }


def test_many_folders_of_no_planned_trial_are_counted(tmp_path: Path) -> None:
    def add(run_dir: RunDir) -> None:
        for number in range(100):
            (run_dir.trials / f"x{number:03d}").mkdir()

    findings = analyse(make_run(tmp_path / "id", change=add)).findings
    assert len(findings) == 21
    assert findings[-1].found.endswith("and 79 more like this")


@pytest.mark.parametrize("is_killed", [False, True])
def test_pairs_of_a_run_that_was_stopped_and_resumed_fit(tmp_path: Path, *, is_killed: bool) -> None:
    """Whole pairs are kept, and half pairs run again; a killed agent may not have recorded its last trial."""
    plan, run_dir = make_staged(tmp_path / "run")
    pids = tmp_path / "pids"
    signal_when(lambda: is_written(pids), signal.SIGTERM)
    assert run_example(run_dir, FakeWorkload(by_trial={"03-p2-baseline": [f"child:{pids}", "sleep:60"]})) == 143
    if is_killed:
        lines = run_dir.agent_log.read_text().splitlines()
        known = next(number for number, line in enumerate(lines) if json.loads(line).get("trial") == ENABLED)
        write_text(run_dir.agent_log, "\n".join([*lines[:known], '{"allocation": "torn\n']))
    assert run_example(run_dir, is_resuming=True) == 0
    allocations = {load_json(run_dir.trial(trial.name).exit)["allocation"] for trial in plan.trials}
    assert len(allocations) == 2
    assert find_misfits(Plan.load(run_dir.plan), run_dir) == {}
    assert verify_bundle(run_dir.bundle) == []


def test_a_bundle_is_signed_and_checked_by_the_documented_commands(tmp_path: Path) -> None:
    """The user's own key signs by ssh-keygen; no code of rlk-repro takes part."""
    if shutil.which("ssh-keygen") is None:
        pytest.skip("ssh-keygen is not installed")
    page = (DOCS / "formats.md").read_text()
    section = page.split("## Who sealed it")[1].split("\n### ")[0]
    sign, check = re.findall(r"```text\n(.*?)```", section, flags=re.DOTALL)
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    algorithm, public, *_ = key.with_suffix(".pub").read_text().split()
    (tmp_path / "signers").write_text(f"alice@example.org {algorithm} {public}\n")
    shutil.copy(finish_run(make_run(tmp_path / "id")), tmp_path / "bundle.tgz")

    def run(commands: str) -> subprocess.CompletedProcess[str]:
        script = f"PATH={Path(sys.executable).parent}:$PATH; " + commands.replace("~/.ssh/id_ed25519", str(key))
        return subprocess.run(["sh", "-euc", script], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert run(sign).returncode == 0
    assert (tmp_path / "bundle.tgz.sig").is_file()
    (tmp_path / "SHA256SUMS").unlink(missing_ok=True)
    assert run(check).returncode == 0, run(check)
    shutil.copy(finish_run(make_run(tmp_path / "other", Recipe(speedup=1.2))), tmp_path / "bundle.tgz")
    assert run(check).returncode != 0
