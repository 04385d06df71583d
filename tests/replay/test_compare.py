from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import scipy.stats

from rlk_repro.analysis.allocations import number_hosts
from rlk_repro.analysis.analyse import analyse
from rlk_repro.base.errors import CheckFailed
from rlk_repro.base.files import load_json, write_json
from rlk_repro.base.findings import Level
from rlk_repro.replay.combine import combine, make_sections, summarise
from rlk_repro.replay.compare import Match, compare_analyses, diff_bundles
from rlk_repro.replay.difference import compare_engines, find_difference
from rlk_repro.report.html import render_page
from rlk_repro.rundir.operator_results import OperatorResult
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.results import Analysis, TrialStatus
from rlk_repro.statistics.stats import STEP_TIME, mean, paired_effect, prediction_interval, t_interval
from tests import ROOT
from tests.analysis.test_checks import BEGIN, SAMPLE, make_lines
from tests.analysis.test_records import Change, add_other_run
from tests.replay.test_replay import change_decisions, change_libraries
from tests.support.analysis_examples import operators, small
from tests.support.make_run import Recipe, finish_run, make_run
from tests.test_plan import plan_smoke


@pytest.fixture(scope="module")
def analysis(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    return analyse(make_run(tmp_path_factory.mktemp("a") / "id", Recipe(speedup=1.1)))


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
        (0.99, 0.002, 0.01, Match.REPRODUCED, "difference +0.00 points, 95 % interval -0.25 to +0.26"),
        (0.985, 0.002, 0.01, Match.REPRODUCED, "now; difference -0.50 points, 95 % interval -0.75 to -0.25"),
        # The difference exceeds its uncertainty; these pairs do not show whether it exceeds the margin.
        (0.983, 0.004, 0.01, Match.IMPRECISE, "; about 17 pairs in each result would show whether"),
        (0.99, 0.02, 0.01, Match.IMPRECISE, "; about 33 pairs in each result would show whether"),
        (0.99, 0.5, 0.01, Match.IMPRECISE, "; more than 200 pairs in each result would show whether"),
        (0.97, 0.002, 0.01, Match.DIFFERENT, "difference -2.00 points, 95 % interval -2.25 to -1.75"),
        (0.97, 0.002, 0.03, Match.REPRODUCED, "difference -2.00 points, 95 % interval -2.25 to -1.75"),
    ],
)
def test_the_step_time_ratio_decides_the_level(
    analysis: Analysis, other: Analysis, ratio: float, sd: float, margin: float, level: Match, words: str
) -> None:
    recorded, new = (measure(side, at, sd) for side, at in ((analysis, 0.99), (other, ratio)))
    comparison = compare_analyses(recorded, new, margin=margin)
    assert (comparison.level, comparison.is_ok) == (level, level is Match.REPRODUCED)
    assert f"step time ratio 0.99 recorded, {ratio:.4g} now; " in comparison.headline
    assert words in comparison.headline
    changed = "00-p1-baseline: loss first differs at step 0: recorded 0.1, now 0.1000001"
    assert changed in comparison.details
    assert comparison.margin_pct == pytest.approx(100 * margin)


def test_the_interval_is_that_of_welch() -> None:
    first = [0.01, -0.02, 0.015, 0.0, -0.01, 0.02]
    second = [0.05, -0.06, 0.04, 0.03, -0.02, 0.07, 0.01, -0.04, 0.0]
    old, new = (paired_effect(STEP_TIME, logs, role="primary", alpha=0.05) for logs in (first, second))
    found = find_difference(old, new)
    assert found is not None
    welch = scipy.stats.ttest_ind(second, first, equal_var=False)
    assert found.estimate / found.error == pytest.approx(welch.statistic)
    assert found.df == math.floor(welch.df) == 10
    assert found.half_width == pytest.approx(scipy.stats.t.ppf(0.975, 10) * found.error)


def test_a_session_counts_once_in_a_training_metric_because_its_variants_train_one_policy() -> None:
    one = small()
    sessions = replace(
        one,
        trials=tuple(replace(trial, name=f"{trial.name[3:5]}-x:{trial.variant}") for trial in one.trials),
        effects=tuple(replace(effect, n=4) for effect in one.effects),
    )
    other = replace(sessions, trials=tuple(replace(trial, series=()) for trial in sessions.trials))
    assert any("n = 2 pairs of equally seeded sessions" in line for line in compare_analyses(sessions, other).details)


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


def test_another_experiment_a_failed_trial_and_another_proof_are_not_comparable(
    analysis: Analysis, tmp_path: Path
) -> None:
    failed = (replace(trial, status=TrialStatus.FAILED, series=()) for trial in analysis.trials)
    broken = replace(analysis, trials=tuple(failed))
    unrouted = analyse(make_run(tmp_path / "id", Recipe(speedup=1.1, is_routed=False)))
    for recorded, new, obstacle in (
        (analysis, replace(analysis, experiment_hash="0" * 64), "the experiments differ"),
        (broken, broken, "00-p1-baseline: recorded failed, now failed"),
        (analysis, broken, "00-p1-baseline: recorded ok, now failed"),
        (analysis, unrouted, "01-p1-enabled: proof of RL-Kernel: recorded proved, now fallback"),
    ):
        comparison = compare_analyses(recorded, new)
        assert (comparison.level, comparison.is_ok) == (Match.NOT_COMPARABLE, False)
        assert comparison.obstacles[0] == obstacle
        assert comparison.lines()[1] == f"  {obstacle}"


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


# ``diff`` compares the log-probs that the training engines of two bundles computed from the same tokens.

PLAN = plan_smoke("measure.pairs=1", "workload.what_for=agreement")


def write(folder: Path, *trials: list[dict[str, Any]]) -> RunDir:
    run_dir = RunDir(folder)
    for trial, lines in zip(PLAN.trials, trials, strict=False):
        engines = run_dir.trial(trial.name).engines
        engines.mkdir(parents=True)
        (engines / "0.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in [BEGIN, *lines]))
    return run_dir


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, "2 tokens bitwise equal"),
        ({"log_probs": [[-1.0, -2.00003]]},
         "1 of 2 tokens differ, mean 1.5e-05, largest 3e-05 at sample 0, position 1 of its response, token 1: "
         "within the contract"),
        ({"log_probs": [[-1.0, -2.5]]},
         "1 of 2 tokens differ, mean 0.25, largest 0.5 at sample 0, position 1 of its response, token 1: "
         "outside the contract"),
        ({"hash": "ac"}, "not compared, because the trials have different weights at this step"),
    ],
)  # fmt: skip
def test_each_trial_of_both_bundles_has_a_line(changes: dict[str, Any], found: str, tmp_path: Path) -> None:
    first = write(tmp_path / "first", make_lines(), make_lines())
    second = write(tmp_path / "second", make_lines(**changes))
    line = f"engines: 00-p1-baseline, step 0, log-probs of training, first against second bundle: {found}"
    assert list(compare_engines(PLAN, first, second)) == [line]


def test_other_tokens_are_not_compared(tmp_path: Path) -> None:
    lines = make_lines()
    lines[0] = lines[0] | {"samples": [SAMPLE | {"tokens": [5, 6, 7, 2]}]}
    first, second = write(tmp_path / "first", make_lines()), write(tmp_path / "second", lines)
    (line,) = compare_engines(PLAN, first, second)
    assert line.endswith(": not compared, because the trials have other tokens at this step")
    assert list(compare_engines(PLAN, RunDir(tmp_path), RunDir(tmp_path))) == []


# Each level of a replay is tested on two bundles made for it: sealed, packed, opened and analysed again.


QUIET, NOISY = Recipe(speedup=1.1, noise=0.001), Recipe(speedup=1.1, noise=0.02)


def change_version(run_dir: RunDir) -> None:
    change_loss(run_dir)
    change_libraries({})(run_dir)
    change_decisions("version", "2")(run_dir)


def lose_sources(run_dir: RunDir) -> None:
    change_loss(run_dir)
    change_libraries({"rl_engine": {"unknown": "Permission denied"}})(run_dir)


@pytest.mark.parametrize(
    ("first", "second", "change", "level", "words"),
    [
        (QUIET, QUIET, None, Match.BITWISE, "losses and rewards are identical, step by step"),
        (QUIET, QUIET, change_loss, Match.REPRODUCED, "reproduced within 1 % (step time ratio 0.9"),
        (NOISY, NOISY, change_loss, Match.IMPRECISE, "would show whether the difference is within 1 %"),
        (QUIET, Recipe(speedup=1.2, noise=0.001), change_loss, Match.DIFFERENT, "difference -7."),
        (QUIET, QUIET, lose_sources, Match.UNDECIDED, "hashes are missing, so nothing proves that the same code ran"),
        (QUIET, QUIET, change_version, Match.NOT_COMPARABLE, "the two results cannot be compared"),
    ],
    ids=lambda value: value.value if isinstance(value, Match) else None,
)
def test_each_pair_of_bundles_gets_its_level(
    first: Recipe, second: Recipe, change: Any, level: Match, words: str, tmp_path: Path, call: Any
) -> None:
    bundles = [
        str(finish_run(make_run(tmp_path / name / "id", recipe, how)))
        for name, recipe, how in (("a", first, None), ("b", second, change))
    ]
    _, out, _ = call("diff", *bundles, "--json")
    found = json.loads(out)["comparison"]
    assert found["level"] == level.value
    assert words in found["headline"]
    assert found["is_ok"] is (level in {Match.BITWISE, Match.REPRODUCED})


# Several bundles of one experiment give one effect per machine, and a claim only from three machines on.

FOLDER = ROOT / "docs" / "evidence"
R3 = [FOLDER / f"qwen3-30b-a3b-random-4l{part}-h200.tgz" for part in ("", "-six", "-sixteen")]
MODULE = [FOLDER / f"module-qwen3-4b-027c809{part}-h200.tgz" for part in ("", "-second", "-third")]
STEP = sorted(FOLDER.glob("qwen3-4b-random-027c809-*.tgz"))


def test_three_bundles_of_five_machines_give_the_figures_of_the_audit() -> None:
    found = combine(R3)
    assert (found.num_machines, found.num_hosts, found.unit) == (5, 5, "host")
    assert [machine.n for machine in found.machines] == [4, 6, 10, 3, 3]
    ends = [found.ratio, found.high, found.low, found.next_high, found.next_low]
    saved = [round(100 - 100 * value, 2) for value in ends if value is not None]
    assert saved == [13.90, 13.20, 14.59, 12.18, 15.58]
    lines = list(summarise(found))
    assert lines[0] == "13.90 % less time (95 % interval 13.20 % to 14.59 %) on 5 NVIDIA H200s on 5 hosts"
    page = render_page(make_sections(found))
    assert [page.count(part) for part in ("<polygon", 'class="interval"', "one more host</text>")] == [6, 7, 1]
    assert lines[-1] == "the plans also differ in what measures nothing: 6 values (--json)"


def test_stacks_of_other_names_with_the_same_commits_are_one_experiment() -> None:
    two = combine(MODULE[:2])
    assert (two.num_machines, two.low, two.next_high) == (2, None, None)
    assert "a claim about this kind of GPU needs 3 hosts" in next(summarise(two))
    found = combine(MODULE)
    ends = [found.ratio, found.high, found.low, found.next_high, found.next_low]
    saved = [round(100 - 100 * value, 2) for value in ends if value]
    assert saved == [83.32, 83.18, 83.46, 83.04, 83.60]


def test_machines_of_two_hosts_say_nothing_about_another_host() -> None:
    found = combine(
        [bundle for bundle in STEP if "third" in bundle.name or "fourth" in bundle.name or "second" in bundle.name]
    )
    assert (found.num_machines, found.num_hosts, found.unit, found.next_low) == (3, 2, "machine", None)
    assert found.low is not None
    assert (
        "the interval is of these machines alone; what to expect of another one takes 3 hosts" in [*summarise(found)][1]
    )


def test_the_headline_of_the_readme_is_what_its_bundles_give() -> None:
    """Bundles of plans without ``stack_on`` and of plans with it; two hosts with two GPUs each, and two with one."""
    found = combine(STEP)
    assert (found.num_machines, found.num_hosts, found.unit) == (6, 4, "host")
    whole, ahead, functions, _ = summarise(found)
    assert whole == "3.29 % less time (95 % interval 2.70 % to 3.89 %) on 6 NVIDIA H200s on 4 hosts"
    assert ahead.startswith("expect 1.95 % to 4.62 % from one more host of this kind")
    assert functions == "in these steps, log-probs and GRPO loss take 85.5 ms less (95 % interval 84.4 to 86.5 ms)"
    readme = (ROOT / "README.md").read_text()
    assert (
        "takes 3.29 % less time with RL-Kernel** (95 % interval 2.70 to 3.89 %), 2.455 → 2.375 s, on 6 H200" in readme
    )
    assert "expect 1.95 to 4.62 %** of this step" in readme
    baseline, enabled = (
        sum(getattr(machine, name) for machine in found.machines) / 6 for name in ("baseline_s", "enabled_s")
    )
    assert (f"{baseline:.3f}", f"{enabled:.3f}") == ("2.455", "2.375")


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([R3[0], MODULE[0]], "is another experiment"),
        ([MODULE[0], FOLDER / "module-qwen3-4b-202f0e3-h200.tgz"], "commits.rl_kernel: is another experiment"),
        ([MODULE[0], MODULE[0]], "is named twice"),
        ([FOLDER / "module-qwen3-4b-compile-h200.tgz"], "compares no step times, got 'not comparable'"),
        ([FOLDER / "qwen3-30b-a3b-16l-full-h200.tgz"], "counts, got 'inconclusive'\n.*full-h200.tgz --summary"),
    ],
)
def test_what_cannot_be_combined_is_refused(sources: list[Path], message: str) -> None:
    with pytest.raises(CheckFailed, match=message):
        combine(sources)


ALL_PASSED = "all pairs together: 5 of 5 gates passed"


def make_parts(folder: Path, *parts: tuple[int, float], change: Change | None = None) -> list[Path]:
    """Bundles of live pairs, each with two pairs, their first seed and what the enabled variant loses of the reward."""
    settings = ("measure.scored_steps=4", "measure.warmup_steps=1", "measure.pairs=2")
    bundles = []
    for place, (seed, drop) in enumerate(parts):
        recipe = Recipe(settings=(*settings, f"measure.seed={seed}"), reward_drop=drop)
        bundles.append(finish_run(make_run(folder / f"{place}" / "id", recipe, change)))
    return bundles


def test_the_reward_is_judged_over_the_pairs_of_all_bundles(tmp_path: Path) -> None:
    found = combine(make_parts(tmp_path, (10, 0.0), (12, 0.001), (14, 0.0)))
    assert [(gate.name, gate.status, gate.n) for gate in found.gates if gate.n] == [
        ("raw_reward", "passed", 6), ("train_rollout_logprob_abs_diff", "passed", 6),
        ("peak_memory_bytes", "passed", 6), ("response_length_mean", "passed", 6), ("pairs", "passed", 6),
    ]  # fmt: skip
    assert ALL_PASSED in list(summarise(found))
    assert "All pairs together" in render_page(make_sections(found))


def test_of_bundles_that_shared_a_gpu_only_the_rewards_are_combined(tmp_path: Path) -> None:
    def share(run_dir: RunDir) -> None:
        for trial in run_dir.trial_dirs():
            add_other_run(run_dir, f"{trial.name}: ", place=f"earlier/{1 + int(trial.name[:2])}")

    found = combine(make_parts(tmp_path, (10, 0.0), (12, 0.0), (14, 0.0), change=share))
    assert (found.ratio, found.machines, [gate.n for gate in found.gates]) == (None, (), [6] * 5)
    lines = [line for line in summarise(found) if not line.startswith("exploratory: ")]
    assert lines[:-1] == ["no step time counts: other runs could use the same GPUs", ALL_PASSED]
    assert "All pairs together" in render_page(make_sections(found))
    assert render_page(make_sections(found)).count("A line is one trial, n = 12 trials") == 2
    assert "curves" not in found.to_json()


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (((10, 0.2), (12, 0.2)), "raw_reward failed: .* beyond the margin .-0.1999.*, 4 pairs"),
        (((10, 0.0), (12, 0.3), (14, 0.0)), "raw_reward undecided: .* 6 pairs"),
        (((10, 0.0), (11, 0.3)), "compares no step times, got 'not comparable'"),
        (((10, 0.3),), "raw_reward failed"),
    ],
)
def test_a_worse_reward_withholds_all_times(tmp_path: Path, parts: tuple[tuple[int, float], ...], words: str) -> None:
    with pytest.raises(CheckFailed, match=words):
        combine(make_parts(tmp_path, *parts))


def test_a_seed_of_two_bundles_is_no_second_pair(tmp_path: Path) -> None:
    found = combine(make_parts(tmp_path, (10, 0.0), (11, 0.0)))
    assert (found.gates, found.machines[0].n) == ((), 4)
    assert "because of 1 seed of two bundles (11): --set measure.seed=N" in found.cautions[-1]
    assert found.cautions == tuple(summarise(found))[:3]
    assert found.cautions[0].startswith("exploratory: Measurement rules differ from the shipped run smoke: ")


def test_machines_that_share_a_boot_or_a_gpu_are_one_host() -> None:
    """The last machine of the second case joins the first two hosts into one."""
    for seen, hosts in (
        (["g1 b1", "g2 b1", "g3 b2", "g1 b3"], [0, 0, 1, 0]),
        (["g1 b1", "g2 b2", "g3 b3", "g4 b1 b2"], [0, 0, 1, 0]),
    ):
        assert number_hosts([frozenset(known.split()) for known in seen]) == hosts


@pytest.mark.long
@pytest.mark.parametrize(("sd_machines", "sizes"), [(1.0, (3, 3, 3)), (0.3, (10, 3, 3, 6, 4)), (0.1, (2, 2, 3, 2))])
def test_the_intervals_hold_the_mean_machine_and_the_next_one(sd_machines: float, sizes: tuple[int, ...]) -> None:
    source = random.Random(f"{sd_machines} {sizes}")
    number, held, ahead = 4000, 0, 0
    for _ in range(number):
        values = []
        for size in sizes:
            machine = source.gauss(0, sd_machines)
            values.append(mean([machine + source.gauss(0, 0.3) for _ in range(size)]))
        interval, wider = t_interval(values, 0.95), prediction_interval(values, 0.95)
        assert interval is not None
        assert wider is not None
        held += interval.low <= 0 <= interval.high
        following = source.gauss(0, sd_machines) + source.gauss(0, 0.3 / max(sizes) ** 0.5)
        ahead += wider.low <= following <= wider.high
    assert 0.93 <= held / number <= 0.975
    assert 0.93 <= ahead / number <= 0.975
