"""Live progress: written by the leading agent into ``.state.json``, read by ``status`` and ``submit --wait``.

It is a convenience for people and no evidence; results come from the logs.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from rlk_repro.base.clock import utc_now
from rlk_repro.base.errors import BundleUnreadable
from rlk_repro.base.files import load_json, write_json
from rlk_repro.base.units import format_duration
from rlk_repro.clusters.api import JobState, JobStatus
from rlk_repro.rundir.paths import RunDir

SCHEMA: Final = 1
MIN_INTERVAL_S: Final = 0.5
POLL_S: Final = 2.0
LINE_S: Final = 10.0
NUM_UNKNOWN: Final = 5

_STEP: Final = re.compile(rb" perf (\d{1,9}): \{[^\n]*'perf/step_time': ([\d.eE+-]{1,32})[,}]")


class Phase(StrEnum):
    """What the leading agent is doing."""

    PREFLIGHT = "preflight"
    PREPARING = "preparing"
    TRIAL = "trial"
    ENDING = "ending"
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """``trial_index`` counts from 0, ``step`` is the last one finished; ``exit_code`` is the agent's, once it ended."""

    phase: Phase
    num_trials: int
    num_steps: int
    trial: str | None = None
    trial_index: int | None = None
    step: int | None = None
    step_time_s: float | None = None
    eta_s: float | None = None
    message: str = ""
    exit_code: int | None = None
    updated_at: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Progress:
        known = {field.name for field in dataclasses.fields(cls)}
        fields = {name: item for name, item in value.items() if name in known}
        return cls(**fields | {"phase": Phase(value["phase"])})


def drop_forecast(state: Progress) -> Progress:
    """What is still true of a state once the submission has ended: the agent may have died without a last word."""
    return dataclasses.replace(state, step=None, step_time_s=None, eta_s=None)


def read_state(run_dir: RunDir) -> Progress | None:
    """The last written state, or None where no agent has begun."""
    try:
        return Progress.from_json(load_json(run_dir.state, schema=SCHEMA))
    except (BundleUnreadable, KeyError, TypeError, ValueError):
        return None


def render_progress(state: Progress) -> str:
    """One line: ``trial 3/12 (02-p2-enabled) · step 7/12 · 0.41 s/step · about 2 min 05 s left``."""
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
        parts.append(state.message)
    return " · ".join(parts)


def follow(
    run_dir: RunDir,
    poll: Callable[[], JobStatus],
    tell: Callable[[str], object],
    *,
    is_live: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> JobStatus:
    """Tell progress until the submission ends; its last status.

    ``poll`` asks the cluster and is called every two seconds at most.  A submission that nobody knows, five times in a
    row, has ended too.  ``tell`` gets a line when phase or trial change and every ten seconds, or every change where
    ``is_live``.
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
            if state.exit_code and not run_dir.is_sealed:  # whoever waited is told why, and once is enough
                state = dataclasses.replace(state, message="")
        told.see(state, status, is_last=is_over)
        if is_over:
            return status
        sleep(MIN_INTERVAL_S)
        has_ended = state is not None and state.exit_code is not None
        if has_ended or num_unknown or time.monotonic() - asked >= POLL_S:
            status, asked = poll(), time.monotonic()


class _Told:
    """What was told already, so that a log does not fill with the same."""

    def __init__(self, tell: Callable[[str], object], *, is_live: bool) -> None:
        self._tell = tell
        self._is_live = is_live
        self._line = ""
        self._topic: tuple[object, ...] = ()
        self._moment = -LINE_S

    def see(self, state: Progress | None, status: JobStatus, *, is_last: bool) -> None:
        if state is None or status.state is JobState.PENDING:  # a requeued run waits with an earlier agent's state
            line = f"{status.state.value} ({status.reason})" if status.reason else status.state.value
            topic: tuple[object, ...] = (status.state, status.reason)
        else:
            line = " · ".join(part for part in (render_progress(state), status.nodes) if part)
            topic = (state.phase, state.trial, state.message)
        is_due = self._is_live or is_last or topic != self._topic or time.monotonic() - self._moment >= LINE_S
        if line != self._line and is_due:
            self._tell(line)
            self._line, self._topic, self._moment = line, topic, time.monotonic()


class ProgressWriter:
    """Keeps ``.state.json``: at once when the phase or trial changes, at most twice a second for steps."""

    def __init__(self, run_dir: RunDir, num_trials: int, num_steps: int) -> None:
        self._run_dir = run_dir
        self._state = Progress(phase=Phase.PREFLIGHT, num_trials=num_trials, num_steps=num_steps)
        self._written = 0.0
        self._durations_s: list[float] = []
        self._num_left = num_trials

    @property
    def trial(self) -> str | None:
        return self._state.trial

    def enter(self, phase: Phase, message: str = "") -> None:
        self._reset(phase=phase, message=message)

    def end(self, exit_code: int, message: str) -> None:
        self._reset(phase=Phase.ENDED, message=message, exit_code=exit_code)

    def begin_trial(self, name: str, index: int, num_left: int) -> None:
        """``num_left`` trials are still to be run, this one included."""
        self._num_left = num_left
        self._reset(phase=Phase.TRIAL, trial=name, trial_index=index, eta_s=self._estimate_s(None, None))

    def end_trial(self, duration_s: float) -> None:
        self._durations_s.append(duration_s)

    def see_output(self, block: bytes) -> None:
        """Look for finished steps in whole lines of the trainer's log."""
        if b"'perf/step_time'" not in block:
            return
        found = list(_STEP.finditer(block))
        if found and time.monotonic() - self._written >= MIN_INTERVAL_S:
            step, step_time_s = int(found[-1][1]), _to_float(found[-1][2])
            eta_s = self._estimate_s(step, step_time_s)
            self._write(dataclasses.replace(self._state, step=step, step_time_s=step_time_s, eta_s=eta_s))

    def _estimate_s(self, step: int | None, step_time_s: float | None) -> float | None:
        """From whole trials where some have ended, else from the last step."""
        num_steps = self._state.num_steps
        done = 0.0 if step is None else (step + 1) / num_steps
        if self._durations_s:
            return sum(self._durations_s) / len(self._durations_s) * (self._num_left - done)
        return None if step_time_s is None else step_time_s * num_steps * (self._num_left - done)

    def _reset(self, **changes: Any) -> None:
        state = self._state
        self._write(Progress(num_trials=state.num_trials, num_steps=state.num_steps, **changes))

    def _write(self, state: Progress) -> None:
        self._state = dataclasses.replace(state, updated_at=utc_now())
        self._written = time.monotonic()
        write_json(self._run_dir.state, self._state.to_json(), is_durable=False)


def _to_float(text: bytes) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
