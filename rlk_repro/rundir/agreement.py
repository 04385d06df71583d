"""Define the classes in which tokens are counted by the difference between the trainer's and the rollout's log-prob.

The trainer writes a table for every step and rank; ``analysis.agreement`` adds the tables up; a report shows them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LADDER: Final = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Bounds of \\|training minus rollout\\|.  Class i holds tokens beyond the first i bounds and not beyond the next."""
NUM_CLASSES: Final = len(LADDER) + 1
NUM_POSITIONS: Final = 17
"""Band i holds positions 2^i - 1 to 2^(i+1) - 2 of a response, counted from 0; the last band has no upper end."""
LOG_PROBS: Final = (-10.0, -3.0, -1.0, -0.1, -0.01)
"""Bounds between bands of the rollout's own log-prob, the least probable tokens first."""
NUM_LOG_PROBS: Final = len(LOG_PROBS) + 1


@dataclass(frozen=True, kw_only=True)
class LargestDifference:
    """One token: ``place`` says its step, rank, microbatch and sample; positions count from 0 in the response."""

    abs_difference: float
    place: str
    position: int
    token: int


@dataclass(frozen=True, kw_only=True)
class AgreementResult:
    """All tokens that a variant trained on in its scored steps.

    ``beyond[i]`` counts tokens whose difference exceeds ``LADDER[i]``.  ``k1`` and ``k3`` estimate the KL divergence of
    the rollout's policy from the trainer's, per token: the means of -r and of exp(r) - 1 - r, where r is the trainer's
    log-prob minus the rollout's (Schulman, Approximating KL Divergence).  ``by_position`` and ``by_log_prob`` have one
    row per band, and each row has the number of tokens by class; ``mean_by_position`` is a band's mean difference, or
    None for an empty band.  ``num_not_finite`` counts tokens whose log-prob is not finite; no other number includes
    them.  ``reason`` says why a step has no record.
    """

    variant: str
    num_steps: int
    num_tokens: int
    num_not_finite: int
    beyond: tuple[int, ...]
    mean_abs: float | None
    k1: float | None
    k3: float | None
    largest: LargestDifference | None
    by_position: tuple[tuple[int, ...], ...]
    mean_by_position: tuple[float | None, ...]
    by_log_prob: tuple[tuple[int, ...], ...]
    reason: str = ""
