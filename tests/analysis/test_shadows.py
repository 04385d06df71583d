"""What shadow steps show, also where one rank's difference is not finite."""

from __future__ import annotations

import pytest

from rlk_repro.analysis.shadows import summarise_shadows
from rlk_repro.logs.ops import OpsLog, RankOps
from rlk_repro.logs.ops_lines import Gap, OpCount, Shadow

CALLS = {"logp": OpCount(calls=1, fallbacks=0, tokens=8)}


def make_rank(rank: int, difference: float | None) -> RankOps:
    gap = Gap(max_abs=difference, mean_abs=difference, max_abs_baseline=1.0, n=8)
    shadow = Shadow(event="shadow", step=86, case="as trained", calls=CALLS, log_probs=gap, logits_grad=gap)
    return RankOps(
        rank=rank, source=f"ops/{rank}.jsonl", install=None, decisions=(), steps={}, shadows=(shadow,),
        kernels=None, first_reject="", num_rejects={},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("differences", "largest", "error"),
    [
        ((1e-6, 2e-6), 2e-6, ""),
        ((5.0, None), 5.0, "a difference is not finite"),
        ((None, None), None, "a difference is not finite"),
    ],
)
def test_a_difference_that_is_not_finite_hides_no_larger_one(
    differences: tuple[float | None, ...], largest: float | None, error: str
) -> None:
    ops = OpsLog(ranks=tuple(make_rank(rank, difference) for rank, difference in enumerate(differences)))
    (found,) = summarise_shadows("s1", ops, num_serving=2)
    assert (found.log_prob_max, found.gradient_share, found.error) == (largest, largest, error)
