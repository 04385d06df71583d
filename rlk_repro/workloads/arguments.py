"""Functions that several workloads share: flags from settings, checks of layouts, and texts for reports."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from pydantic import BaseModel

from rlk_repro.base.errors import Problem
from rlk_repro.base.resources import suggest
from rlk_repro.base.units import count, format_count
from rlk_repro.plan import Plan, Trial
from rlk_repro.workloads.environment import find_env_problems

MOST_PAIRS_WITHOUT_VERDICT: Final = 5


def trial_flags(plan: Plan, seed: int, num_rollouts: int | None = None) -> list[str]:
    device = "cpu" if plan.hardware.platform == "cpu" else "cuda"
    return ["--seed", str(seed), "--num-rollout", str(num_rollouts or plan.num_steps), "--device", device]


def setting_flags(settings: BaseModel) -> dict[str, Any]:
    """Return a flag for each setting; a setting that is false has no flag."""
    values = settings.model_dump(exclude={"kind"})
    return {name.replace("_", "-"): value for name, value in values.items() if value is not False}


def spell_flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return flags and values as an argument list; True makes a flag without a value, a tuple makes several values."""
    words = []
    for flag, value in arguments.items():
        words.append(f"--{flag}")
        if value is not True:
            words += [str(item) for item in (value if isinstance(value, tuple | list) else (value,))]
    return words


def switch_flags(plan: Plan, trial: Trial, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trial's arguments with the flags of the user's own switch; its value False leaves a flag out."""
    own = {} if plan.run.switch is None or plan.is_crossover else plan.run.switch.flags_of(trial.variant)
    return {flag: value for flag, value in {**arguments, **own}.items() if flag not in own or value is not False}


def _find_switch_problems(plan: Plan, known: Collection[str]) -> Iterator[Problem]:
    """Refuse flags of an own switch that this trainer does not have."""
    for name in sorted(plan.switches):
        if name.startswith("--") and name[2:] not in known:
            expected = ", ".join(f"--{flag}" for flag in sorted(known)) or "variables only"
            yield Problem(f"run {plan.run.run}: switch.{name}", "is no flag that may differ between this trainer's "
                          "variants", expected=expected, hint=suggest(name[2:], sorted(known)))  # fmt: skip


def find_plan_problems(plan: Plan, what: str, known: Collection[str] = (), free: Collection[str] = ()) -> list[Problem]:
    """Find variables that a plan may not set, flags that are not ``known``, and sizes above 1 that are not ``free``."""
    problems = [*find_env_problems(plan), *_find_switch_problems(plan, known)]
    where = f"run {plan.run.run}: layouts.{plan.hardware.hardware}"
    for name, value in plan.layout.model_dump().items():
        if value > 1 and name not in free:
            problems.append(Problem(f"{where}.{name}", what, got=value, expected="at most 1"))
    return problems


def find_untimed_problems(plan: Plan) -> Iterator[Problem]:
    """If a run measures no time, refuse a design or a number of pairs that could give a verdict on speed."""
    if plan.run.workload.is_timed:
        return
    measure = plan.run.measure
    where, what = f"run {plan.run.run}: measure", f"a run with what_for: {plan.run.workload.purpose} measures no time"
    if plan.is_crossover:
        yield Problem(f"{where}.design", what, got=measure.design, expected="parallel")
    elif measure.pairs > MOST_PAIRS_WITHOUT_VERDICT:
        expected = f"at most {MOST_PAIRS_WITHOUT_VERDICT} pairs, so that the run gives no verdict on speed"
        yield Problem(f"{where}.pairs", what, got=measure.pairs, expected=expected)


def describe_rollouts(grpo: Mapping[str, Any]) -> str:
    prompts, samples = format_count(grpo["rollout_batch_size"]), grpo["n_samples_per_prompt"]
    return f"{prompts} prompts × {samples} samples, at most {count(grpo['rollout_max_response_len'], 'token')} each"
