"""Findings: what a check saw.  Preflight, verify, diff and replay collect them and never stop at the first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from rlk_repro.escapes import printable


class Level(StrEnum):
    """How much a finding matters, most serious first."""

    BLOCKING = "blocking"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True)
class Finding:
    """One observation: ``where`` names a file, a fact (``gpu.driver``) or a member of a bundle."""

    level: Level
    where: str
    expected: str
    found: str

    def __str__(self) -> str:
        return printable(f"{self.level}: {self.where}: expected {self.expected}, found {self.found}")

    def to_json(self) -> dict[str, str]:
        return {"level": self.level.value, "where": self.where, "expected": self.expected, "found": self.found}

    @classmethod
    def from_json(cls, value: dict[str, str]) -> Finding:
        return cls(Level(value["level"]), value["where"], value["expected"], value["found"])


def has_blocking(findings: Iterable[Finding]) -> bool:
    return any(finding.level is Level.BLOCKING for finding in findings)


def sort_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Most serious first, then by place, so that two machines print the same list."""
    order = list(Level)
    return sorted(findings, key=lambda finding: (order.index(finding.level), finding.where, finding.found))
