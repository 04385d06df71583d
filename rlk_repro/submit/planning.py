"""From the flags of ``submit`` to a plan and the job that its cluster would get; nothing is written or sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from rlk_repro.base.errors import (
    Problem,
    SpecError,
)
from rlk_repro.base.resources import hardware_folders, list_names, profile_folders, run_folders, stack_folders
from rlk_repro.clusters.api import Job
from rlk_repro.clusters.registry import BACKENDS, get_backend
from rlk_repro.plan import BASELINE, ENABLED, Plan, flag_overrides, make_plan
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec.load import Loaded, load_hardware, load_profile, load_run, load_stack, parse_overrides
from rlk_repro.submit.stage import Inputs, new_run_dir
from rlk_repro.workloads import get_workload
from rlk_repro.workloads.differences import find_undeclared

LOCAL: Final = "local"


@dataclass(frozen=True, kw_only=True)
class Request:
    """The flags of ``submit``; None means not given."""

    run: str
    cluster: str | None = None
    hardware: str | None = None
    profile: str | None = None
    stack: str | None = None
    lane: str | None = None
    pairs: int | None = None
    control_pairs: int | None = None
    variants: tuple[str, ...] = (BASELINE, ENABLED)
    settings: tuple[str, ...] = ()
    is_exploratory: bool = False


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Planned and rendered; nothing has been written or sent.  ``inputs`` is None where they are staged already."""

    plan: Plan
    inputs: Inputs | None
    run_dir: RunDir
    job: Job


def prepare(request: Request) -> Prepared:
    """Resolve, plan and render.

    Raises:
        SpecError: with everything that is wrong in the files and flags.
    """
    if not request.run:
        known = ", ".join(list_names(run_folders()))
        raise SpecError(Problem("--run", "missing", expected=f"a file, or one of {known}"))
    overrides = parse_overrides(request.settings)
    overrides += flag_overrides(lane=request.lane, pairs=request.pairs, control_pairs=request.control_pairs)
    run = load_run(request.run, run_folders(), overrides)
    profile = resolve_profile(request.profile, request.cluster)
    hardware_name = request.hardware or profile.model.hardware
    if hardware_name is None:
        known = ", ".join(sorted(run.model.layouts))
        raise SpecError(Problem("--hardware", "missing, and the profile names none", expected=f"one of {known}"))
    hardware = load_hardware(hardware_name, hardware_folders())
    stack = load_stack(request.stack or run.model.stack, stack_folders())
    plan = make_plan(
        run=run,
        stack=stack,
        hardware=hardware,
        profile=profile,
        overrides=overrides,
        variants=request.variants,
        is_exploratory=request.is_exploratory,
    )
    inputs = Inputs(run=run.data, stack=stack.data, hardware=hardware.data, profile=profile.data)
    return render(plan, inputs)


def render(plan: Plan, inputs: Inputs | None, run_dir: RunDir | None = None, *, nodes: Sequence[str] = ()) -> Prepared:
    """Render a plan for its cluster; pure but for the choice of a new run id where no directory is given.

    Raises:
        SpecError: neither the trainer nor the cluster could run this plan.
    """
    problems = get_workload(plan.run.workload.kind).find_problems(plan) or find_undeclared(plan)
    if problems:
        raise SpecError(*problems)
    run_dir = run_dir or new_run_dir(plan)
    job = get_backend(plan.cluster).render(plan, run_dir, nodes=nodes)
    return Prepared(plan=plan, inputs=inputs, run_dir=run_dir, job=job)


def resolve_profile(name: str | None, cluster: str | None) -> Loaded[Any]:
    """The profile by name or file; ``local`` by default on the local cluster only.

    Raises:
        SpecError: none given for a real cluster, or a profile made for another cluster.
    """
    wanted = cluster or LOCAL
    get_backend(wanted)
    folders = profile_folders(wanted)
    if name is None:
        if wanted != LOCAL:
            known = ", ".join(list_names(folders)) or "(none)"
            raise SpecError(Problem("--profile", f"needed for cluster {wanted}", expected=f"a file, or one of {known}"))
        name = LOCAL
    profile = load_profile(name, folders, BACKENDS)
    if cluster is not None and profile.model.cluster != cluster:
        raise SpecError(
            Problem("--profile", "made for another cluster", got=profile.model.cluster, expected=cluster,
                    hint=f"use --cluster {profile.model.cluster}")
        )  # fmt: skip
    return profile
