"""Estimate, without measuring, how much memory a vime plan needs, from the sizes of model and layout.

In the bundles of ``docs/evidence`` that time a step of RL-Kernel at real sizes, PyTorch's peak was
within 2 % of ``training_gib``, and what it reserved within 4 GiB of ``reserved_gib`` (torch.compile
needs 6 % more). The estimate leaves out memory outside PyTorch (3 to 6 GiB) and CUDA graphs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rlk_repro.base.units import GIB
from rlk_repro.division import Division, divide, vime_of
from rlk_repro.plan import Plan
from rlk_repro.spec import VimeModel
from rlk_repro.spec.layers import read_layer_pattern

GRADIENT_BYTES: Final = 4  # gradients are accumulated and reduced in fp32
WEIGHT_BYTES: Final = 2
OPTIMIZER_BYTES: Final = 12  # a copy of the weights in fp32 and two moments, divided among the data parallel ranks
PRECISION_AWARE_BYTES: Final = 10  # only the lower 16 bits of that copy; moments in bf16 are copied to fp32 in a step
STATELESS_BYTES: Final = 4  # that copy alone
ACTIVATIONS_PER_LAYER: Final = 34  # bytes per token and hidden unit, without recomputation (Korthikanti et al. 2022)
LOGIT_COPIES: Final = 2  # in fp32, at the peak of a step: the softmax that the backward pass needs, and the gradient


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The memory of one GPU in GiB."""

    states_gib: float
    activations_gib: float
    logits_gib: float
    engine_weights_gib: float

    @property
    def training_gib(self) -> float:
        return self.states_gib + self.activations_gib + self.logits_gib

    @property
    def fragments_gib(self) -> float:
        """What PyTorch reserves but cannot use at the peak: 0.8 to 1.8 copies of the logits."""
        return self.logits_gib / LOGIT_COPIES

    @property
    def reserved_gib(self) -> float:
        return self.training_gib + self.fragments_gib

    def __str__(self) -> str:
        return (
            f"weights, gradients, optimizer {self.states_gib:.0f}, activations {self.activations_gib:.0f}, "
            f"logits {self.logits_gib:.0f}, fragments {self.fragments_gib:.0f}"
        )


def count_parameters(model: VimeModel) -> tuple[int, int]:
    """Count the parameters of a decoder with gated MLPs: the dense ones, and those of experts.

    Latent attention counts as grouped-query attention.
    """
    size = model.size
    hidden, layers = size("hidden-size"), size("num-layers")
    heads, groups = size("num-attention-heads"), size("num-query-groups", size("num-attention-heads"))
    channels = size("kv-channels", hidden // max(heads, 1))
    attention = hidden * channels * (2 * heads + 2 * groups)
    num_moe = count_moe_layers(model)
    feed_forward = 3 * hidden * size("ffn-hidden-size")
    shared = 3 * hidden * size("moe-shared-expert-intermediate-size")
    router = hidden * model.num_experts
    is_untied = bool(model.arguments.get("untie-embeddings-and-output-weights"))
    dense = layers * (attention + 2 * hidden) + (layers - num_moe) * feed_forward + num_moe * (shared + router)
    dense += size("vocab-size") * hidden * (2 if is_untied else 1)
    return dense, num_moe * model.num_experts * 3 * hidden * size("moe-ffn-hidden-size")


def count_moe_layers(model: VimeModel) -> int:
    """Count the MoE layers from ``moe-layer-freq``: a number, or a pattern such as ``[0]*1+[1]*45``."""
    layers = model.size("num-layers")
    if not model.num_experts:
        return 0
    pattern = model.arguments.get("moe-layer-freq", 1)
    if isinstance(pattern, str) and "[" in pattern:
        found = read_layer_pattern(pattern)
        return layers if found is None else found.num_chosen
    return layers // max(int(str(pattern)), 1)


def estimate_memory(plan: Plan) -> Estimate:
    workload, division = vime_of(plan), divide(plan)
    dense, experts = count_parameters(workload.model)
    engine_bytes = (dense + experts) * WEIGHT_BYTES / division.placement.rollout_num_gpus_per_engine
    return Estimate(
        states_gib=_states_bytes(plan, dense, experts, division) / GIB,
        activations_gib=_activation_bytes(workload.model, division) / GIB,
        logits_gib=_logits_bytes(workload.model, division) / GIB,
        engine_weights_gib=engine_bytes / GIB,
    )


def _states_bytes(plan: Plan, dense: int, experts: int, division: Division) -> float:
    """Every rank holds its share of weights and gradients; the optimizer's state is divided among all."""
    split = division.layout.tensor_parallel * division.layout.pipeline_parallel
    held = dense / split + experts / division.expert_model_parallel
    flags = vime_of(plan).arguments_on(plan.hardware.hardware)
    optimizer = OPTIMIZER_BYTES
    if division.placement.optimizer_cpu_offload:
        optimizer = 0
    elif flags.get("use-stateless-adam"):
        optimizer = STATELESS_BYTES
    elif flags.get("use-precision-aware-optimizer"):
        optimizer = PRECISION_AWARE_BYTES
    return held * (WEIGHT_BYTES + GRADIENT_BYTES) + optimizer * (dense + experts) / division.actor_num_gpus


def _activation_bytes(model: VimeModel, division: Division) -> float:
    """With full recomputation only the activations of one layer and the inputs of all layers are kept."""
    tokens, hidden = division.placement.max_tokens_per_gpu, model.size("hidden-size")
    layers = model.size("num-layers") / division.layout.pipeline_parallel
    split = division.layout.tensor_parallel if division.placement.sequence_parallel else 1
    one_layer = tokens * hidden * ACTIVATIONS_PER_LAYER / division.layout.tensor_parallel
    if not division.placement.recompute:
        return layers * one_layer
    return layers * tokens * hidden * WEIGHT_BYTES / split + one_layer


def _logits_bytes(model: VimeModel, division: Division) -> float:
    columns = model.size("vocab-size") / division.layout.tensor_parallel
    return division.placement.max_tokens_per_gpu * columns * 4 * LOGIT_COPIES
