"""Send a job to its cluster: stage it, record it, ask for its state, show its progress until it ends."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rlk_repro.base.errors import CheckFailed, EnvironmentMissing, Problem
from rlk_repro.base.files import load_json, write_json
from rlk_repro.base.units import format_duration
from rlk_repro.clusters.api import JobState, JobStatus, Submission
from rlk_repro.clusters.asking import find_next_step
from rlk_repro.clusters.registry import get_backend
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.state import Progress, read_state
from rlk_repro.rundir.store import list_run_dirs, recall, remember
from rlk_repro.submit.stage import stage, stage_again

if TYPE_CHECKING:
    from rlk_repro.submit.planning import Prepared

LOOK_S: Final = 0.5
POLL_S: Final = 2.0
LINE_S: Final = 10.0
NUM_UNKNOWN: Final = 5


@dataclass(frozen=True, kw_only=True)
class Launched:
    run_dir: RunDir
    submission: Submission


def submit(prepared: Prepared, details: Iterable[tuple[str, str]] = ()) -> Launched:
    run_dir = prepared.run_dir
    backend = get_backend(prepared.plan.cluster)
    reason = backend.available()
    if reason is not None:
        raise EnvironmentMissing(Problem(prepared.plan.cluster, reason, hint="--dry-run works anywhere"))
    previous = load_submission(run_dir)
    if prepared.inputs is None:
        stage_again(run_dir, prepared.job)
    else:
        stage(prepared.plan, prepared.inputs, run_dir, prepared.job)
    submission = backend.submit(prepared.job, run_dir)
    kept = {} if previous is None else previous.details
    submission = dataclasses.replace(submission, details={**kept, **submission.details, **dict(details)})
    record_submission(run_dir, submission)
    return Launched(run_dir=run_dir, submission=submission)


def record_submission(run_dir: RunDir, submission: Submission) -> None:
    """Record a submission for this user's later commands, and in the run directory as evidence."""
    remember(run_dir, submission.to_json())
    write_json(run_dir.submission, submission.to_json())


def is_own(run_dir: RunDir) -> bool:
    """Tell whether this user staged the run directory; a directory unpacked from a bundle was not staged."""
    return recall(run_dir) is not None


def require_own(run_dir: RunDir) -> None:
    """Raise CheckFailed if this user did not submit the run, because commands must not touch other users' jobs."""
    if not is_own(run_dir):
        raise CheckFailed(
            Problem(run_dir.run_id, "was not submitted by you", expected="a run directory of your own submit or replay",
                    hint=f"rlk-repro replay {run_dir.root} runs the same experiment on your own site")
        )  # fmt: skip


def load_submission(run_dir: RunDir) -> Submission | None:
    """Return this user's submission, or None; raise CheckFailed if the run directory records another one."""
    own = recall(run_dir)
    if own is None or not run_dir.submission.is_file():
        return None
    told = Submission.from_json(load_json(run_dir.submission), str(run_dir.submission))
    sent = None if own["submission"] is None else Submission.from_json(own["submission"])
    if sent is None or (sent.cluster, sent.job_id) != (told.cluster, told.job_id):
        expected = "none" if sent is None else f"{sent.job_id} on {sent.cluster}"
        got = f"{told.job_id} on {told.cluster}"
        raise CheckFailed(
            Problem(str(run_dir.submission), "differs from what was submitted", got=got, expected=expected)
        )
    return sent


def poll(launched: Launched) -> JobStatus:
    return get_backend(launched.submission.cluster).poll(launched.submission, launched.run_dir)


def poll_all(launched: Sequence[Launched]) -> list[JobStatus]:
    """Ask for the states of many submissions, with one query per cluster if the cluster allows that."""
    found: dict[int, JobStatus] = {}
    for cluster in {item.submission.cluster for item in launched}:
        own = {number: item for number, item in enumerate(launched) if item.submission.cluster == cluster}
        answers = get_backend(cluster).poll_all([(item.submission, item.run_dir) for item in own.values()])
        found |= zip(own, answers, strict=True)
    return [found[number] for number in range(len(launched))]


def list_launched() -> list[Launched]:
    found = ((run_dir, load_submission(run_dir)) for run_dir in list_run_dirs())
    return [Launched(run_dir=run_dir, submission=item) for run_dir, item in found if item is not None]


def wait(launched: Launched, tell: Callable[[str], None], *, is_quiet: bool = False) -> None:
    """Wait until the submission ends, with live progress on a terminal; an interrupt leaves the job running."""
    from rlk_repro.base.console import live_line

    try:
        with live_line(is_quiet=is_quiet) as line:
            follow(launched.run_dir, lambda: poll(launched), line.tell, is_live=line.is_live)
    except KeyboardInterrupt:
        tell(f"the run continues; stop it with: rlk-repro cancel {launched.run_dir.run_id}")
        raise


def drop_forecast(state: Progress) -> Progress:
    """Drop step and times from an ended run's state; they are wrong if its agent was killed."""
    return dataclasses.replace(state, step=None, step_time_s=None, eta_s=None)


def render_progress(state: Progress) -> str:
    """Return one line such as ``trial 3/12 (02-p2-enabled) · step 7/12 · 0.41 s/step · about 2 min 05 s left``."""
    parts: list[str] = [state.phase.value]
    if state.trial is not None and state.trial_index is not None:
        parts = [f"trial {state.trial_index + 1}/{state.num_trials} ({state.trial})"]
        if state.step is not None:
            parts.append(f"step {state.step + 1}/{state.num_steps}")
        if state.step_time_s is not None:
            parts.append(f"{format_duration(state.step_time_s)}/step")
        if state.eta_s is not None:
            parts.append(f"about {format_duration(state.eta_s)} left")
    if state.message:
        parts.append(state.line)
    return " · ".join(parts)


def follow(
    run_dir: RunDir,
    ask: Callable[[], JobStatus],
    tell: Callable[[str], object],
    *,
    is_live: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> JobStatus:
    """Report progress until the submission ends, and return its last status.

    A submission whose state is unknown in five polls in a row counts as ended. ``tell`` gets a line of progress at each
    change of phase or trial, and otherwise at most one every ten seconds. With ``is_live``, ``tell`` gets every line.
    """
    told = _Told(tell, is_live=is_live)
    num_unknown = 0
    status, asked = ask(), time.monotonic()
    while True:
        state = read_state(run_dir)
        if not status.is_unreachable:
            num_unknown = num_unknown + 1 if status.state is JobState.UNKNOWN else 0
        is_over = status.state.is_final or num_unknown == NUM_UNKNOWN
        if is_over and state is not None:
            state = drop_forecast(state)
            if state.exit_code and not run_dir.is_sealed:  # the run's error will print this message
                state = dataclasses.replace(state, message="")
        told.see(state, status, is_last=is_over)
        if is_over:
            return status
        sleep(LOOK_S)
        has_ended = state is not None and state.exit_code is not None
        if has_ended or num_unknown or time.monotonic() - asked >= POLL_S:
            status, asked = ask(), time.monotonic()


class _Told:
    def __init__(self, tell: Callable[[str], object], *, is_live: bool) -> None:
        self._tell = tell
        self._is_live = is_live
        self._line = ""
        self._topic: tuple[object, ...] = ()
        self._moment = -LINE_S

    def see(self, state: Progress | None, status: JobStatus, *, is_last: bool) -> None:
        if state is None or status.state is JobState.PENDING:  # a pending job's state is from before a requeue
            line = f"{status.state.value} ({status.reason})" if status.reason else status.state.value
            step = find_next_step(status.reason)
            line += f"; next: {step}" if step else ""
            topic: tuple[object, ...] = (status.state, status.reason)
        else:
            line = " · ".join(part for part in (render_progress(state), status.nodes) if part)
            topic = (state.phase, state.trial, state.message)
        is_due = self._is_live or is_last or topic != self._topic or time.monotonic() - self._moment >= LINE_S
        if line != self._line and is_due:
            self._tell(line)
            self._line, self._topic, self._moment = line, topic, time.monotonic()
