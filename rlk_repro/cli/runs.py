"""Define ``list``, ``runs list`` and ``runs show``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from rlk_repro.base.units import count
from rlk_repro.cli.commands import FOLDERS, RunName
from rlk_repro.cli.output import AsJson, say, say_json, say_yaml

if TYPE_CHECKING:
    from rlk_repro.clusters.api import JobStatus
    from rlk_repro.rundir.paths import RunDir
    from rlk_repro.spec import Run
    from rlk_repro.submit.sending import Launched

_TRY: Final = "Try it, on any machine"
_RANDOM: Final = "A training step of vime, random weights, no download"
_WHOLE: Final = "A training step of vime, published models"
_LOSS: Final = "vime's loss functions alone"
_OPERATORS: Final = "Single operators"
_GROUPS: Final = (_TRY, _RANDOM, _WHOLE, _LOSS, _OPERATORS)
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
    from rlk_repro.base.resources import display_name, find_yaml, list_names, profile_folders, suggest

    if kind and kind not in FOLDERS:
        raise SpecError(
            Problem("KIND", "unknown", got=kind, expected=f"one of {', '.join(FOLDERS)}",
                    hint=suggest(kind, list(FOLDERS)) or "rlk-repro list")
        )  # fmt: skip
    kinds = [kind] if kind else list(FOLDERS)
    found: dict[str, dict[str, str]] = {}
    for name in kinds:
        folders = FOLDERS[name]()
        found[name] = {item: display_name(find_yaml(name, item, folders)) for item in list_names(folders)}
    if as_json:
        say_json(found)
        return
    width = max((len(item) for files in found.values() for item in files), default=0)
    for name, files in found.items():
        say(f"{name}:")
        for item, file in files.items():
            say(f"  {item:<{width}}  {file}")
        if name == "profiles":
            k8s = list_names(profile_folders("k8s")[1:])
            say(f"  with --cluster k8s also: {', '.join(k8s)}")


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
    for title in _GROUPS:
        say(f"{title}:")
        for run in models:
            if _find_group(run) == title:
                say(f"  {run.run:<26} {_describe_size(run):<18} {', '.join(sorted(run.layouts))}")
    say("rlk-repro runs show RUN prints one with its purpose")


def _find_group(run: Run) -> str:
    kind, source = run.workload.kind, getattr(getattr(run.workload, "model", None), "source", None)
    if kind == "reference":
        return _TRY
    if kind == "operators":
        return _OPERATORS
    if kind == "module":
        return _LOSS
    return _RANDOM if getattr(source, "kind", "") == "random" else _WHOLE


def _describe_size(run: Run) -> str:
    """Return the GPUs and the time on the run's first hardware that has an estimate, such as ``8 GPUs, 4.5 h``."""
    hardware = next((name for name in ("h200", *run.layouts) if name in run.expected_minutes), None)
    layout = run.layouts[hardware or next(iter(run.layouts))]
    num_gpus = layout.num_nodes * layout.gpus_per_node
    size = count(num_gpus, "GPU") if num_gpus else "CPU"
    if hardware is None:
        return size
    minutes = run.expected_minutes[hardware] * run.measure.num_trials
    return f"{size}, {minutes / 60:.1f} h" if minutes >= 60 else f"{size}, {max(1, round(minutes))} min"


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
    from rlk_repro.rundir.state import read_state

    return {
        "id": item.run_dir.run_id,
        "run": item.run_dir.root.parent.name,
        "verdict": _read_verdict(item.run_dir),
        "progress": read_state(item.run_dir),
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
