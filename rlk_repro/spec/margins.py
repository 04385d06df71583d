"""The margins of the gates, fixed before a run's first trial."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from rlk_repro.spec.values import GrowingModel, NonNegative, Positive


class Margins(GrowingModel):
    """How much worse the enabled variant may be before its speed no longer counts (docs/statistics.md)."""

    added_later: ClassVar[frozenset[str]] = frozenset({"shadow_log_prob", "shadow_gradient_share"})

    raw_reward: NonNegative = Field(0.01, description="largest allowed drop of the mean raw_reward, absolute")
    logprob_abs_diff_ratio: Positive = Field(
        1.05, description="largest allowed ratio, enabled / baseline, of the mean train_rollout_logprob_abs_diff"
    )
    logprob_abs_diff_difference: NonNegative = Field(
        0.001, description="the gate also passes if enabled exceeds baseline by at most this much, whatever the ratio"
    )
    logprob_abs_diff_cap: Positive = Field(
        0.1, description="largest allowed train_rollout_logprob_abs_diff of a trial, as in vime's own tests"
    )
    peak_memory_ratio: Positive = Field(
        1.02, description="largest allowed ratio, enabled / baseline, of peak device memory"
    )
    response_length_pct: Positive = Field(
        2.0, description="largest allowed difference of the mean response length in either direction, in percent"
    )
    shadow_log_prob: Positive = Field(
        0.01, description="largest allowed difference of one log-prob between RL-Kernel and the trainer's function"
    )
    shadow_gradient_share: Positive = Field(
        0.01, description="largest allowed difference of a gradient at the logits, as a share of the largest gradient"
    )
