"""Define the options that name checkouts of vime, Megatron-LM and RL-Kernel, and use these checkouts.

Checkouts are used on the local cluster only, where the job is a child of this process.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

if TYPE_CHECKING:
    from rlk_repro.plan import Plan
    from rlk_repro.sources import CodeSource

VimeSource: TypeAlias = Annotated[Path | None, typer.Option("--vime-src", help="vime checkout; default: VIME_SRC.")]
MegatronSource: TypeAlias = Annotated[
    Path | None,
    typer.Option("--megatron-src", help="Megatron-LM checkout; default: MEGATRON_SRC."),
]
RlKernelSource: TypeAlias = Annotated[
    Path | None, typer.Option("--rl-kernel-src", help="RL-Kernel checkout; default: RLK_SRC.")
]


def use_sources(vime: Path | None, megatron: Path | None, rl_kernel: Path | None, *, cluster: str) -> None:
    """Put the named checkouts on the PYTHONPATH of every process that this process starts.

    Raises:
        SpecError: a folder lacks its package, or an option is given for a cluster that is not local.
    """
    from rlk_repro.base.errors import Problem, SpecError
    from rlk_repro.sources import MEGATRON, RL_KERNEL, VIME
    from rlk_repro.submit.site import LOCAL
    from rlk_repro.workloads.checkouts import FLAGS, use_checkouts

    given = {VIME: vime, MEGATRON: megatron, RL_KERNEL: rl_kernel}
    if cluster == LOCAL:
        named = {source: folder or _read_variable(source) for source, folder in given.items()}
        use_checkouts({source: folder for source, folder in named.items() if folder is not None})
        return
    problems = [
        Problem(FLAGS[source], "works on the local cluster only", got=cluster, expected="--cluster local",
                hint="set the paths in the profile: env: {PYTHONPATH: /shared/vime:/shared/Megatron-LM}")
        for source, folder in given.items()
        if folder is not None
    ]  # fmt: skip
    if problems:
        raise SpecError(*problems)


def _read_variable(source: CodeSource) -> Path | None:
    value = os.environ.get(source.variable)
    return Path(value) if value else None


def require_sources(plan: Plan, also: Iterable[str] = ()) -> None:
    """Refuse to start if the trainer's packages or the modules in ``also`` cannot be found.

    Raises:
        SpecError: the profile's PYTHONPATH hides the checkouts.
    """
    from rlk_repro.base.errors import Problem, SpecError
    from rlk_repro.sources import RL_KERNEL
    from rlk_repro.submit.consent import find_shipped_pins
    from rlk_repro.submit.site import LOCAL
    from rlk_repro.workloads.checkouts import FLAGS, find_given, find_missing_commits, require_importable
    from rlk_repro.workloads.environment import profile_env

    if plan.cluster != LOCAL:
        return
    path = profile_env(plan)[0].get("PYTHONPATH")
    hidden = find_given() if "PYTHONPATH" in plan.profile.env else []
    if hidden:
        where = f"profile {plan.profile.profile}: env.PYTHONPATH"
        raise SpecError(
            *(Problem(where, f"hides {FLAGS[source]}", expected=f"either env.PYTHONPATH or {source.variable}, not both")
              for source in hidden)
        )  # fmt: skip
    own = set() if plan.run.rl_kernel.commits is None else {RL_KERNEL.module}
    needed = {*plan.run.workload.modules, *also} - own
    require_importable(
        *(source for source in FLAGS if source.module in needed),
        path=path,
        pins=find_shipped_pins(plan.stack),
        commits=find_missing_commits(plan),
    )


def note_switches() -> None:
    from rlk_repro.cli.output import note
    from rlk_repro.workloads.environment import SWITCHES

    for name, setting in SWITCHES.items():
        value = os.environ.get(name)
        if value:
            note(f"{name}={value} is set in this shell but has no effect; use {setting}")
