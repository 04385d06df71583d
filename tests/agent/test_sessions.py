"""Sessions under the node agent, with the reference trainer: stored rollouts laid out, and what a stop leaves."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.agent.rollouts import lay_out_rollouts
from rlk_repro.analysis.analyse import analyse
from rlk_repro.base.errors import CheckFailed
from rlk_repro.base.files import load_json
from rlk_repro.logs.ops import read_ops
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RolloutDir, RunDir
from rlk_repro.rundir.results import PairStatus, ProofStatus
from rlk_repro.rundir.state import read_state
from rlk_repro.schedule import make_schedule
from rlk_repro.workloads import WORKLOADS
from tests import ROOT, SUPPORT
from tests.support.analysis_examples import small
from tests.support.job_examples import FakeWorkload, make_staged, run_example, statuses
from tests.support.make_run import verify_bundle

REFERENCE = WORKLOADS["reference"]

SESSIONS = ("measure.design=crossover", "measure.sessions=2", "measure.blocks=1", "measure.control_blocks=1")
TINY = ("workload.grpo.rollout_batch_size=4", "workload.grpo.n_samples_per_prompt=4")
NAMES = ["00-s1-crossover", "01-s2-crossover"]


@pytest.fixture(autouse=True)
def rl_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The double of RL-Kernel, on the trainers' path."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(SUPPORT / "fake_rl_engine")]))


def run_sessions(run_dir: RunDir) -> int:
    return run_example(run_dir, REFERENCE, analyse=lambda folder: analyse(folder).to_json())


def list_tokens(run_dir: RunDir, name: str) -> list[int]:
    """By step, how many rows of logits RL-Kernel served on rank 0."""
    log = read_ops(run_dir.trial(name))
    return [log.calls_in("logp", step).tokens for step in log.steps()]


def list_lengths(run_dir: RunDir, name: str) -> list[float]:
    lines = run_dir.trial(name).stdout.read_text().splitlines()
    found = [line.partition("'rollout/total_lengths': ")[2].partition(",")[0] for line in lines]
    return [float(text) for text in found if text]


def check_work(plan: Plan, run_dir: RunDir, name: str, seed: int) -> None:
    """Each rollout trained on the file that its place in the schedule gives it."""
    files = [event["files"] for event in events(run_dir, "rollouts") if event.get("trial") == name]
    rollouts = make_schedule(plan.run.measure, seed).rollouts
    assert [len(item) for item in files] == [len(rollouts)]
    for rollout, file in zip(rollouts, files[0], strict=True):
        assert rollout.stored is None or file == f"{rollout.stored}.pt"
    sizes = {path.name: path.stat().st_size for path in run_dir.rollouts_of(seed).path.glob("*.pt")}
    assert len(sizes) == plan.run.measure.num_stored == 8
    assert files[0][0] == files[0][1]
    assert sizes[files[0][0]] == max(sizes.values())
    by_file: dict[str, set[float]] = {}
    for file, length in zip(files[0], list_lengths(run_dir, name), strict=True):
        by_file.setdefault(file, set()).add(length)
    assert all(len(lengths) == 1 for lengths in by_file.values())


def events(run_dir: RunDir, name: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in run_dir.agent_log.read_text().splitlines()]
    return [event for event in found if event["event"] == name]


@pytest.mark.real
def test_sessions_on_stored_rollouts_are_run_sealed_and_read(tmp_path: Path) -> None:
    plan, run_dir = make_staged(tmp_path / "run", (*SESSIONS, *TINY, "lane=train-only"))
    assert run_sessions(run_dir) == 0
    assert statuses(run_dir) == dict.fromkeys(NAMES, "ok")
    for trial in plan.trials:
        check_work(plan, run_dir, trial.name, trial.seed)
        planned = [rollout.variant for rollout in make_schedule(plan.run.measure, trial.seed).rollouts]
        assert [tokens > 0 for tokens in list_tokens(run_dir, trial.name)] == [name == "enabled" for name in planned]
    found = analyse(run_dir)
    assert [trial.proof for trial in found.trials] == [ProofStatus.NOT_REQUESTED, ProofStatus.NATIVE] * 2
    assert "RL-Kernel's operators ran as plain PyTorch" in found.verdict.headline
    assert (len(found.pairs), found.num_pairs_planned, found.num_scored_steps) == (2, 2, 8)
    assert [block.is_control for block in found.blocks] == [False, True] * 2
    assert verify_bundle(run_dir.bundle) == []
    assert not list(run_dir.work.glob("rollouts*"))
    environment = load_json(run_dir.trial(NAMES[0]).env)["env"]
    assert environment["VIME_RL_KERNEL_SCHEDULE"] == make_schedule(plan.run.measure, plan.trials[0].seed).text
    command = load_json(run_dir.trial(NAMES[0]).command)["argv"]
    assert command[-1] == "{run_dir}/.work/rollouts-00-s1-crossover/{rollout_id}.pt"


VOID, SCORED, DROPPED = PairStatus.VOID, PairStatus.SCORED, PairStatus.DROPPED
AGAIN = "02-s3-crossover: no block counts (1 repeated allocation in step 6, which is scored)"


@pytest.mark.parametrize(
    ("ends", "num_run", "hint"),
    [
        ([(VOID, AGAIN), (DROPPED, "01-s2-crossover: out of memory")], 2, "memory is full"),
        ([(VOID, "no step time"), (DROPPED, "failed"), (VOID, "no step time")], 3, "read trials/"),
        ([(VOID, AGAIN), (SCORED, ""), (VOID, AGAIN)], 4, ""),
        ([(DROPPED, "01-s2-crossover: failed"), (DROPPED, "01-s2-crossover: failed")], 4, ""),
    ],
)
def test_a_run_is_given_up_whose_first_sessions_are_spoiled(
    tmp_path: Path, ends: list[tuple[PairStatus, str]], num_run: int, hint: str
) -> None:
    _, run_dir = make_staged(tmp_path / "run", (*SESSIONS, "measure.sessions=4", "lane=train-only"))
    pair = small().pairs[0]

    def analyse_some(run_dir: RunDir) -> dict[str, Any]:
        seen = ends[: len(statuses(run_dir))]
        pairs = [replace(pair, status=status, reason=reason) for status, reason in seen]
        return replace(small(), pairs=tuple(pairs)).to_json()

    assert run_example(run_dir, FakeWorkload(), analyse=analyse_some) == bool(hint)
    assert len(statuses(run_dir)) == num_run
    state = read_state(run_dir)
    assert state is not None
    assert ("does not count, and no session before it did (2 spoiled)" in state.message) == bool(hint)
    assert hint in state.message


def test_rollouts_are_laid_out_from_another_file_system_too(tmp_path: Path) -> None:
    plan, run_dir = make_staged(tmp_path / "run", (*SESSIONS, "lane=train-only"))
    trial, folder = plan.trials[0], run_dir.session_rollouts(plan.trials[0].name)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        stored = RolloutDir(Path(place))
        for number in range(8):
            stored.file(number).write_text(f"{number}" * (20 if number == 5 else 1))
        with lay_out_rollouts(plan, trial, stored, folder) as files:
            texts = [folder.file(number).read_text() for number in range(plan.num_steps)]
            assert not any(path.is_symlink() for path in folder.path.iterdir())
        assert texts == [stored.path.joinpath(name).read_text() for name in files]
        assert files[:2] == ["5.pt", "5.pt"]
        assert files[-2] == files[-1]
        assert not folder.path.exists()
        stored.file(3).unlink()
        with (
            pytest.raises(CheckFailed, match=r"1 of 8 rollouts are missing, the first is 3\.pt"),
            lay_out_rollouts(plan, trial, stored, folder),
        ):
            pass


def test_the_warm_up_does_not_end_with_the_rollout_of_the_first_block(tmp_path: Path) -> None:
    plan, run_dir = make_staged(tmp_path / "run", (*SESSIONS, "measure.warmup_steps=4", "lane=train-only"))
    stored = RolloutDir(tmp_path / "stored")
    stored.path.mkdir()
    for number in range(8):
        stored.file(number).write_text("large" if number == 5 else "")
    trial = plan.trials[0]
    with lay_out_rollouts(plan, trial, stored, run_dir.session_rollouts(trial.name)) as files:
        assert files[:5] == ["0.pt", "0.pt", "5.pt", "5.pt", "0.pt"]
