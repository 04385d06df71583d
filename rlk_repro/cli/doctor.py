"""Define ``doctor``: check this machine, and print each result as ok, warn or fail with a next step."""

from __future__ import annotations

import typer

from rlk_repro.cli.output import AsJson, say, say_json


def doctor(as_json: AsJson = False) -> None:
    """Check this machine, and show what would make a run fail."""
    from rlk_repro.agent.preflight.doctor import Diagnoses, diagnose, look_around
    from rlk_repro.clusters.local import guess_hardware
    from rlk_repro.clusters.registry import list_clients
    from rlk_repro.probes.node import probe_node
    from rlk_repro.rundir.paths import runs_root

    manifest = probe_node("here")
    checks = diagnose(manifest, look_around(runs_root(), list_clients()), guess_hardware(manifest))
    if as_json:
        say_json(Diagnoses(checks=tuple(checks), manifest=manifest.to_json()))
    else:
        for check in checks:
            say(f"{check.status:<5} {check.name:<22} {check.found}")
            if check.advice:
                say(f"{'':<28} → {check.advice}")
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(1)
