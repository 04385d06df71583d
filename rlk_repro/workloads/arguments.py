"""What the workloads' command lines share: flags from settings, and layouts that are larger than they can be."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from pydantic import BaseModel

from rlk_repro.base.errors import Problem
from rlk_repro.plan import Plan


def trial_flags(plan: Plan, seed: int, num_rollouts: int | None = None) -> list[str]:
    """What every trainer is told: seed, number of rollouts (that of a trial unless told), device."""
    device = "cpu" if plan.hardware.platform == "cpu" else "cuda"
    return ["--seed", str(seed), "--num-rollout", str(num_rollouts or plan.num_steps), "--device", device]


def setting_flags(settings: BaseModel) -> Iterator[str]:
    """Field names are the trainer's flag names; True is a bare flag, False leaves it out."""
    for name, value in settings.model_dump(exclude={"kind"}).items():
        if value is False:
            continue
        yield f"--{name.replace('_', '-')}"
        if value is not True:
            yield str(value)


def find_layout_problems(plan: Plan, what: str, free: Collection[str] = ()) -> list[Problem]:
    """Sizes of the layout above 1, but for those that are ``free``; ``what`` the trainer is instead."""
    where = f"run {plan.run.run}: layouts.{plan.hardware.hardware}"
    return [
        Problem(f"{where}.{name}", what, got=value, expected="at most 1")
        for name, value in plan.layout.model_dump().items()
        if value > 1 and name not in free
    ]
