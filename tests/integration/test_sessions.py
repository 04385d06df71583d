"""The switch inside a real Ray actor: Ray runs copies of the actor's methods, so that what is replaced must be seen."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rlk_repro
from rlk_repro.analysis.proof import prove
from rlk_repro.base import proc
from rlk_repro.base.errors import CheckFailed, SpecError
from rlk_repro.integration.route.api import Route, RouteContext
from rlk_repro.integration.switch import Mode, Settings, install_into
from rlk_repro.logs.ops import OpsLog, read_ops
from rlk_repro.operators import Case
from rlk_repro.rundir.paths import TrialDir
from rlk_repro.rundir.results import ProofStatus
from rlk_repro.schedule import LETTERS
from tests import ROOT, SUPPORT
from tests.support.loss_examples import load_loss_module, make_args, run_ranks, train_once

pytest.importorskip("ray")

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
        self.train_actor(rollout_id, "data")
    def train_actor(self, rollout_id, rollout_data, external_data=None):
        data_iterator = get_data_iterator(rollout_data)
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


def test_an_actor_of_ray_switches_between_rollouts(tmp_path: Path) -> None:
    package = tmp_path / "vime" / "backends" / "megatron_utils"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    core = Path(rlk_repro.__file__).parent / "refengine" / "core.py"
    (package / "loss.py").write_bytes(core.read_bytes())
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


# Both variants in one process: who switches, what a step shows, and that a baseline step is the trainer's own.


SCHEDULE = "bebeebs"
PLANNED = [LETTERS[letter] for letter in SCHEDULE]
OPS = ("logp", "ratio_kl")
SMALL = (
    "--rollout-batch-size 4 --n-samples-per-prompt 4 --micro-batch-size 8 --use-kl-loss --kl-loss-coef 0.1 "
    "--num-steps-per-rollout 2 --entropy-coef 0 --num-threads 1 --device cpu --seed 3"
)
STILL = f"{SMALL} --lr 1e-30"
"""The weights stay what they are."""

LOUD = """
from dataclasses import replace
from rlk_repro.integration import reference
from rlk_repro.integration.route.table import ROUTES
def loud(make):
    def make_loud(context):
        route = make(context)
        def run(call):
            log_probs, entropy = route.run(call)
            return log_probs * 1.01, entropy
        return replace(route, run=run)
    return make_loud
def install(args):
    ROUTES.update({op: loud(make) for op, make in ROUTES.items()})
    return reference.install(args)
"""
"""RL-Kernel's answers are one percent off, so that no call of it goes unnoticed."""

SABOTAGE = {
    "nothing switches": (
        "from rlk_repro.integration import reference\n"
        "from rlk_repro.refengine.trainer import Trainer\n"
        "def install(args):\n"
        "    train = Trainer.train\n"
        "    reference.install(args)\n"
        "    Trainer.train = train\n"
    ),
    "the switch is stuck": (
        "from rlk_repro.integration import reference\n"
        "from rlk_repro.integration.route.api import Turn\n"
        "def install(args):\n"
        "    reference.install(args)\n"
        "    Turn.is_enabled = property(lambda self: True, lambda self, value: None)\n"
    ),
    "calls go by another switch": (
        "from rlk_repro.integration import reference, switch\n"
        "from rlk_repro.integration.route.api import Turn, dispatch_calls\n"
        "def install(args):\n"
        "    switch.dispatch_calls = lambda native, claims, recorder, turn, **_: dispatch_calls(\n"
        "        native, claims, recorder, Turn()\n"
        "    )\n"
        "    reference.install(args)\n"
    ),
    "RL-Kernel never has its turn": (
        "from rlk_repro.integration import reference, switch\n"
        "from rlk_repro.integration.route.api import Turn, dispatch_calls\n"
        "def install(args):\n"
        "    switch.dispatch_calls = lambda native, claims, recorder, turn, **_: dispatch_calls(\n"
        "        native, claims, recorder, Turn(is_enabled=False)\n"
        "    )\n"
        "    reference.install(args)\n"
    ),
}  # fmt: skip


def run_trainer(
    folder: Path, flags: str, *, init: str = "rlk_repro.integration.reference.install", **switches: str
) -> proc.Completed:
    """The reference trainer in a process of its own, with the double of RL-Kernel at hand."""
    sources = [str(folder), str(ROOT), str(SUPPORT / "fake_rl_engine")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("VIME_", "RLK_"))}
    environment |= {"PYTHONPATH": os.pathsep.join(sources), "RLK_REPRO_OPS_DIR": str(folder / "ops"), **switches}
    command = [sys.executable, "-m", "rlk_repro.refengine", *flags.split(), "--custom-megatron-init-path", init]
    return proc.run(command, cwd=folder, env=environment, timeout_s=180)


def run_session(folder: Path, flags: str = SMALL, **options: str) -> OpsLog:
    switches = {"VIME_RL_KERNEL": "1", "VIME_RL_KERNEL_OPS": ",".join(OPS), "VIME_RL_KERNEL_SCHEDULE": SCHEDULE}
    completed = run_trainer(folder, f"{flags} --num-rollout {len(SCHEDULE)}", **switches | options)
    assert completed.is_ok, completed.stderr
    (folder / "stdout.log").write_text(completed.stdout)
    return read_ops(TrialDir(folder))


def judge(log: OpsLog) -> tuple[ProofStatus, str]:
    proof = prove(log, variant="crossover", requested_ops=OPS, platform="cpu", planned=dict(enumerate(PLANNED)))
    return proof.status, proof.reason


def read_losses(text: str) -> dict[int, list[str]]:
    """By rollout, the lines of its two optimizer steps as they were printed."""
    found: dict[int, list[str]] = {}
    for number, line in re.findall(r"step (\d+): (\{.*\})", text):
        found.setdefault(int(number) // 2, []).append(line)
    return found


def test_each_step_records_and_shows_its_variant(tmp_path: Path) -> None:
    log = run_session(tmp_path)
    assert [log.variant_of(step) for step in log.steps()] == PLANNED
    for op in OPS:
        calls = [log.calls_in(op, step).calls for step in log.steps()]
        assert [bool(number) for number in calls] == [variant == "enabled" for variant in PLANNED]
    assert judge(log)[0] is ProofStatus.NATIVE


def test_objects_are_frozen_after_the_warm_up_in_both_variants(tmp_path: Path) -> None:
    log = run_session(tmp_path, RLK_REPRO_GC_FREEZE_AFTER="2")
    frozen = {number: step.gc_frozen for number, (_, step) in log.ranks[0].steps.items()}
    assert [number for number, found in frozen.items() if found is not None] == [1]
    # torch alone has made more than that
    assert (frozen[1] or 0) > 50_000


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[str]]:
    """The losses of a run without a switch."""
    folder, flags = tmp_path_factory.mktemp("plain"), f"{STILL} --num-rollout {len(SCHEDULE)}"
    plain = run_trainer(folder, flags, RLK_REPRO_ENTROPY_METRIC="0")
    assert plain.is_ok, plain.stderr
    return read_losses(plain.stdout)


@pytest.mark.parametrize("ops", ["logp,ratio_kl", "linear_logp"])
def test_baseline_steps_are_bitwise_an_unswitched_run_s(
    tmp_path: Path, ops: str, expected: dict[int, list[str]]
) -> None:
    """Losses, gradient norms and metrics of both optimizer steps, with weights that stay the same."""
    (tmp_path / "loud.py").write_text(LOUD)
    log = run_session(tmp_path, STILL, init="loud.install", VIME_RL_KERNEL_OPS=ops, RLK_REPRO_ENTROPY_METRIC="0")
    found = read_losses((tmp_path / "stdout.log").read_text())
    baseline = [step for step, variant in enumerate(PLANNED) if variant == "baseline"]
    assert len(baseline) == 4
    assert [found[step] for step in baseline] == [expected[step] for step in baseline]
    enabled = [step for step in log.steps() if step not in baseline]
    assert all(log.calls_in(op, step).calls for op in ops.split(",") for step in enabled)
    assert all(found[step] != expected[step] for step in enabled)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("nothing switches", "step 0 is planned as baseline and recorded as neither variant"),
        ("the switch is stuck", "step 0 is planned as baseline and recorded as enabled"),
        ("calls go by another switch", "called in step 0, which is baseline"),
        ("RL-Kernel never has its turn", "never called in step 1"),
    ],
)
def test_a_switch_that_did_not_happen_shows(tmp_path: Path, kind: str, reason: str) -> None:
    (tmp_path / "sabotage.py").write_text(SABOTAGE[kind])
    log = run_session(tmp_path, init="sabotage.install")
    assert judge(log) == (ProofStatus.MISSING, f"logp: {reason}; ratio_kl: {reason}")


def test_an_invalid_schedule_is_refused() -> None:
    with pytest.raises(SpecError) as caught:
        Settings.from_env({"VIME_RL_KERNEL": "1", "VIME_RL_KERNEL_SCHEDULE": "bxe"})
    message = "VIME_RL_KERNEL_SCHEDULE: is not a valid schedule, got 'bxe', expected a letter per rollout: b or e or s"
    assert str(caught.value) == message
    assert Settings.from_env({"VIME_RL_KERNEL_SCHEDULE": "be"}) == Settings()


def make_route(context: RouteContext) -> Route:
    """RL-Kernel's stand-in: twice what the trainer's own function says, so that no call of it goes unnoticed."""

    def run(call: Any) -> Any:
        log_probs, entropy = context.native(**call)
        return log_probs * 2, entropy

    return Route(implementation="NativeLogpOp", version="0.1.0", refuse=lambda _: None, run=run)


def make_session(folder: Path, schedule: str = "beb") -> tuple[ModuleType, Any]:
    module = load_loss_module()
    settings = Settings(mode=Mode.REQUIRE, ops=("logp",), schedule=schedule, ops_dir=folder / "ops")
    case = Case(platform="cpu")
    return module, install_into(module, settings, trainer="example", case=case, routes={"logp": make_route})


def test_losses_and_gradients_of_a_baseline_step_are_bitwise_the_trainer_s_own(tmp_path: Path) -> None:
    expected = train_once(load_loss_module(), make_args())
    module, installation = make_session(tmp_path)
    with installation:
        for step, is_same in enumerate((True, False, True)):
            installation.begin_step(step)
            found = train_once(module, make_args())
            installation.end_step(step)
            assert all(map(torch.equal, found, expected)) is is_same


def run_rank(rank: int, folder: Path, schedules: tuple[str, str], steps: tuple[str, str]) -> None:
    """Begin steps until the ranks disagree, and write down which were begun and what was said."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    begun, said = [], "agreed"
    try:
        _, installation = make_session(folder / str(rank), schedules[rank])
        for step in map(int, steps[rank]):
            installation.begin_step(step)
            begun.append(step)
    except CheckFailed as error:
        said = str(error).splitlines()[0]
    (folder / f"said-{rank}").write_text(f"{begun} {said}")


@pytest.mark.parametrize(
    ("schedules", "steps", "expected"),
    [
        (("beb", "beb"), ("012", "012"), ["[0, 1, 2] agreed"] * 2),
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
