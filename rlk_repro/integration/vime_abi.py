"""Name the functions and classes of vime 1fc199d9, and of its Megatron-LM 1dcf0daf, that this package replaces.

Each function stands with its parameters, because vime's training code has no version number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

LOG_PROBS: Final = "calculate_log_probs_and_entropy"
APPROX_KL: Final = "compute_approx_kl"
CLIP: Final = "compute_policy_loss"
LOSS: Final = "policy_loss_function"
LOSS_MODULE: Final[Mapping[str, str]] = {
    LOG_PROBS: "(logits, tokens, tp_group, with_entropy, chunk_size, log_prob_keep_mask, with_entropy_grad)",
    APPROX_KL: "(log_probs, log_probs_base, kl_loss_type, importance_ratio)",
    CLIP: "(ppo_kl, advantages, eps_clip, eps_clip_high, eps_clip_c)",
    LOSS: "(args, batch, logits, sum_of_sample_mean)",
}
ACTOR_MODULE: Final[Mapping[str, str]] = {
    "forward_only": "(f, args, model, data_iterator, num_microbatches, store_prefix, use_rollout_top_p_replay)",
    "train": "(rollout_id, model, optimizer, opt_param_scheduler, data_iterator, num_microbatches, global_batch_sizes)",
    "initialize_model_and_optimizer": "(args, role)",
    "log_perf_data": "(rollout_id, args, extra_metrics)",
}
BEGIN: Final = "get_data_iterator"
"""The actor calls it once when it begins to train on a rollout.

A method of the actor cannot be replaced: Ray copies an actor's methods before this code runs.
"""
BEGIN_SIGNATURE: Final = {BEGIN: "(rollout_data)"}
REPLAY: Final[Mapping[str, str]] = {"clear_all_forward": "()", "clear_all": "()"}
"""The functions of ``RoutingReplay`` (R3) that end the old-policy pass and training."""
UPDATERS: Final[Mapping[str, str]] = {
    "UpdateWeightFromTensor": "_send_hf_params",
    "UpdateWeightFromDistributed": "_update_bucket_weights_from_distributed",
}
"""Classes that send weights to vLLM, each with its method that sends a part of the weights."""
OUTPUT_LAYERS: Final[Mapping[str, str]] = {
    "ColumnParallelLinear": "(self, input_, weight, runtime_gather_output)",
    "LinearCrossEntropyModule": "(self, input_, weight, runtime_gather_output, output_cross_entropy_loss, "
    "labels, reduction, ignore_index)",
}
"""Classes of Megatron-LM, each with the parameters of its ``forward``."""
WRAPPERS: Final = frozenset({"DistributedDataParallel", "Float16Module"})
"""Classes that may wrap a model."""
