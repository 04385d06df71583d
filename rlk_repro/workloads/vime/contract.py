"""An argument contract lists the flags that one commit of vime reads; ``python -m tools.contract`` makes it.

vime silently ignores unknown flags, so every argument list is compared with a contract before the start.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import Any, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from rlk_repro.base.errors import Problem, SpecError
from rlk_repro.base.resources import data_dir, suggest
from rlk_repro.rundir.differences import split_arguments
from rlk_repro.spec.values import Commit, Schema

Nargs: TypeAlias = int | Literal["?", "*", "+"] | None
Kind: TypeAlias = Literal["text", "int", "float", "bool", "json", "other"]
"""The type of a value.  ``other``: the parser reads the value by a function of its own, so the value is not checked."""


class Flag(BaseModel):
    """One flag as one parser defines it; ``flags`` are its spellings, ``takes_value`` is false for a bare flag."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    flags: tuple[str, ...]
    dest: str
    owner: Literal["vime", "megatron", "vllm", "router"]
    action: str
    kind: Kind = "text"
    nargs: Nargs = None
    choices: tuple[Any, ...] | None = None
    is_required: bool = False
    takes_value: bool = True


class Contract(BaseModel):
    """All flags of one commit of vime."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    schema_: Schema = Field(alias="schema")
    vime: Commit
    megatron_lm: Commit
    flags: tuple[Flag, ...]

    @cached_property
    def by_flag(self) -> Mapping[str, tuple[Flag, ...]]:
        """The definitions of flags, by spelling; a flag that several parsers read has several definitions."""
        found: dict[str, tuple[Flag, ...]] = {}
        for item in self.flags:
            for spelling in item.flags:
                found[spelling] = (*found.get(spelling, ()), item)
        return found

    def find_problems(self, argv: Sequence[str], where: str, *, is_whole: bool = True) -> list[Problem]:
        """Find everything in an argument list that vime would refuse or silently ignore.

        With ``is_whole``, the list must also hold all flags that vime requires.
        """
        problems: list[Problem] = []
        seen: set[str] = set()
        for flag, values in split_arguments(argv):
            place = f"{where}: {flag}"
            if flag in seen:
                problems.append(Problem(place, "is given twice", expected="the flag once"))
            seen.add(flag)
            definitions = self.by_flag.get(flag)
            if definitions is None:
                what = f"is unknown to vime {self.vime[:8]}, which would ignore the flag"
                problems.append(Problem(place, what, hint=suggest(flag, sorted(self.by_flag))))
                continue
            found = (_find_value_problem(place, item, values) for item in definitions)
            problems += [problem for problem in found if problem is not None][:1]
        required = {item.flags[-1] for item in self.flags if item.is_required and is_whole}
        problems += [Problem(f"{where}: {flag}", "missing", expected="a value") for flag in sorted(required - seen)]
        return problems


def _find_value_problem(place: str, item: Flag, values: Sequence[str]) -> Problem | None:
    expected, least, most = _find_range(item)
    if not least <= len(values) <= most:
        return Problem(place, "has the wrong number of values", got=" ".join(values), expected=expected)
    for value in values:
        if item.choices is not None and value not in {str(choice) for choice in item.choices}:
            menu = ", ".join(str(choice) for choice in item.choices)
            return Problem(place, "is not one of the choices", got=value, expected=f"one of {menu}",
                           hint=suggest(value, [str(choice) for choice in item.choices]))  # fmt: skip
        if not _reads(item.kind, value):
            return Problem(place, "has a value of the wrong type", got=value, expected=_KINDS[item.kind])
    return None


_NUMBERS: Final[Mapping[Nargs, tuple[str, int, float]]] = {
    None: ("one value", 1, 1),
    "+": ("one value or more", 1, math.inf),
    "?": ("one value at most", 0, 1),
    "*": ("any values", 0, math.inf),
}


def _find_range(item: Flag) -> tuple[str, float, float]:
    if not item.takes_value:
        return "no value", 0, 0
    if isinstance(item.nargs, int):
        return f"{item.nargs} values", item.nargs, item.nargs
    return _NUMBERS[item.nargs]


_KINDS: Final[Mapping[Kind, str]] = {"text": "text", "int": "a whole number", "float": "a number",
                                     "bool": "true or false", "json": "JSON", "other": "text"}  # fmt: skip


def _reads(kind: Kind, value: str) -> bool:
    try:
        match kind:
            case "int":
                int(value)
            case "float":
                float(value)
            case "json":
                json.loads(value)
            case "text" | "bool" | "other":
                pass
    except ValueError:
        return False
    return True


@cache
def load_contract(vime_commit: str) -> Contract:
    """Load the contract of one commit of vime; raise SpecError if there is no such contract."""
    folder = data_dir("manifests") / "contracts"
    path = folder / f"vime-{vime_commit}.json"
    if not path.is_file():
        known = ", ".join(sorted(item.stem for item in folder.glob("vime-*.json"))) or "(none)"
        hint = "name a stack with a known vime by --stack; rlk-repro list stacks shows them"
        raise SpecError(Problem("stack: pins.vime", "no argument contract for this commit", got=vime_commit,
                                expected=f"one of {known}", hint=hint))  # fmt: skip
    return Contract.model_validate_json(path.read_bytes())
