"""``status``, ``logs``, ``cancel``, ``collect``: what one asks of a submission."""

from __future__ import annotations

from typing import Annotated

import typer

from rlk_repro.cli.output import AsJson, note, say, say_json

RunId = Annotated[
    str | None, typer.Argument(metavar="[ID]", help="Run id, its beginning, or a path; newest if absent.")
]


def register(app: typer.Typer) -> None:
    app.command("status")(status)
    app.command("logs")(logs)
    app.command("cancel")(cancel)
    app.command("collect")(collect)


def status(
    run_id: RunId = None,
    is_watching: Annotated[bool, typer.Option("--watch", help="Stay until it ends.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say where a submission stands."""
    from rlk_repro import launch
    from rlk_repro.job.progress import read_state, render_progress
    from rlk_repro.store import find_run_dir

    run_dir = find_run_dir(run_id)
    submission = launch.load_submission(run_dir)
    if submission is None:
        say(f"{run_dir.run_id}: staged, never submitted")
        return
    launched = launch.Launched(run_dir=run_dir, submission=submission)
    if is_watching:
        launch.wait(launched, note)
    answer = launch.poll(launched)
    progress = read_state(run_dir)
    if as_json:
        say_json(
            {
                "id": run_dir.run_id,
                "state": answer.state.value,
                "reason": answer.reason,
                "is_sealed": run_dir.is_sealed,
                "progress": None if progress is None else progress.to_json(),
            }
        )
        return
    say(f"{run_dir.run_id}: {answer.state}{f' ({answer.reason})' if answer.reason else ''}")
    if progress is not None:
        say(f"  {render_progress(progress)}")
    say(f"  {'sealed' if run_dir.is_sealed else 'not sealed'} · {run_dir.root}")


def logs(
    run_id: RunId = None,
    is_following: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the run ends.")] = False,
) -> None:
    """Print the trials' logs in order."""
    from rlk_repro import launch
    from rlk_repro.backends import get_backend
    from rlk_repro.store import find_run_dir

    run_dir = find_run_dir(run_id)
    submission = launch.load_submission(run_dir)
    if submission is None:
        note(f"{run_dir.run_id}: staged, never submitted")
        return
    for line in get_backend(submission.cluster).logs(submission, run_dir, is_following=is_following):
        say(line)


def cancel(run_id: RunId = None, as_json: AsJson = False) -> None:
    """Stop a submission; what has run stays and can be collected and resumed."""
    from rlk_repro import launch
    from rlk_repro.backends import get_backend
    from rlk_repro.store import find_run_dir

    run_dir = find_run_dir(run_id)
    submission = launch.load_submission(run_dir)
    if submission is not None:
        get_backend(submission.cluster).cancel(submission)
    if as_json:
        say_json({"id": run_dir.run_id, "is_submitted": submission is not None})
        return
    say(f"{run_dir.run_id}: {'asked to stop' if submission is not None else 'was never submitted'}")


def collect(run_id: RunId = None, as_json: AsJson = False) -> None:
    """Bring the bundle here and say where it is."""
    from rlk_repro import launch
    from rlk_repro.backends import get_backend
    from rlk_repro.errors import CheckFailed, Problem
    from rlk_repro.store import find_run_dir

    run_dir = find_run_dir(run_id)
    submission = launch.load_submission(run_dir)
    if submission is None:
        raise CheckFailed(Problem(run_dir.run_id, "was never submitted", expected="something to collect"))
    path = get_backend(submission.cluster).collect(submission, run_dir)
    if as_json:
        say_json({"id": run_dir.run_id, "bundle": str(path), "is_sealed": run_dir.is_sealed})
        return
    say(f"bundle: {path}{'' if run_dir.is_sealed else '  (not sealed: the run has not finished)'}")
