"""Show the progress of a submission until it ends."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Final

from rlk_repro.base.units import format_duration
from rlk_repro.clusters.api import JobState, JobStatus
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.state import Progress, read_state

LOOK_S: Final = 0.5
POLL_S: Final = 2.0
LINE_S: Final = 10.0
NUM_UNKNOWN: Final = 5


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
    poll: Callable[[], JobStatus],
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
    status, asked = poll(), time.monotonic()
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
            status, asked = poll(), time.monotonic()


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
            topic: tuple[object, ...] = (status.state, status.reason)
        else:
            line = " · ".join(part for part in (render_progress(state), status.nodes) if part)
            topic = (state.phase, state.trial, state.message)
        is_due = self._is_live or is_last or topic != self._topic or time.monotonic() - self._moment >= LINE_S
        if line != self._line and is_due:
            self._tell(line)
            self._line, self._topic, self._moment = line, topic, time.monotonic()
