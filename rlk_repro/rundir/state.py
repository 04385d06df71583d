"""Write and read ``.state.json``, a run's progress.  It is no evidence: results come from logs."""

from __future__ import annotations

import dataclasses
import re
import signal
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from rlk_repro.base.answer import Answer
from rlk_repro.base.errors import BundleUnreadable, code_after
from rlk_repro.base.files import load_json, write_json
from rlk_repro.base.units import utc_now
from rlk_repro.rundir.paths import RunDir

SCHEMA: Final = 1
MIN_INTERVAL_S: Final = 0.5

_STEP: Final = re.compile(
    rb" perf (\d{1,9}): \{[^\n]*'perf/step_time': (\d{1,16}(?:\.\d{1,20})?(?:[eE][+-]?\d{1,3})?)[,}]"
)

_INTERRUPTED: Final = frozenset({code_after(signal.SIGINT), code_after(signal.SIGTERM)})


class Phase(StrEnum):
    PREFLIGHT = "preflight"
    PREPARING = "preparing"
    TRIAL = "trial"
    ENDING = "ending"
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True)
class Progress(Answer):
    """``trial_index`` counts from 0, ``step`` is the last finished step, ``exit_code`` is None until the agent ends."""

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
    schema: int = SCHEMA

    @property
    def line(self) -> str:
        """The message on one line; an error with several problems or a hint has several lines."""
        return "; ".join(line.strip() for line in self.message.splitlines())

    @property
    def is_interrupted(self) -> bool:
        return self.exit_code in _INTERRUPTED

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Progress:
        known = {field.name for field in dataclasses.fields(cls)}
        fields = {name: item for name, item in value.items() if name in known}
        return cls(**fields | {"phase": Phase(value["phase"])})


def read_state(run_dir: RunDir) -> Progress | None:
    try:
        return Progress.from_json(load_json(run_dir.state, schema=SCHEMA))
    except (BundleUnreadable, KeyError, TypeError, ValueError):
        return None


def read_last_word(run_dir: RunDir) -> Progress:
    return read_state(run_dir) or Progress(phase=Phase.PREFLIGHT, num_trials=0, num_steps=0)


class ProgressWriter:
    """Writes ``.state.json`` at once for a new phase or trial, and at most twice a second for finished steps."""

    def __init__(self, run_dir: RunDir, num_trials: int, num_steps: int) -> None:
        self._run_dir = run_dir
        self._state = Progress(phase=Phase.PREFLIGHT, num_trials=num_trials, num_steps=num_steps)
        self._written = 0.0
        self._durations_s: list[float] = []
        self._num_left = num_trials

    def enter(self, phase: Phase, message: str = "") -> None:
        self._reset(phase=phase, message=message)

    def end(self, exit_code: int, message: str) -> None:
        self._reset(phase=Phase.ENDED, message=message, exit_code=exit_code)

    def begin_trial(self, name: str, index: int, num_left: int) -> None:
        """Begin a trial; ``num_left`` counts the trials that still have to run, including this one."""
        self._num_left = num_left
        self._reset(phase=Phase.TRIAL, trial=name, trial_index=index, eta_s=self._estimate_s(None, None))

    def end_trial(self, duration_s: float) -> None:
        self._durations_s.append(duration_s)

    def see_output(self, block: bytes) -> None:
        if b"'perf/step_time'" not in block:
            return
        found = list(_STEP.finditer(block))
        if found and time.monotonic() - self._written >= MIN_INTERVAL_S:
            step, step_time_s = int(found[-1][1]), float(found[-1][2])
            eta_s = self._estimate_s(step, step_time_s)
            self._write(dataclasses.replace(self._state, step=step, step_time_s=step_time_s, eta_s=eta_s))

    def _estimate_s(self, step: int | None, step_time_s: float | None) -> float | None:
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
