"""Name in an analysis what served the trainer's operators in the enabled variant and in the baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from rlk_repro.analysis.shadows import ROUTES
from rlk_repro.operators import RL_KERNEL, TITLES
from rlk_repro.plan import Plan

_IN_PLACE_OF = " in place of "


@dataclass(frozen=True, kw_only=True)
class Served:
    """``title`` is a run's ``implementation_title``; ``names`` lists what must be proved to have run."""

    title: str = ""
    names: str = TITLES[RL_KERNEL]

    @classmethod
    def of(cls, plan: Plan) -> Self:
        return cls(title=plan.run.implementation_title, names=plan.serving)

    @property
    def enabled(self) -> str:
        return self.title.partition(_IN_PLACE_OF)[0] or self.names

    @property
    def routes(self) -> str:
        return self.title.replace(_IN_PLACE_OF, " and ") or ROUTES

    @property
    def are_proved(self) -> str:
        return f"{self.names} {'are' if ' and ' in self.names else 'is'} proved to run"

    def open(self, *, is_exploratory: bool) -> str:
        """Begin a headline: say first what was enabled, if it is not RL-Kernel."""
        enabled = f"with {self.title}, " if self.title else ""
        return f"exploratory: {enabled}" if is_exploratory else enabled
