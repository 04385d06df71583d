"""Define ``doctor`` and ``profile init|show|check``: what this machine and a cluster can run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlk_repro.base.escapes import printable
from rlk_repro.cli.commands import as_typed, complete_profile, complete_run
from rlk_repro.cli.output import AsJson, note, say, say_findings, say_json, say_yaml

if TYPE_CHECKING:
    from rlk_repro.spec import Profile

Name = Annotated[str, typer.Argument(metavar="PROFILE", help="A name or a file.", autocompletion=complete_profile)]
Cluster = Annotated[str, typer.Option(help="local, slurm or k8s.")]


def init(
    cluster: Cluster = "slurm",
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="File to write; default: one in your own folder of profiles."
        ),
    ] = None,
    is_taking_likeliest: Annotated[
        bool, typer.Option("--yes", help="Take the most likely answers without asking.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a profile from what the cluster reports."""
    from rlk_repro.base.errors import CheckFailed, Problem
    from rlk_repro.base.files import write_text
    from rlk_repro.clusters.profiles import make_name, render_profile, take_likeliest
    from rlk_repro.clusters.registry import get_backend

    ask = take_likeliest if is_taking_likeliest or not sys.stdin.isatty() else _ask
    proposal, origin = get_backend(cluster).propose_profile(ask)
    if output is None:
        from rlk_repro.base.resources import user_profiles_dir

        output = user_profiles_dir() / f"{proposal.name}.yaml"
    else:
        # Commands find a profile by its file's name.
        proposal.values["profile"] = make_name(output.stem) if output.stem else proposal.name
    if output.exists():
        raise CheckFailed(Problem(str(output), "already exists", hint="name another file with -o, or remove it"))
    write_text(output, render_profile(proposal, origin))
    if as_json:
        say_json({"file": output, "profile": proposal.values, "remarks": proposal.remarks})
        return
    for remark in proposal.remarks:
        note(f"check: {remark}")
    say(f"wrote {output}")
    say(as_typed(f"next: rlk-repro profile check {output}"))


def _ask(question: str, choices: Sequence[str], likeliest: str) -> str:
    for number, choice in enumerate(choices, start=1):
        note(f"  {number}  {choice}")
    while True:
        answer = str(typer.prompt(printable(question), default=printable(likeliest), err=True)).strip()
        if answer in choices:
            return answer
        if answer.isdecimal() and 1 <= int(answer) <= len(choices):
            return choices[int(answer) - 1]


def show(
    name: Name,
    cluster: Annotated[str | None, typer.Option(help="slurm or k8s, where both have a profile of this name.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show a profile with all default values, and what each preflight check does on failure."""
    from rlk_repro.agent.preflight.checks import default_policies
    from rlk_repro.spec.values import EVERY_KEY

    profile = _load(name, cluster)
    value: dict[str, Any] = profile.model_dump(mode="json", by_alias=True, context=EVERY_KEY)
    value["preflight"]["policy"] = {**default_policies(), **value["preflight"]["policy"]}
    if as_json:
        say_json(value)
    else:
        say_yaml(profile.profile, value)


def _load(name: str, cluster: str | None) -> Profile:
    from rlk_repro.agent.preflight.checks import require_known
    from rlk_repro.base.resources import all_profile_folders, profile_folders
    from rlk_repro.clusters.registry import BACKENDS
    from rlk_repro.spec.load import load_profile

    folders = all_profile_folders() if cluster is None else profile_folders(cluster)
    profile = load_profile(name, folders, BACKENDS)
    require_known(profile)
    return profile.model


def check(
    name: Name,
    run: Annotated[
        str | None, typer.Option("--run", help="Check also what this run needs.", autocompletion=complete_run)
    ] = None,
    cluster: Annotated[str | None, typer.Option(help="slurm or k8s, where both have a profile of this name.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check a profile against this cluster without a job; print what would fail, and why."""
    from rlk_repro.base.findings import has_blocking
    from rlk_repro.base.units import count
    from rlk_repro.clusters.registry import get_backend
    from rlk_repro.submit import planning

    profile = _load(name, cluster)
    request = None if run is None else planning.Request(run=run, cluster=profile.cluster, profile=name)
    plan = None if request is None else planning.prepare(request).plan
    findings = get_backend(profile.cluster).check_profile(profile, plan)
    if as_json:
        say_json({"profile": profile.profile, "findings": findings})
    else:
        say(f"profile {profile.profile}: {count(len(findings), 'finding')}")
        say_findings(findings)
    if has_blocking(findings):
        raise typer.Exit(1)


def doctor(as_json: AsJson = False) -> None:
    """Check this machine, and show what would make a run fail."""
    from rlk_repro.cli.examination import examine
    from rlk_repro.clusters.local import guess_hardware
    from rlk_repro.clusters.registry import list_clients
    from rlk_repro.probes.node import probe_node
    from rlk_repro.rundir.paths import runs_root

    manifest = probe_node("here")
    entries = examine(manifest, guess_hardware(manifest), runs_root(), list_clients())
    if as_json:
        say_json({"checks": entries, "manifest": manifest.to_json()})
    else:
        for entry in entries:
            say(f"{entry.status:<5} {entry.name:<22} {entry.found}")
            if entry.advice:
                say(f"{'':<28} → {entry.advice}")
    if any(entry.status == "fail" for entry in entries):
        raise typer.Exit(1)
