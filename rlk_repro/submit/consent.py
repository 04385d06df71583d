"""List what the replay of a recorded experiment would run on this machine.

Code that is neither part of this package nor pinned by a shipped stack needs ``--trust``, unless the user submitted the
same plan before. A replay takes run, stack and hardware from the bundle, but not the author's profile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

from rlk_repro.base.errors import CheckFailed, Problem
from rlk_repro.base.escapes import printable
from rlk_repro.base.resources import list_names, stack_folders
from rlk_repro.base.units import count, format_duration, format_number
from rlk_repro.plan import Plan
from rlk_repro.spec import Profile, Stack
from rlk_repro.spec.load import load_stack
from rlk_repro.spec.stack import Pin
from rlk_repro.spec.values import PinName
from rlk_repro.workloads import WORKLOADS
from rlk_repro.workloads.api import Code


def find_foreign(plan: Plan) -> list[Code]:
    """List the code that the plan names but that is neither in this package nor pinned by a shipped stack."""
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


def find_shipped_pins(stack: Stack) -> dict[PinName, Pin]:
    """Return the pins that a shipped stack has, too: a stranger's stack may pin any repository, commit or tree."""
    return {name: pin for name, pin in stack.pins.items() if _is_shipped(name, pin)}


def find_build_hint(plan: Plan) -> str | None:
    """Return the command that builds the plan's unpublished image, if a shipped stack names that command."""
    missing = plan.stack.unpublished.get(plan.hardware.image_platform)
    shipped = (known for stack in _load_shipped_stacks() for known in stack.unpublished.values())
    return missing.build if missing is not None and missing in shipped else None


def list_what_runs(plan: Plan, recorded: Profile, *, is_own: bool = False) -> dict[str, str]:
    """Describe what would run; ``is_own`` says that the user submitted this plan before."""
    shown = dict(_list_experiment(plan))
    site = f"your profile {plan.profile.profile}, cluster {plan.cluster}"
    shown["site"] = f"{site} (recorded: {recorded.profile}, {recorded.cluster}; not used)"
    code = _list_code(plan)
    known = [str(item) for item in code if item.is_known or is_own]
    foreign = [str(item) for item in code if not (item.is_known or is_own)]
    if known or not foreign:
        named = printable("; ".join(known))
        shown["named code"] = named or "this run names no other code: its trainer is part of rlk-repro"
    for number, item in enumerate(foreign, start=1):
        shown[f"FOREIGN {number} of {len(foreign)}"] = f"{printable(item)} (needs --trust)"
    return shown


def _list_experiment(plan: Plan) -> Iterator[tuple[str, str]]:
    """The time is the author's estimate, so the cost is what the limits allow."""
    run, layout, minutes = plan.run, plan.layout, plan.expected_minutes()
    steps = f"{plan.num_steps} steps each"
    author = "the author estimates"
    duration = "time not estimated" if minutes is None else f"{author} {format_duration(minutes * 60)} in all"
    yield "run", f"{run.run}: {run.workload.kind}, lane {run.lane}, stack {plan.stack.stack}"
    yield "trials", f"{len(plan.trials)}, {steps}, {duration}; at most {plan.time_limit_min:g} min each"
    nodes = f"{count(layout.num_nodes, 'node')} × {count(layout.gpus_per_node, 'GPU')} of {plan.hardware.hardware}"
    yield "nodes", f"{nodes} ({plan.hardware.platform})"
    hours = plan.all_limits_min / 60
    gpu_hours = format_number(hours * layout.num_nodes * layout.gpus_per_node)
    yield "cost", f"at most {gpu_hours} GPU-hours, in {format_duration(hours * 3600)}"
    if run.switch is not None:
        sides = {"baseline": run.switch.baseline, "enabled": run.switch.enabled}
        shown = {side: {name: str(value) for name, value in values.items()} for side, values in sides.items()}
        yield "variants", "; ".join(f"{name}: {_join(env)}" for name, env in shown.items())
    brought = WORKLOADS[run.workload.kind].find_brought(plan)
    yield from brought.sources.items()
    yield "environment", _join(brought.env) + (", and all variables of this shell" if plan.cluster == "local" else "")


def _list_code(plan: Plan) -> list[Code]:
    brought = WORKLOADS[plan.run.workload.kind].find_brought(plan)
    return [*_list_stack_code(plan), *brought.code]


def _list_stack_code(plan: Plan) -> Iterator[Code]:
    """An image may run any code, and nodes compare their sources with the pins, so both count only as shipped."""
    if plan.image is not None:
        shipped = {image.digest for stack in _load_shipped_stacks() for image in stack.images.values()}
        yield Code(where="image", value=plan.image.pinned, is_known=plan.image.digest in shipped)
    for name in plan.stack.pins.keys() - find_shipped_pins(plan.stack).keys():
        pin = plan.stack.pins[name]
        yield Code(where=f"pin {name}", value=f"{pin.repository} at {pin.commit}", is_known=False)
    commits, pinned = plan.run.rl_kernel.commits, {pin.commit for pin in _list_shipped_pins("rl_kernel")}
    for commit in () if commits is None else (commits.baseline, commits.enabled):
        yield Code(where="rl_kernel.commits", value=commit, is_known=commit in pinned)


def _is_shipped(name: PinName, pin: Pin) -> bool:
    """A tree hash counts as the commit, so it must be a shipped one, too."""
    return any(
        (pin.repository, pin.commit) == (known.repository, known.commit)
        and pin.tree in {None, known.tree}
        and pin.patched_tree in {None, known.patched_tree}
        for known in _list_shipped_pins(name)
    )


def _list_shipped_pins(name: PinName) -> list[Pin]:
    return [stack.pins[name] for stack in _load_shipped_stacks() if name in stack.pins]


@cache
def _load_shipped_stacks() -> tuple[Stack, ...]:
    return tuple(load_stack(name).model for name in list_names(stack_folders()))


def _join(env: Mapping[str, str]) -> str:
    return (
        ", ".join(f"{name}={printable(value)}" for name, value in sorted(env.items())) or "no variables from the bundle"
    )
