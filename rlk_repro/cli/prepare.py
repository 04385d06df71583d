"""Define ``prepare``: put a run's model, data and stored rollouts where its trials look for them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from rlk_repro.cli.commands import HardwareName, PinsName, RunName, Settings, complete_profile
from rlk_repro.cli.output import AsJson, say, say_json

if TYPE_CHECKING:
    from rlk_repro.prepare.steps import Done, PrepareRequest, PrepareStep
    from rlk_repro.spec import Profile, Run


_NOTHING: Final = "nothing to prepare: the workload makes everything itself"


def prepare(
    name: RunName,
    hardware: HardwareName = None,
    profile: Annotated[
        str | None, typer.Option(help="Site profile that names the target folder.", autocompletion=complete_profile)
    ] = None,
    cluster: Annotated[str | None, typer.Option(help="Cluster of the profile.", show_default="local")] = None,
    stack: PinsName = None,
    settings: Settings = None,
    mirror: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Copy from this folder or hub cache first.")
    ] = None,
    cache: Annotated[Path | None, typer.Option(metavar="DIR", help="Target folder; default: the profile's.")] = None,
    is_offline: Annotated[bool, typer.Option("--offline", help="Do not use the network.")] = False,
    is_verifying: Annotated[bool, typer.Option("--verify", help="Hash existing files again.")] = False,
    is_dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what is missing and its size.")] = False,
    as_json: AsJson = False,
) -> None:
    """Fetch, make or convert what a run needs: model, data, stored rollouts."""
    from rlk_repro.base.console import live_line, silence
    from rlk_repro.prepare import steps as work
    from rlk_repro.prepare.layout import PreparedDir
    from rlk_repro.rundir.paths import RunDir, runs_root
    from rlk_repro.rundir.store import require_own_place
    from rlk_repro.spec.choices import find_rule_problems
    from rlk_repro.spec.load import load_hardware, load_run, load_stack, parse_overrides
    from rlk_repro.submit.site import resolve_profile
    from rlk_repro.workloads import WORKLOADS

    overrides = parse_overrides(settings or [])
    run = load_run(name, overrides).model
    site = resolve_profile(profile, cluster).model
    own = PreparedDir.of(site, RunDir(runs_root() / run.run / "any"))
    machine = load_hardware(_choose_hardware(run, site, hardware)).model
    request = work.PrepareRequest(
        run=run,
        stack=load_stack(stack or run.find_stack(machine.hardware)).model,
        hardware=machine,
        prepared=own if cache is None else PreparedDir(cache.absolute()),
        mirror=mirror,
        is_offline=is_offline,
    )
    require_own_place(request.prepared.root, "call this command in another folder, or give --cache DIR")
    steps = WORKLOADS[request.run.workload.kind].list_steps(request)
    if is_dry_run:
        _show_missing(steps, as_json=as_json)
        return
    with live_line() as live:
        tell = silence if as_json and not live.is_live else live.tell
        for problem in find_rule_problems(overrides):
            tell(f"{problem.where}: submit needs --exploratory for this setting, which {problem.what}")
        done = work.prepare(request, steps, tell, is_live=live.is_live)
        if is_verifying:
            work.verify(done, tell)
    _show(request, done, as_json=as_json)


def _show_missing(steps: list[PrepareStep], *, as_json: bool) -> None:
    from rlk_repro.prepare.steps import describe_steps

    if as_json:
        say_json([{"kind": step.kind, "folder": step.folder, "is_there": step.is_there} for step in steps])
        return
    for line in describe_steps(steps):
        say(line)
    if not steps:
        say(_NOTHING)


def _choose_hardware(run: Run, site: Profile, hardware: str | None) -> str:
    from rlk_repro.base.errors import Problem, SpecError

    known = sorted(run.layouts)
    menu = f"one of {', '.join(known)}"
    name = hardware or site.hardware or (known[0] if len(known) == 1 else None)
    if name is None:
        raise SpecError(Problem("--hardware", "missing; the profile names no hardware", expected=menu))
    if name not in run.layouts:
        hint = None if hardware else f"the profile says {name}; name the nodes' hardware: --hardware {known[0]}"
        what = f"run {run.run} has no layout for this hardware"
        raise SpecError(Problem("--hardware", what, got=name, expected=menu, hint=hint))
    return name


def _show(request: PrepareRequest, done: list[Done], *, as_json: bool) -> None:
    unpinned = [item.unpinned for item in done if item.unpinned]
    if as_json:
        answer = {"run": request.run.run, "prepared_dir": request.prepared.root, "parts": done, "unpinned": unpinned}
        say_json(answer)
        return
    from rlk_repro.base.units import format_bytes

    for item in done:
        contents = item.contents
        say(f"{contents.kind:<10} {item.step.folder}  {len(contents.files)} files, "
            f"{format_bytes(contents.size_bytes)}, digest {contents.digest[:12]}")  # fmt: skip
    if not done:
        say(_NOTHING)
    for pin in unpinned:
        say(f"not pinned: the hub served {pin['revision']}; review this revision, then write it to {pin['path']}")
