"""Make the dictionaries of vime's log lines, with keys in vime's order; a value that is not measured has no key."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from rlk_repro.base.units import group
from rlk_repro.refengine.core import make_sum_of_sample_mean
from rlk_repro.refengine.data import Sample, TrainData


def make_generation_metrics(samples: Sequence[Sample], rollout_time_s: float) -> dict[str, float]:
    """Make the log line ``perf N`` of vime's rollout manager, which is printed where rollouts are generated."""
    lengths = [sample.response_length for sample in samples]
    effective = [sum(sample.loss_mask) for sample in samples]
    return {
        "rollout/response_len/mean": statistics.fmean(effective),
        "rollout/response_len/median": float(statistics.median(effective)),
        "rollout/response_len/max": max(effective),
        "rollout/response_len/min": min(effective),
        **_count_constant_groups(samples),
        "rollout/truncated_ratio": statistics.fmean(sample.status == "truncated" for sample in samples),
        "perf/rollout_time": rollout_time_s,
        "perf/tokens_per_gpu_per_sec": sum(lengths) / rollout_time_s,
        "perf/longest_sample_tokens_per_sec": max(lengths) / rollout_time_s,
        "perf/effective_tokens_per_gpu_per_sec": sum(effective) / rollout_time_s,
        "perf/longest_effective_sample_tokens_per_sec": max(effective) / rollout_time_s,
    }


def _count_constant_groups(samples: Sequence[Sample]) -> dict[str, int]:
    """A group whose samples all have the same reward gives no training signal."""
    groups = group((sample.group_index, sample.reward) for sample in samples)
    constant = [str(round(rewards[0], 1)) for rewards in groups.values() if len(set(rewards)) == 1]
    return {f"rollout/zero_std/count_{reward}": count for reward, count in Counter(constant).items()}


def make_rollout_metrics(
    data: TrainData,
    *,
    ref_log_probs: list[torch.Tensor],
    log_probs: list[torch.Tensor],
    advantages: list[torch.Tensor],
) -> dict[str, float]:
    """Make the log line ``rollout N``: means over samples; a per-token value is first averaged within its sample."""
    mean_of_sample_mean = make_sum_of_sample_mean(data.loss_masks, data.rollout_mask_sums)

    def mean(values: list[torch.Tensor]) -> float:
        return mean_of_sample_mean(torch.cat(values)).item() / len(values)

    metrics = {
        "response_lengths": statistics.fmean(data.response_lengths),
        "rewards": statistics.fmean(data.rewards),
        "truncated": statistics.fmean(data.truncated),
    }
    if data.rollout_log_probs is not None:
        metrics["rollout_log_probs"] = mean(data.rollout_log_probs)
    metrics |= {
        "raw_reward": statistics.fmean(data.raw_reward),
        "total_lengths": statistics.fmean(data.total_lengths),
        "ref_log_probs": mean(ref_log_probs),
        "log_probs": mean(log_probs),
        "advantages": mean(advantages),
        "returns": mean(advantages),
    }
    return {f"rollout/{name}": value for name, value in metrics.items()}


def make_step_metrics(
    losses: Mapping[str, float], *, grad_norm: float, lrs: Sequence[float], global_batch_size: int, step: int
) -> dict[str, float]:
    metrics = dict(losses) | {"grad_norm": grad_norm}
    metrics |= {f"lr-pg_{group}": lr for group, lr in enumerate(lrs)}
    metrics |= {"global_batch_size": global_batch_size, "step": step}
    return {f"train/{name}": value for name, value in metrics.items()}


def make_trainer_metrics(elapsed_s: Mapping[str, float], num_tokens: int) -> dict[str, float]:
    """Make the trainer's log line ``perf N``; ``num_tokens`` counts all prompt and response tokens of the rollout."""
    metrics = {f"perf/{name}_time": value for name, value in elapsed_s.items()}
    step_time_s = elapsed_s["train_wait"] + elapsed_s["train"]
    metrics["perf/actor_train_tok_per_s"] = num_tokens / elapsed_s["actor_train"]
    metrics["perf/step_time"] = step_time_s
    metrics["perf/wait_time_ratio"] = elapsed_s["train_wait"] / step_time_s
    return metrics
