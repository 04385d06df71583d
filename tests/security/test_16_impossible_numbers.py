"""An impossible time voids its step, and the same version uses the same words."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlk_repro import __version__
from rlk_repro.analysis.analyse import analyse
from rlk_repro.base.files import load_json, write_json, write_text
from rlk_repro.probes.code import probe_source
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.results import PairStatus, TrialStatus, VerdictWord
from rlk_repro.sources import OURSELVES
from tests.support.make_run import Recipe, finish_run, make_run, reseal

ENABLED = "01-p1-enabled"


def put(run_dir: RunDir, key: str, value: str, step: int = 3) -> None:
    """Put another number into one line of one trial's log."""
    log = run_dir.trial(ENABLED).stdout
    kind = "step" if key.startswith("train/") else "perf"
    pattern = rf"({kind} {step}: {{.*'{re.escape(key)}': )[-+.\w]+"
    text, count = re.subn(pattern, rf"\g<1>{value}", log.read_text())
    assert count == 1
    write_text(log, text)


def analyse_with(tmp_path: Path, key: str, value: str) -> Any:
    return analyse(make_run(tmp_path / "id", change=lambda run_dir: put(run_dir, key, value)))


@pytest.mark.parametrize("value", ["-7198.3", "0", "0.0", "-0.0", "nan", "inf", "-inf", "1e999"])
def test_an_impossible_step_time_voids_its_step(tmp_path: Path, value: str) -> None:
    analysis = analyse_with(tmp_path, "perf/step_time", value)
    trial = analysis.trials[1]
    assert (trial.status, trial.num_steps_found) == (TrialStatus.FAILED, 4)
    assert trial.reason.startswith("ended well, but only 4 of 5 steps are in its log; step 3 is void: perf/step_time ")
    assert trial.rejects == {"steps with an impossible time or another impossible number": 1}
    assert analysis.pairs[0].status is PairStatus.DROPPED
    found = trial.summary("step_time_s")
    assert (found.n, found.minimum > 0) == (3, True)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("perf/train_time", "-1"),
        ("perf/actor_train_time", "nan"),
        ("perf/train_wait_time", "-inf"),
        ("perf/update_weights_time", "-0.01"),
        ("perf/rollout_time", "-3"),
        ("perf/actor_train_tok_per_s", "-1000"),
        ("perf/actor_train_tok_per_s", "inf"),
        ("rollout/response_len/mean", "-5"),
    ],
)
def test_any_other_impossible_time_or_rate_voids_its_step(tmp_path: Path, key: str, value: str) -> None:
    trial = analyse_with(tmp_path, key, value).trials[1]
    assert trial.status is TrialStatus.FAILED
    assert f"step 3 is void: {key} " in trial.reason
    assert all(series.values[3] is None for series in trial.series if series.source.endswith("stdout.log")
               and series.metric != "weight_sync_time_s")  # fmt: skip


def test_a_negative_log_prob_difference_voids_its_step(tmp_path: Path) -> None:
    key = "train/train_rollout_logprob_abs_diff"
    trial = analyse_with(tmp_path, key, "-1").trials[1]
    assert trial.reason.endswith(f"; step 1 is void: {key} -1 on line 10 is impossible")  # two updates per rollout


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
    trial = analyse_with(tmp_path, key, value).trials[1]
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


def record_version(version: str, **others: str) -> Any:
    def change(run_dir: RunDir) -> None:
        path = run_dir.node("node0").manifest
        value = load_json(path)
        ours = {"version": version, **others}
        write_json(path, {**value, "sections": {**value["sections"], "code": {"rlk_repro": ours}}})

    return change


def forge_words(run_dir: RunDir) -> Path:
    finish_run(run_dir)
    value = load_json(run_dir.analysis)
    value["gates"][4]["detail"] = "checked by an independent laboratory"
    value["verdict"]["reasons"].append("confirmed on eight machines")
    write_json(run_dir.analysis, value)
    return reseal(run_dir)


def own_code() -> dict[str, str]:
    found = probe_source(OURSELVES, {}, {})
    return {name: value for name in ("commit", "package_tree") if isinstance(value := found[name], str)}


@pytest.mark.parametrize("change", [None, record_version(__version__), record_version(__version__, **own_code())])
def test_forged_words_of_this_version_are_refused(call, tmp_path: Path, change: Any) -> None:
    bundle = str(forge_words(make_run(tmp_path / "id", Recipe(speedup=1.2), change)))
    code, _, err = call("replay", bundle, "--analyze-only")
    assert code == 1
    assert "independent laboratory" in err
    code, out, _ = call("report", bundle, "-o", str(tmp_path / "out"))
    assert code == 1
    assert "Records of the bundle contradict each other" in " ".join(out.split())
    assert "independent laboratory" not in (tmp_path / "out" / "report.md").read_text().split("## Findings")[0]


@pytest.mark.parametrize(
    "change",
    [
        record_version("0.1.0"),
        record_version(__version__, commit="0" * 40),
        # An installed package knows no commit of its own.
        record_version(__version__, package_tree="0" * 40),
    ],
)
def test_another_version_may_have_other_words_and_they_are_not_shown(call, tmp_path: Path, change: Any) -> None:
    bundle = str(forge_words(make_run(tmp_path / "id", Recipe(speedup=1.2), change)))
    code, out, _ = call("replay", bundle, "--analyze-only")
    assert (code, "because another version of rlk-repro sealed it" in " ".join(out.split())) == (0, True)
    assert call("report", bundle, "-o", str(tmp_path / "out"))[0] == 0
    assert "independent laboratory" not in (tmp_path / "out" / "report.md").read_text()


def test_one_pair_that_stands_for_several_is_void(tmp_path: Path) -> None:
    """No clock measures one series of times twice."""

    def copy_first_pair(run_dir: RunDir) -> None:
        trials = [trial for trial in run_dir.trial_dirs() if "-p" in trial.name]
        for variant in ("baseline", "enabled"):
            first, *others = [trial for trial in trials if trial.name.endswith(variant)]
            for other in others:
                shutil.copy(first.stdout, other.stdout)
                shutil.copytree(first.ops, other.ops, dirs_exist_ok=True)

    recipe = Recipe(speedup=1.2)
    assert analyse(make_run(tmp_path / "honest", recipe)).verdict.word is VerdictWord.FASTER
    analysis = analyse(make_run(tmp_path / "copied", recipe, copy_first_pair))
    assert analysis.verdict.word is VerdictWord.INCONCLUSIVE
    assert "have the same step times" in {pair.status: pair.reason for pair in analysis.pairs}[PairStatus.VOID]
