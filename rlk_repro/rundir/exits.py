"""Read from ``exit.json`` how a trial ended."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from rlk_repro.base.errors import BundleUnreadable
from rlk_repro.base.files import load_json
from rlk_repro.base.units import parse_utc
from rlk_repro.rundir.paths import TrialDir
from rlk_repro.rundir.results import TrialStatus

EXIT_SCHEMA: Final = 1
HOST_MEMORY: Final = "host memory ran out"
OTHER_DEVICE: Final = "device memory of"
NO_LIMIT: Final = (HOST_MEMORY, OTHER_DEVICE)
"""How the reason of a trial begins that ran out of memory, but not out of its trainer's on the GPU."""


@dataclass(frozen=True, kw_only=True)
class ExitRecord:
    """How and when a trial ended; times are Unix seconds, or None if they cannot be read."""

    status: TrialStatus
    reason: str = ""
    duration_s: float | None = None
    allocation: str = ""
    begin_s: float | None = None
    end_s: float | None = None


def read_exit(folder: TrialDir) -> ExitRecord:
    """Read the exit record; a trial without a readable record was interrupted or never began."""
    if not folder.path.is_dir():
        return ExitRecord(status=TrialStatus.MISSING, reason="never started")
    if not folder.exit.is_file():
        reason = "no exit record: the agent or the machine was lost"
        return ExitRecord(status=TrialStatus.INTERRUPTED, reason=reason)
    try:
        value: Any = load_json(folder.exit, schema=EXIT_SCHEMA)
        return ExitRecord(
            status=TrialStatus(value["status"]),
            reason=str(value.get("reason") or ""),
            duration_s=_read_duration(value.get("duration_s")),
            allocation=allocation if isinstance(allocation := value.get("allocation"), str) else "",
            begin_s=_read_time(value.get("started_at")),
            end_s=_read_time(value.get("ended_at")),
        )
    except (BundleUnreadable, KeyError, TypeError, ValueError, OverflowError) as error:
        return ExitRecord(status=TrialStatus.INTERRUPTED, reason=f"exit record unreadable ({error})")


def _read_duration(value: Any) -> float | None:
    if value is None:
        return None
    duration_s = float(value)
    if not 0 < duration_s < math.inf:
        raise ValueError(f"duration_s {duration_s:g} is not a positive time")
    return duration_s


def _read_time(value: Any) -> float | None:
    try:
        return parse_utc(value) if isinstance(value, str) else None
    except ValueError:
        return None
