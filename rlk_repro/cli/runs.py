"""Define ``list``, ``runs list`` and ``runs show``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from rlk_repro.cli.completion import FOLDERS, RunName
from rlk_repro.cli.output import AsJson, say, say_json, say_yaml

if TYPE_CHECKING:
    from rlk_repro.clusters.api import JobStatus
    from rlk_repro.rundir.paths import RunDir
    from rlk_repro.submit.sending import Launched

_SUBMITTED: Final = "{:<31} {:<22} {:<7} {:<10} {:<9} {}"


def list_kinds(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="[KIND]",
            help=f"{', '.join(FOLDERS)}; default: all kinds.",
            show_default=False,
            autocompletion=lambda: list(FOLDERS),
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """List the names of runs, hardware, stacks and profiles, and the file behind each name."""
    from rlk_repro.base.errors import Problem, SpecError
    from rlk_repro.base.resources import display_name, find_yaml, list_names, suggest

    if kind and kind not in FOLDERS:
        raise SpecError(
            Problem("KIND", "unknown", got=kind, expected=f"one of {', '.join(FOLDERS)}",
                    hint=suggest(kind, list(FOLDERS)) or "rlk-repro list")
        )  # fmt: skip
    kinds = [kind] if kind else list(FOLDERS)
    found = {
        name: {item: display_name(find_yaml(name, item, FOLDERS[name]())) for item in list_names(FOLDERS[name]())}
        for name in kinds
    }
    if as_json:
        say_json(found)
        return
    width = max((len(item) for files in found.values() for item in files), default=0)
    for name, files in found.items():
        say(f"{name}:")
        for item, file in files.items():
            say(f"  {item:<{width}}  {file}")


def list_runs(
    is_submitted: Annotated[
        bool, typer.Option("--submitted", help="List the submitted runs and their states.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the shipped run definitions, or the submitted runs."""
    if is_submitted:
        _list_submitted(as_json=as_json)
        return
    from rlk_repro.base.resources import list_names, run_folders
    from rlk_repro.spec.load import load_run

    models = [load_run(name).model for name in list_names(run_folders())]
    if as_json:
        say_json(
            [
                {
                    "run": run.run,
                    "lane": run.lane,
                    "workload": run.workload.kind,
                    "purpose": run.purpose,
                    "hardware": sorted(run.layouts),
                }
                for run in models
            ]
        )
        return
    width = max(len(run.run) for run in models)
    for run in models:
        say(f"{run.run:<{width}} {run.workload.kind:<10} {run.lane:<14} {', '.join(sorted(run.layouts))}")
        say(f"{'':<{width}} {run.purpose}")


def _list_submitted(*, as_json: bool) -> None:
    """List the submitted runs; ask each cluster once for all its submissions."""
    from rlk_repro.clusters.api import JobState
    from rlk_repro.rundir.state import read_state
    from rlk_repro.submit import sending
    from rlk_repro.submit.sending import render_progress

    launched = sending.list_launched()
    answers = sending.poll_all(launched)
    if as_json:
        say_json([_describe_submitted(item, answer) for item, answer in zip(launched, answers, strict=True)])
        return
    if launched:
        say(_SUBMITTED.format("id", "run", "cluster", "job", "state", "verdict, or progress"))
    for item, answer in zip(launched, answers, strict=True):
        is_running = not answer.state.is_final and answer.state is not JobState.PENDING
        progress = read_state(item.run_dir) if is_running else None
        more = [_read_verdict(item.run_dir), answer.reason, "" if progress is None else render_progress(progress)]
        text = " · ".join(part for part in more if part)
        sent, run = item.submission, item.run_dir.root.parent.name
        say(_SUBMITTED.format(item.run_dir.run_id, run, sent.cluster, sent.job_id, answer.state, text).rstrip())


def _describe_submitted(item: Launched, answer: JobStatus) -> dict[str, Any]:
    return {
        "id": item.run_dir.run_id,
        "cluster": item.submission.cluster,
        "job_id": item.submission.job_id,
        "state": answer.state.value,
        "reason": answer.reason,
        "nodes": answer.nodes,
        "is_sealed": item.run_dir.is_sealed,
    }


def _read_verdict(run_dir: RunDir) -> str:
    from rlk_repro.base.errors import BundleUnreadable
    from rlk_repro.base.files import MAX_ANALYSIS_BYTES, load_json
    from rlk_repro.rundir.results import Analysis

    try:
        found = load_json(run_dir.analysis, max_bytes=MAX_ANALYSIS_BYTES) if run_dir.is_sealed else None
        return "" if found is None else Analysis.from_json(found).verdict.word.value
    except BundleUnreadable:
        return ""


def show_run(name: RunName, as_json: AsJson = False) -> None:
    """Show one run, with default values for the keys that its file leaves out."""
    from rlk_repro.base.resources import find_yaml, run_folders
    from rlk_repro.spec.load import load_run
    from rlk_repro.spec.values import EVERY_KEY

    value = load_run(name).model.model_dump(mode="json", by_alias=True, context=EVERY_KEY)
    if as_json:
        say_json(value)
    else:
        say_yaml(find_yaml("run", name, run_folders()).name, value)
