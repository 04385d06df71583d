"""Read ``.state.json``, the progress of a run.  The file is not evidence: results come from logs."""

from __future__ import annotations

import dataclasses
import signal
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from rlk_repro.base.answer import Answer
from rlk_repro.base.errors import BundleUnreadable, code_after
from rlk_repro.base.files import load_json
from rlk_repro.rundir.paths import RunDir

SCHEMA: Final = 1

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
