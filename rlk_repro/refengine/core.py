"""Compute the numeric core of the loss: selected log-probs, entropy, KL estimates, clipped policy loss, reduction.

Names, arguments and shapes are those of vime's loss module, so that one timer or route works in both modules; arguments
of features that this trainer does not have must be None.  Callers look these functions up in this module at each call,
so a function put in their place is used from the next call on.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any, NotRequired, TypedDict

import torch

Reducer = Callable[[torch.Tensor], torch.Tensor]


class LossBatch(TypedDict):
    """One microbatch of n samples.  Lists hold an entry per sample; only ``unconcat_tokens`` includes prompt tokens."""

    unconcat_tokens: list[torch.Tensor]
    total_lengths: list[int]
    response_lengths: list[int]
    loss_masks: list[torch.Tensor]
    rollout_mask_sums: torch.Tensor  # [n], the denominators of the sample means
    advantages: list[torch.Tensor]
    log_probs: list[torch.Tensor]
    ref_log_probs: list[torch.Tensor]
    rollout_log_probs: NotRequired[list[torch.Tensor]]


def calculate_log_probs_and_entropy(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    tp_group: object,
    with_entropy: bool = False,
    chunk_size: int = -1,
    log_prob_keep_mask: None = None,
    with_entropy_grad: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the log-probability of each row's token and, if requested, each row's entropy.

    Args:
        logits: [T, V], already divided by the temperature.  Float64 logits are computed in float64, others in float32.
        tokens: [T] int64.
        chunk_size: number of rows computed at a time; 0 or less computes all rows at once.
        with_entropy_grad: whether the entropy has a gradient.

    Returns:
        [T, 1] log-probs and [T] entropy or None.
    """
    assert tp_group is None, "one process holds the whole vocabulary"
    assert log_prob_keep_mask is None, "this trainer has no top-p sampling"
    rows = chunk_size if chunk_size > 0 else max(len(logits), 1)
    log_probs, entropies = [], []
    for chunk, targets in zip(torch.split(logits, rows), torch.split(tokens, rows), strict=True):
        values = chunk if chunk.dtype == torch.float64 else chunk.float()
        full = values.log_softmax(dim=-1)
        log_probs.append(full.gather(-1, targets.unsqueeze(-1)))
        if with_entropy:
            source = full if with_entropy_grad else full.detach()
            entropies.append(-(source.exp() * source).sum(dim=-1))
    return torch.cat(log_probs), torch.cat(entropies) if with_entropy else None


def compute_approx_kl(
    log_probs: torch.Tensor, log_probs_base: torch.Tensor, kl_loss_type: str, importance_ratio: None = None
) -> torch.Tensor:
    """Return an estimate of KL(policy || base) per token [N], from the tokens' log-probs [N] under policy and base.

    The estimators are Schulman's (joschu.net/blog/kl-approx.html); low_var_kl is k3 clamped to [-10, 10], which also
    stops the gradient outside this range.
    """
    assert importance_ratio is None, "this trainer has no off-policy corrections"
    difference = log_probs - log_probs_base
    if kl_loss_type == "k1":
        kl = difference
    elif kl_loss_type == "k2":
        kl = difference.square() / 2
    elif kl_loss_type in {"k3", "low_var_kl"}:
        kl = torch.exp(-difference) - 1 + difference
    else:
        raise ValueError(f"kl_loss_type {kl_loss_type!r}: unknown estimator")
    return kl.clamp(-10, 10) if kl_loss_type == "low_var_kl" else kl


def compute_policy_loss(
    ppo_kl: torch.Tensor, advantages: torch.Tensor, eps_clip: float, eps_clip_high: float, eps_clip_c: None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return PPO's clipped loss per token, and a mask that is 1.0 where clipping makes the loss larger; both are [N].

    ``ppo_kl`` is old minus current log-prob.
    """
    assert eps_clip_c is None, "this trainer has no dual clip"
    ratio = torch.exp(-ppo_kl)
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages
    losses = torch.maximum(unclipped, clipped)
    return losses, (clipped > unclipped).to(losses.dtype)


def policy_loss_function(
    args: argparse.Namespace, batch: LossBatch, logits: torch.Tensor, sum_of_sample_mean: Reducer
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the GRPO loss of one microbatch and its detached metrics, both summed over samples.

    ``logits`` is [1, T, V] float32 over all packed rows, not yet divided by the temperature.
    """
    chunks, entropies = find_response_log_probs(args, batch, logits, with_entropy=True)
    log_probs, old_log_probs = torch.cat(chunks), torch.cat(batch["log_probs"])
    ppo_kl = old_log_probs - log_probs
    pg_losses, clipfrac = compute_policy_loss(ppo_kl, torch.cat(batch["advantages"]), args.eps_clip, args.eps_clip_high)
    pg_loss = sum_of_sample_mean(pg_losses)
    entropy_loss = sum_of_sample_mean(torch.cat(entropies))
    loss = pg_loss - args.entropy_coef * entropy_loss
    metrics = {
        "pg_loss": pg_loss,
        "entropy_loss": entropy_loss,
        "pg_clipfrac": sum_of_sample_mean(clipfrac),
        "ppo_kl": sum_of_sample_mean(ppo_kl),
    }
    if "rollout_log_probs" in batch:
        difference = (old_log_probs - torch.cat(batch["rollout_log_probs"])).abs()
        metrics["train_rollout_logprob_abs_diff"] = sum_of_sample_mean(difference)
    if args.use_kl_loss:
        kl = compute_approx_kl(log_probs, torch.cat(batch["ref_log_probs"]), kl_loss_type=args.kl_loss_type)
        metrics["kl_loss"] = sum_of_sample_mean(kl)
        loss = loss + args.kl_loss_coef * metrics["kl_loss"]
    return loss, {name: value.detach() for name, value in ({"loss": loss} | metrics).items()}


def find_response_log_probs(
    args: argparse.Namespace, batch: LossBatch, logits: torch.Tensor, *, with_entropy: bool = False
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return log-probs and entropies (empty without ``with_entropy``) of each sample's response tokens."""
    packed = logits.squeeze(0)
    if args.rollout_temperature != 1:
        packed = packed / args.rollout_temperature
    log_probs, entropy = calculate_log_probs_and_entropy(
        packed.contiguous(),
        _shift_tokens(batch["unconcat_tokens"]),
        None,
        with_entropy=with_entropy,
        chunk_size=args.log_probs_chunk_size,
        with_entropy_grad=with_entropy and args.entropy_coef != 0,
    )
    return cut_responses(log_probs.squeeze(-1), batch), [] if entropy is None else cut_responses(entropy, batch)


def _shift_tokens(samples: list[torch.Tensor]) -> torch.Tensor:
    """The last row of a sample has no next token and gets 0."""
    packed = torch.cat(samples)
    last_rows = torch.tensor([len(tokens) for tokens in samples], device=packed.device).cumsum(0) - 1
    return packed.roll(-1).index_fill(0, last_rows, 0)


def cut_responses(rows: torch.Tensor, batch: Mapping[str, Any]) -> list[torch.Tensor]:
    """Cut out responses: row i predicts token i + 1, so a response of length R is rows [-R - 1, -1) of its sample."""
    samples = torch.split(rows, batch["total_lengths"])
    return [sample[-length - 1 : -1] for sample, length in zip(samples, batch["response_lengths"], strict=True)]


def make_sum_of_sample_mean(
    loss_masks: list[torch.Tensor], rollout_mask_sums: torch.Tensor, *, calculate_per_token_loss: bool = False
) -> Reducer:
    """Return a function that reduces per-token values [N] to a scalar.

    By default, the scalar is the sum of the samples' masked means; the denominator is at least 1, so a fully masked
    sample adds 0.  With ``calculate_per_token_loss``, it is the masked sum; the caller divides by the number of tokens.
    """
    weights = torch.cat(loss_masks).to(torch.float32)
    if not calculate_per_token_loss:
        lengths = torch.tensor([len(mask) for mask in loss_masks], device=weights.device)
        weights = weights / rollout_mask_sums.clamp_min(1).repeat_interleave(lengths)
    return lambda values: (values * weights).sum()


def count_loss_tokens(loss_masks: list[torch.Tensor]) -> int:
    """Return the divisor of the per-token loss; a fully masked sample counts as one token, as in vime."""
    return sum(max(int(mask.sum()), 1) for mask in loss_masks)
