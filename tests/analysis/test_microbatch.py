"""The largest microbatch: from logs of trials that ran out of memory to the answer, its report and its refusals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlk_repro.agent.outcome import is_good_end
from rlk_repro.analysis.analyse import analyse
from rlk_repro.base.files import dump_json, write_json, write_text
from rlk_repro.plan import Plan, Trial, make_record
from rlk_repro.replay.compare import Match, compare_analyses
from rlk_repro.report.answer import describe_answer, describe_word
from rlk_repro.report.html import render_html
from rlk_repro.report.markdown import render_markdown
from rlk_repro.report.view import make_view
from rlk_repro.rundir.microbatch import describe_microbatches
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.results import Analysis, TrialStatus, VerdictWord
from rlk_repro.workloads import WORKLOADS
from tests.support.make_run import PREFIX, list_ops_lines, make_exit, write_records
from tests.support.run_plans import make_run_plan

VIME = WORKLOADS["vime"]

SIZES = [16 * (64 + length) for length in range(2496, 3521, 64)]
PEAK_PER_TOKEN = 1_500_000
BASELINE_TRIAL, ENABLED_TRIAL = "00-p1-baseline", "01-p1-enabled"


@dataclass(frozen=True)
class End:
    """How a trial ended: its number of trained steps, its status, and the responses that its log reports."""

    num_steps: int
    status: str = "out of memory"
    response_len: int | None = None
    is_routed: bool = True


def make_memory_run(root: Path, ends: Mapping[str, End]) -> Analysis:
    plan = make_run_plan("qwen3-4b-memory", "h200")
    run_dir = RunDir(root / "id")
    write_json(run_dir.plan, make_record(plan, run_dir.run_id))
    write_records(run_dir, plan)
    for trial in plan.trials:
        write_trial(run_dir, plan, trial, ends[trial.name])
    analysis = analyse(run_dir)
    assert Analysis.from_json(json.loads(dump_json(analysis.to_json()))) == analysis
    return analysis


def write_trial(run_dir: RunDir, plan: Plan, trial: Trial, end: End) -> None:
    folder, sizes = run_dir.trial(trial.name), SIZES[: end.num_steps]
    lines = [f"{PREFIX}Timer train start"]
    for step, size in enumerate(sizes):
        length = end.response_len or size // 16 - 64
        lines += [f"{PREFIX}rollout {step}: {{'rollout/response_lengths': {float(length)}}}",
                  f"{PREFIX}perf {step}: {{'perf/step_time': 2.0, 'perf/train_time': 1.5}}"]  # fmt: skip
    ops_lines = list_ops_lines(plan, trial, [PEAK_PER_TOKEN * size for size in sizes], is_routed=end.is_routed)
    write_text(folder.stdout, "\n".join(lines) + "\n")
    write_text(folder.ops_file(0), "\n".join(ops_lines) + "\n")
    write_json(folder.exit, make_exit(trial, end.status))


def test_the_answer_is_the_largest_microbatch_that_fitted_in_each_variant(tmp_path: Path) -> None:
    analysis = make_memory_run(tmp_path, {BASELINE_TRIAL: End(6), ENABLED_TRIAL: End(8)})
    assert analysis.verdict.word is VerdictWord.NO_COMPARISON
    assert analysis.verdict.headline == (
        "largest microbatch that trained: 46,080 tokens in baseline, 48,128 tokens in enabled"
    )
    assert analysis.verdict.reasons == (
        "00-p1-baseline: 46,080 tokens fitted, 47,104 ran out of memory",
        "01-p1-enabled: 48,128 tokens fitted, 49,152 ran out of memory",
        "the steps have different numbers of tokens, so this run does not compare the speed of the variants",
    )
    assert describe_word(analysis) == "largest microbatch"
    answer = f"Result: {analysis.verdict.headline}."
    assert describe_answer(make_view(analysis)) == answer
    page = render_markdown(analysis)
    assert answer in page
    assert "| 46,080 | 64.37 | 64.37 |" in page
    assert "| 47,104 | out of memory | 65.80 |" in page
    assert "| 49,152 | – | out of memory |" in page
    assert "Largest microbatch" in render_html(analysis)


def test_a_trial_that_trained_every_rollout_gives_a_lower_bound(tmp_path: Path) -> None:
    analysis = make_memory_run(tmp_path, {BASELINE_TRIAL: End(16), ENABLED_TRIAL: End(17, "ok")})
    assert describe_microbatches(analysis.microbatches) == (
        "largest microbatch that trained: 56,320 tokens in baseline, 57,344 tokens or more in enabled"
    )
    assert "01-p1-enabled: 57,344 tokens fitted, every rollout fitted" in analysis.verdict.reasons


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (End(5, "failed"), "failed: made to end with failed"),
        (End(0), "the first rollout ran out of memory"),
        (End(5, response_len=512), "step 0 was planned with responses of 2496 tokens, and its log says 512"),
        (End(5, is_routed=False), "RL-Kernel is not proved to have run: "),
    ],
)
def test_a_trial_without_proof_gives_no_number(tmp_path: Path, end: End, reason: str) -> None:
    analysis = make_memory_run(tmp_path, {BASELINE_TRIAL: End(6), ENABLED_TRIAL: end})
    assert describe_microbatches(analysis.microbatches) == (
        "largest microbatch that trained: 46,080 tokens in baseline, unknown in enabled"
    )
    assert any(item.startswith(f"01-p1-enabled: {reason}") for item in analysis.verdict.reasons)


def test_a_replay_reproduces_equal_limits(tmp_path: Path) -> None:
    recorded = make_memory_run(tmp_path / "a", {BASELINE_TRIAL: End(6), ENABLED_TRIAL: End(8)})
    again = make_memory_run(tmp_path / "b", {BASELINE_TRIAL: End(6), ENABLED_TRIAL: End(8)})
    other = make_memory_run(tmp_path / "c", {BASELINE_TRIAL: End(6), ENABLED_TRIAL: End(7)})
    failed = make_memory_run(tmp_path / "d", {BASELINE_TRIAL: End(6), ENABLED_TRIAL: End(8, "failed")})
    same, different = compare_analyses(recorded, again), compare_analyses(recorded, other)
    assert (same.level, same.is_ok) == (Match.REPRODUCED, True)
    assert different.level is Match.DIFFERENT
    assert "now: largest microbatch that trained: 46,080 tokens in baseline, 47,104 tokens" in different.headline
    assert compare_analyses(recorded, failed).obstacles == ("01-p1-enabled: recorded out of memory, now failed",)


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("workload.placements.h200.max_tokens_per_gpu=9216",
         "does not hold the longest samples of a step, got 9216, expected 57344 or more"),
        ("workload.rollouts_growth=220",
         "is too large for 17 rollouts of at most 3520 tokens a response, got 220, expected at most 219"),
        ("lane=live", "lane: does not fit what_for: largest-microbatch, whose rollouts prepare makes, got 'live', "
         "expected train-only"),
        ("measure.pairs=6", "measures no time, got 6, expected at most 5 pairs"),
    ],
)  # fmt: skip
def test_a_plan_that_could_not_answer_is_refused(setting: str, problem: str) -> None:
    plan = make_run_plan("qwen3-4b-memory", "h200", setting)
    assert any(problem in str(found) for found in VIME.find_problems(plan))


@pytest.mark.parametrize(
    ("run", "status", "is_good"),
    [
        ("qwen3-4b-memory", TrialStatus.OUT_OF_MEMORY, True),
        ("qwen3-4b-memory", TrialStatus.OK, True),
        ("qwen3-4b-memory", TrialStatus.FAILED, False),
        ("qwen3-4b-random", TrialStatus.OUT_OF_MEMORY, False),
    ],
)
def test_out_of_memory_is_a_good_end_only_where_the_run_fills_the_memory(
    run: str, status: TrialStatus, is_good: bool
) -> None:
    assert is_good_end(make_run_plan(run, "h200"), status) is is_good
