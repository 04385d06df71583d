"""``bench module`` and ``bench operators``: runs of the lower tiers on this machine, on checkouts that it names.

Each is an ordinary run; ``submit`` takes the same run files, on any cluster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from rlk_repro.cli.output import AsJson
from rlk_repro.cli.sources import MegatronSource, RlKernelSource, VimeSource, use_sources
from rlk_repro.cli.submit import send

if TYPE_CHECKING:
    from rlk_repro.submit.planning import Prepared, Request

RunName: TypeAlias = Annotated[str, typer.Option("--run", help="Run definition: a name from `runs list`, or a file.")]
HardwareName: TypeAlias = Annotated[str | None, typer.Option("--hardware", help="Hardware; default from the profile.")]
ProfileName: TypeAlias = Annotated[str | None, typer.Option("--profile", help="Profile of this machine.")]
StackName: TypeAlias = Annotated[
    str | None, typer.Option("--stack", help="Set of pins; default from the run. host: whatever is there.")
]
Pairs: TypeAlias = Annotated[int | None, typer.Option("--pairs", help="Pairs of baseline and enabled.")]
ControlPairs: TypeAlias = Annotated[int | None, typer.Option("--control-pairs", help="Pairs of baseline and baseline.")]
Settings: TypeAlias = Annotated[
    list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Change a value of the run; repeatable.")
]
IsDryRun: TypeAlias = Annotated[bool, typer.Option("--dry-run", help="Show plan and job; run nothing.")]
IsWaiting: TypeAlias = Annotated[bool, typer.Option("--wait/--no-wait", help="Stay until it is sealed.")]
IsExploratory: TypeAlias = Annotated[
    bool, typer.Option("--exploratory", help="Allow changed measurement rules; the verdict says so.")
]


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="The lower tiers, on this machine: vime's loss, or operators alone.", no_args_is_help=True)
    group.command("module")(module)
    group.command("operators")(operators)
    app.add_typer(group, name="bench")


def module(
    run: RunName = "module-smoke",
    vime_src: VimeSource = None,
    megatron_src: MegatronSource = None,
    rl_kernel_src: RlKernelSource = None,
    hardware: HardwareName = None,
    profile: ProfileName = None,
    stack: StackName = None,
    pairs: Pairs = None,
    control_pairs: ControlPairs = None,
    settings: Settings = None,
    is_dry_run: IsDryRun = False,
    is_waiting: IsWaiting = True,
    is_exploratory: IsExploratory = False,
    as_json: AsJson = False,
) -> None:
    """Measure vime's own loss functions on random batches, RL-Kernel off and on."""
    from rlk_repro.submit.planning import LOCAL, Request

    use_sources(vime_src, megatron_src, rl_kernel_src, cluster=LOCAL)
    request = Request(
        run=run,
        hardware=hardware,
        profile=profile,
        stack=stack,
        pairs=pairs,
        control_pairs=control_pairs,
        settings=tuple(settings or ()),
        is_exploratory=is_exploratory,
    )
    send(_prepare(request, "module"), is_dry_run=is_dry_run, is_waiting=is_waiting, as_json=as_json)


def operators(
    run: RunName = "operators-smoke",
    vime_src: VimeSource = None,
    megatron_src: MegatronSource = None,
    rl_kernel_src: RlKernelSource = None,
    hardware: HardwareName = None,
    profile: ProfileName = None,
    stack: StackName = None,
    control_pairs: ControlPairs = None,
    settings: Settings = None,
    is_dry_run: IsDryRun = False,
    is_waiting: IsWaiting = True,
    is_exploratory: IsExploratory = False,
    as_json: AsJson = False,
) -> None:
    """Measure operators alone, shape by shape and implementation by implementation."""
    from rlk_repro.submit.planning import LOCAL, Request

    use_sources(vime_src, megatron_src, rl_kernel_src, cluster=LOCAL)
    request = Request(
        run=run,
        hardware=hardware,
        profile=profile,
        stack=stack,
        control_pairs=control_pairs,
        settings=tuple(settings or ()),
        is_exploratory=is_exploratory,
    )
    send(_prepare(request, "operators"), is_dry_run=is_dry_run, is_waiting=is_waiting, as_json=as_json)


def _prepare(request: Request, kind: str) -> Prepared:
    from rlk_repro.base.errors import Problem, SpecError
    from rlk_repro.submit import planning

    prepared = planning.prepare(request)
    found = prepared.plan.run.workload.kind
    if found != kind:
        raise SpecError(
            Problem("--run", f"is no run of the {kind} tier", got=f"{request.run} ({found})", expected=f"kind {kind}",
                    hint=f"rlk-repro submit --run {request.run}")
        )  # fmt: skip
    return prepared
