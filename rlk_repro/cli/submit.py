"""Define ``submit``: plan, render, stage and send a job."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Final

import typer

from rlk_repro.base.console import silence
from rlk_repro.cli.commands import as_typed
from rlk_repro.cli.completion import HardwareName, PinsName, Settings, complete_id, complete_profile, complete_run
from rlk_repro.cli.output import AsJson, note, say, say_json, say_text, show
from rlk_repro.cli.sources import (
    MegatronSource,
    RlKernelSource,
    VimeSource,
    note_switches,
    require_sources,
    use_sources,
)

if TYPE_CHECKING:
    from rlk_repro.clusters.api import Job
    from rlk_repro.plan import Plan
    from rlk_repro.submit.planning import Prepared
    from rlk_repro.submit.sending import Launched


_SOURCES: Final = frozenset({"vime_src", "megatron_src", "rl_kernel_src"})
_WITH_RESUME: Final = _SOURCES | {"resume", "is_dry_run", "is_job_shown", "is_waiting", "as_json"}


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
    sessions: Annotated[int | None, typer.Option(help="Number of sessions (design crossover).")] = None,
    pairs: Annotated[int | None, typer.Option(help="Number of pairs (design parallel).")] = None,
    control_pairs: Annotated[int | None, typer.Option(help="Number of pairs of two baseline trials.")] = None,
    variants: Annotated[str, typer.Option(help="Variants, separated by commas.")] = "baseline,enabled",
    settings: Settings = None,
    vime_src: VimeSource = None,
    megatron_src: MegatronSource = None,
    rl_kernel_src: RlKernelSource = None,
    max_job_time: Annotated[
        str | None, typer.Option(metavar="TIME", help="Slurm: longest time of one job, such as 4h.")
    ] = None,
    is_dry_run: Annotated[bool, typer.Option("--dry-run", help="Show plan and job; send nothing.")] = False,
    is_job_shown: Annotated[bool, typer.Option("--show-job", help="With --dry-run: print the job's files.")] = False,
    is_waiting: Annotated[bool, typer.Option("--wait", help="Wait for the run's end and its result.")] = False,
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
        )
        prepared = planning.prepare(request)
    use_sources(vime_src, megatron_src, rl_kernel_src, cluster=prepared.plan.cluster)
    if not as_json:
        for remark in prepared.remarks:
            note(remark)
        note_switches()
        if prepared.is_proposed:
            _offer_to_save(prepared)
    if is_dry_run:
        show_dry_run(prepared.plan, prepared.job, is_job_shown=is_job_shown, as_json=as_json)
        return
    _send(prepared, is_waiting=is_waiting, as_json=as_json)


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


def _send(prepared: Prepared, *, is_waiting: bool, as_json: bool) -> None:
    from rlk_repro.submit import sending

    require_sources(prepared.plan)
    launched = sending.submit(prepared)
    if not is_waiting:
        _show_submitted(prepared.plan, launched, as_json=as_json)
        return
    tell = silence if as_json else note
    tell(f"run directory: {launched.run_dir.root}")
    sending.wait(launched, tell, is_quiet=as_json)
    _show_result(launched, as_json=as_json)


def _refuse_other_flags(context: typer.Context) -> None:
    """Refuse flags that would change a resumed run, which keeps its plan."""
    from rlk_repro.base.errors import Problem, SpecError

    what, expected = "cannot change a run that is resumed", "only --dry-run, --wait or --json"
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


def _show_submitted(plan: Plan, launched: Launched, *, as_json: bool) -> None:
    from rlk_repro.clusters.registry import get_backend
    from rlk_repro.submit.show import bound_line

    run_dir, submission = launched.run_dir, launched.submission
    if as_json:
        say_json({"id": run_dir.run_id, "run_dir": run_dir.root, "submission": submission})
        return
    say(f"submitted {run_dir.run_id} to {submission.cluster} as {submission.job_id}")
    say(f"run directory: {run_dir.root}")
    bound = get_backend(submission.cluster).find_bound(plan)
    if bound is not None:
        say(bound_line(plan, bound))
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
