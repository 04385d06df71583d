"""Define, for each supported vime commit and its pinned Megatron-LM, the names of functions and classes.

The signatures of the imported functions select the entry of ``ABIS``, because vime's training code has no version
number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rlk_repro.base.errors import EnvironmentMissing, Problem
from rlk_repro.integration.measure.installation import find_signature_problems

LOG_PROBS: Final = "calculate_log_probs_and_entropy"
APPROX_KL: Final = "compute_approx_kl"
CLIP: Final = "compute_policy_loss"
LOSS: Final = "policy_loss_function"


@dataclass(frozen=True, kw_only=True)
class Abi:
    """Names and signatures of functions and classes in one vime commit.

    ``loss`` and ``actor``: functions of vime's loss module and of the actor's module, with their parameters.
    ``begin``: the function that the actor calls once when it begins to train on a rollout.  ``updaters``: classes that
    send weights to vLLM, each with its method that sends a part of the weights.  ``output_layers``: classes of
    Megatron-LM, each with the parameters of its ``forward``.  ``wrappers``: classes that may wrap a model.
    """

    loss: Mapping[str, str]
    actor: Mapping[str, str]
    begin: Mapping[str, str]
    updaters: Mapping[str, str]
    output_layers: Mapping[str, str]
    wrappers: frozenset[str]


ABIS: Final[Mapping[str, Abi]] = {
    # with Megatron-LM 1dcf0daf
    "1fc199d9d57eb9d9e66d337cce406c27e7bd916f": Abi(
        loss={
            LOG_PROBS: "(logits, tokens, tp_group, with_entropy, chunk_size, log_prob_keep_mask, with_entropy_grad)",
            APPROX_KL: "(log_probs, log_probs_base, kl_loss_type, importance_ratio)",
            CLIP: "(ppo_kl, advantages, eps_clip, eps_clip_high, eps_clip_c)",
            LOSS: "(args, batch, logits, sum_of_sample_mean)",
        },
        actor={
            "forward_only": "(f, args, model, data_iterator, num_microbatches, store_prefix, use_rollout_top_p_replay)",
            "train": "(rollout_id, model, optimizer, opt_param_scheduler, data_iterator, num_microbatches, "
            "global_batch_sizes)",
            "initialize_model_and_optimizer": "(args, role)",
            "log_perf_data": "(rollout_id, args, extra_metrics)",
        },
        # this cannot be a method of the actor: Ray copies an actor's methods before this code can replace one
        begin={"get_data_iterator": "(rollout_data)"},
        updaters={
            "UpdateWeightFromTensor": "_send_hf_params",
            "UpdateWeightFromDistributed": "_update_bucket_weights_from_distributed",
        },
        output_layers={
            "ColumnParallelLinear": "(self, input_, weight, runtime_gather_output)",
            "LinearCrossEntropyModule": "(self, input_, weight, runtime_gather_output, output_cross_entropy_loss, "
            "labels, reduction, ignore_index)",
        },
        wrappers=frozenset({"DistributedDataParallel", "Float16Module"}),
    )
}
NEWEST: Final = list(ABIS.values())[-1]


def find_abi(loss: Any, actor: Any | None = None) -> Abi:
    """Return the entry whose signatures match the loss module and, if given, the actor module.

    Raises:
        EnvironmentMissing: no entry matches; the error names the differences from the newest entry.
    """
    problems: list[Problem] = []
    for abi in ABIS.values():
        problems = [] if actor is None else find_signature_problems(actor, abi.actor)
        problems += find_signature_problems(loss, abi.loss)
        if not problems:
            return abi
    raise EnvironmentMissing(*problems)
