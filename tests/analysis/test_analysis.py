from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlk_repro.analysis.analyse import analyse
from rlk_repro.base.files import dump_json, load_json, write_json, write_text
from rlk_repro.base.findings import Level
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.results import Analysis, GateStatus, PairStatus, ProofStatus, TrialStatus, VerdictWord
from tests.support.make_run import Recipe, make_run


def test_the_same_bytes_give_the_same_analysis_wherever_they_lie(tmp_path: Path, weird_name: str) -> None:
    first = dump_json(analyse(make_run(tmp_path / "a" / "id")).to_json())
    second = dump_json(analyse(make_run(tmp_path / weird_name / "id")).to_json())
    assert first == second


def test_an_analysis_survives_a_round_trip(tmp_path: Path) -> None:
    analysis = analyse(make_run(tmp_path / "id"))
    assert Analysis.from_json(json.loads(dump_json(analysis.to_json()))) == analysis


def test_a_real_gain_is_called_faster_and_swapped_slower(tmp_path: Path) -> None:
    faster = analyse(make_run(tmp_path / "a", Recipe(speedup=1.2)))
    assert faster.verdict.word is VerdictWord.FASTER, faster.verdict
    slower = analyse(make_run(tmp_path / "b", Recipe(speedup=1 / 1.2)))
    assert slower.verdict.word is VerdictWord.SLOWER, slower.verdict


def test_a_worse_reward_makes_it_not_comparable(tmp_path: Path) -> None:
    analysis = analyse(make_run(tmp_path / "a", Recipe(speedup=1.2, reward_drop=0.2)))
    assert analysis.verdict.word is VerdictWord.NOT_COMPARABLE


def test_enabled_that_fell_back_everywhere_makes_control_pairs(tmp_path: Path) -> None:
    analysis = analyse(make_run(tmp_path / "a", Recipe(is_routed=False)))
    assert all(pair.is_control and pair.status is PairStatus.SCORED for pair in analysis.pairs)
    assert "RL-Kernel cannot be imported" in analysis.pairs[0].control_reason
    assert "never ran" in analysis.verdict.headline
    assert analysis.noise_floor.is_measured
    assert analysis.verdict.word is VerdictWord.NOT_COMPARABLE


def test_native_ops_on_a_cpu_count_as_invoked_and_carry_no_speed_verdict(tmp_path: Path) -> None:
    analysis = analyse(make_run(tmp_path / "a", Recipe(hardware="cpu", speedup=1.5)))
    assert {trial.proof for trial in analysis.trials} == {ProofStatus.NATIVE, ProofStatus.NOT_REQUESTED}
    assert analysis.verdict.word not in {VerdictWord.FASTER, VerdictWord.SLOWER}


def test_a_failed_trial_stays_in_the_table_and_drops_its_pair(tmp_path: Path) -> None:
    analysis = analyse(make_run(tmp_path / "a", Recipe(failed={"01-p1-enabled": "out of memory"})))
    assert analysis.trials[1].status is TrialStatus.OUT_OF_MEMORY
    assert analysis.trials[1].num_steps_found == 2
    assert analysis.pairs[0].status is PairStatus.DROPPED
    assert analysis.pairs[0].reason == "01-p1-enabled: out of memory"
    assert analysis.verdict.num_pairs == 5


def remove_exit(run_dir: RunDir) -> None:
    run_dir.trial("00-p1-baseline").exit.unlink()


def cut_log(run_dir: RunDir) -> None:
    path = run_dir.trial("00-p1-baseline").stdout
    write_text(path, "\n".join(path.read_text().splitlines()[:8]))


def remove_ops(run_dir: RunDir) -> None:
    run_dir.trial("01-p1-enabled").ops_file(0).unlink()


def touch_baseline(run_dir: RunDir) -> None:
    enabled, baseline = (run_dir.trial(name).ops_file(0) for name in ("01-p1-enabled", "00-p1-baseline"))
    write_text(baseline, enabled.read_text())


def tear_exit(run_dir: RunDir) -> None:
    run_dir.trial("00-p1-baseline").exit.write_text('{"schema": 1, "sta')


@pytest.mark.parametrize(
    ("change", "status", "reason"),
    [
        (remove_exit, PairStatus.DROPPED, "00-p1-baseline: interrupted"),
        (tear_exit, PairStatus.DROPPED, "00-p1-baseline: interrupted"),
        (cut_log, PairStatus.DROPPED, "00-p1-baseline: failed"),
        (remove_ops, PairStatus.VOID, "01-p1-enabled: missing (the trainer wrote no ops file)"),
        (touch_baseline, PairStatus.VOID, "00-p1-baseline: RL-Kernel may have run"),
    ],
)
def test_a_pair_counts_only_with_every_proof(
    tmp_path: Path, change: Callable[[RunDir], None], status: PairStatus, reason: str
) -> None:
    analysis = analyse(make_run(tmp_path / "a", change=change))
    pair = analysis.pairs[0]
    assert pair.status is status
    assert pair.reason.startswith(reason)
    assert all(other.status is PairStatus.SCORED for other in analysis.pairs[1:])


def test_variants_that_differ_outside_the_switch_are_not_comparable(tmp_path: Path) -> None:
    def change(run_dir: RunDir) -> None:
        path = run_dir.trial("01-p1-enabled").env
        value = load_json(path)
        value["env"]["NCCL_ALGO"] = "Ring"
        write_json(path, value)

    analysis = analyse(make_run(tmp_path / "a", Recipe(speedup=1.2), change))
    found = [finding for finding in analysis.findings if finding.level is Level.BLOCKING]
    assert [(item.where, item.expected, item.found) for item in found] == [
        ("p1.environment.NCCL_ALGO", "not set", "Ring")
    ]
    assert any(gate.status is GateStatus.FAILED for gate in analysis.gates)
    assert analysis.verdict.word is VerdictWord.NOT_COMPARABLE


def test_every_number_knows_its_log_line(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a")
    analysis = analyse(run_dir)
    series = analysis.trials[0].get_series("step_time_s")
    assert series is not None
    lines = (run_dir.root / series.source).read_text().splitlines()
    for value, line in zip(series.values, series.lines, strict=True):
        assert line is not None
        printed = lines[line - 1].rpartition("'perf/step_time': ")[2].rstrip("}")
        assert value == pytest.approx(float(printed), rel=1e-11)


def test_warm_up_steps_are_not_scored(tmp_path: Path) -> None:
    summary = analyse(make_run(tmp_path / "a")).trials[0].summary("step_time_s")
    assert summary is not None
    assert summary.n == 4
    assert (summary.p50, summary.p90, summary.p99) == (summary.median, None, None)


def test_nodes_without_records_become_findings(tmp_path: Path) -> None:
    def change(run_dir: RunDir) -> None:
        run_dir.node("node0").manifest.unlink()
        run_dir.node("node0").preflight.unlink()

    analysis = analyse(make_run(tmp_path / "a", change=change))
    assert [finding.expected for finding in analysis.findings] == [
        "a manifest",
        "a preflight record",
        "manifest and preflight record of 1 node",
    ]
