"""Collect the lines that a parser refused: the first 100 with line numbers, and exact totals per reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

KEPT: Final = 100
DETAIL_CHARACTERS: Final = 200


@dataclass(frozen=True, slots=True)
class Reject:
    """One refused message: its line (counted from 1), the parser's reason, and its text."""

    line: int
    reason: str
    detail: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.reason}: {self.detail}"


class RejectLog:
    def __init__(self) -> None:
        self._kept: list[Reject] = []
        self._totals: Counter[str] = Counter()

    def add(self, line: int, reason: str, detail: str) -> None:
        self._totals[reason] += 1
        if len(self._kept) < KEPT:
            self._kept.append(Reject(line, reason, detail[:DETAIL_CHARACTERS]))

    @property
    def kept(self) -> tuple[Reject, ...]:
        return tuple(self._kept)

    @property
    def totals(self) -> dict[str, int]:
        return dict(sorted(self._totals.items()))


def describe(error: ValueError) -> str:
    """Describe why a line is invalid: the first reason, with the place in the line."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else str(first["msg"])
