"""Operator records are read from a log, and no line crashes the reader."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk_repro.agent.ends import is_good_end
from rlk_repro.analysis.analyse import analyse
from rlk_repro.base.files import dump_json, dump_json_line, write_json, write_text
from rlk_repro.logs.operators import OperatorLog, parse_operators
from rlk_repro.plan import Plan, Trial, make_record
from rlk_repro.replay.compare import Match, compare_analyses
from rlk_repro.report.answer import describe_answer, describe_word
from rlk_repro.report.html import render_html
from rlk_repro.report.markdown import render_markdown
from rlk_repro.report.view import make_view
from rlk_repro.rundir.microbatch import describe_microbatches
from rlk_repro.rundir.operator_results import OperatorKind, OperatorStatus
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.results import Analysis, TrialStatus, VerdictWord
from rlk_repro.workloads import WORKLOADS
from tests.support.make_run import PREFIX, list_ops_lines, make_exit, write_records
from tests.support.run_plans import make_run_plan

HARNESS = "[2026-11-20 16:00:00] harness.py:60 - operator "
STAMP = "2026-11-20T16:00:00.123Z "
CASE: dict[str, Any] = {
    "operator": "logp", "num_tokens": 9216, "vocab_size": 151936, "hidden_size": None, "dtype": "float32",
    "density": 1.0, "work": "forward",
}  # fmt: skip
TIME: dict[str, Any] = {
    "event": "time", "case": CASE, "implementation": "rl-kernel-online", "sweep": 0, "kind": "fused",
    "class_name": "FusedLogpGenericOp.online_fp32", "version": "0.1.0", "status": "pass", "reason": "",
    "samples_s": [0.0017, 0.0018], "peak_extra_bytes": 0, "floor_s": 0.0013,
}  # fmt: skip
CHECK: dict[str, Any] = {
    "event": "check", "case": CASE, "implementation": "rl-kernel-online", "status": "pass", "reason": "",
    "error": 1.7e-6, "gradient_error": None, "is_repeatable": True, "kernels": ["void online<float>(float const*)"],
}  # fmt: skip
DEVICE: dict[str, Any] = {"event": "device", "name": "NVIDIA H200", "bytes_per_s": 4.3e12, "flops_per_s": {}}


def read(*lines: str | bytes) -> OperatorLog:
    data = b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + b"\n"
    with NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        return parse_operators(Path(file.name))


def record(value: dict[str, Any], **changes: Any) -> str:
    return HARNESS + dump_json_line(value | changes)


def test_records_are_read_by_cell_and_sweep_with_their_lines() -> None:
    log = read(record(DEVICE), "chatter", STAMP + record(TIME), record(TIME, sweep=1), record(CHECK))
    assert log.num_rejects == {}
    assert log.device is not None
    assert log.device.bytes_per_s == 4.3e12
    ((case, name),) = log.times
    assert (case.vocab_size, case.hidden_size, name) == (151936, None, "rl-kernel-online")
    lines = {sweep: line for sweep, (line, _) in log.times[case, name].items()}
    assert lines == {0: 3, 1: 4}
    first = log.times[case, name][0][1]
    assert (first.kind, first.status, first.samples_s) == (OperatorKind.FUSED, OperatorStatus.PASSED, (0.0017, 0.0018))
    check = log.checks[case, name]
    assert (check.error, check.is_repeatable) == (1.7e-6, True)


def test_a_record_that_comes_again_is_refused_and_the_first_stays() -> None:
    log = read(record(DEVICE), record(DEVICE, bytes_per_s=9e12), record(TIME), record(TIME, samples_s=[1.0]),
               record(CHECK), record(CHECK, error=0.0))  # fmt: skip
    assert log.num_rejects == {"the same record was read before": 3}
    assert log.device is not None
    assert log.device.bytes_per_s == 4.3e12
    assert read(record(CHECK)).num_rejects == {"a check of a cell that was never timed": 1}


@pytest.mark.parametrize(
    "changes",
    [{"samples_s": [-1.0]}, {"samples_s": [1e300]}, {"samples_s": "fast"}, {"sweep": "0"}, {"sweep": -1},
     {"implementation": "<script>"}, {"class_name": "x" * 401}, {"kind": "fastest"}, {"case": CASE | {"density": 0}},
     {"event": "victory"}],
)  # fmt: skip
def test_an_invalid_record_is_refused(changes: dict[str, Any]) -> None:
    log = read("chatter", HARNESS + json.dumps(TIME | changes))
    assert (log.num_rejects, log.times) == ({"not an operator record": 1}, {})


@given(st.lists(st.one_of(st.binary(max_size=200), st.binary(max_size=80).map(HARNESS.encode().__add__)), max_size=8))
def test_no_bytes_crash_the_log_reader(lines: list[bytes]) -> None:
    log = read(*lines, b"", record(TIME))
    assert len(log.times) == 1


@given(st.integers(0, 400), st.binary(min_size=1, max_size=6))
def test_a_damaged_record_is_read_or_refused_without_a_crash(place: int, junk: bytes) -> None:
    whole = record(TIME).encode()
    place = len(HARNESS) + place % (len(whole) - len(HARNESS))
    log = read(whole[:place] + junk + whole[place + len(junk) :], record(TIME, implementation="other"))
    assert len(log.times) + sum(log.num_rejects.values()) >= 1
    assert any(name == "other" for _, name in log.times)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=10),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=5,
    ),
    st.sampled_from(sorted(TIME)),
)
@settings(max_examples=30)
def test_no_value_of_a_field_crashes_the_log_reader(value: Any, name: str) -> None:
    log = read(HARNESS + json.dumps(TIME | {name: value}), record(TIME, sweep=7))
    assert any(7 in sweeps for sweeps in log.times.values())


# The largest microbatch: from logs of trials that ran out of memory to the answer, its report and its refusals.


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
    reason: str = ""


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
    record = make_exit(trial, end.status)
    write_json(folder.exit, record | ({"reason": end.reason} if end.reason else {}))


def test_the_answer_is_the_largest_microbatch_that_fitted_in_each_variant(tmp_path: Path) -> None:
    analysis = make_memory_run(tmp_path, {BASELINE_TRIAL: End(6), ENABLED_TRIAL: End(8)})
    assert analysis.verdict.word is VerdictWord.NO_COMPARISON
    headline = "largest microbatch that trained: 46,080 tokens in baseline, 48,128 tokens in enabled"
    assert analysis.verdict.headline == headline
    assert analysis.verdict.reasons == (
        "00-p1-baseline: 46,080 tokens fitted, 47,104 ran out of memory",
        "01-p1-enabled: 48,128 tokens fitted, 49,152 ran out of memory",
        "the steps have different numbers of tokens, so this run does not compare the speed of the variants",
    )
    assert describe_word(analysis) == "largest microbatch"
    assert describe_answer(make_view(analysis)) == f"Result: {headline}."
    page = render_markdown(analysis)
    shown = (
        f"Result: {headline}.",
        "| 46,080 | 64.37 | 64.37 |",
        "| 47,104 | out of memory | 65.80 |",
        "| 49,152 | – | out of memory |",
    )
    assert [words for words in shown if words not in page] == []
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
        (End(5, "failed", reason="host memory ran out (the kernel)"), "failed: host memory ran out (the kernel)"),
        (End(5, reason="host memory ran out (x)"), "out of memory: host memory ran out (x)"),
        (End(5, reason="device memory of EngineCore ran out (x)"), "out of memory: device memory of EngineCore"),
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


def test_out_of_memory_is_a_good_end_only_where_the_run_fills_the_memory() -> None:
    memory, other = (make_run_plan(run, "h200") for run in ("qwen3-4b-memory", "qwen3-4b-random"))
    good = {status for status in TrialStatus if is_good_end(memory, status)}
    assert good == {TrialStatus.OUT_OF_MEMORY, TrialStatus.OK}
    assert not is_good_end(other, TrialStatus.OUT_OF_MEMORY)
