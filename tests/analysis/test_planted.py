"""Sessions from real processes to an effect: planted slow-downs are found, and what went wrong in a block is named."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.analysis.analyse import analyse
from rlk_repro.base.files import load_json
from rlk_repro.plan import Plan, Trial
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.results import Analysis, Effect, GateStatus, PairStatus, TrialStatus, VerdictWord
from rlk_repro.schedule import make_schedule
from rlk_repro.workloads.api import Command
from rlk_repro.workloads.reference import INIT_PATH, Reference
from tests import ROOT, SUPPORT
from tests.support.job_examples import make_staged, run_example

PLANTED = """
import os, time
from rlk_repro.integration import reference
def install(args):
    installation = reference.install(args)
    from rlk_repro.refengine.trainer import Trainer
    train_step = Trainer._train_step
    def slow(self, *values):
        begun = time.perf_counter()
        time.sleep(float(os.environ["WAIT_S"]))
        result = train_step(self, *values)
        share = float(os.environ["PLANTED"]) if installation.turn.is_enabled else 0.0
        time.sleep(share * (time.perf_counter() - begun))
        return result
    Trainer._train_step = slow
    return installation
"""
"""Each optimizer step waits ``WAIT_S`` seconds; in the enabled variant it then waits a share of its own time."""


class Planted(Reference):
    """The reference trainer as a workload, with a wait planted into its steps."""

    def __init__(self, folder: Path, share: float, wait_s: float) -> None:
        (folder / "planted.py").write_text(PLANTED)
        self._env = {
            "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT), str(SUPPORT / "fake_rl_engine")]),
            "PLANTED": str(share),
            "WAIT_S": str(wait_s),
        }

    def trainer_command(self, plan: Plan, trial: Trial, run_dir: RunDir) -> Command:
        command = super().trainer_command(plan, trial, run_dir)
        argv = tuple("planted.install" if word == INIT_PATH else word for word in command.argv)
        return replace(command, argv=argv, env={**command.env, **self._env})


def run_planted(folder: Path, share: float, *settings: str, wait_s: float = 0.03) -> RunDir:
    tiny = ("workload.grpo.rollout_batch_size=2", "workload.grpo.n_samples_per_prompt=4", "lane=train-only")
    design = ("measure.design=crossover", "measure.shadow_steps=0", *settings)
    _, run_dir = make_staged(folder / "run", (*design, *tiny))
    assert run_example(run_dir, Planted(folder, share, wait_s), analyse=lambda place: analyse(place).to_json()) == 0
    return run_dir


def find_planted(analysis: Analysis, share: float) -> float:
    """The ratio of step times that the planted share of the optimizer steps makes."""
    baseline = next(arm for arm in analysis.trials if arm.variant == "baseline")
    step, training = (baseline.summary(name) for name in ("step_time_s", "actor_train_time_s"))
    assert step is not None
    assert training is not None
    return 1 + share * training.median / step.median


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Three sessions of six blocks in which enabled waits twice as long: found beside whatever else runs here."""
    folder = tmp_path_factory.mktemp("planted")
    return run_planted(folder, 1.0, "measure.sessions=3", "measure.blocks=6", "measure.control_blocks=2")


@pytest.mark.real
def test_a_planted_slow_down_is_found(finished: RunDir) -> None:
    found = analyse(finished)
    effect = found.effect("step_time_s")
    assert effect is not None
    assert effect.n == 3
    # the route of the double costs some percent of its own
    assert effect.ratio == pytest.approx(find_planted(found, 1.0), rel=0.12)
    assert effect.low is not None
    assert effect.low > 1
    assert effect.p_floor == pytest.approx(2 / 20**3)
    assert effect.p_value is not None
    assert effect.p_value < 0.01
    assert [pair.status for pair in found.pairs] == [PairStatus.SCORED] * 3
    assert [trial.name for trial in found.trials][:2] == ["00-s1-crossover:baseline", "00-s1-crossover:enabled"]
    assert len(found.blocks) == 24
    assert not any(block.reason for block in found.blocks)
    assert {name: item.n for name, item in found.pooled.items()} == {"baseline": 36, "enabled": 36}
    gates = {gate.name: gate for gate in found.gates}
    assert gates["blocks"].status is GateStatus.PASSED
    assert (gates["raw_reward"].status, gates["response_length_mean"].status) == (GateStatus.NOT_APPLICABLE,) * 2
    # the operators of a CPU are plain PyTorch: the route is proved, never a speed
    assert found.verdict.word is VerdictWord.INCONCLUSIVE
    assert "plain PyTorch" in found.verdict.headline


def run_quietly(folder: Path, share: float) -> RunDir:
    """Run four sessions whose steps mostly wait: a CPU adds little noise, the cheapest operator little time."""
    return run_planted(folder, share, "entropy_metric=false", "rl_kernel.ops=[ratio_kl]", wait_s=0.16)


@pytest.mark.real
@pytest.mark.timeout(600)
def test_planted_slow_downs_of_0_2_and_10_percent_are_found(tmp_path: Path) -> None:
    """Three runs side by side take 160 s on 2 cores; each interval holds what was planted."""
    folders = {share: tmp_path / str(share) for share in (0.0, 0.02, 0.1)}
    for folder in folders.values():
        folder.mkdir()
    with ProcessPoolExecutor(len(folders), mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {share: pool.submit(run_quietly, folder, share) for share, folder in folders.items()}
        analyses = {share: analyse(run.result()) for share, run in running.items()}
    for share, found in analyses.items():
        effect = found.effect("step_time_s")
        assert effect is not None
        assert effect.ratio is not None
        assert effect.low is not None
        half_width = find_half_width(effect)
        # the intervals are of 95 %: three of them and the double's own route, up to 1 %, need some room
        assert abs(math.log(effect.ratio / find_planted(found, share))) <= 1.5 * half_width + 0.01
        assert half_width < 0.15
        # an idle machine of 2 cores reaches 0.7 to 2.1 %, so it finds 10 %; other tests beside this one widen intervals
        assert (effect.low > 1) or share < 2 * half_width


def find_half_width(effect: Effect) -> float:
    assert effect.low is not None
    assert effect.high is not None
    return math.log(effect.high / effect.low) / 2


def damage(finished: RunDir, folder: Path, change: Callable[[list[dict[str, Any]]], None]) -> Analysis:
    """The analysis after a change to the events of the first session's first rank."""
    shutil.copytree(finished.root, folder / "copy")
    run_dir = RunDir(folder / "copy")
    path = run_dir.trial("00-s1-crossover").ops / "0.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    change(events)
    path.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    return analyse(run_dir)


def find_step(events: list[dict[str, Any]], step: int) -> dict[str, Any]:
    return next(event for event in events if event["event"] == "step" and event["step"] == step)


def find_scored(finished: RunDir, variant: str) -> int:
    """A scored step of the first comparison block of the first session."""
    plan = Plan.load(finished.plan)
    schedule = make_schedule(plan.run.measure, plan.trials[0].seed)
    block = next(number for number, item in enumerate(schedule.blocks) if not item.is_control)
    return next(
        step
        for step, rollout in enumerate(schedule.rollouts)
        if rollout.block == block and rollout.variant == variant and rollout.is_scored
    )


def lost(analysis: Analysis) -> list[str]:
    return [block.reason for block in analysis.blocks if block.reason]


@pytest.mark.parametrize(
    ("variant", "change", "reason"),
    [
        ("enabled", {"variant": "baseline"}, "step {} is planned as enabled and recorded as baseline"),
        ("baseline", {"variant": None}, "step {} is planned as baseline and recorded as neither variant"),
        ("enabled", {"calls": {}}, "never called in step {}"),
        ("baseline", {"counts": {"compilations": 2}}, "2 compilations in step {}, which is scored"),
        ("enabled", {"counts": {"kernel_compilations": 1}}, "1 kernel compilation in step {}, which is scored"),
        ("enabled", {"counts": {"recompile_limit_hits": 1}}, "1 recompile-limit hit in step {}, which is scored"),
    ],
)  # fmt: skip
@pytest.mark.real
def test_one_wrong_step_voids_its_block_by_name(
    finished: RunDir, tmp_path: Path, variant: str, change: dict[str, Any], reason: str
) -> None:
    step = find_scored(finished, variant)
    found = damage(finished, tmp_path, lambda events: find_step(events, step).update(change))
    assert lost(found) == [reason.format(step)]
    assert [pair.status for pair in found.pairs] == [PairStatus.SCORED] * 3
    gate = next(gate for gate in found.gates if gate.name == "blocks")
    assert gate.status is GateStatus.UNDECIDED  # a session needs six blocks, and had no more
    assert reason.format(step) in gate.detail
    assert found.pooled["enabled"].n == 34


@pytest.mark.real
def test_a_call_in_a_baseline_step_voids_its_block(finished: RunDir, tmp_path: Path) -> None:
    step, other = find_scored(finished, "baseline"), find_scored(finished, "enabled")

    def call_twice(events: list[dict[str, Any]]) -> None:
        find_step(events, step)["calls"] = find_step(events, other)["calls"]

    assert lost(damage(finished, tmp_path, call_twice)) == [f"called in step {step}, which is baseline"]


@pytest.mark.real
def test_a_fallback_in_one_step_voids_the_session(finished: RunDir, tmp_path: Path) -> None:
    step = find_scored(finished, "enabled")

    def fall_back(events: list[dict[str, Any]]) -> None:
        find_step(events, step)["calls"]["logp"]["fallbacks"] = 1

    found = damage(finished, tmp_path, fall_back)
    assert [pair.status for pair in found.pairs] == [PairStatus.VOID, PairStatus.SCORED, PairStatus.SCORED]
    assert "1 calls fell back" in found.pairs[0].reason


@pytest.mark.real
def test_a_step_without_a_record_of_a_rank_voids_the_session(finished: RunDir, tmp_path: Path) -> None:
    step = find_scored(finished, "enabled")
    found = damage(finished, tmp_path, lambda events: events.remove(find_step(events, step)))
    assert found.pairs[0].status is PairStatus.SCORED
    assert lost(found) == [f"step {step} is planned as enabled and recorded as neither variant"]


@pytest.mark.real
def test_a_session_that_was_killed_counts_nothing(finished: RunDir, tmp_path: Path) -> None:
    shutil.copytree(finished.root, tmp_path / "copy")
    run_dir = RunDir(tmp_path / "copy")
    record = run_dir.trial("01-s2-crossover").exit
    record.write_text(json.dumps({**load_json(record), "status": "interrupted", "reason": "killed"}))
    found = analyse(run_dir)
    assert [trial.status for trial in found.trials if trial.pair == "s2"] == [TrialStatus.INTERRUPTED] * 2
    assert found.pairs[1].status is PairStatus.DROPPED
    assert {block.session for block in found.blocks} == {"s1", "s3"}
    assert found.pooled["enabled"].n == 24
    assert "a verdict on speed needs 3 sessions with a step time, found 2" in found.verdict.reasons


@pytest.mark.real
def test_a_log_without_a_step_s_time_makes_the_session_a_failure(finished: RunDir, tmp_path: Path) -> None:
    shutil.copytree(finished.root, tmp_path / "copy")
    run_dir = RunDir(tmp_path / "copy")
    log = run_dir.trial("00-s1-crossover").stdout
    step = find_scored(finished, "enabled")
    log.write_text("".join(line for line in log.read_text().splitlines(keepends=True) if f"perf {step}:" not in line))
    found = analyse(run_dir)
    assert found.pairs[0].status is PairStatus.DROPPED
    assert "only 65 of 66 steps" in found.trials[0].reason
