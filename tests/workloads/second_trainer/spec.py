"""Settings of the line trainer, as an author writes them."""

from typing import Any, Literal

from rlk_repro.spec.values import Count
from rlk_repro.spec.workloads import AnyWorkload


class LineWorkload(AnyWorkload):
    """Fits a line by gradient descent."""

    lanes = ("live",)
    lane_limit = "the line trainer stores no rollouts"
    modules = ()

    kind: Literal["line"]
    num_points: Count = 100

    @property
    def loss_options(self) -> dict[str, Any]:
        """As if its loss held a reference policy, so that an operator may be asked for."""
        return {"use_kl_loss": True, "kl_loss_coef": 0.1}
