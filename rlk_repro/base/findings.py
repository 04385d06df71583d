"""Define findings, the observations of a check."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

from rlk_repro.base.errors import CheckFailed, Problem, shorten
from rlk_repro.base.escapes import printable

MAX_FINDINGS: Final = 1000


class Level(StrEnum):
    """The levels of findings, the most serious first."""

    BLOCKING = "blocking"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True)
class Finding:
    level: Level
    where: str
    expected: str
    found: str

    def __str__(self) -> str:
        return printable(f"{self.level}: {self.where}: expected {self.expected}, found {self.found}")

    def to_json(self) -> dict[str, str]:
        return {"level": self.level.value, "where": self.where, "expected": self.expected, "found": self.found}

    @classmethod
    def from_json(cls, value: Any) -> Finding:
        """Rebuild a finding; raise KeyError, TypeError or ValueError for a value that ``to_json`` does not write."""
        texts = [value[name] for name in ("where", "expected", "found")]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("a finding must consist of strings")
        return cls(Level(value["level"]), *map(shorten, texts))


def has_blocking(findings: Iterable[Finding]) -> bool:
    return any(finding.level is Level.BLOCKING for finding in findings)


def refuse_blocking(findings: Iterable[Finding], what: str, *, under: str = "", hint: str | None = None) -> None:
    """Raise CheckFailed that names every blocking finding, and ``hint`` after the last one."""
    blocking = [finding for finding in findings if finding.level is Level.BLOCKING]
    if blocking:
        problems = [Problem(f"{under}{item.where}", what, got=item.found, expected=item.expected) for item in blocking]
        raise CheckFailed(*problems[:-1], replace(problems[-1], hint=hint))


def sort_findings(findings: Iterable[Finding]) -> list[Finding]:
    order = list(Level)
    return sorted(findings, key=lambda finding: (order.index(finding.level), finding.where, finding.found))


def limit_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings; of a long list, keep the most serious ones, and count the others."""
    found = sort_findings(findings)
    rest = found[MAX_FINDINGS:]
    if not rest:
        return found
    more = Finding(rest[0].level, "findings", f"at most {MAX_FINDINGS}", f"{len(rest)} more, not listed")
    return [*found[:MAX_FINDINGS], more]


def diff_values(path: str, old: Any, new: Any, level: Level) -> Iterator[Finding]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from diff_values(f"{path}.{key}", old.get(key), new.get(key), level)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (left, right) in enumerate(zip(old, new, strict=True)):
            yield from diff_values(f"{path}.{index}", left, right, level)
    elif isinstance(old, list) and isinstance(new, list):
        yield Finding(level, path, f"{len(old)} entries", f"{len(new)} entries")
    elif old != new:
        yield Finding(level, path, shorten(str(old)), shorten(str(new)))
