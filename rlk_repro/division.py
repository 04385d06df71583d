"""Divide a plan's GPUs between training and generation, and the tokens of a step among the GPUs that train."""

from __future__ import annotations

from dataclasses import dataclass

from rlk_repro.plan import Plan
from rlk_repro.spec import Layout, VimeWorkload
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


def find_least_microbatch(plan: Plan) -> int:
    """Return the fewest tokens of a GPU's microbatch that hold the longest sample.

    Context parallelism spreads a microbatch over several GPUs.
    """
    return -(-vime_of(plan).grpo.max_sample_len // plan.layout.context_parallel)


def find_response_len(longest: int, growth: int, num_files: int, rollout: int) -> int:
    """Return the length of a rollout's responses: ``growth`` tokens more in each rollout, up to the longest."""
    return longest - growth * (num_files - 1 - rollout)


def list_microbatches(plan: Plan) -> list[tuple[int, int]]:
    """Return each step's response length and tokens of its one microbatch; empty unless the run fills the memory."""
    if not plan.run.workload.fills_memory:
        return []
    workload, num_files = vime_of(plan), plan.run.measure.num_stored
    grpo, growth = workload.grpo, workload.rollouts_growth or 0
    num_samples = grpo.global_batch_size // max(1, divide(plan).data_parallel)
    lengths = [find_response_len(grpo.rollout_max_response_len, growth, num_files, step) for step in range(num_files)]
    context_parallel = plan.layout.context_parallel
    return [(n, -(-num_samples * (grpo.rollout_max_prompt_len + n) // context_parallel)) for n in lengths]
