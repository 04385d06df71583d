from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from pathlib import Path

import pytest

from rlk_repro.analysis.analyse import analyse
from rlk_repro.base.errors import SpecError
from rlk_repro.base.files import load_json, write_json
from rlk_repro.base.findings import Finding, Level
from rlk_repro.prepare.contents import Contents, FileRecord, write_parts
from rlk_repro.replay.compare import Match, compare_analyses, diff_bundles
from rlk_repro.replay.difference import find_difference
from rlk_repro.replay.gate import judge_analyses
from rlk_repro.rundir.operator_results import OperatorResult
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.results import Analysis, TrialStatus
from rlk_repro.spec.load import load_run, parse_overrides
from rlk_repro.statistics.stats import STEP_TIME, paired_effect
from rlk_repro.submit.authored import describe_rule_changes
from tests.support.analysis_examples import small
from tests.support.make_run import Recipe, finish_run, make_plan_for, make_run
from tests.support.operator_examples import operators


@pytest.fixture(scope="module")
def analysis(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    return analyse(make_run(tmp_path_factory.mktemp("a") / "id", Recipe(speedup=1.1)))


def test_identical_losses_and_rewards_are_bitwise(analysis: Analysis) -> None:
    comparison = compare_analyses(analysis, analysis)
    assert comparison.level is Match.BITWISE
    assert comparison.is_ok
    first = comparison.lines()[0]
    assert first.startswith("replay level: bitwise (losses and rewards are identical, step by step; step time ratio ")
    assert "difference +0.00 %" in first


@pytest.mark.parametrize(("ratio", "level"), [(0.3, Match.DIFFERENT), (0.985, Match.BITWISE)])
def test_equal_losses_do_not_prove_times(analysis: Analysis, ratio: float, level: Match) -> None:
    comparison = compare_analyses(measure(analysis, 0.99, 0.002), measure(analysis, ratio, 0.002), margin=0.01)
    assert comparison.level is level
    assert comparison.is_ok is (level is Match.BITWISE)
    assert "losses and rewards are identical, step by step" in comparison.headline
    assert ("but times differ by more than 1 %" in comparison.headline) is (level is Match.DIFFERENT)


def test_a_run_cannot_declare_any_margin_for_its_replays(analysis: Analysis, other: Analysis) -> None:
    comparison = compare_analyses(measure(analysis, 0.3, 0.002), measure(other, 0.99, 0.002), margin=1e10)
    assert (comparison.level, comparison.is_ok, comparison.margin_pct) == (Match.DIFFERENT, False, 10)
    assert comparison.cautions == ("the run declares a margin of 1e+12 % for replays; 10 % counts",)
    assert not judge_analyses(measure(analysis, 0.3, 0.002), measure(other, 0.99, 0.002), 1e10).is_open


def change_loss(run_dir: RunDir) -> None:
    log = run_dir.trial("00-p1-baseline").stdout
    log.write_text(log.read_text().replace("'train/loss': 0.1", "'train/loss': 0.1000001"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    """Return a result of the same experiment with another loss, so that it is not bitwise."""
    return analyse(make_run(tmp_path_factory.mktemp("o") / "id", Recipe(speedup=1.1), change_loss))


def measure(analysis: Analysis, ratio: float, sd: float, *, n: int = 6) -> Analysis:
    """Return a result with this step time ratio, whose pairs spread by ``sd``."""
    far = sd * math.sqrt((n - 1) / n)
    effect = paired_effect(
        STEP_TIME, [math.log(ratio) + far * (-1) ** index for index in range(n)], role="primary", alpha=0.05
    )
    return replace(analysis, effects=(effect,))


@pytest.mark.parametrize(
    ("ratio", "sd", "margin", "level", "words"),
    [
        (0.99, 0.002, 0.01, Match.REPRODUCED, "difference +0.00 %, 95 % interval -0.26 to +0.26 %"),
        (0.985, 0.002, 0.01, Match.REPRODUCED, "0.985 now; difference -0.51 %, 95 % interval -0.76 to -0.25 %"),
        # The difference exceeds its uncertainty; these pairs do not show whether it exceeds the margin.
        (0.983, 0.004, 0.01, Match.IMPRECISE, "; about 17 pairs in each result would show whether"),
        (0.99, 0.02, 0.01, Match.IMPRECISE, "; about 33 pairs in each result would show whether"),
        (1.00, 0.02, 0.01, Match.IMPRECISE, "; about 33 pairs in each result would show whether"),
        (0.99, 0.5, 0.01, Match.IMPRECISE, "; more than 200 pairs in each result would show whether"),
        (0.97, 0.002, 0.01, Match.DIFFERENT, "difference -2.02 %, 95 % interval -2.27 to -1.77 %"),
        (0.97, 0.002, 0.03, Match.REPRODUCED, "difference -2.02 %, 95 % interval -2.27 to -1.77 %"),
    ],
)
def test_the_step_time_ratio_decides_the_level(
    analysis: Analysis,
    other: Analysis,
    ratio: float,
    sd: float,
    margin: float,
    level: Match,
    words: str,
) -> None:
    recorded, new = (measure(side, at, sd) for side, at in ((analysis, 0.99), (other, ratio)))
    comparison = compare_analyses(recorded, new, margin=margin)
    assert (comparison.level, comparison.is_ok) == (level, level is Match.REPRODUCED)
    assert f"step time ratio 0.99 recorded, {ratio:.4g} now; " in comparison.headline
    assert words in comparison.headline
    assert "00-p1-baseline: loss first differs at step 0: recorded 0.1, now 0.1000001" in comparison.details
    assert comparison.margin_pct == pytest.approx(100 * margin)


def test_a_headline_names_margin_both_ratios_and_the_interval(analysis: Analysis, other: Analysis) -> None:
    comparison = compare_analyses(measure(analysis, 0.2267, 0.0015), measure(other, 0.2251, 0.0015))
    assert comparison.lines()[0] == (
        "replay level: reproduced within 1 % (step time ratio 0.2267 recorded, 0.2251 now; "
        "difference -0.71 %, 95 % interval -0.90 to -0.51 %)"
    )


def test_the_interval_is_that_of_welch() -> None:
    from scipy.stats import t, ttest_ind

    first, second = [0.01, -0.02, 0.015, 0.0, -0.01, 0.02], [0.05, -0.06, 0.04, 0.03, -0.02, 0.07, 0.01, -0.04, 0.0]
    old, new = (paired_effect(STEP_TIME, logs, role="primary", alpha=0.05) for logs in (first, second))
    found = find_difference(old, new)
    assert found is not None
    welch = ttest_ind(second, first, equal_var=False)
    assert found.estimate / found.error == pytest.approx(welch.statistic)
    assert 2 * t.sf(welch.statistic, 10.726942791807) == pytest.approx(welch.pvalue)
    assert found.df == 10
    assert found.half_width == pytest.approx(t.ppf(0.975, 10) * found.error)


def test_a_comparison_of_sessions_calls_them_sessions(analysis: Analysis, other: Analysis) -> None:
    recorded, new = (
        replace(
            measure(side, 0.99, 0.02, n=4),
            trials=tuple(replace(trial, name=f"{trial.name}:enabled") for trial in side.trials),
        )
        for side in (analysis, other)
    )
    assert "sessions in each result" in compare_analyses(recorded, new).headline


def test_a_session_counts_once_in_a_training_metric_because_its_variants_train_one_policy() -> None:
    one = small()
    sessions = replace(
        one,
        trials=tuple(replace(trial, name=f"{trial.name[3:5]}-x:{trial.variant}") for trial in one.trials),
        effects=tuple(replace(effect, n=4) for effect in one.effects),
    )
    other = replace(sessions, trials=tuple(replace(trial, series=()) for trial in sessions.trials))
    assert any("n = 2 pairs of equally seeded sessions" in line for line in compare_analyses(sessions, other).details)


def test_two_results_without_losses_and_rewards_are_not_bitwise() -> None:
    one = small()
    bare = replace(one, trials=tuple(replace(trial, series=()) for trial in one.trials))
    assert compare_analyses(bare, bare).level is not Match.BITWISE


def test_without_an_interval_nothing_is_comparable(analysis: Analysis, other: Analysis) -> None:
    comparison = compare_analyses(measure(analysis, 0.99, 0.0, n=1), measure(other, 0.99, 0.0, n=1))
    assert comparison.level is Match.NOT_COMPARABLE
    assert comparison.obstacles == ("the results are not identical, and a step time ratio has no confidence interval",)


def test_times_of_another_gpu_are_not_compared(analysis: Analysis, other: Analysis) -> None:
    def name(side: Analysis, gpu: str) -> Analysis:
        return replace(side, facts={**side.facts, "GPU": gpu})

    h200 = name(analysis, "NVIDIA H200")
    comparison = compare_analyses(h200, name(other, "NVIDIA H100"))
    assert comparison.level is Match.NOT_COMPARABLE
    assert comparison.obstacles == ("GPU: recorded NVIDIA H200, now NVIDIA H100",)
    assert compare_analyses(h200, name(analysis, "NVIDIA H100")).level is Match.BITWISE
    assert compare_analyses(h200, other).level is Match.IMPRECISE


def test_other_rewards_are_different_whatever_the_step_time(analysis: Analysis, tmp_path: Path) -> None:
    new = analyse(make_run(tmp_path / "id", Recipe(speedup=1.1, reward_drop=0.01)))
    comparison = compare_analyses(measure(analysis, 0.99, 0.002), measure(new, 0.99, 0.002))
    assert comparison.level is Match.DIFFERENT
    assert comparison.headline.startswith("different (raw_reward: mean change -0.005")


def test_another_effect_is_different(analysis: Analysis, tmp_path: Path) -> None:
    new = analyse(make_run(tmp_path / "id", Recipe(speedup=0.8, reward_drop=0.01)))
    comparison = compare_analyses(analysis, new)
    assert comparison.level is Match.DIFFERENT
    assert not comparison.is_ok
    assert any(detail.startswith("step_time_s: recorded") for detail in comparison.details)


def test_operators_agree_cell_by_cell_and_never_bitwise() -> None:
    recorded = operators()
    comparison = compare_analyses(recorded, recorded)
    assert comparison.level is Match.REPRODUCED
    assert comparison.headline == "reproduced within 10 % (operators: 10 of 10 agree)"
    assert "operators: 10 of 10 agree" in comparison.details

    def slow_down(cell: OperatorResult) -> OperatorResult:
        trials = (replace(trial, speedup=trial.speedup and trial.speedup / 1.2) for trial in cell.trials)
        return replace(cell, trials=tuple(trials)) if cell.implementation == "rl-kernel-online" else cell

    slower = replace(recorded, operators=tuple(map(slow_down, recorded.operators)))
    comparison = compare_analyses(recorded, slower)
    assert comparison.level is Match.DIFFERENT
    assert "operators: 9 of 10 agree" in comparison.details
    assert (
        "logp forward 9216x151936 float32 density 1 rl-kernel-online: recorded 7.78 times vime's speed, now 6.48"
    ) in comparison.details


def test_an_operator_that_now_fails_is_a_difference() -> None:
    recorded = operators()
    comparison = compare_analyses(recorded, replace(recorded, operators=recorded.operators[1:]))
    assert comparison.level is Match.DIFFERENT
    assert "logp forward 9216x151936 float32 density 1 vime: recorded pass, now absent" in comparison.details


def test_another_experiment_is_never_a_match(analysis: Analysis) -> None:
    other = dataclasses.replace(analysis, experiment_hash="0" * 64)
    comparison = compare_analyses(analysis, other)
    assert comparison.level is Match.NOT_COMPARABLE
    assert comparison.lines()[:2] == [
        "replay level: not comparable (the two results cannot be compared)",
        "  the experiments differ",
    ]


def test_a_trial_missing_on_both_sides_does_not_agree(analysis: Analysis) -> None:
    failed = tuple(dataclasses.replace(trial, status=TrialStatus.FAILED, series=()) for trial in analysis.trials)
    broken = dataclasses.replace(analysis, trials=failed)
    assert compare_analyses(broken, broken).level is Match.NOT_COMPARABLE
    comparison = compare_analyses(analysis, broken)
    assert not comparison.is_ok
    assert comparison.obstacles[0] == "00-p1-baseline: recorded ok, now failed"


def test_rl_kernel_that_ran_on_one_side_only_is_not_comparable(analysis: Analysis, tmp_path: Path) -> None:
    new = analyse(make_run(tmp_path / "id", Recipe(speedup=1.1, is_routed=False)))
    comparison = compare_analyses(analysis, new)
    assert comparison.level is Match.NOT_COMPARABLE
    assert comparison.obstacles[0] == "01-p1-enabled: proof of RL-Kernel: recorded proved, now fallback"


def test_a_comparison_counts_blocking_drift(analysis: Analysis) -> None:
    drift = [Finding(Level.BLOCKING, "gpu.devices.0.name", "NVIDIA H200", "NVIDIA A100-SXM4-80GB")]
    assert "blocking differences of plan, files or machine: 1" in "\n".join(
        compare_analyses(analysis, analysis, drift).lines()
    )


def test_diff_names_what_differs_in_plan_and_manifest(tmp_path: Path) -> None:
    def change(run_dir: RunDir) -> None:
        path = run_dir.node("node0").manifest
        value = load_json(path)
        value["sections"]["gpu"]["driver"] = "570.10"
        write_json(path, value)

    first = finish_run(make_run(tmp_path / "a" / "id"))
    second = finish_run(make_run(tmp_path / "b" / "id", Recipe(settings=("measure.pairs=7",)), change))
    difference = diff_bundles(first, second)
    found = {item.where: (item.level, item.expected, item.found) for item in difference.findings}
    assert found["plan.trials"] == (Level.BLOCKING, "12 entries", "14 entries")
    assert difference.comparison is not None
    assert difference.comparison.level is Match.NOT_COMPARABLE
    assert found["plan.run.measure.pairs"] == (Level.BLOCKING, "6", "7")
    assert found["gpu.driver"] == (Level.WARNING, "580.159.04", "570.10")
    assert not [where for where in found if where.startswith("prepared")]
    same = diff_bundles(first, first)
    assert (same.findings, same.comparison and same.comparison.level) == ((), Match.BITWISE)


def test_texts_and_estimates_of_a_run_are_no_blocking_difference(tmp_path: Path) -> None:
    usual = Recipe()
    changed = (*usual.settings, "purpose=Other words.", "expected_trial_minutes.h200=99", "time_limit_min=30")
    first = finish_run(make_run(tmp_path / "a" / "id", usual))
    second = finish_run(make_run(tmp_path / "b" / "id", replace(usual, settings=changed)))
    levels = {item.where: item.level for item in diff_bundles(first, second).findings}
    assert levels["plan.run.purpose"] is Level.INFO
    assert levels["plan.run.expected_trial_minutes.h200"] is Level.INFO
    assert levels["plan.run.time_limit_min"] is Level.BLOCKING


def test_a_layout_of_hardware_that_no_plan_uses_is_no_blocking_difference(tmp_path: Path) -> None:
    usual = Recipe()
    first = finish_run(make_run(tmp_path / "a" / "id", usual))
    for name, level in (("a100", Level.INFO), (usual.hardware, Level.BLOCKING)):
        changed = (*usual.settings, f"layouts.{name}.num_nodes=2")
        second = finish_run(make_run(tmp_path / name / "id", replace(usual, settings=changed)))
        levels = {item.where: item.level for item in diff_bundles(first, second).findings}
        assert levels[f"plan.run.layouts.{name}.num_nodes"] is level


def test_diff_names_what_was_trained_on(tmp_path: Path) -> None:
    def make(name: str, digit: str) -> Path:
        file = FileRecord(size_bytes=1, sha256=digit * 64, ends_sha256=digit * 64)
        model = Contents(kind="model", name="a-model", source={"revision": digit}, files={"model.safetensors": file})
        run_dir = make_run(tmp_path / name / "id", Recipe())
        write_parts(run_dir.prepared, {"model": model})
        return finish_run(run_dir)

    difference = diff_bundles(make("a", "1"), make("b", "2"))
    assert [(item.level, item.where) for item in difference.findings] == [(Level.BLOCKING, "prepared.model")]


def test_the_margin_is_the_one_that_the_run_declared(tmp_path: Path) -> None:
    levels = []
    for index, settings in enumerate(((), ("measure.replay_margin_pct=3",))):
        recipe = Recipe(speedup=1.1, noise=0.001, settings=(*Recipe().settings, *settings))
        recorded = finish_run(make_run(tmp_path / f"{index}a" / "id", recipe))
        new = finish_run(make_run(tmp_path / f"{index}b" / "id", replace(recipe, speedup=1.125), change_loss))
        comparison = diff_bundles(recorded, new).comparison
        assert comparison is not None
        levels.append((comparison.level, comparison.margin_pct))
    assert levels == [(Match.DIFFERENT, 1), (Match.REPRODUCED, 3)]


def test_a_declared_margin_is_shown_as_a_rule_and_needs_a_step_time_ratio() -> None:
    plan = make_plan_for(Recipe(settings=("measure.replay_margin_pct=3",)))
    assert describe_rule_changes(plan) == (
        "Measurement rules differ from the shipped run smoke: replay_margin_pct 3 instead of none."
    )
    with pytest.raises(SpecError, match=r"measure\.replay_margin_pct: this workload has no ratio of step times"):
        load_run("operators", parse_overrides(("measure.replay_margin_pct=3",)))
