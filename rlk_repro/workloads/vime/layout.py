"""Divide a plan's GPUs between training and generation, and list the folders that a run needs on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlk_repro.base.errors import Problem, SpecError
from rlk_repro.plan import Plan
from rlk_repro.prepare.layout import PreparedDir
from rlk_repro.prepare.random_rollouts import RandomRollouts
from rlk_repro.spec import Layout, Run, Stack, VimeWorkload
from rlk_repro.spec.vime import Placement


@dataclass(frozen=True, kw_only=True)
class Division:
    """The division of GPUs: ``actor`` GPUs train, ``rollout`` GPUs generate; all do both if ``is_colocated``."""

    layout: Layout
    placement: Placement

    @property
    def is_colocated(self) -> bool:
        return self.placement.rollout_num_gpus == 0

    @property
    def num_gpus(self) -> int:
        return self.layout.num_nodes * self.layout.gpus_per_node

    @property
    def actor_num_nodes(self) -> int:
        """With several nodes and separate GPUs for generation, each node either trains or generates."""
        if self.layout.num_nodes == 1:
            return 1
        return self.layout.num_nodes - self.placement.rollout_num_gpus // self.layout.gpus_per_node

    @property
    def actor_num_gpus_per_node(self) -> int:
        if self.layout.num_nodes == 1:
            return self.layout.gpus_per_node - self.placement.rollout_num_gpus
        return self.layout.gpus_per_node

    @property
    def actor_num_gpus(self) -> int:
        return self.actor_num_nodes * self.actor_num_gpus_per_node

    @property
    def rollout_num_gpus(self) -> int:
        return self.num_gpus if self.is_colocated else self.placement.rollout_num_gpus

    @property
    def model_parallel(self) -> int:
        """The number of GPUs of one data parallel rank: tensor x pipeline x context parallel size."""
        return self.layout.tensor_parallel * self.layout.pipeline_parallel * self.layout.context_parallel

    @property
    def expert_model_parallel(self) -> int:
        """The number of GPUs that hold one copy of the experts."""
        layout = self.layout
        return self.placement.expert_tensor_parallel * layout.expert_parallel * layout.pipeline_parallel

    @property
    def data_parallel(self) -> int:
        return self.actor_num_gpus // self.model_parallel


def vime_of(plan: Plan) -> VimeWorkload:
    workload = plan.run.workload
    assert isinstance(workload, VimeWorkload)
    return workload


def divide(plan: Plan) -> Division:
    return Division(layout=plan.layout, placement=vime_of(plan).placements[plan.hardware.hardware])


def list_microbatches(plan: Plan) -> list[tuple[int, int]]:
    """Return each step's response length and tokens of its one microbatch, for a run that fills the GPU's memory."""
    workload = vime_of(plan)
    rollouts = RandomRollouts.of(plan.run, workload)
    assert rollouts is not None
    num_samples = workload.grpo.global_batch_size // max(1, divide(plan).data_parallel)
    lengths = map(rollouts.find_response_len, range(rollouts.num_files))
    return [(n, -(-num_samples * (rollouts.prompt_len + n) // plan.layout.context_parallel)) for n in lengths]


def list_folders(run: Run, stack: Stack, prepared: PreparedDir) -> dict[str, Path]:
    """Return the folders that the run's lane needs; raise SpecError if the stack does not pin vime for a conversion."""
    workload = run.workload
    assert isinstance(workload, VimeWorkload)
    folders = {"model": prepared.model(workload.model)}
    if workload.model.checkpoint == "torch_dist":
        vime = stack.pins.get("vime")
        if vime is None:
            raise SpecError(Problem(f"stack {stack.stack}: pins.vime", "missing", expected="a commit of vime"))
        folders["checkpoint"] = prepared.checkpoint(workload.model, vime.commit)
    if (rollouts := prepared.rollouts(run, workload)) is not None:
        folders["rollouts"] = rollouts.path
    if workload.generates(run.lane):
        folders["data"] = prepared.data_folder(workload.data.source)
    return folders
