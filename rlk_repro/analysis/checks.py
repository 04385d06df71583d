"""Compare what engines computed from the same tokens: inputs, weights, experts, layers and log-probs.

An engine is also compared with itself, for example on the same tokens in another batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Final

from rlk_repro.analysis.hashes import compare_hashes
from rlk_repro.analysis.routing import compare_routing
from rlk_repro.base.errors import BundleUnreadable, Problem
from rlk_repro.base.units import count, format_number
from rlk_repro.logs.engines import (
    EngineLog,
    Inputs,
    Layer,
    LogProbs,
    Routing,
    Rows,
    SampleInput,
    Skipped,
    Weights,
    read_contract,
    read_engines,
)
from rlk_repro.plan import Plan
from rlk_repro.rundir.agreement import (
    AS_RUN,
    EMPTY_CACHE,
    PREFIX_CACHE,
    ROLLOUT,
    TRAINING,
    AgreementCheck,
    CheckKind,
    CheckWord,
)
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec.agreement import DTYPES, AgreementContract, load_contract

BOTH: Final = "both"
MAX_CHECKS: Final = 20_000
NO_RECORD: Final = "the trial left no record of its engines"

Place = tuple[str, str, int]
"""The pair, the variant and the step to which a check belongs."""


def check_agreement(plan: Plan, run_dir: RunDir) -> Iterator[AgreementCheck]:
    """Judge every pair by this version's contract.

    Raises:
        BundleUnreadable: a record holds steps that the plan lacks, or the records give more checks than any run.
    """
    contract, number = load_contract(), 0
    for pair, trials in plan.pairs().items() if plan.run.workload.compares_engines else ():
        logs = []
        for trial in trials:
            log = read_engines(run_dir.trial(trial.name))
            if log is not None and log.steps and log.steps[-1] >= plan.num_steps:
                expected = f"steps below {plan.num_steps}"
                what = "records steps that the plan lacks"
                raise BundleUnreadable(Problem(trial.name, what, got=log.steps[-1], expected=expected))
            logs.append((trial.variant, log and replace(log, contract=contract)))
        for check in check_pair(pair, logs, range(plan.num_steps)):
            number += 1
            if number > MAX_CHECKS:
                raise BundleUnreadable(Problem("records of engines", f"give more than {MAX_CHECKS} checks"))
            yield check


def has_other_contract(plan: Plan, run_dir: RunDir) -> bool:
    """Tell whether a trial's recorded contract differs from that of this version of rlk-repro."""
    if not plan.run.workload.compares_engines:
        return False
    recorded = [read_contract(run_dir.trial(trial.name)) for trial in plan.trials]
    return any(contract not in {None, load_contract()} for contract in recorded)


def check_pair(
    pair: str, logs: Sequence[tuple[str, EngineLog | None]], planned: Iterable[int] = ()
) -> Iterator[AgreementCheck]:
    """Yield the checks of a pair; a ``planned`` step that a record lacks gives a check that was not measured."""
    for variant, log in logs:
        if log is None or not log.steps:
            yield _skip(CheckKind.INPUTS, (pair, variant, 0), ROLLOUT, TRAINING, NO_RECORD)
            continue
        for step in log.steps:
            yield from _check_step(log, (pair, variant, step))
        for step in (step for step in planned if step not in log.steps):
            yield _skip(CheckKind.LOG_PROBS, (pair, variant, step), ROLLOUT, TRAINING, "the record lacks this step")
        if log.num_dropped:
            reason = f"lines of the record that cannot be read: {log.num_dropped}"
            yield _skip(CheckKind.INPUTS, (pair, variant, log.steps[-1]), ROLLOUT, TRAINING, reason)
    (first, one), (second, other) = logs
    if one is not None and other is not None:
        for step in (step for step in one.steps if step in other.steps):
            names = (f"{TRAINING}, {first}", f"{TRAINING}, {second}")
            yield from compare_training((pair, BOTH, step), names, one, other)


def _check_step(log: EngineLog, place: Place) -> Iterator[AgreementCheck]:
    step = place[2]
    inputs, weights = list(log.inputs.get(step, {}).items()), list(log.weights.get(step, {}).items())
    for (first, one), (second, other) in combinations(inputs, 2):
        yield _compare_inputs(place, (first, second), (one, other))
    for (first, this), (second, that) in combinations(weights, 2):
        yield _compare_weights(place, (first, second), (this, that))
    if len(inputs) < 2:
        yield _skip_missing(CheckKind.INPUTS, place, dict(inputs))
    if len(weights) < 2:
        yield _skip_missing(CheckKind.WEIGHTS, place, dict(weights))
    log_probs = {engine: found for (engine, case), found in log.log_probs.get(step, {}).items() if case == AS_RUN}
    if len(log_probs) < 2:
        yield _skip_missing(CheckKind.LOG_PROBS, place, log_probs)
    yield from _check_routing(log, place)
    yield from _check_values(log, place)


def _skip_missing(kind: CheckKind, place: Place, found: Mapping[str, object]) -> AgreementCheck:
    name = next(iter(found), ROLLOUT)
    other = ROLLOUT if name == TRAINING else TRAINING
    return _skip(kind, place, name, other, _first_reason(found.values()) or f"engines with a record: {len(found)}")


def _first_reason(sides: Iterable[object]) -> str:
    return next((side.reason for side in sides if isinstance(side, Skipped)), "")


def _check_routing(log: EngineLog, place: Place) -> Iterator[AgreementCheck]:
    routing = log.routing.get(place[2], {})
    inputs = log.find_inputs(place[2])
    engines = [engine for engine, case in routing if case == AS_RUN]
    for first, second in combinations(engines, 2):
        sides = (routing[first, AS_RUN], routing[second, AS_RUN])
        yield _compare_routing(log.contract, place, (first, second), sides, inputs)
    for (engine, case), found in routing.items():
        if case != AS_RUN and engine in engines:
            sides = (routing[engine, AS_RUN], found)
            yield _compare_routing(log.contract, place, (engine, f"{engine}, {case}"), sides, inputs)
    if len(engines) == 1:
        yield _skip_missing(CheckKind.ROUTING, place, {engines[0]: routing[engines[0], AS_RUN]})


def _compare_routing(
    contract: AgreementContract,
    place: Place,
    names: tuple[str, str],
    sides: tuple[Routing | Skipped, Routing | Skipped],
    inputs: Inputs | None,
) -> AgreementCheck:
    one, other = sides
    if isinstance(one, Skipped) or isinstance(other, Skipped):
        return _skip(CheckKind.ROUTING, place, *names, _first_reason(sides))
    dtype = _find_dtype(one.dtype, other.dtype)
    word, found, numbers = compare_routing(contract, one, other, dtype, inputs)
    return _make(CheckKind.ROUTING, place, names, word, found, **numbers)


def _check_values(log: EngineLog, place: Place) -> Iterator[AgreementCheck]:
    layers, log_probs = log.layers.get(place[2], {}), log.log_probs.get(place[2], {})
    inputs = log.find_inputs(place[2])
    for first, second in combinations([engine for engine, case in layers if case == AS_RUN], 2):
        yield _compare_layers(log.contract, place, (first, second), (layers[first, AS_RUN], layers[second, AS_RUN]))
    for (engine, case), found in layers.items():
        if case != AS_RUN and (engine, AS_RUN) in layers:
            names = (engine, f"{engine}, {case}")
            yield _compare_layers(log.contract, place, names, (layers[engine, AS_RUN], found))
    for (engine, case), lacking in log.lacking_layers.get(place[2], {}).items():
        other = f"{engine}, {case}" if case != AS_RUN else ROLLOUT if engine == TRAINING else TRAINING
        yield _skip(CheckKind.LAYERS, place, engine, other, lacking.reason)
    for first, second in combinations([engine for engine, case in log_probs if case == AS_RUN], 2):
        sides = (log_probs[first, AS_RUN], log_probs[second, AS_RUN])
        yield _compare_log_probs(log.contract, place, (first, second), sides, inputs)
    for (engine, case), values in log_probs.items():
        # vLLM computes the same token with an empty and with a filled prefix cache; the check compares these log-probs.
        as_run = EMPTY_CACHE if case == PREFIX_CACHE else AS_RUN
        base = log_probs.get((engine, as_run)) or log_probs.get((engine, AS_RUN))
        if case not in {AS_RUN, EMPTY_CACHE} and base is not None:
            check = _compare_log_probs(log.contract, place, (engine, case), (base, values), inputs)
            yield replace(check, kind=CheckKind.INVARIANCE, found=_describe_case(check))


def _describe_case(check: AgreementCheck) -> str:
    if check.word is not CheckWord.PASS:
        return check.found
    return f"within the contract: {check.found}" if check.num_unequal else "bitwise"


def compare_training(
    place: Place, names: tuple[str, str], one: EngineLog, other: EngineLog
) -> Iterator[AgreementCheck]:
    step = place[2]
    reason = _find_other(step, one, other)
    if reason:
        yield _skip(CheckKind.LOG_PROBS, place, *names, reason)
        return
    key = (TRAINING, AS_RUN)
    routing = [log.routing.get(step, {}).get(key) for log in (one, other)]
    if routing[0] is not None and routing[1] is not None:
        inputs = one.inputs.get(step, {}).get(ROLLOUT)
        yield _compare_routing(one.contract, place, names, (routing[0], routing[1]), inputs)
    layers = [log.layers.get(step, {}).get(key) for log in (one, other)]
    if layers[0] is not None and layers[1] is not None:
        yield _compare_layers(one.contract, place, names, (layers[0], layers[1]))
    values = [log.log_probs.get(step, {}).get(key) for log in (one, other)]
    if values[0] is not None and values[1] is not None:
        inputs = one.inputs.get(step, {}).get(ROLLOUT)
        yield _compare_log_probs(one.contract, place, names, (values[0], values[1]), inputs)


def _find_other(step: int, one: EngineLog, other: EngineLog) -> str:
    tokens, others = (log.inputs.get(step, {}).get(ROLLOUT) for log in (one, other))
    if tokens is None or others is None:
        return "the tokens of a trial are not recorded at this step"
    if tokens != others:
        return "the trials have other tokens at this step"
    mine, theirs = (log.weights.get(step, {}).get(TRAINING) for log in (one, other))
    if isinstance(mine, Weights) and isinstance(theirs, Weights):
        return "" if mine == theirs else "the trials have different weights at this step"
    # Both trials begin from one checkpoint, so at step 0 their weights are equal even if no hash was recorded.
    return "the weights of training are not recorded in both trials" if step else ""


def _make(
    kind: CheckKind, place: Place, names: tuple[str, str], word: CheckWord, found: str, **numbers: Any
) -> AgreementCheck:
    pair, variant, step = place
    first, second = names
    return AgreementCheck(
        kind=kind, pair=pair, variant=variant, step=step, first=first, second=second, word=word, found=found, **numbers
    )


def _skip(kind: CheckKind, place: Place, first: str, second: str, reason: str) -> AgreementCheck:
    return _make(kind, place, (first, second), CheckWord.NOT_MEASURED, reason)


def _compare_inputs(place: Place, names: tuple[str, str], sides: tuple[Inputs, Inputs]) -> AgreementCheck:
    one, other = sides
    num = sum(len(sample.tokens) for sample in one.samples)
    special = {token: name for name, token in one.special.items()}
    problem = "" if len(one.samples) == len(other.samples) else (
        f"{count(len(one.samples), 'sample')} against {len(other.samples)}"
    )  # fmt: skip
    for number, pair in enumerate(zip(one.samples, other.samples, strict=False)):
        problem = problem or _find_mismatch(number, names, pair, special)
    word = CheckWord.FAIL if problem else CheckWord.PASS
    return _make(CheckKind.INPUTS, place, names, word, problem or f"{count(num, 'token')} equal", num=num)


def _find_mismatch(
    number: int, names: tuple[str, str], sides: tuple[SampleInput, SampleInput], special: Mapping[int, str]
) -> str:
    if sides[0].padding != sides[1].padding:
        values = " against ".join(f"{name} {side.padding}" for name, side in zip(names, sides, strict=True))
        return f"padding in front of sample {number}: {values}"
    for field in ("tokens", "loss_mask"):
        rows = [getattr(side, field) for side in sides]
        if len(rows[0]) != len(rows[1]):
            return f"{field} of sample {number}: length {len(rows[0])} against {len(rows[1])}"
        for position, found in enumerate(zip(*rows, strict=True)):
            if found[0] != found[1]:
                meanings = special if field == "tokens" else {}
                words = [
                    f"{name} {value}{f' ({meanings[value]})' if value in meanings else ''}"
                    for name, value in zip(names, found, strict=True)
                ]
                return f"{field} of sample {number}, position {position}: {' against '.join(words)}"
    return ""


def _compare_weights(
    place: Place, names: tuple[str, str], sides: tuple[Weights | Skipped, Weights | Skipped]
) -> AgreementCheck:
    one, other = sides
    if isinstance(one, Skipped) or isinstance(other, Skipped):
        return _skip(CheckKind.WEIGHTS, place, *names, _first_reason(sides))
    num, found = compare_hashes(names, (one, other))
    word = CheckWord.FAIL if num else CheckWord.PASS
    return _make(CheckKind.WEIGHTS, place, names, word, found, num=len(one.tensors), num_unequal=num)


def _find_dtype(one: str, other: str) -> str:
    """Return the less precise of two number types."""
    return max((one, other), key=lambda name: DTYPES.index(name) if name in DTYPES else len(DTYPES))


def _judge(largest: float | None, bound: float | None, dtype: str, found: str) -> tuple[CheckWord, str]:
    if bound is None:
        return CheckWord.NOT_MEASURED, f"the contract has no bound for {dtype}; {found}"
    if largest is None or largest > bound:
        return CheckWord.FAIL, found
    return CheckWord.PASS, found


@dataclass(frozen=True)
class _Gap:
    """``largest`` and ``mean`` are None if a value is not finite."""

    num: int
    num_unequal: int
    largest: float | None
    mean: float | None
    row: int
    position: int


def _find_gap(one: Rows, other: Rows) -> _Gap:
    gaps: list[float] = []
    num_unequal, largest, where = 0, 0.0, (0, 0)
    for row, pair in enumerate(zip(one, other, strict=True)):
        for position, (left, right) in enumerate(zip(*pair, strict=True)):
            gap = math.inf if left is None or right is None else abs(left - right)
            num_unequal += gap > 0
            gaps.append(gap)
            if gap > largest:
                largest, where = gap, (row, position)
    is_finite = largest < math.inf
    mean = math.fsum(gaps) / len(gaps) if gaps and is_finite else None
    return _Gap(len(gaps), num_unequal, largest if is_finite else None, mean, *where)


def _compare_log_probs(
    contract: AgreementContract,
    place: Place,
    names: tuple[str, str],
    sides: tuple[LogProbs | Skipped, LogProbs | Skipped],
    inputs: Inputs | None,
) -> AgreementCheck:
    one, other = sides
    if isinstance(one, Skipped) or isinstance(other, Skipped):
        return _skip(CheckKind.LOG_PROBS, place, *names, _first_reason(sides))
    if list(map(len, one.values)) != list(map(len, other.values)):
        return _make(CheckKind.LOG_PROBS, place, names, CheckWord.FAIL, "the engines give different numbers of tokens")
    if not any(one.values):
        return _skip(CheckKind.LOG_PROBS, place, *names, "the record of the log-probs holds 0 numbers")
    gap, dtype = _find_gap(one.values, other.values), _find_dtype(one.dtype, other.dtype)
    bound = contract.find_bound("log-probs", dtype)
    word, found = _judge(gap.largest, bound, dtype, _describe_gap(gap, one, inputs))
    return _make(
        CheckKind.LOG_PROBS, place, names, word, found,
        num=gap.num, num_unequal=gap.num_unequal, largest=gap.largest, mean=gap.mean, dtype=dtype, bound=bound,
    )  # fmt: skip


def _describe_gap(gap: _Gap, one: LogProbs, inputs: Inputs | None) -> str:
    if not gap.num_unequal:
        return f"{count(gap.num, 'token')} equal"
    token, position = "", gap.position
    if inputs is not None and gap.row < len(inputs.samples):
        sample, num = inputs.samples[gap.row], len(one.values[gap.row])
        back = num - gap.position
        token = f", token {sample.tokens[-back]}" if back <= len(sample.tokens) else ""
        # A record may hold only a response's last tokens; the position shown counts from the response's first token.
        position += max(0, len(sample.loss_mask) - num)
    size = "not finite" if gap.largest is None else f"largest {format_number(gap.largest, 3)}"
    return f"{size} at sample {gap.row}, position {position} of its response{token}"


def _compare_layers(
    contract: AgreementContract,
    place: Place,
    names: tuple[str, str],
    sides: tuple[Mapping[str, Layer], Mapping[str, Layer]],
) -> AgreementCheck:
    one, other = sides
    points = [point for point in one if point in other]
    if not points:
        return _skip(CheckKind.LAYERS, place, *names, "the engines recorded no layer in common")
    odd = next((point for point in points if not _have_one_shape(one[point], other[point])), None)
    if odd is not None:
        found = f"{odd}: the engines recorded different numbers of rows or columns"
        return _make(CheckKind.LAYERS, place, names, CheckWord.FAIL, found)
    if not any(map(any, map(_find_shape, one.values()))):
        return _skip(CheckKind.LAYERS, place, *names, "the record of the layers holds 0 numbers")
    curve = [_find_distance(one[point], other[point]) for point in points]
    dtype = _find_dtype(one[points[0]].dtype, other[points[0]].dtype)
    bound = contract.find_bound("layers", dtype)
    sizes = [math.inf if value is None else value for value in curve]
    first = next((n for n, size in enumerate(sizes) if bound is not None and size > bound), None)
    at = sizes.index(max(sizes)) if first is None else first
    shown = "not finite" if curve[at] is None else f"relative difference {format_number(sizes[at], 3)}"
    lead = "largest at" if first is None else "first outside at"
    found = "bitwise" if not any(sizes) else f"{lead} {points[at]}: {shown}"
    largest = None if None in curve else max(sizes)
    word, found = _judge(largest, bound, dtype, found)
    return _make(
        CheckKind.LAYERS, place, names, word, found, num=len(points), num_unequal=sum(size > 0 for size in sizes),
        largest=largest, dtype=dtype, bound=bound, points=tuple(points), curve=tuple(curve),
    )  # fmt: skip


def _have_one_shape(one: Layer, other: Layer) -> bool:
    return _find_shape(one) == _find_shape(other) and len(one.norms) == len(one.values)


def _find_shape(layer: Layer) -> tuple[int, ...]:
    return (len(layer.norms), *map(len, layer.values))


def _find_distance(one: Layer, other: Layer) -> float | None:
    """Return the largest norm(one - other) / norm(other) over all tokens; None if it is not finite."""
    found = 0.0
    for left, right, norm in zip(one.values, other.values, other.norms, strict=False):
        gaps = [None if a is None or b is None else a - b for a, b in zip(left, right, strict=True)]
        known = [gap for gap in gaps if gap is not None]
        if len(known) < len(gaps) or norm is None:
            return None
        size = math.sqrt(math.fsum(gap * gap for gap in known))
        if size:
            found = max(found, size / norm if norm else math.inf)
    return found if found < math.inf else None
