from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.analysis.analyse import analyse
from rlk_repro.analysis.proof import find_unswitched
from rlk_repro.base.files import dump_json, load_json, write_json, write_text
from rlk_repro.base.findings import Level
from rlk_repro.logs.ops import OpsLog, RankOps
from rlk_repro.logs.ops_lines import Step, Tokens
from rlk_repro.replay.identity import compare_identities, read_identity
from rlk_repro.rundir.paths import RunDir, TrialDir
from rlk_repro.rundir.results import Analysis, GateStatus, PairStatus, ProofStatus, TrialStatus, VerdictWord
from tests.conftest import WEIRD_NAMES
from tests.support.make_run import Recipe, make_plan_for, make_run


def test_the_same_bytes_give_the_same_analysis_wherever_they_lie(tmp_path: Path) -> None:
    first = analyse(make_run(tmp_path / "a" / "id")).content
    assert all(analyse(make_run(tmp_path / name / "id")).content == first for name in WEIRD_NAMES[:3])


@pytest.mark.parametrize(
    ("recipe", "word"),
    [
        (Recipe(speedup=1.2), VerdictWord.FASTER),
        (Recipe(speedup=1 / 1.2), VerdictWord.SLOWER),
        (Recipe(speedup=1.2, reward_drop=0.2), VerdictWord.NOT_COMPARABLE),
    ],
)
def test_a_gain_a_loss_and_a_worse_reward_are_told(tmp_path: Path, recipe: Recipe, word: VerdictWord) -> None:
    analysis = analyse(make_run(tmp_path / "a", recipe))
    assert analysis.verdict.word is word, analysis.verdict
    assert Analysis.from_json(json.loads(dump_json(analysis.to_json()))) == analysis


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


def cut_log(run_dir: RunDir) -> None:
    path = run_dir.trial("00-p1-baseline").stdout
    write_text(path, "\n".join(path.read_text().splitlines()[:8]))


def touch_baseline(run_dir: RunDir) -> None:
    enabled, baseline = (run_dir.trial(name).ops_file(0) for name in ("01-p1-enabled", "00-p1-baseline"))
    write_text(baseline, enabled.read_text())


@pytest.mark.parametrize(
    ("change", "status", "reason"),
    [
        (lambda run_dir: run_dir.trial("00-p1-baseline").exit.unlink(), PairStatus.DROPPED,
         "00-p1-baseline: interrupted"),
        (lambda run_dir: run_dir.trial("00-p1-baseline").exit.write_text('{"schema": 1, "sta'), PairStatus.DROPPED,
         "00-p1-baseline: interrupted"),
        (cut_log, PairStatus.DROPPED, "00-p1-baseline: failed"),
        (lambda run_dir: run_dir.trial("01-p1-enabled").ops_file(0).unlink(), PairStatus.VOID,
         "01-p1-enabled: missing (the trainer wrote no ops file)"),
        (touch_baseline, PairStatus.VOID, "00-p1-baseline: RL-Kernel may have run"),
    ],
)  # fmt: skip
def test_a_pair_counts_only_with_every_proof(tmp_path: Path, change: Any, status: PairStatus, reason: str) -> None:
    analysis = analyse(make_run(tmp_path / "a", change=change))
    pair = analysis.pairs[0]
    assert (pair.status, pair.reason.startswith(reason)) == (status, True)
    assert all(other.status is PairStatus.SCORED for other in analysis.pairs[1:])


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


@pytest.mark.parametrize("key", ["train/train_rollout_logprob_abs_diff", "rollout/raw_reward"])
def test_a_metric_that_lacks_a_step_in_both_variants_leaves_its_gate_undecided(tmp_path: Path, key: str) -> None:
    run_dir = make_run(tmp_path / "run", Recipe(speedup=1.2))
    for log in run_dir.root.glob("trials/*/stdout.log"):
        lines = log.read_text().splitlines(keepends=True)
        last = max(number for number, line in enumerate(lines) if key in line)
        log.write_text("".join(lines[:last] + lines[last + 1 :]))
    analysis = analyse(run_dir)
    undecided = {item.name for item in analysis.gates if item.status is GateStatus.UNDECIDED}
    assert key.partition("/")[2] in undecided
    assert analysis.verdict.word is VerdictWord.INCONCLUSIVE


# A session that switches the record of tokens counts only steps whose ops files show the planned record.

TOKENS, NO_TOKENS = Tokens(tokens=3), Tokens(reason="the batch has no log-probs of the rollout")


def make_rank(rank: int, variant: Any, agreement: Tokens | None, step: int = 0) -> RankOps:
    found = Step(event="step", step=step, timers={}, memory={}, calls={}, variant=variant, agreement=agreement)
    return RankOps(
        rank=rank, source=f"ops/{rank}.jsonl", install=None, decisions=(), steps={step: (2, found)}, shadows=(),
        kernels=None, first_reject="", num_rejects={},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("planned", "ranks", "reason"),
    [
        ("baseline", [("baseline", None), ("baseline", None)], ""),
        # of the ranks that split a vocabulary, only the first has a record
        ("enabled", [("enabled", TOKENS), ("enabled", None)], ""),
        ("enabled", [("baseline", None)], "step 0 is planned as enabled and recorded as baseline"),
        ("baseline", [], "step 0 is planned as baseline and recorded as neither variant"),
        ("baseline", [("baseline", TOKENS)], "step 0, which is baseline, has a record of tokens"),
        ("enabled", [("enabled", None)], "step 0, which is enabled, has no record of tokens"),
        ("enabled", [("enabled", NO_TOKENS)],
         "step 0, which is enabled, has no record of tokens: the batch has no log-probs of the rollout"),
    ],
)  # fmt: skip
def test_a_step_shows_whether_its_record_was_switched(planned: str, ranks: list[Any], reason: str) -> None:
    log = OpsLog(ranks=tuple(make_rank(number, *rank) for number, rank in enumerate(ranks)))
    assert find_unswitched(log, 0, planned, of_tokens=True) == reason


def test_a_missing_file_or_step_of_a_rank_proves_nothing() -> None:
    rank, other = make_rank(0, "enabled", TOKENS), make_rank(1, "enabled", TOKENS, step=1)
    for log, reason in (
        (OpsLog(ranks=(rank,), missing_ranks=(1,)), "no ops file of rank 1"),
        (OpsLog(ranks=(rank, other)), "ops/1.jsonl: has no record of step 0"),
    ):
        assert find_unswitched(log, 0, "enabled", of_tokens=False) == reason


# TCP on nodes that have a fabric, and variants that used different networks, prevent a verdict.

ONE_PAIR = Recipe(settings=(*Recipe().settings, "measure.pairs=1"))
TWO_NODES = Recipe(settings=(*ONE_PAIR.settings, "layouts.h200.num_nodes=2"))
IB = {"network": "IB", "paths": ["NET/IB/GDRDMA"], "nvls": True, "mnnvl": False}
TCP = {**IB, "network": "Socket", "paths": ["NET/Socket"]}


def plant(run_dir: RunDir, *, state: str = "ACTIVE", enabled: object = IB, baseline: object = IB) -> None:
    path = run_dir.node("node0").manifest
    value = load_json(path)
    value["sections"]["network"] = {"rdma_devices": {"mlx5_0": {"ports": {"1": {"state": state}}}}}
    write_json(path, value)
    for folder in run_dir.trial_dirs():
        set_transport(folder, enabled if folder.name.endswith("enabled") else baseline)


def set_transport(folder: TrialDir, transport: object) -> None:
    write_json(folder.libraries_file(0), {**load_json(folder.libraries_file(0)), "transport": transport})


def blocking(analysis: Analysis) -> list[str]:
    return [finding.where for finding in analysis.findings if finding.level is Level.BLOCKING]


def test_tcp_beside_an_active_port_is_blocking(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "id", TWO_NODES, lambda made: plant(made, enabled=TCP, baseline=TCP))
    analysis = analyse(run_dir)
    wheres = [f"{folder.name}.libraries.transport" for folder in run_dir.trial_dirs()]
    assert blocking(analysis) == wheres
    told = next(item for item in analysis.findings if item.where == wheres[0])
    assert (told.expected, told.found) == ("RDMA over 1 active port of the nodes", "Socket, on rank 0")
    assert analysis.verdict.word is VerdictWord.NOT_COMPARABLE


def test_variants_over_different_networks_are_not_comparable(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "id", ONE_PAIR, lambda made: plant(made, enabled={**IB, "nvls": False}))
    analysis = analyse(run_dir)
    assert blocking(analysis)[0] == "p1.libraries.0.transport"
    assert analysis.verdict.word is VerdictWord.NOT_COMPARABLE


def test_a_used_or_absent_fabric_gives_no_finding(tmp_path: Path) -> None:
    used = make_run(tmp_path / "used", TWO_NODES, plant)
    down = make_run(tmp_path / "down", TWO_NODES, lambda made: plant(made, state="DOWN", enabled=TCP, baseline=TCP))
    one = make_run(tmp_path / "one", ONE_PAIR, lambda made: plant(made, enabled=TCP, baseline=TCP))
    assert [blocking(analyse(run_dir)) for run_dir in (used, down, one)] == [[], [], []]


def test_a_replay_over_another_network_is_reported(tmp_path: Path) -> None:
    plan = make_plan_for(TWO_NODES)
    old, new, early = (
        read_identity(make_run(tmp_path / name, TWO_NODES, change), plan)
        for name, change in {
            "old": plant, "new": lambda made: plant(made, enabled=TCP, baseline=TCP), "early": None,
        }.items()
    )  # fmt: skip
    found = {item.where: (item.level, item.expected, item.found) for item in compare_identities(old, new)}
    assert found["transport"] == (Level.BLOCKING, "IB", "Socket")
    assert "transport" not in {item.where for item in compare_identities(early, new)}
