"""Define ``submit``: plan, render, stage and send a job."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from rlk_repro.base.console import silence
from rlk_repro.cli.commands import (
    HardwareName,
    PinsName,
    Settings,
    as_typed,
    complete_id,
    complete_profile,
    complete_run,
)
from rlk_repro.cli.output import AsJson, note, say, say_json, say_text, show

if TYPE_CHECKING:
    from rlk_repro.clusters.api import Job
    from rlk_repro.plan import Plan
    from rlk_repro.submit.planning import Prepared
    from rlk_repro.submit.sending import Launched


_WITH_RESUME: Final = frozenset({"resume", "is_dry_run", "is_job_shown", "is_waiting", "as_json"})


def _read_number(text: str) -> int | str:
    """Leave other words to the check of the run's values, which names what is expected."""
    try:
        return int(text)
    except ValueError:
        return text


def _number(what: str) -> Any:
    return typer.Option(help=what, metavar="N", parser=_read_number)


def submit(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            metavar="[RUN]",
            help="Run: a name from `runs list`, or a file.",
            show_default=False,
            autocompletion=complete_run,
        ),
    ] = "",
    run: Annotated[str, typer.Option("--run", help="Another way to give RUN.", autocompletion=complete_run)] = "",
    cluster: Annotated[str | None, typer.Option(help="local, slurm or k8s.", show_default="local")] = None,
    hardware: HardwareName = None,
    profile: Annotated[
        str | None, typer.Option(help="Site profile: a name or a file.", autocompletion=complete_profile)
    ] = None,
    stack: PinsName = None,
    lane: Annotated[str | None, typer.Option(help="live, fixed-rollout or train-only.")] = None,
    sessions: Annotated[int | None, _number("Number of sessions (design crossover).")] = None,
    pairs: Annotated[int | None, _number("Number of pairs (design parallel).")] = None,
    control_pairs: Annotated[int | None, _number("Number of pairs of two baseline trials.")] = None,
    variants: Annotated[str, typer.Option(help="Variants, separated by commas.")] = "baseline,enabled",
    settings: Settings = None,
    max_job_time: Annotated[
        str | None, typer.Option(metavar="TIME", help="Slurm: longest time of one job, such as 4h.")
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(metavar="N,…", help="Local: only these GPUs; others may serve another run."),
    ] = None,
    is_dry_run: Annotated[bool, typer.Option("--dry-run", help="Show plan and job; send nothing.")] = False,
    is_job_shown: Annotated[bool, typer.Option("--show-job", help="With --dry-run: print the job's files.")] = False,
    is_waiting: Annotated[bool, typer.Option("--wait", help="Wait for the run's end and its result.")] = False,
    machines: Annotated[
        int, typer.Option(min=1, metavar="N", help="Send N submissions at once, for `combine`.", show_default=False)
    ] = 1,
    resume: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Redo the incomplete pairs of this run.", autocompletion=complete_id),
    ] = None,
    is_exploratory: Annotated[bool, typer.Option("--exploratory", help="Allow changed measurement rules.")] = False,
    as_json: AsJson = False,
) -> None:
    """Start a run: baseline trials and trials with RL-Kernel, in one allocation."""
    from rlk_repro.submit import planning

    if resume is not None:
        _refuse_other_flags(context)
        prepared = planning.prepare_resume(resume)
    else:
        request = planning.Request(
            run=_choose(name, run),
            cluster=cluster,
            hardware=hardware,
            profile=profile,
            stack=stack,
            lane=lane,
            sessions=sessions,
            pairs=pairs,
            control_pairs=control_pairs,
            variants=tuple(name.strip() for name in variants.split(",")),
            settings=tuple(settings or ()),
            is_exploratory=is_exploratory,
            is_dry_run=is_dry_run,
            max_job_time=max_job_time,
            gpus=gpus,
        )
        prepared = planning.prepare(request)
    if machines > 1:
        _require_several(prepared.plan, is_waiting=is_waiting)
    use_sources(cluster=prepared.plan.cluster)
    if not as_json:
        for remark in prepared.remarks:
            note(remark)
        _note_switches()
        if prepared.is_proposed:
            _offer_to_save(prepared)
    if is_dry_run:
        show_dry_run(prepared.plan, prepared.job, is_job_shown=is_job_shown, as_json=as_json)
        return
    _send(prepared, machines, is_waiting=is_waiting, as_json=as_json)


def _offer_to_save(prepared: Prepared) -> None:
    """Offer to save the profile that was made; never replace an existing profile."""
    from rlk_repro.base.files import write_bytes
    from rlk_repro.base.resources import user_profiles_dir

    name = prepared.plan.profile.profile
    path = user_profiles_dir() / f"{name}.yaml"
    if path.exists():
        note(f"you already have a profile of this name: --profile {name} uses {path}")
    elif sys.stdin.isatty() and prepared.inputs and typer.confirm(f"Save this profile as {path}?", err=True):
        write_bytes(path, prepared.inputs.profile)
        note(f"wrote {path}; the next time: --profile {name}")


def _choose(name: str, run: str) -> str:
    from rlk_repro.base.errors import Problem, SpecError

    if name and run and name != run:
        raise SpecError(Problem("--run", "names another run than the argument", got=run, expected=name))
    return name or run


def _send(prepared: Prepared, number: int, *, is_waiting: bool, as_json: bool) -> None:
    """Send so many plans at once, which differ in their seeds; the scheduler gives each another node."""
    from rlk_repro.submit import planning, sending

    plan = prepared.plan
    require_sources(plan)
    launched: list[Launched] = []
    for place in range(number):
        if place:
            prepared = planning.render(planning.seed_apart(plan, place), prepared.inputs)
        launched.append(sending.submit(prepared))
        if not (as_json or is_waiting):
            _show_submitted(plan, launched[-1])
    if is_waiting:
        tell = silence if as_json else note
        tell(f"run directory: {launched[0].run_dir.root}")
        sending.wait(launched[0], tell, is_quiet=as_json)
        _show_result(launched[0], as_json=as_json)
        return
    command = shlex.join(["rlk-repro", "combine", *(item.run_dir.run_id for item in launched)])
    if as_json:
        sent = [{"id": item.run_dir.run_id, "run_dir": item.run_dir.root, "submission": item.submission}
                for item in launched]  # fmt: skip
        say_json(sent[0] if number == 1 else {"submissions": sent, "combine": command})
    elif number > 1:
        say(as_typed(f"when all have ended: {command}"))


def _require_several(plan: Plan, *, is_waiting: bool) -> None:
    from rlk_repro.base.errors import Problem, SpecError
    from rlk_repro.clusters.registry import get_backend

    if get_backend(plan.cluster).CLIENT is None:
        raise SpecError(Problem("--machines", "needs a scheduler with several nodes", got=f"--cluster {plan.cluster}",
                                hint="run it on each machine, then: rlk-repro combine with their bundles"))  # fmt: skip
    if is_waiting:
        raise SpecError(Problem("--wait", "waits for one submission", expected="no --machines"))
    if plan.profile.slurm is not None and not plan.profile.slurm.exclusive:
        note("slurm.exclusive is false, so that submissions may share a node: combine counts GPUs and hosts")


def _refuse_other_flags(context: typer.Context) -> None:
    """Refuse flags that would change a resumed run, which keeps its plan."""
    from rlk_repro.base.errors import Problem, SpecError

    what, expected = "a resumed run keeps its plan", "this left out; --dry-run, --wait and --json may stay"
    problems = [
        Problem("RUN" if option.name == "name" else option.opts[-1], what, expected=expected)
        for option in context.command.params
        if option.name not in _WITH_RESUME
        and (source := context.get_parameter_source(option.name or "")) is not None
        and source.name == "COMMANDLINE"
    ]
    if problems:
        raise SpecError(*problems)


def show_dry_run(plan: Plan, job: Job, *, is_job_shown: bool, as_json: bool) -> None:
    """Show what ``submit`` would send; the plan comes last, so that a small terminal still shows it."""
    from rlk_repro.base.files import write_text
    from rlk_repro.base.resources import user_cache_dir
    from rlk_repro.clusters.registry import get_backend
    from rlk_repro.submit.show import bound_line, describe_dry_run, plan_lines

    if as_json:
        say_json(describe_dry_run(plan, job))
        return
    folder = user_cache_dir() / "dry-run" / f"{plan.run.run}-{plan.cluster}-{plan.hardware.hardware}"
    for name, text in job.files.items():
        write_text(folder / name, text)
        if is_job_shown:
            say(f"--- job/{name}")
            say_text(text.rstrip("\n"))
            say()
    for line in plan_lines(plan):
        say(line)
    bound = get_backend(plan.cluster).find_bound(plan)
    if bound is not None:
        say(f"{'reserves':<16} {bound_line(plan, bound)}")
    files = ", ".join(str(folder / name) for name in job.files)
    say(f"{'job':<16} {files}{'' if is_job_shown else '  (--show-job prints it)'}")
    say(f"{'command':<16} {shlex.join(job.command)}")


def _show_submitted(plan: Plan, launched: Launched) -> None:
    from rlk_repro.clusters.registry import get_backend
    from rlk_repro.submit.show import bound_line, describe_cost

    run_dir, submission = launched.run_dir, launched.submission
    say(f"submitted {run_dir.run_id} to {submission.cluster} as {submission.job_id}")
    say(f"run directory: {run_dir.root}")
    say(f"expected: {describe_cost(plan)}")
    bound = get_backend(submission.cluster).find_bound(plan)
    if bound is not None:
        say(f"reserved: {bound_line(plan, bound)}")
    say(as_typed(f"next: rlk-repro status --watch {run_dir.run_id}"))


def _show_result(launched: Launched, *, as_json: bool) -> None:
    from rlk_repro.submit import finishing

    result = finishing.finish(launched, silence if as_json else note)
    if as_json:
        say_json(result.describe())
    else:
        from rlk_repro.report.terminal import print_summary

        show(lambda console: print_summary(result.analysis, console, result.context))
    if not result.is_ok:
        raise typer.Exit(1)


def use_sources(*, cluster: str) -> None:
    """Use the checkouts that the environment names, on the local cluster only, whose job is a child of this process."""
    from rlk_repro.submit.site import LOCAL
    from rlk_repro.workloads.checkouts import use_checkouts

    if cluster == LOCAL:
        use_checkouts()


def require_sources(plan: Plan, also: Iterable[str] = ()) -> None:
    """Refuse to start if the trainer's packages or the modules in ``also`` cannot be found.

    Raises:
        SpecError: the profile's PYTHONPATH hides the checkouts.
    """
    from rlk_repro.base.errors import EnvironmentMissing, Problem, SpecError
    from rlk_repro.sources import RL_KERNEL
    from rlk_repro.submit.consent import find_shipped_pins
    from rlk_repro.submit.site import LOCAL
    from rlk_repro.workloads import checkouts
    from rlk_repro.workloads.environment import find_trainer_path

    if plan.cluster != LOCAL:
        return
    hidden = [item.variable for item in checkouts.SOURCES if os.environ.get(item.variable)]
    if hidden and "PYTHONPATH" in plan.profile.env:
        where = f"profile {plan.profile.profile}: env.PYTHONPATH"
        raise SpecError(Problem(where, f"hides {', '.join(hidden)}", expected="one of the two, not both"))
    checkouts.refuse_missing(checkouts.find_missing_checkouts(plan))
    if "torch" in plan.run.workload.modules and not checkouts.is_found("torch", find_trainer_path(plan)):
        hint = "python -m pip install 'rlk-repro[local]'"
        raise EnvironmentMissing(Problem("python module torch", "is not installed", hint=hint))
    own = set() if plan.run.rl_kernel.commits is None else {RL_KERNEL.module}
    needed = {*plan.run.workload.modules, *also} - own
    checkouts.require_importable(
        *(source for source in checkouts.SOURCES if source.module in needed),
        path=find_trainer_path(plan, os.environ.get("PYTHONPATH", "")),
        pins=find_shipped_pins(plan.stack),
        commits=checkouts.find_missing_commits(plan),
    )


def _note_switches() -> None:
    from rlk_repro.workloads.environment import SWITCHES

    for name, setting in SWITCHES.items():
        if value := os.environ.get(name):
            note(f"{name}={value} is set in this shell but has no effect; use {setting}")
