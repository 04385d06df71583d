"""Records that no honest run leaves: impossible times, pairs of two allocations, copies and words of another hand."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlk_repro import __version__
from rlk_repro.analysis.allocations import find_misfits
from rlk_repro.analysis.analyse import analyse
from rlk_repro.base.clock import format_utc, parse_utc
from rlk_repro.base.files import load_json, write_json, write_text
from rlk_repro.bundle.seal import unpack
from rlk_repro.plan import Plan
from rlk_repro.probes.code import probe_source
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.results import PairStatus, TrialStatus, VerdictWord
from rlk_repro.sources import OURSELVES
from tests import ROOT
from tests.support.job_examples import FakeWorkload, make_staged, run_example
from tests.support.make_run import Recipe, finish_run, make_run, reseal, verify_bundle
from tests.support.waiting import is_written, signal_when

FASTER = ROOT / "docs" / "evidence" / "module-qwen3-4b-pairs-h200.tgz"
BASELINE, ENABLED = "00-p1-baseline", "01-p1-enabled"
GAIN = Recipe(speedup=1.2)
Change = Callable[[RunDir], None]


def put(key: str, value: str) -> Change:
    """Put another number into step 3 of one trial's log."""

    def apply(run_dir: RunDir) -> None:
        log = run_dir.trial(ENABLED).stdout
        kind = "step" if key.startswith("train/") else "perf"
        pattern = rf"({kind} 3: {{.*'{re.escape(key)}': )[-+.\w]+"
        text, count = re.subn(pattern, rf"\g<1>{value}", log.read_text())
        assert count == 1
        write_text(log, text)

    return apply


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("perf/step_time", value) for value in ("-7198.3", "0", "0.0", "-0.0", "nan", "inf", "-inf", "1e999")),
        ("perf/train_time", "-1"),
        ("perf/actor_train_time", "nan"),
        ("perf/train_wait_time", "-inf"),
        ("perf/update_weights_time", "-0.01"),
        ("perf/rollout_time", "-3"),
        ("perf/actor_train_tok_per_s", "-1000"),
        ("perf/actor_train_tok_per_s", "inf"),
        ("rollout/response_len/mean", "-5"),
        ("train/train_rollout_logprob_abs_diff", "-1"),
    ],
)
def test_an_impossible_number_voids_its_step(tmp_path: Path, key: str, value: str) -> None:
    analysis = analyse(make_run(tmp_path / "id", change=put(key, value)))
    trial = analysis.trials[1]
    step = 1 if key.startswith("train/") else 3  # two updates per rollout
    assert (trial.status, trial.num_steps_found) == (TrialStatus.FAILED, 4)
    said = f"ended well, but only 4 of 5 steps are in its log; step {step} is void: {key} "
    assert trial.reason.startswith(said)
    assert trial.rejects == {"steps with an impossible time or another impossible number": 1}
    assert analysis.pairs[0].status is PairStatus.DROPPED
    logged = [item for item in trial.series if item.source.endswith("stdout.log")]
    assert {item.metric for item in logged if item.values[step] is not None} <= {"weight_sync_time_s"}
    times = trial.summary("step_time_s")
    assert times is not None
    assert times.minimum > 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("perf/update_weights_time", "0"),
        ("perf/train_wait_time", "0.0"),
        ("train/kl_loss", "-0.1"),
        ("train/grad_norm", "nan"),
        ("train/train_rollout_logprob_abs_diff", "nan"),
    ],
)
def test_an_ordinary_log_has_no_void_step(tmp_path: Path, key: str, value: str) -> None:
    """A phase that did not take place takes no time, and a skipped training step prints NaN."""
    trial = analyse(make_run(tmp_path / "id", change=put(key, value))).trials[1]
    assert (trial.status, trial.rejects) == (TrialStatus.OK, {})


@pytest.mark.parametrize("duration_s", ["-3.5", "0", "NaN", "Infinity", "-Infinity", '"3.5 s"', "1e999"])
def test_an_exit_record_with_an_impossible_duration_is_refused(tmp_path: Path, duration_s: str) -> None:
    def change(run_dir: RunDir) -> None:
        path = run_dir.trial(ENABLED).exit
        write_text(path, path.read_text().replace('"duration_s": 3.5', f'"duration_s": {duration_s}'))

    analysis = analyse(make_run(tmp_path / "id", change=change))
    assert (analysis.trials[1].status, analysis.trials[1].duration_s) == (TrialStatus.INTERRUPTED, None)
    assert "exit record unreadable" in analysis.trials[1].reason
    assert analysis.pairs[0].status is PairStatus.DROPPED


@pytest.mark.parametrize("value", ["-0.1", "NaN", "Infinity", "1e999"])
def test_an_impossible_module_time_is_no_proof(tmp_path: Path, value: str) -> None:
    def change(run_dir: RunDir) -> None:
        path = run_dir.trial(ENABLED).ops_file(0)
        write_text(path, path.read_text().replace('"log_probs_forward":0.1', f'"log_probs_forward":{value}', 1))

    analysis = analyse(make_run(tmp_path / "id", change=change))
    assert analysis.pairs[0].status is PairStatus.VOID
    assert analysis.trials[1].rejects == {"ops: not an event": 1}


def record_version(version: str, **others: str) -> Change:
    def change(run_dir: RunDir) -> None:
        path = run_dir.node("node0").manifest
        value = load_json(path)
        code = {"rlk_repro": {"version": version, **others}}
        write_json(path, {**value, "sections": {**value["sections"], "code": code}})

    return change


def forge_words(run_dir: RunDir) -> str:
    finish_run(run_dir)
    value = load_json(run_dir.analysis)
    value["gates"][4]["detail"] = "checked by an independent laboratory"
    value["verdict"]["reasons"].append("confirmed on eight machines")
    write_json(run_dir.analysis, value)
    return str(reseal(run_dir))


def own_code() -> dict[str, str]:
    found = probe_source(OURSELVES, {}, {})
    return {name: value for name in ("commit", "package_tree") if isinstance(value := found[name], str)}


@pytest.mark.parametrize("change", [None, record_version(__version__), record_version(__version__, **own_code())])
def test_forged_words_of_this_version_are_refused(call, tmp_path: Path, change: Change | None) -> None:
    bundle = forge_words(make_run(tmp_path / "id", GAIN, change))
    code, _, err = call("replay", bundle, "--analyze-only")
    assert (code, "independent laboratory" in err) == (1, True)
    code, out, _ = call("report", bundle, "-o", str(tmp_path / "out"))
    assert (code, "Records of the bundle contradict each other" in " ".join(out.split())) == (1, True)
    assert "independent laboratory" not in (tmp_path / "out" / "report.md").read_text().split("## Findings")[0]


@pytest.mark.parametrize(
    "change",
    [
        record_version("0.1.0"),
        record_version(__version__, commit="0" * 40),
        record_version(__version__, package_tree="0" * 40),  # an installed package knows no commit of its own
    ],
)
def test_another_version_may_have_other_words_and_they_are_not_shown(call, tmp_path: Path, change: Change) -> None:
    bundle = forge_words(make_run(tmp_path / "id", GAIN, change))
    code, out, _ = call("replay", bundle, "--analyze-only")
    assert (code, "because another version of rlk-repro sealed it" in " ".join(out.split())) == (0, True)
    assert call("report", bundle, "-o", str(tmp_path / "out"))[0] == 0
    assert "independent laboratory" not in (tmp_path / "out" / "report.md").read_text()


def edit_exit(name: str, **fields: Any) -> Change:
    def apply(run_dir: RunDir) -> None:
        path = run_dir.trial(name).exit
        record = {**load_json(path), **fields}
        write_json(path, {key: value for key, value in record.items() if value is not None})

    return apply


def shift(name: str, seconds: float) -> Change:
    def apply(run_dir: RunDir) -> None:
        record = load_json(run_dir.trial(name).exit)
        later = {key: format_utc(parse_utc(record[key]) + seconds) for key in ("started_at", "ended_at")}
        edit_exit(name, **later)(run_dir)

    return apply


def put_log(text: str) -> Change:
    return lambda run_dir: write_text(run_dir.agent_log, text)


def merge_logs(run_dir: RunDir) -> None:
    """Merge both agents' logs, so that each allocation is known."""
    edit_exit(ENABLED, allocation="b")(run_dir)
    lines = run_dir.agent_log.read_text()
    write_text(run_dir.agent_log, lines + lines.replace('"allocation":"a"', '"allocation":"b"'))


UNKNOWN = "the agent's log has no allocation "
INCONSISTENT = "its exit record has no consistent allocation and times"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (merge_logs, "its trials ran in two allocations, a and b"),
        (edit_exit(ENABLED, allocation="other"), f"{UNKNOWN}other"),
        (lambda run_dir: run_dir.agent_log.unlink(), f"{UNKNOWN}a"),
        (put_log("{}\n[]\n{\n"), f"{UNKNOWN}a"),
        (edit_exit(ENABLED, allocation=None), INCONSISTENT),
        (edit_exit(ENABLED, started_at=None), INCONSISTENT),
        (edit_exit(ENABLED, ended_at="soon"), INCONSISTENT),
        (edit_exit(ENABLED, duration_s=100.0), INCONSISTENT),
        (shift(ENABLED, 86400), "01-p1-enabled: ran from "),
        (shift(BASELINE, -86400), "00-p1-baseline: ran from "),
        (shift(ENABLED, -20), "01-p1-enabled: began before 00-p1-baseline had ended"),
    ],
)
def test_a_pair_needs_one_agent_in_one_allocation(tmp_path: Path, change: Change, reason: str) -> None:
    analysis = analyse(make_run(tmp_path / "id", GAIN, change))
    assert (analysis.pairs[0].status, reason in analysis.pairs[0].reason) == (PairStatus.VOID, True)
    assert "void: p1" in analysis.verdict.headline


def test_trials_of_two_runs_in_one_bundle_are_no_pairs(call, tmp_path: Path) -> None:
    """The bundle has one run's baseline trials, and the enabled trials of another, faster run."""

    def merge(run_dir: RunDir) -> None:
        other = make_run(tmp_path / "other", GAIN)
        for trial in run_dir.trial_dirs():
            if trial.name.endswith("enabled"):
                shutil.rmtree(trial.path)
                shutil.copytree(other.trial(trial.name).path, trial.path)
                edit_exit(trial.name, allocation="b")(run_dir)

    bundle = finish_run(make_run(tmp_path / "id", Recipe(), merge))
    code, out, _ = call("report", str(bundle), "-o", str(tmp_path / "out"))
    text = " ".join(out.split()) + (tmp_path / "out" / "report.md").read_text()
    expected = ("INCONCLUSIVE", "0 scored, 6 void", f"01-p1-enabled: {UNKNOWN}b")
    assert (code, [words for words in expected if words not in text]) == (0, [])


def copy_pair(run_dir: RunDir) -> None:
    for source, target in ((ENABLED, "02-p2-enabled"), (BASELINE, "03-p2-baseline")):
        shutil.rmtree(run_dir.trial(target).path)
        shutil.copytree(run_dir.trial(source).path, run_dir.trial(target).path)


def copy_times(run_dir: RunDir) -> None:
    """No clock measures one series of times twice."""
    for variant in ("baseline", "enabled"):
        first, *others = [trial for trial in run_dir.trial_dirs() if trial.name.endswith(variant)]
        for other in others:
            shutil.copy(first.stdout, other.stdout)
            shutil.copytree(first.ops, other.ops, dirs_exist_ok=True)


def test_a_copied_pair_and_its_original_are_void(tmp_path: Path) -> None:
    assert analyse(make_run(tmp_path / "honest", GAIN)).verdict.word is VerdictWord.FASTER
    analysis = analyse(make_run(tmp_path / "id", GAIN, copy_pair))
    # nothing tells the copy from the original
    assert [pair.status for pair in analysis.pairs[:3]] == [PairStatus.VOID, PairStatus.VOID, PairStatus.SCORED]
    analysis = analyse(make_run(tmp_path / "times", GAIN, copy_times))
    assert analysis.verdict.word is VerdictWord.INCONCLUSIVE
    assert "have the same step times" in {pair.status: pair.reason for pair in analysis.pairs}[PairStatus.VOID]


def test_another_allocation_in_a_bundle_of_the_evidence_voids_its_pairs(tmp_path: Path) -> None:
    run_dir = unpack(FASTER, tmp_path / "id")
    assert analyse(run_dir).verdict.word is VerdictWord.FASTER
    for trial in run_dir.trial_dirs():
        if trial.name.endswith("enabled"):
            edit_exit(trial.name, allocation="other")(run_dir)
    analysis = analyse(run_dir)
    assert {pair.status for pair in analysis.pairs} == {PairStatus.VOID}
    assert analysis.verdict.word is VerdictWord.INCONCLUSIVE


def test_folders_of_no_planned_trial_are_findings_up_to_a_limit(tmp_path: Path) -> None:
    def add(run_dir: RunDir) -> None:
        shutil.copytree(run_dir.trial(ENABLED).path, run_dir.trials / "12-p7-enabled")
        (run_dir.trials / "note\x1b.txt").write_text("x")

    expected = "expected only trials of the plan, found not in the plan"
    names = ("12-p7-enabled", r"note\x1b.txt")
    found = analyse(make_run(tmp_path / "id", change=add)).findings
    assert {str(item) for item in found} == {f"warning: trials/{name}: {expected}" for name in names}

    def add_many(run_dir: RunDir) -> None:
        for number in range(100):
            (run_dir.trials / f"x{number:03d}").mkdir()

    found = analyse(make_run(tmp_path / "many", change=add_many)).findings
    assert (len(found), found[-1].found.endswith("and 79 more like this")) == (21, True)


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
