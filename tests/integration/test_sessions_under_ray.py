"""The switch inside a real Ray actor: Ray runs copies of the actor's methods, so that what is replaced must be seen."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import rlk_repro
from rlk_repro.base import proc
from rlk_repro.logs.ops import read_ops
from rlk_repro.rundir.paths import TrialDir
from tests import ROOT, SUPPORT

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
