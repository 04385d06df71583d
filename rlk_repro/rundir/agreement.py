"""Define results on how far the log-probs and other values of trainer and rollout agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from rlk_repro.base.units import count
from rlk_repro.spec.values import BASELINE, ENABLED

LADDER: Final = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Bounds of the difference between a token's two log-probs; a token of class i exceeds exactly the first i bounds."""
NUM_CLASSES: Final = len(LADDER) + 1
NUM_POSITIONS: Final = 17
"""Number of bands of positions in a response.  Band i holds the positions 2^i - 1 to 2^(i+1) - 2, counted from 0.

The last band has no upper end.
"""
LOG_PROBS: Final = (-10.0, -3.0, -1.0, -0.1, -0.01)
"""Bounds of the rollout's log-prob that sort tokens into bands; the first band holds the least probable tokens."""
NUM_LOG_PROBS: Final = len(LOG_PROBS) + 1
MOST_CHANGED: Final = 5


@dataclass(frozen=True, kw_only=True)
class LargestDifference:
    """The token with the largest difference; ``position`` counts from 0 in the response.

    ``place`` is the step, rank, microbatch and sample of the token.
    """

    abs_difference: float
    place: str
    position: int
    token: int


@dataclass(frozen=True, kw_only=True)
class AgreementResult:
    """All tokens that a variant trained on in its scored steps.

    ``beyond[i]`` counts tokens whose difference exceeds ``LADDER[i]``. ``k1`` and ``k3`` estimate the KL divergence of
    the rollout's policy from the trainer's, per token: the means of -r and of exp(r) - 1 - r, where r is the trainer's
    log-prob minus the rollout's (Schulman, Approximating KL Divergence). ``by_position`` and ``by_log_prob`` have one
    row per band; item i of a row is the number of the band's tokens whose difference exceeds exactly the first i bounds
    of ``LADDER``. ``num_not_finite`` counts tokens whose log-prob is not finite; no other number includes these tokens.
    """

    variant: str
    num_steps: int
    num_tokens: int
    num_not_finite: int
    beyond: tuple[int, ...]
    mean_abs: float | None
    k1: float | None
    k3: float | None
    largest: LargestDifference | None
    by_position: tuple[tuple[int, ...], ...]
    mean_by_position: tuple[float | None, ...]
    by_log_prob: tuple[tuple[int, ...], ...]
    reason: str = ""


# The names from ``ROLLOUT`` to ``REFERENCE`` are engines; from ``AS_RUN`` on, ways to compute the same tokens.
ROLLOUT: Final = "rollout"
GENERATED: Final = "rollout, generated"
PROMPTS: Final = "rollout, prompts"
TRAINING: Final = "training"
REFERENCE: Final = "reference"
ENGINES: Final = frozenset({ROLLOUT, GENERATED, PROMPTS, TRAINING, REFERENCE})
AS_RUN: Final = ""
ALONE: Final = "alone"
EMPTY_CACHE: Final = "empty prefix cache"
PREFIX_CACHE: Final = "prefix cache"


class CheckKind(StrEnum):
    """What a check compares, causes first: a difference of one kind can make checks of later kinds fail."""

    INPUTS = "inputs"
    WEIGHTS = "weights"
    ROUTING = "routing"
    LAYERS = "layers"
    LOG_PROBS = "log-probs"
    INVARIANCE = "invariance"


class CheckWord(StrEnum):
    PASS = "pass"  # noqa: S105 a result, not a password
    FAIL = "fail"
    NOT_MEASURED = "not measured"


AGREEMENT_WORDS: Final = {
    CheckWord.PASS: "engines agree within the contract",
    CheckWord.FAIL: "engines differ beyond the contract",
    CheckWord.NOT_MEASURED: "agreement not shown",
}


@dataclass(frozen=True, kw_only=True)
class AgreementCheck:
    """One comparison on the same tokens of one step: two engines, or one engine in two ways.

    ``variant`` is the variant of the trial, or ``both`` if trials of both variants are compared. ``found`` names the
    first difference, or says why nothing could be compared. Of ``num`` compared values, ``num_unequal`` differ;
    ``bound`` is the contract's bound for ``dtype``.

    For layers, ``curve`` is the relative difference at each of ``points``, and None for a value that is not finite. For
    routing, ``curve`` is each layer's share of tokens whose experts differ.
    """

    kind: CheckKind
    pair: str
    variant: str
    step: int
    first: str
    second: str
    word: CheckWord
    found: str
    num: int = 0
    num_unequal: int = 0
    largest: float | None = None
    mean: float | None = None
    dtype: str = ""
    bound: float | None = None
    points: tuple[str, ...] = ()
    curve: tuple[float | None, ...] = ()

    @property
    def key(self) -> tuple[str, ...]:
        return self.kind.value, self.pair, self.variant, f"step {self.step}", f"{self.first} against {self.second}"

    def __str__(self) -> str:
        return f"{self.kind}, step {self.step}, {self.variant}: {self.first} against {self.second}: {self.found}"


def list_failures(checks: Iterable[AgreementCheck]) -> list[AgreementCheck]:
    """Return the failed checks: earlier steps first, and within a step by kind."""
    order = list(CheckKind)
    failed = [item for item in checks if item.word is CheckWord.FAIL]
    return sorted(failed, key=lambda item: (item.step, order.index(item.kind)))


def describe_checks(checks: Sequence[AgreementCheck]) -> str:
    """Return one line: the number of failed checks and the first failure, or the number of passed checks."""
    failed = list_failures(checks)
    if failed:
        return f"{count(len(failed), 'check')} of {len(checks)} failed; first: {failed[0]}"
    measured = [item for item in checks if item.word is not CheckWord.NOT_MEASURED]
    if not measured:
        return "nothing was measured"
    return f"{count(len(measured), 'check')} within the contract, {len(checks) - len(measured)} not measured"


def choose_word(checks: Sequence[AgreementCheck]) -> CheckWord:
    """Return the result of a run.

    ``pass`` requires that inputs, weights and log-probs pass in both variants at every step, and layers at the first.
    """
    if any(item.word is CheckWord.FAIL for item in checks):
        return CheckWord.FAIL
    passed = {(item.kind, item.variant, item.step) for item in checks if item.word is CheckWord.PASS}
    steps = sorted({item.step for item in checks if item.kind is CheckKind.LOG_PROBS})
    for variant in (BASELINE, ENABLED):
        wanted = {(CheckKind.LAYERS, variant, step) for step in steps[:1]}
        for kind in (CheckKind.INPUTS, CheckKind.WEIGHTS, CheckKind.LOG_PROBS):
            wanted |= {(kind, variant, step) for step in steps}
        if not wanted or not wanted <= passed:
            return CheckWord.NOT_MEASURED
    return CheckWord.PASS


def compare_checks(recorded: Iterable[AgreementCheck], new: Iterable[AgreementCheck]) -> Iterator[str]:
    was, now = _number(recorded), _number(new)
    keys = list(was | now)
    changed = [key for key in keys if was.get(key) != now.get(key)]
    if keys:
        yield f"engines: {len(changed)} of {len(keys)} checks changed their result"
    for key in changed[:MOST_CHANGED]:
        yield f"engines: {', '.join(key[0])}: recorded {was.get(key, 'absent')}, now {now.get(key, 'absent')}"


def _number(checks: Iterable[AgreementCheck]) -> dict[tuple[tuple[str, ...], int], str]:
    seen: Counter[tuple[str, ...]] = Counter()
    words: dict[tuple[tuple[str, ...], int], str] = {}
    for item in checks:
        words[item.key, seen[item.key]] = item.word.value
        seen[item.key] += 1
    return words
