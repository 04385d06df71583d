"""Define ``doctor``: tell what this machine can run, and print preflight's findings, each with a next step."""

from __future__ import annotations

import typer

from rlk_repro.cli.output import AsJson, say, say_json


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
