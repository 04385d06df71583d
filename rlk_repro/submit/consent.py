"""List what the replay of a recorded experiment would run on this machine.

Code that is neither part of this package nor pinned by the stack needs ``--trust``. A replay takes run, stack and
hardware from the bundle, but not the author's profile with its paths and variables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlk_repro.base.errors import CheckFailed, Problem
from rlk_repro.base.escapes import printable
from rlk_repro.base.resources import list_names, stack_folders
from rlk_repro.base.units import format_duration
from rlk_repro.plan import Plan
from rlk_repro.spec import Profile, Stack
from rlk_repro.spec.load import load_stack
from rlk_repro.workloads import WORKLOADS
from rlk_repro.workloads.api import Code


def find_foreign(plan: Plan) -> list[Code]:
    """List the code that the plan names but that is neither in this package nor in the sources that its stack pins."""
    return [item for item in _list_code(plan) if not item.is_known]


def require_trust(plan: Plan) -> None:
    """Raise CheckFailed, with a list, if a plan names code from outside this package and the pinned sources."""
    problems = [
        Problem(item.where, "may run code from outside this package and the pinned sources", got=item.value,
                hint="review this code; --trust allows it")
        for item in find_foreign(plan)
    ]  # fmt: skip
    if problems:
        raise CheckFailed(*problems)


def list_what_runs(plan: Plan, recorded: Profile) -> dict[str, str]:
    shown = dict(_list_experiment(plan))
    site = f"your profile {plan.profile.profile}, cluster {plan.cluster}"
    return {**shown, "site": f"{site} (recorded: {recorded.profile}, {recorded.cluster}; not used)"}


def _list_experiment(plan: Plan) -> Iterator[tuple[str, str]]:
    run, minutes = plan.run, plan.expected_minutes()
    steps = f"{plan.num_steps} steps each"
    duration = "time not estimated" if minutes is None else f"about {format_duration(minutes * 60)} in all"
    yield "run", f"{run.run}: {run.workload.kind}, lane {run.lane}, stack {plan.stack.stack}"
    yield "trials", f"{len(plan.trials)}, {steps}, {duration}; at most {plan.time_limit_min:g} min each"
    if run.switch is not None:
        sides = {"baseline": run.switch.baseline, "enabled": run.switch.enabled}
        yield "variants", "; ".join(f"{name}: {_join(env)}" for name, env in sides.items())
    brought = WORKLOADS[run.workload.kind].find_brought(plan)
    yield from brought.sources.items()
    yield "environment", _join(brought.env) + (", and all variables of this shell" if plan.cluster == "local" else "")
    code = _list_code(plan)
    yield (
        "named code",
        "; ".join(_mark(item) for item in code) or "this run names no other code: its trainer is part of rlk-repro",
    )


def _list_code(plan: Plan) -> list[Code]:
    return [*_list_images(plan), *_list_commits(plan), *WORKLOADS[plan.run.workload.kind].find_brought(plan).code]


def _list_commits(plan: Plan) -> Iterator[Code]:
    """A commit is known if a shipped stack pins it."""
    commits = plan.run.rl_kernel.commits
    if commits is None:
        return
    pinned = {stack.pins["rl_kernel"].commit for stack in _load_shipped_stacks() if "rl_kernel" in stack.pins}
    for commit in (commits.baseline, commits.enabled):
        yield Code(where="rl_kernel.commits", value=commit, is_known=commit in pinned)


def _list_images(plan: Plan) -> Iterator[Code]:
    """An image can run any code, so an image is known only if a shipped stack has its digest."""
    image = plan.image
    if image is not None:
        shipped = {known.digest for stack in _load_shipped_stacks() for known in stack.images.values()}
        yield Code(where="image", value=image.pinned, is_known=image.digest in shipped)


def _load_shipped_stacks() -> Iterator[Stack]:
    return (load_stack(name).model for name in list_names(stack_folders()))


def _mark(item: Code) -> str:
    return printable(str(item)) + ("" if item.is_known else " (FOREIGN: needs --trust)")


def _join(env: Mapping[str, str]) -> str:
    return (
        ", ".join(f"{name}={printable(value)}" for name, value in sorted(env.items())) or "no variables from the bundle"
    )
