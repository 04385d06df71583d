"""How the pods of one job find each other: by files in the run directory, which all of them see.

A pod's name is not known before it runs, and an earlier attempt leaves files of its own.  So a pod that wants to take
part keeps changing its file, the leader counts those that change, and a follower believes only a roster that holds the
unique id of its own pod.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rlk_repro.base.errors import BundleUnreadable
from rlk_repro.base.files import load_json, write_json
from rlk_repro.rundir.paths import RunDir

SCHEMA: Final = 1
BEAT_S: Final = 1.0
_DIGITS: Final = re.compile(r"(\d+)")


@dataclass(frozen=True, kw_only=True)
class PodSeat:
    """One pod: its unique id, its node, and the group that only pods of the same attempt share."""

    pod: str
    uid: str
    node: str
    group: str


@dataclass(frozen=True, kw_only=True)
class Roster:
    """Who takes part.  The leader's node comes first, the others in their natural order."""

    allocation: str
    nodes: tuple[str, ...]
    uids: tuple[str, ...]


def join(run_dir: RunDir, seat: PodSeat, wait: Callable[[float], bool]) -> Roster | None:
    """Ask to take part until a roster names this pod; None when asked to stop."""
    beat = 0
    try:
        while True:
            beat += 1
            with contextlib.suppress(OSError):  # the leader may not have made the folder yet
                _write_join(run_dir, seat, beat)
            roster = read_roster(run_dir)
            if roster is not None and seat.uid in roster.uids:
                return roster
            if wait(BEAT_S):
                return None
    finally:
        run_dir.pod_join(seat.pod).unlink(missing_ok=True)


class Gathering:
    """The leader's side: counts the pods that keep asking."""

    def __init__(self, run_dir: RunDir, leader: PodSeat, num_nodes: int) -> None:
        self._run_dir = run_dir
        self._leader = leader
        self._num_missing = num_nodes - 1
        self._beats: dict[str, int] = {}
        self._seats: dict[str, PodSeat] = {}

    @property
    def num_missing(self) -> int:
        return self._num_missing - len(self._seats)

    def look(self) -> Roster | None:
        """The roster, written, once everybody is there."""
        for path in self._run_dir.pod_joins():
            self._see(_read(path))
        if self.num_missing > 0:
            return None
        seats = sorted(self._seats.values(), key=lambda seat: _natural(seat.node))[: self._num_missing]
        roster = Roster(
            allocation=self._leader.uid,
            nodes=(self._leader.node, *(seat.node for seat in seats)),
            uids=(self._leader.uid, *(seat.uid for seat in seats)),
        )
        write_json(self._run_dir.roster, {"schema": SCHEMA, "allocation": roster.allocation,
                                          "nodes": list(roster.nodes), "uids": list(roster.uids)})  # fmt: skip
        return roster

    def _see(self, value: Mapping[str, Any] | None) -> None:
        if value is None or value.get("group") != self._leader.group:
            return
        uid, beat = str(value.get("uid")), value.get("beat")
        if isinstance(beat, int) and self._beats.setdefault(uid, beat) != beat:
            self._seats[uid] = PodSeat(pod=str(value.get("pod")), uid=uid, node=str(value.get("node")),
                                    group=self._leader.group)  # fmt: skip


def read_roster(run_dir: RunDir) -> Roster | None:
    value = _read(run_dir.roster)
    if value is None:
        return None
    try:
        return Roster(allocation=value["allocation"], nodes=tuple(value["nodes"]), uids=tuple(value["uids"]))
    except (KeyError, TypeError):
        return None


def _write_join(run_dir: RunDir, seat: PodSeat, beat: int) -> None:
    value = {"schema": SCHEMA, "pod": seat.pod, "uid": seat.uid, "node": seat.node, "group": seat.group, "beat": beat}
    write_json(run_dir.pod_join(seat.pod), value, is_durable=False)


def _read(path: Any) -> Mapping[str, Any] | None:
    try:
        value: Mapping[str, Any] = load_json(path, schema=SCHEMA)
    except BundleUnreadable:
        return None
    return value


def _natural(name: str) -> list[tuple[int, str]]:
    """``node-2`` before ``node-10``."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _DIGITS.split(name)]
