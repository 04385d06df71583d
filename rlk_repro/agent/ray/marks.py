"""What the agents tell each other about Ray, in files of the run directory: the leader's order, followers' reports.

An order is a wish, not a message: a follower that reads it late, or twice, does the same.
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
    """``join``: start, and again where it ends; ``hold``: all have joined; ``down``: end it, tell what is left."""

    JOIN = "join"
    HOLD = "hold"
    DOWN = "down"


class Condition(StrEnum):
    """``ended``: by itself; ``down``: as ordered; ``left``: because the node's agent ends."""

    UP = "up"
    ENDED = "ended"
    DOWN = "down"
    LEFT = "left"


@dataclass(frozen=True, kw_only=True)
class Use:
    """What Ray is for: a trial by its name, or the stored rollouts of a seed."""

    trial: str | None = None
    seed: int | None = None

    def __str__(self) -> str:
        return f"rollouts-{self.seed}" if self.trial is None else self.trial


@dataclass(frozen=True, kw_only=True)
class RayOrder:
    """``number`` tells one Ray cluster of an allocation from the next; ``head`` is its ``address:port``."""

    allocation: str
    number: int
    want: Want
    use: Use
    head: str

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RayOrder:
        return cls(**{**value, "want": Want(value["want"]), "use": Use(**value["use"])})


@dataclass(frozen=True, kw_only=True)
class Report:
    """``reason`` is why Ray ended or does not start; ``busy`` are the GPUs still in use after it went down."""

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
    """None until the leader of this allocation has written one."""
    value = _read(path, allocation)
    return None if value is None else RayOrder.from_json(value)


def read_report(path: Path, allocation: str, number: int) -> Report | None:
    """None until the node has something to say about this cluster."""
    value = _read(path, allocation)
    return None if value is None or value["number"] != number else Report.from_json(value)


def _read(path: Path, allocation: str) -> dict[str, Any] | None:
    try:
        value: dict[str, Any] = load_json(path, schema=SCHEMA)
    except BundleUnreadable:
        return None
    del value["schema"]
    return value if value["allocation"] == allocation else None
