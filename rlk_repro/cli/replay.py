"""``replay``: verify, analyse again, show drift, run the same experiment here, compare."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlk_repro.cli.output import AsJson, note, say, say_findings, say_json
from rlk_repro.cli.sources import MegatronSource, RlKernelSource, VimeSource, require_sources, use_sources
from rlk_repro.console import silence

if TYPE_CHECKING:
    from rlk_repro.replay import Prepared, Recorded


def register(app: typer.Typer) -> None:
    app.command("replay")(replay)


def replay(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A bundle.tgz or a sealed run directory.")],
    is_analyze_only: Annotated[bool, typer.Option("--analyze-only", help="Stop after the re-analysis.")] = False,
    is_dry_run: Annotated[bool, typer.Option("--dry-run", help="Show drift and the job; send nothing.")] = False,
    cluster: Annotated[str | None, typer.Option(help="Where to run; default as recorded.")] = None,
    profile: Annotated[str | None, typer.Option(help="Site profile; default as recorded.")] = None,
    is_on_same_nodes: Annotated[
        bool, typer.Option("--same-nodes", help="Ask the cluster for the recorded nodes, by name.")
    ] = False,
    vime_src: VimeSource = None,
    megatron_src: MegatronSource = None,
    rl_kernel_src: RlKernelSource = None,
    is_accepted: Annotated[bool, typer.Option("--yes", help="Go on in spite of blocking drift.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check a bundle, repeat its analysis, run the same experiment again and compare."""
    from rlk_repro import replay as steps

    recorded = steps.reanalyse(bundle)
    if is_analyze_only:
        if as_json:
            say_json(
                {
                    "level": "re-analysis",
                    "is_ok": True,
                    "is_reworded": recorded.is_reworded,
                    "bundle_id": recorded.bundle_id,
                }
            )
        else:
            say(
                f"{bundle}: the analysis is reproduced {_how_exact(recorded)} from its logs (level: re-analysis, exact)"
            )
            say(recorded.analysis.verdict.headline)
        return
    use_sources(vime_src, megatron_src, rl_kernel_src, cluster=steps.find_cluster(recorded, cluster, profile))
    prepared = steps.prepare(recorded, cluster=cluster, profile=profile, is_on_same_nodes=is_on_same_nodes)
    if is_dry_run:
        _show_dry_run(prepared, as_json=as_json)
        return
    require_sources(prepared.launch.plan, recorded.identity.sources)
    if not as_json:
        _say_drift(prepared)
    steps.check_drift(prepared.known_drift, is_accepted=is_accepted)
    comparison = steps.run(prepared, silence if as_json else note, is_quiet=as_json)
    if as_json:
        say_json(comparison.to_json())
    else:
        for line in comparison.lines():
            say(line)
    if not comparison.is_ok:
        raise typer.Exit(1)


def _how_exact(recorded: Recorded) -> str:
    return "value for value (its words are another version's)" if recorded.is_reworded else "byte for byte"


def _say_drift(prepared: Prepared) -> None:
    from rlk_repro.findings import Level

    say(f"analysis reproduced {_how_exact(prepared.recorded)} from the logs")
    if prepared.drift is None:
        say("how the nodes differ from the recorded ones is found by the run")
        return
    shown = [finding for finding in prepared.drift if finding.level is not Level.INFO]
    rest = f"{len(prepared.drift) - len(shown)} for information only (--dry-run --json lists them)"
    if not shown:
        say(f"this machine against the recorded one: no drift that matters, {rest}")
        return
    say(f"drift of this machine against the recorded one, and {rest}:")
    say_findings(shown)


def _show_dry_run(prepared: Prepared, *, as_json: bool) -> None:
    from rlk_repro.cli.submit import show_dry_run
    from rlk_repro.planview import dry_run_json

    plan, job, run_dir = prepared.launch.plan, prepared.launch.job, prepared.launch.run_dir
    if as_json:
        drift = None if prepared.drift is None else [finding.to_json() for finding in prepared.drift]
        parts = [finding.to_json() for finding in prepared.parts]
        say_json({**dry_run_json(plan, job), "drift": drift, "parts": parts, "replay_of": prepared.recorded.bundle_id})
        return
    _say_drift(prepared)
    show_dry_run(plan, job, run_dir, as_json=False)
