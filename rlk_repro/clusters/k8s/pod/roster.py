"""Make the roster, the list of a job's pods, from files that the pods write to their shared run directory.

Pods of earlier attempts leave files too.  Therefore each pod changes its file every second, and the leader counts only
files that change.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from rlk_repro.agent.lock import Listener
from rlk_repro.base.errors import BundleUnreadable
from rlk_repro.base.files import dump_json_line, load_json, parse_json, read_limited, write_json
from rlk_repro.clusters.k8s.pod.pulse import Pulse
from rlk_repro.rundir.paths import RunDir

SCHEMA: Final = 1
BEAT_S: Final = 1.0
SILENT_S: Final = 120.0
"""A pod that has not changed its file for so many seconds has ended without removing its file."""
MAX_SEAT_BYTES: Final = 1 << 16
_DIGITS: Final = re.compile(r"(\d+)")


@dataclass(frozen=True, kw_only=True)
class PodSeat:
    """One pod: its name, unique id and node; in a RayJob, ``group`` is the name of its Ray cluster, otherwise empty."""

    pod: str
    uid: str
    node: str
    group: str


@dataclass(frozen=True, kw_only=True)
class Roster:
    """The pods of a job: the leader's node comes first, the other nodes follow in natural order."""

    allocation: str
    nodes: tuple[str, ...]
    uids: tuple[str, ...]


def join(run_dir: RunDir, seat: PodSeat, wait: Callable[[float], bool], earlier: str = "") -> Roster | None:
    """Announce this pod until a roster names it.

    Return that roster, or None if this process is asked to stop or the run is complete.  This pod has already taken
    part in the allocation ``earlier``, so a roster of that allocation is ignored.
    """
    path = run_dir.pod_join(seat.pod)
    try:
        with Pulse(path, BEAT_S, dump_json_line({"schema": SCHEMA, **asdict(seat)})):
            while True:
                roster = read_roster(run_dir)
                if roster is not None and seat.uid in roster.uids and roster.allocation != earlier:
                    return roster
                if wait(BEAT_S) or run_dir.is_sealed:
                    return None
    finally:
        path.unlink(missing_ok=True)


class Gathering:
    """Counts, in the leading pod, the pods that announce themselves."""

    def __init__(self, run_dir: RunDir, leader: PodSeat, num_nodes: int, number: int = 0) -> None:
        """``number`` is how many rosters this leading pod has already written."""
        self._run_dir = run_dir
        self._leader = leader
        self._allocation = f"{leader.uid}.{number}" if number else leader.uid
        self._num_missing = num_nodes - 1
        self._pulses: dict[Path, Listener] = {}
        self._seats: list[PodSeat] = []

    @property
    def num_missing(self) -> int:
        return self._num_missing - len(self._seats)

    def look(self) -> Roster | None:
        """Write and return the roster if all pods are there; return None while pods are missing."""
        self._seats = [seat for path in self._run_dir.pod_joins() if (seat := self._see(path)) is not None]
        if self.num_missing > 0:
            return None
        seats = sorted(self._seats, key=lambda seat: _natural(seat.node))[: self._num_missing]
        roster = Roster(
            allocation=self._allocation,
            nodes=(self._leader.node, *(seat.node for seat in seats)),
            uids=(self._leader.uid, *(seat.uid for seat in seats)),
        )
        write_json(self._run_dir.roster, {"schema": SCHEMA, **asdict(roster)})
        return roster

    def _see(self, path: Path) -> PodSeat | None:
        """Return the pod that changes this file, or None if the file is of an earlier attempt or its pod is silent."""
        if path not in self._pulses:
            self._pulses[path] = Listener(path)
        silence_s = self._pulses[path].measure_silence_s()
        seat = _read_seat(path) if self._pulses[path].has_heard and silence_s < SILENT_S else None
        return seat if seat is not None and seat.group == self._leader.group else None


def read_roster(run_dir: RunDir) -> Roster | None:
    try:
        value = load_json(run_dir.roster, schema=SCHEMA)
        return Roster(allocation=value["allocation"], nodes=tuple(value["nodes"]), uids=tuple(value["uids"]))
    except (BundleUnreadable, KeyError, TypeError):
        return None


def _read_seat(path: Path) -> PodSeat | None:
    try:
        text = read_limited(path, MAX_SEAT_BYTES).partition(b"\n")[2]
        value = parse_json(str(path), text, schema=SCHEMA)
        return PodSeat(**{name: str(value[name]) for name in PodSeat.__dataclass_fields__})
    except (BundleUnreadable, KeyError):
        return None


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts ``node-2`` before ``node-10``."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _DIGITS.split(name)]
