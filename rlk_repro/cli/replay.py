"""``replay``: verify, analyse again, show drift, run the same experiment here, compare."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlk_repro.cli.output import AsJson, note, say, say_findings, say_json
from rlk_repro.cli.submit import ClusterName


def register(app: typer.Typer) -> None:
    app.command("replay")(replay)


def replay(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A bundle.tgz or a sealed run directory.")],
    is_analyze_only: Annotated[bool, typer.Option("--analyze-only", help="Stop after the re-analysis.")] = False,
    is_dry_run: Annotated[bool, typer.Option("--dry-run", help="Show drift and the job; send nothing.")] = False,
    cluster: Annotated[ClusterName | None, typer.Option(help="Where to run; default as recorded.")] = None,
    profile: Annotated[str | None, typer.Option(help="Site profile; default as recorded.")] = None,
    is_accepted: Annotated[bool, typer.Option("--yes", help="Go on in spite of blocking drift.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check a bundle, repeat its analysis, run the same experiment again and compare."""
    from rlk_repro import replay as steps

    recorded = steps.reanalyse(bundle)
    if is_analyze_only:
        if as_json:
            say_json({"level": "re-analysis", "is_ok": True, "bundle_id": recorded.bundle_id})
        else:
            say(f"{bundle}: the analysis is reproduced byte for byte from its logs (level: re-analysis, exact)")
            say(recorded.analysis.verdict.headline)
        return
    prepared = steps.prepare(recorded, cluster=None if cluster is None else cluster.value, profile=profile)
    if not as_json:
        say("analysis reproduced byte for byte; drift of this machine against the recorded one:")
        say_findings(prepared.drift)
        if not prepared.drift:
            say("  none")
    if is_dry_run:
        from rlk_repro.cli.submit import show_dry_run

        show_dry_run(prepared.launch.plan, prepared.launch.job, prepared.launch.run_dir, as_json=as_json)
        return
    steps.check_drift(prepared.drift, is_accepted=is_accepted)
    comparison = steps.run(prepared, note)
    if as_json:
        say_json(comparison.to_json())
    else:
        for line in comparison.lines():
            say(line)
    if not comparison.is_ok:
        raise typer.Exit(1)
