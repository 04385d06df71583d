"""Turn the flags of ``submit`` into a plan and the job for its cluster; nothing is written or sent."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlk_repro.agent.preflight.checks import require_known
from rlk_repro.base.errors import CheckFailed, EnvironmentMissing, Problem, SpecError
from rlk_repro.base.resources import list_names, run_folders
from rlk_repro.clusters.api import Job, JobState
from rlk_repro.clusters.registry import get_backend
from rlk_repro.plan import PROFILE, Plan, make_plan
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.store import find_run_dir
from rlk_repro.spec.load import (
    Override,
    load_hardware,
    load_run,
    load_stack,
    parse_overrides,
)
from rlk_repro.spec.values import MAX_SEED
from rlk_repro.submit.sending import Launched, load_submission, poll, require_own
from rlk_repro.submit.site import Request as Request  # noqa: PLC0414  (planning.Request is what callers write)
from rlk_repro.submit.site import choose_hardware, find_site
from rlk_repro.submit.stage import AuthorFiles, new_run_dir
from rlk_repro.workloads import WORKLOADS
from rlk_repro.workloads.differences import find_undeclared
from rlk_repro.workloads.environment import find_foreign_switch


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A job that is not sent yet; ``remarks`` name the choices that rlk-repro made for missing flags.

    ``inputs`` is None if the run directory already holds the author's files.
    """

    plan: Plan
    inputs: AuthorFiles | None
    run_dir: RunDir
    job: Job
    remarks: tuple[str, ...] = ()
    is_proposed: bool = False


def flag_overrides(request: Request) -> list[Override]:
    flags = (
        (("lane",), request.lane, "--lane"),
        (("measure", "sessions"), request.sessions, "--sessions"),
        (("measure", "pairs"), request.pairs, "--pairs"),
        (("measure", "control_pairs"), request.control_pairs, "--control-pairs"),
    )
    return [Override(path, value, flag) for path, value, flag in flags if value is not None]


def prepare(request: Request) -> Prepared:
    """Plan and render a job; raise SpecError with every problem of the files and flags."""
    if not request.run:
        known = ", ".join(list_names(run_folders()))
        raise SpecError(Problem("RUN", "missing", expected=f"a file, or one of {known}", hint="rlk-repro submit smoke"))
    overrides = parse_overrides(request.settings)
    overrides += flag_overrides(request)
    run = load_run(request.run, overrides)
    site = find_site(request, run.model)
    profile = site.profile
    require_known(profile)
    hardware_name, shown_for = choose_hardware(request, run.model, site)
    hardware = load_hardware(hardware_name)
    stack = load_stack(request.stack or run.model.find_stack(hardware.model.hardware))
    plan = make_plan(
        run=run,
        stack=stack,
        hardware=hardware,
        profile=profile,
        overrides=overrides,
        variants=request.variants,
        is_exploratory=request.is_exploratory,
    )
    inputs = AuthorFiles(
        run=run.data,
        stack=stack.data,
        hardware=hardware.data,
        profile=profile.data,
        prepare_hint=_name_prepare(request, hardware_name),
    )
    plan = replace(plan, sources={**plan.sources, **{f"{PROFILE}{path}": flag for path, flag in profile.sources.items()
                                                     if flag.startswith("--")}})  # fmt: skip
    try:
        prepared = render(plan, inputs)
    except SpecError as error:
        raise (_name_the_file(error, plan.cluster) if site.is_proposed else error) from None
    return replace(prepared, remarks=(*site.remarks, *shown_for, *prepared.remarks), is_proposed=site.is_proposed)


def seed_apart(plan: Plan, number: int) -> Plan:
    """Return the plan with the seeds that follow those of ``number`` submissions before it.

    Live pairs with one seed are one pair, so ``combine`` would not judge their rewards; sessions draw their own orders.

    Raises:
        SpecError: no seeds are left.
    """
    measure = plan.run.measure
    seed = measure.seed + number * len({trial.seed for trial in plan.trials})
    if seed > MAX_SEED:
        raise SpecError(Problem("--machines", "leaves no seeds", got=seed, expected=f"seeds up to {MAX_SEED}"))
    run = plan.run.model_copy(update={"measure": measure.model_copy(update={"seed": seed})})
    return replace(plan, run=run, sources={**plan.sources, "measure.seed": "--machines"})


def prepare_resume(name: str) -> Prepared:
    """Render the job of an unfinished run again; the agent will repeat incomplete pairs as a whole.

    Raises:
        CheckFailed: the run is sealed or still running.
        EnvironmentMissing: this machine cannot tell whether the run is still running.
    """
    run_dir = find_run_dir(name)
    require_own(run_dir)
    if run_dir.is_sealed:
        hint = "submit the run again for more trials"
        raise CheckFailed(Problem(run_dir.run_id, "is sealed: every trial has run", hint=hint))
    submission = load_submission(run_dir)
    status = None if submission is None else poll(Launched(run_dir=run_dir, submission=submission))
    if status is not None and status.state is JobState.UNKNOWN:
        what = f"may still be running ({status.reason})"
        raise EnvironmentMissing(Problem(run_dir.run_id, what, expected="a run that has ended"))
    if status is not None and not status.state.is_final:
        raise CheckFailed(Problem(run_dir.run_id, "is still running", hint=f"rlk-repro cancel {run_dir.run_id}"))
    return render(Plan.load(run_dir.plan), None, run_dir)


def _name_prepare(request: Request, hardware: str) -> str:
    place = {"--cluster": request.cluster, "--profile": request.profile} if request.profile else {}
    flags = {"--hardware": hardware, "--stack": request.stack, **place}
    settings = list(request.settings)
    if request.lane:
        settings.append(f"lane={request.lane}")
    words = ["rlk-repro", "prepare", request.run]
    for flag, value in (*flags.items(), *(("--set", setting) for setting in settings)):
        if value:
            words += [flag, value]
    return shlex.join(words)


def _name_the_file(error: SpecError, cluster: str) -> SpecError:
    """A profile file can set what the cluster did not report."""
    hint = (
        f"rlk-repro profile init --cluster {cluster} -o my-site.yaml; set the value there; use --profile my-site.yaml"
    )
    return SpecError(*(replace(problem, hint=problem.hint or hint) for problem in error.problems))


def render(
    plan: Plan,
    inputs: AuthorFiles | None,
    run_dir: RunDir | None = None,
    *,
    nodes: Sequence[str] = (),
    is_own: bool = True,
) -> Prepared:
    """Render the job of a plan; with ``is_own`` false, the plan is another person's and its switch is restricted."""
    problems = [] if is_own else find_foreign_switch(plan)
    problems = problems or WORKLOADS[plan.run.workload.kind].find_problems(plan) or find_undeclared(plan)
    if problems:
        raise SpecError(*problems)
    run_dir = run_dir or new_run_dir(plan)
    job = get_backend(plan.cluster).render(plan, run_dir, nodes=nodes)
    return Prepared(plan=plan, inputs=inputs, run_dir=run_dir, job=job, remarks=job.remarks)
