"""Compare which experts two engines chose for the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress
from typing import Any

from rlk_repro.base.units import count
from rlk_repro.logs.engines import Inputs, Routing
from rlk_repro.rundir.agreement import GENERATED, CheckWord
from rlk_repro.spec.agreement import AgreementContract

LEAST_SHARE = 0.5
"""A layer counts if at least this share of the tokens has equal experts in all earlier layers."""

Choice = tuple[int, ...]


def compare_routing(
    contract: AgreementContract, one: Routing, other: Routing, dtype: str, inputs: Inputs | None
) -> tuple[CheckWord, str, dict[str, Any]]:
    """Return the result of a check, what the check found, and the check's numbers.

    An engine that replays the rollout's choice must use exactly the rollout's experts.  Other engines may differ where
    two experts are almost equally good, so the contract bounds the share of such tokens.
    """
    layers = [name for name in one.layers if name in other.layers]
    sides = [dict(zip(side.layers, side.experts, strict=False)) for side in (one, other)]
    if one.tokens != other.tokens or not one.tokens:
        return CheckWord.NOT_MEASURED, "the engines recorded the experts of different tokens", {}
    if not layers:
        return CheckWord.NOT_MEASURED, "the engines have no layer with experts in common", {}
    choices = {name: [side.get(name, ()) for side in sides] for name in layers}
    short = next((name for name, pair in choices.items() if {len(pair[0]), len(pair[1])} != {len(one.tokens)}), "")
    if short:
        return CheckWord.NOT_MEASURED, f"{short}: the record lacks the experts of some tokens", {}
    differs = [[set(mine) != set(theirs) for mine, theirs in zip(*choices[name], strict=True)] for name in layers]
    replays = (one.is_replayed and other.engine == GENERATED) or (other.is_replayed and one.engine == GENERATED)
    bound = 0.0 if replays else contract.find_bound("routing", dtype)
    largest = float(any(map(any, differs))) if replays else max(_list_shares(differs))
    num, num_unequal = len(layers) * len(one.tokens), sum(map(sum, differs))
    found = f"{count(num, 'choice')} of experts equal"
    if num_unequal:
        where = _describe_first(layers, differs, choices, one, inputs)
        found = f"{num - num_unequal} of {count(num, 'choice')} of experts equal; first at {where}"
    numbers = {
        "num": num, "num_unequal": num_unequal, "largest": largest, "dtype": dtype, "bound": bound,
        "points": tuple(layers), "curve": tuple(sum(row) / len(row) for row in differs),
    }  # fmt: skip
    word, found = judge_size(largest, bound, dtype, found)
    return word, found, numbers


def judge_size(largest: float | None, bound: float | None, dtype: str, found: str) -> tuple[CheckWord, str]:
    """Compare the largest difference, None if it is not finite, with the contract's bound."""
    if bound is None:
        return CheckWord.NOT_MEASURED, f"the contract has no bound for {dtype}; {found}"
    return CheckWord.FAIL if largest is None or largest > bound else CheckWord.PASS, found


def _list_shares(differs: Sequence[Sequence[bool]]) -> Iterator[float]:
    """Yield each layer's share of tokens whose experts differ, counting only tokens equal in all earlier layers."""
    is_equal = [True] * len(differs[0])
    for row in differs:
        here = list(compress(row, is_equal))
        if len(here) < LEAST_SHARE * len(row):
            return
        yield sum(here) / len(here)
        is_equal = [equal and not differ for equal, differ in zip(is_equal, row, strict=True)]


def _describe_first(
    layers: Sequence[str], differs: Sequence[Sequence[bool]], choices: dict[str, list[tuple[Choice, ...]]],
    one: Routing, inputs: Inputs | None,
) -> str:  # fmt: skip
    place = next(number for number, row in enumerate(differs) if any(row))
    token = differs[place].index(True)
    mine, theirs = (side[token] for side in choices[layers[place]])
    experts = " against ".join(
        ", ".join(map(str, sorted(only))) or "none" for only in (set(mine) - set(theirs), set(theirs) - set(mine))
    )
    sample, row = one.tokens[token]
    where = f"row {row}"
    if inputs is not None and sample < len(inputs.samples) and row + 1 < len(inputs.samples[sample].tokens):
        found = inputs.samples[sample]
        position = row + 1 - len(found.tokens) + len(found.loss_mask)
        where = f"position {position} of its response, token {found.tokens[row + 1]}"
    return f"{layers[place]}, sample {sample}, {where}: expert {experts}"
