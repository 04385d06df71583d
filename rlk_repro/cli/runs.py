"""``runs list`` and ``runs show``: the run definitions there are."""

from __future__ import annotations

from typing import Annotated

import typer

from rlk_repro.cli.output import AsJson, say, say_json


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Run definitions: list them, show one.", no_args_is_help=True)
    group.command("list")(list_runs)
    group.command("show")(show_run)
    app.add_typer(group, name="runs")


def list_runs(as_json: AsJson = False) -> None:
    """List the shipped run definitions."""
    from rlk_repro.resources import list_names, run_folders
    from rlk_repro.specfile import load_run

    models = [load_run(name, run_folders()).model for name in list_names(run_folders())]
    if as_json:
        say_json([{"run": run.run, "lane": run.lane, "workload": run.workload.kind, "purpose": run.purpose,
                   "hardware": sorted(run.layouts)} for run in models])  # fmt: skip
        return
    width = max(len(run.run) for run in models)
    for run in models:
        say(f"{run.run:<{width}} {run.workload.kind:<10} {run.lane:<14} {', '.join(sorted(run.layouts))}")
        say(f"{'':<{width}} {run.purpose}")


def show_run(
    name: Annotated[str, typer.Argument(metavar="RUN", help="A name from `runs list`, or a file.")],
    as_json: AsJson = False,
) -> None:
    """Show one run with every default filled in."""
    from rlk_repro.resources import find_yaml, run_folders
    from rlk_repro.specfile import load_run

    loaded = load_run(name, run_folders())
    value = loaded.model.model_dump(mode="json", by_alias=True)
    if as_json:
        say_json(value)
        return
    import yaml

    say(f"# {find_yaml('run', name, run_folders()).name}, defaults filled in")
    say(yaml.safe_dump(value, sort_keys=False, allow_unicode=True).rstrip("\n"))
