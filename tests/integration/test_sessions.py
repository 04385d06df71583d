"""Both variants in one process: who switches, what a step shows, and whose a baseline step is."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import rlk_repro
from rlk_repro.analysis.proof import prove
from rlk_repro.base import proc
from rlk_repro.base.errors import CheckFailed
from rlk_repro.integration import reference, switch
from rlk_repro.integration.measure.installation import find_installation
from rlk_repro.integration.route.api import RouteContext, Turn, dispatch_calls
from rlk_repro.integration.route.table import ROUTES
from rlk_repro.integration.switch import TIMERS, Mode, Settings, install_into
from rlk_repro.logs.ops import OpsLog, read_ops
from rlk_repro.operators import Case
from rlk_repro.refengine import core, trainer
from rlk_repro.refengine.__main__ import main
from rlk_repro.refengine.optimizer import AdamW
from rlk_repro.rundir.paths import TrialDir
from rlk_repro.rundir.results import ProofStatus
from rlk_repro.schedule import LETTERS
from tests import ROOT, SUPPORT
from tests.support.loss_examples import load_loss_module, make_loud_route, run_ranks
from tests.support.reference_runs import SMALL, run_trainer

ACTOR = """
from vime.backends.megatron_utils import loss
from tests.support.loss_examples import make_args, train_once

ARGS = make_args(tensor_model_parallel_size=1, context_parallel_size=1)

def get_data_iterator(rollout_data):
    return [rollout_data]
def forward_only(f, args, model, data_iterator, num_microbatches, store_prefix="", use_rollout_top_p_replay=False):
    ...
def train(rollout_id, model, optimizer, opt_param_scheduler, data_iterator, num_microbatches, global_batch_sizes):
    ...
def initialize_model_and_optimizer(args, role="actor"):
    ...
def log_perf_data(rollout_id, args, extra_metrics=None):
    ...

class MegatronTrainRayActor:
    def init(self):
        from rlk_repro.integration import vime
        self.installation = vime.install(ARGS)
    def train(self, rollout_id):
        data_iterator = get_data_iterator("data")
        train_once(loss, ARGS)
        log_perf_data(rollout_id, ARGS)
    def end(self):
        self.installation.undo()
"""
MAIN = """
import os
import ray
from vime.backends.megatron_utils.actor import MegatronTrainRayActor

ray.init(num_cpus=1, include_dashboard=False, _node_ip_address="127.0.0.1")
options = {"num_cpus": 0.1, "runtime_env": {"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}}}
actor = ray.remote(**options)(MegatronTrainRayActor).remote()
ray.get(actor.init.remote())
for rollout_id in range(4):
    ray.get(actor.train.remote(rollout_id))
ray.get(actor.end.remote())
ray.shutdown()
"""


@pytest.mark.real  # Ray copies an actor's methods before they run; test_vime has all but that
def test_an_actor_of_ray_switches_between_rollouts(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    package = tmp_path / "vime" / "backends" / "megatron_utils"
    package.mkdir(parents=True)
    source = Path(rlk_repro.__file__).parent / "refengine" / "core.py"
    (package / "loss.py").write_bytes(source.read_bytes())
    (package / "actor.py").write_text(ACTOR)
    sources = [str(tmp_path), str(ROOT), str(SUPPORT / "fake_rl_engine")]
    switches = {"VIME_RL_KERNEL": "1", "VIME_RL_KERNEL_SCHEDULE": "beeb", "RLK_REPRO_OPS_DIR": str(tmp_path / "ops")}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sources)} | switches
    completed = proc.run([sys.executable, "-c", MAIN], cwd=tmp_path, env=environment, timeout_s=180)
    assert completed.is_ok, completed.stderr
    log = read_ops(TrialDir(tmp_path))
    assert [log.variant_of(step) for step in log.steps()] == ["baseline", "enabled", "enabled", "baseline"]
    for op in ("logp", "ratio_kl"):
        assert [log.calls_in(op, step).calls > 0 for step in log.steps()] == [False, True, True, False]


OPS = ("logp", "ratio_kl")
needs_double = pytest.mark.usefixtures("torch_as_it_was", "rl_kernel")


def run_session(
    folder: Path, caplog: pytest.LogCaptureFixture, schedule: str, more: str = "", **options: str
) -> tuple[OpsLog, list[list[str]]]:
    """What a session recorded, and by rollout the lines of its two optimizer steps."""
    switches = {"VIME_RL_KERNEL": "1", "VIME_RL_KERNEL_SCHEDULE": schedule}
    switches["RLK_REPRO_OPS_DIR"] = str(folder / "ops")
    flags = f"{SMALL} --num-rollout {len(schedule)} {more}"
    lines = run_trainer(caplog, flags, **switches | options)
    return read_ops(TrialDir(folder)), [lines[at : at + 2] for at in range(0, len(lines), 2)]


def judge(log: OpsLog, schedule: str) -> tuple[ProofStatus, str]:
    planned = {step: LETTERS[letter] for step, letter in enumerate(schedule)}
    proof = prove(log, variant="crossover", requested_ops=OPS, platform="cpu", planned=planned)
    return proof.status, proof.reason


@needs_double
def test_each_step_records_its_variant_and_objects_are_frozen_after_the_warm_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log, _ = run_session(tmp_path, caplog, "bebe", RLK_REPRO_GC_FREEZE_AFTER="2")
    assert [log.variant_of(step) for step in log.steps()] == ["baseline", "enabled"] * 2
    for op in OPS:
        assert [log.calls_in(op, step).calls > 0 for step in log.steps()] == [False, True] * 2
    assert judge(log, "bebe")[0] is ProofStatus.NATIVE
    frozen = {number: step.gc_frozen for number, (_, step) in log.ranks[0].steps.items()}
    assert [number for number, found in frozen.items() if found is not None] == [1]
    # torch alone has made more than that
    assert (frozen[1] or 0) > 50_000


@needs_double
def test_baseline_steps_are_bitwise_an_unswitched_run_s(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, gradient norms and metrics of both optimizer steps, with weights that stay the same."""
    still, no_entropy = "--lr 1e-30", {"RLK_REPRO_ENTROPY_METRIC": "0"}
    plain = run_trainer(caplog, f"{SMALL} --num-rollout 4 {still}", **no_entropy)
    expected = [plain[at : at + 2] for at in range(0, 8, 2)]
    for op, make in ROUTES.items():
        monkeypatch.setitem(ROUTES, op, make_loud(make))
    for ops in (OPS, ("linear_logp",)):
        folder = tmp_path / ops[0]
        options = no_entropy | {"VIME_RL_KERNEL_OPS": ",".join(ops)}
        log, found = run_session(folder, caplog, "bebs", still, **options)
        is_same = [one == other for one, other in zip(found, expected, strict=True)]
        assert is_same == [True, False, True, True]
        assert all(log.calls_in(op, 1).calls for op in ops)


def make_loud(make: Callable[[RouteContext], Any]) -> Callable[[RouteContext], Any]:
    """The answers of an operator are one percent off, so that no call of it goes unnoticed."""

    def make_other(context: RouteContext) -> Any:
        route = make(context)

        def run(call: Any) -> Any:
            log_probs, entropy = route.run(call)
            return log_probs * 1.01, entropy

        return replace(route, run=run)

    return make_other


def switch_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reference, "_begin_step_before", lambda _, train: train)


def stick(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Turn, "is_enabled", property(lambda _: True, lambda *_: None))


def switch_elsewhere(patch: pytest.MonkeyPatch, *, is_enabled: bool = True) -> None:
    other = Turn(is_enabled=is_enabled)

    def dispatch(native: Any, enabled: Any, baseline: Any, recorder: Any, _: Turn) -> Any:
        return dispatch_calls(native, enabled, baseline, recorder, other)

    patch.setattr(switch, "dispatch_calls", dispatch)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (switch_nothing, "step 0 is planned as baseline and recorded as neither variant"),
        (stick, "step 0 is planned as baseline and recorded as enabled"),
        (switch_elsewhere, "called in step 0, which is baseline"),
        (lambda patch: switch_elsewhere(patch, is_enabled=False), "never called in step 1"),
    ],
)
@needs_double
def test_a_switch_that_did_not_happen_shows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, spoil: Any, reason: str
) -> None:
    spoil(monkeypatch)
    log, _ = run_session(tmp_path, caplog, "be")
    assert judge(log, "be") == (ProofStatus.MISSING, f"logp: {reason}; ratio_kl: {reason}")


# What is hooked into the reference trainer, and what stops a trial.


@pytest.mark.parametrize("is_asked", [False, True])
def test_installing_twice_hooks_once_and_undo_takes_everything_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_asked: bool
) -> None:
    before = dict(vars(core)), AdamW.step, list(trainer.step_end_hooks)
    args = argparse.Namespace(device="cpu")
    if is_asked:
        monkeypatch.setenv("RLK_REPRO_OPS_DIR", str(tmp_path / "ops"))
    installation = reference.install(args)
    assert reference.install(args) is installation
    assert (installation is not None) is is_asked
    if installation is not None:
        assert trainer.step_end_hooks == [installation.end_step]
        installation.undo()
    assert before == (vars(core), AdamW.step, trainer.step_end_hooks)


@pytest.mark.usefixtures("torch_as_it_was", "without_rl_kernel")
def test_a_trial_in_require_mode_does_not_start_and_gives_the_reason_in_two_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLK_REPRO_OPS_DIR", str(tmp_path / "ops"))
    monkeypatch.setenv("VIME_RL_KERNEL", "1")
    assert main(SMALL.split()) == 3
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("this machine cannot: VIME_RL_KERNEL_MODE=require: logp, ratio_kl: RL-")
    assert second.startswith("  hint: repair the cause, remove the operator from VIME_RL_KERNEL_O")
    assert find_installation(core, TIMERS) is None
    assert not (tmp_path / "ops").exists()


def run_rank(rank: int, folder: Path, schedules: tuple[str, str], steps: tuple[str, str]) -> None:
    """Begin steps until the ranks disagree, and write down which were begun and what was said."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    begun, said = [], "agreed"
    settings = Settings(mode=Mode.REQUIRE, ops=("logp",), schedule=schedules[rank])
    module, case = load_loss_module(), Case(platform="cpu")
    routes = {"logp": make_loud_route}
    try:
        installation = install_into(module, settings, trainer="example", case=case, routes=routes)
        for step in map(int, steps[rank]):
            installation.begin_step(step)
            begun.append(step)
    except CheckFailed as error:
        said = str(error).splitlines()[0]
    (folder / f"said-{rank}").write_text(f"{begun} {said}")


@pytest.mark.parametrize(
    ("schedules", "steps", "expected"),
    [
        (("beb", "bee"), ("012", "012"),
         [f"[] rank {1 - rank}: has other settings, got" for rank in range(2)]),
        (("beb", "beb"), ("012", "021"),
         ["[0] rank 1: has other settings, got 'rollout 2, baseline, ",
          "[0] rank 0: has other settings, got 'rollout 1, enabled, "]),
    ],
)  # fmt: skip
def test_ranks_that_disagree_are_refused_before_the_step(
    tmp_path: Path, schedules: tuple[str, str], steps: tuple[str, str], expected: list[str]
) -> None:
    run_ranks(run_rank, tmp_path, schedules, steps)
    for rank, beginning in enumerate(expected):
        said = (tmp_path / f"said-{rank}").read_text()
        assert said.startswith(beginning), said
