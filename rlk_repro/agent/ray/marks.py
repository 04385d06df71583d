"""Exchange messages about Ray through files in the run directory: the leader's order and the followers' reports.

An order describes the wanted state of Ray, so it has the same effect if a follower reads it late, or twice.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from rlk_repro.base.errors import BundleUnreadable
from rlk_repro.base.files import load_json, write_json

SCHEMA: Final = 1


class Want(StrEnum):
    """``join``: start Ray, and restart Ray if it ends.  ``hold``: do not restart Ray, because all nodes have joined."""

    JOIN = "join"
    HOLD = "hold"
    DOWN = "down"


class Condition(StrEnum):
    """State of Ray on a node: ``ended`` by itself, ``down`` by order, or ``left`` because the node's agent ended."""

    UP = "up"
    ENDED = "ended"
    DOWN = "down"
    LEFT = "left"


@dataclass(frozen=True, kw_only=True)
class Use:
    """What Ray is used for: a trial, or the stored rollouts of a seed."""

    trial: str | None = None
    seed: int | None = None

    def __str__(self) -> str:
        return f"rollouts-{self.seed}" if self.trial is None else self.trial


@dataclass(frozen=True, kw_only=True)
class RayOrder:
    """The leader's order; ``number`` counts the allocation's Ray clusters, and ``head`` is the address:port of Ray's
    head.  Without ``keeps_logs``, the nodes delete Ray's logs, because the command ended well.
    """

    allocation: str
    number: int
    want: Want
    use: Use
    head: str
    keeps_logs: bool = True

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RayOrder:
        return cls(**{**value, "want": Want(value["want"]), "use": Use(**value["use"])})


@dataclass(frozen=True, kw_only=True)
class Report:
    """A follower's report: ``reason`` says why Ray ended or did not start; ``busy`` names GPUs still in use."""

    allocation: str
    number: int
    condition: Condition
    reason: str = ""
    busy: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Report:
        return cls(**{**value, "condition": Condition(value["condition"]), "busy": tuple(value["busy"])})


def write_mark(path: Path, mark: RayOrder | Report) -> None:
    write_json(path, {"schema": SCHEMA, **dataclasses.asdict(mark)}, is_durable=False)


def read_order(path: Path, allocation: str) -> RayOrder | None:
    value = _read(path, allocation)
    return None if value is None else RayOrder.from_json(value)


def read_report(path: Path, allocation: str, number: int) -> Report | None:
    value = _read(path, allocation)
    return None if value is None or value["number"] != number else Report.from_json(value)


def _read(path: Path, allocation: str) -> dict[str, Any] | None:
    try:
        value: dict[str, Any] = load_json(path, schema=SCHEMA)
    except BundleUnreadable:
        return None
    del value["schema"]
    return value if value["allocation"] == allocation else None
