"""Define ``status``, ``logs``, ``cancel`` and ``collect``: show, read, stop and fetch a submitted run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from rlk_repro.base.console import silence
from rlk_repro.cli.commands import as_typed, complete_id
from rlk_repro.cli.output import AsJson, note, say, say_answer, say_json, say_text

if TYPE_CHECKING:
    from rlk_repro.clusters.api import JobState
    from rlk_repro.rundir.paths import RunDir
    from rlk_repro.rundir.state import Progress

RunId = Annotated[
    str | None,
    typer.Argument(
        metavar="[ID]", help="Run id, its beginning, or a path; default: the newest.", autocompletion=complete_id
    ),
]


STAGED: Final = "staged but not submitted"
NOT_OURS: Final = "was not submitted by you, so only the run's files were read, not the cluster"


def status(
    run_id: RunId = None,
    is_watching: Annotated[bool, typer.Option("--watch", help="Wait until the run ends.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the state of a submitted run."""
    from rlk_repro.clusters.api import JobState
    from rlk_repro.clusters.asking import NO_REPORT, find_next_step
    from rlk_repro.rundir.state import Phase, read_state
    from rlk_repro.rundir.store import find_run_dir
    from rlk_repro.submit import finishing, sending
    from rlk_repro.submit.sending import drop_forecast, render_progress

    run_dir = find_run_dir(run_id)
    submission = sending.load_submission(run_dir)
    unasked = STAGED if sending.is_own(run_dir) else NOT_OURS
    answer = None
    if submission is not None:
        launched = sending.Launched(run_dir=run_dir, submission=submission)
        if is_watching:
            sending.wait(launched, silence if as_json else note, is_quiet=as_json)
        answer = sending.poll(launched)
    state = None if answer is None else answer.state
    # While a requeued run waits, its recorded progress still describes the earlier attempt.
    progress = None if state is JobState.PENDING else read_state(run_dir)
    is_over = state is not None and state.is_final
    if is_over and progress is not None:
        # A DONE job has been through phase ENDED; if its recorded progress shows another phase, the record is outdated.
        is_outdated = state is JobState.DONE and progress.phase is not Phase.ENDED
        progress = None if is_outdated else drop_forecast(progress)
    if as_json:
        say_json(
            {
                "id": run_dir.run_id,
                "state": None if state is None else state.value,
                "reason": unasked if answer is None else answer.reason,
                "is_sealed": run_dir.is_sealed,
                "progress": progress,
            }
        )
        return
    if answer is None:
        say(f"{run_dir.run_id}: {unasked}")
        return
    say(f"{run_dir.run_id}: {answer.state}{f' ({answer.reason})' if answer.reason else ''}")
    if progress is not None:
        say(f"  {'ended in ' if is_over and progress.phase is not Phase.ENDED else ''}{render_progress(progress)}")
    if answer.state is not JobState.DONE and (step := find_next_step(answer.reason)):
        say(as_typed(f"  next: {step}"))
    is_begun = NO_REPORT not in answer.reason or run_dir.agent_log.is_file()
    if is_over and (advice := _advise(run_dir, answer.state, progress, is_begun=is_begun)):
        say(as_typed(f"  hint: {advice}"))
        if answer.state is not JobState.DONE and is_begun:
            say(as_typed(f"  the agent's log: {finishing.find_agent_log(run_dir)}"))
    say(f"  {'sealed' if run_dir.is_sealed else 'not sealed'} · {run_dir.root}")


def _advise(run_dir: RunDir, job: JobState, progress: Progress | None, *, is_begun: bool = True) -> str:
    from rlk_repro.clusters.api import JobState
    from rlk_repro.submit import finishing

    if not finishing.is_worth_resuming(run_dir, progress):
        return ""
    if job is JobState.DONE:
        return f"the bundle is not on this machine yet; fetch it with rlk-repro collect {run_dir.run_id}"
    if job is JobState.FAILED and finishing.is_uncollected(run_dir, progress):
        collect_first = f"fetch the run's files with rlk-repro collect {run_dir.run_id}"
        return f"nothing was collected yet; {collect_first}, then rlk-repro submit --resume {run_dir.run_id}"
    end = "was cancelled" if job is JobState.CANCELLED else "was killed from outside" if is_begun else "never began"
    return f"the run {end}; resume with rlk-repro submit --resume {run_dir.run_id}"


def logs(
    run_id: RunId = None,
    is_following: Annotated[bool, typer.Option("-f", "--follow", help="Print new lines until the run ends.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each line as a JSON object that names its trial.")
    ] = False,
) -> None:
    """Print the logs of a run's trials in the order of the trials."""
    from rlk_repro.base.files import dump_json_line
    from rlk_repro.clusters.registry import get_backend
    from rlk_repro.clusters.triallogs import read_logs
    from rlk_repro.rundir.state import read_state
    from rlk_repro.rundir.store import find_run_dir
    from rlk_repro.submit import sending

    run_dir = find_run_dir(run_id)
    submission = sending.load_submission(run_dir)
    if submission is not None:
        lines = get_backend(submission.cluster).logs(submission, run_dir, is_following=is_following)
    else:
        note(f"{run_dir.run_id}: {STAGED if sending.is_own(run_dir) else NOT_OURS}")
        lines = read_logs(run_dir, lambda: True)
    trial = ""
    for line in lines:
        if as_json:
            say(dump_json_line({"trial": line.trial, "line": line.text}))
            continue
        if line.trial != trial:
            trial = line.trial
            say(f"==> {trial} <==")
        say_text(line.text)
    if submission is not None and not run_dir.is_sealed:
        answer = sending.poll(sending.Launched(run_dir=run_dir, submission=submission))
        if answer.state.is_final and (advice := _advise(run_dir, answer.state, read_state(run_dir))):
            note(f"{run_dir.run_id}: {advice}")


def cancel(run_id: RunId = None, as_json: AsJson = False) -> None:
    """Stop a submitted run; its finished trials stay, and `submit --resume` continues it."""
    from rlk_repro.clusters.registry import get_backend
    from rlk_repro.rundir.store import find_run_dir
    from rlk_repro.submit import sending

    run_dir = find_run_dir(run_id)
    sending.require_own(run_dir)
    submission = sending.load_submission(run_dir)
    is_stopping = submission is not None and get_backend(submission.cluster).cancel(submission, run_dir)
    found = {"id": run_dir.run_id, "is_submitted": submission is not None, "is_stopping": is_stopping}
    ended = STAGED if submission is None else "the run has already ended"
    told = "the run was asked to stop" if is_stopping else ended
    say_answer(found, f"{run_dir.run_id}: {told}", as_json=as_json)


def collect(run_id: RunId = None, as_json: AsJson = False) -> None:
    """Copy a run's bundle to this machine, if it is elsewhere, and print its path."""
    from rlk_repro.base.errors import CheckFailed, Problem
    from rlk_repro.clusters.registry import get_backend
    from rlk_repro.rundir.store import find_run_dir
    from rlk_repro.submit import sending

    run_dir = find_run_dir(run_id)
    sending.require_own(run_dir)
    submission = sending.load_submission(run_dir)
    if submission is None:
        raise CheckFailed(Problem(run_dir.run_id, "was never submitted", expected="a submitted run"))
    path = get_backend(submission.cluster).collect(submission, run_dir, silence if as_json else note)
    found = {"id": run_dir.run_id, "bundle": path, "is_sealed": run_dir.is_sealed}
    told = f"bundle: {path}{'' if run_dir.is_sealed else '  (not sealed: the run has not finished)'}"
    say_answer(found, told, as_json=as_json)
