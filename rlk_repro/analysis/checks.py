"""Compare what engines, or one engine in two ways, computed from the same tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Final, NamedTuple

from rlk_repro.analysis.measured import Measured, Records
from rlk_repro.analysis.routing import compare_routing, judge_size
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
    AGREEMENT_WORDS,
    AS_RUN,
    EMPTY_CACHE,
    PREFIX_CACHE,
    ROLLOUT,
    TRAINING,
    AgreementCheck,
    CheckKind,
    CheckWord,
    choose_word,
    describe_checks,
)
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec.agreement import DTYPES, AgreementContract, load_contract

ENGINES: Final = (ROLLOUT, TRAINING)
MAX_CHECKS: Final = 20_000
NO_TIME: Final = "an agreement run measures no time, so it does not compare the speed of the variants"

Place = tuple[str, str, int]  # the pair, the variant and the step to which a check belongs
Names = tuple[str, str]
Logs = Sequence[tuple[str, EngineLog | None]]  # of a pair's two trials, each with its variant


def read(records: Records) -> Measured:
    checks = tuple(check_agreement(records.plan, records.run_dir))
    if not checks:
        return Measured()
    headline = f"{AGREEMENT_WORDS[choose_word(checks)]}: {describe_checks(checks)}"
    return Measured(keys={"checks": checks}, headline=headline, reasons=[NO_TIME, *records.failures])


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
                what, expected = "records steps that the plan lacks", f"steps below {plan.num_steps}"
                raise BundleUnreadable(Problem(trial.name, what, got=log.steps[-1], expected=expected))
            logs.append((trial.variant, log and replace(log, contract=contract)))
        for check in check_pair(pair, logs, range(plan.num_steps)):
            number += 1
            if number > MAX_CHECKS:
                raise BundleUnreadable(Problem("records of engines", f"give more than {MAX_CHECKS} checks"))
            yield check


def has_other_contract(plan: Plan, run_dir: RunDir) -> bool:
    """Tell whether a trial's recorded contract differs from that of this version of rlk-repro."""
    trials = plan.trials if plan.run.workload.compares_engines else ()
    recorded = [read_contract(run_dir.trial(trial.name)) for trial in trials]
    return any(contract not in {None, load_contract()} for contract in recorded)


def check_pair(pair: str, logs: Logs, planned: Iterable[int] = ()) -> Iterator[AgreementCheck]:
    """Yield the checks of a pair; a ``planned`` step that a record lacks gives a check that was not measured."""
    for variant, log in logs:
        if log is None or not log.steps:
            reason = "the trial left no record of its engines"
            yield _skip(CheckKind.INPUTS, (pair, variant, 0), ENGINES, reason)
            continue
        for step in log.steps:
            yield from _check_step(log, (pair, variant, step))
        for step in planned:
            if step not in log.steps:
                reason = "the record lacks this step"
                yield _skip(CheckKind.LOG_PROBS, (pair, variant, step), ENGINES, reason)
        if log.num_dropped:
            reason = f"lines of the record that cannot be read: {log.num_dropped}"
            yield _skip(CheckKind.INPUTS, (pair, variant, log.steps[-1]), ENGINES, reason)
    (first, one), (second, other) = logs
    if one is not None and other is not None:
        for step in (step for step in one.steps if step in other.steps):
            names = f"{TRAINING}, {first}", f"{TRAINING}, {second}"
            yield from compare_training((pair, "both", step), names, one, other)


def _check_step(log: EngineLog, place: Place) -> Iterator[AgreementCheck]:
    step = place[2]
    at = _At(place, log.contract, log.find_inputs(step))
    inputs, weights = log.inputs.get(step, {}), log.weights.get(step, {})
    routing, layers, log_probs = log.routing.get(step, {}), log.layers.get(step, {}), log.log_probs.get(step, {})
    yield from _compare_engines(CheckKind.INPUTS, at, inputs)
    yield from _compare_engines(CheckKind.WEIGHTS, at, weights)
    as_run = _find_as_run(log_probs)
    needed: dict[CheckKind, Any] = {CheckKind.INPUTS: inputs, CheckKind.WEIGHTS: weights}
    needed[CheckKind.LOG_PROBS] = as_run
    for kind, found in needed.items():
        if len(found) < 2:
            yield _skip_missing(kind, place, found)
    yield from _compare_engines(CheckKind.ROUTING, at, _find_as_run(routing))
    yield from _compare_cases(CheckKind.ROUTING, at, routing)
    if len(engines := _find_as_run(routing)) == 1:
        yield _skip_missing(CheckKind.ROUTING, place, engines)
    yield from _compare_engines(CheckKind.LAYERS, at, _find_as_run(layers))
    yield from _compare_cases(CheckKind.LAYERS, at, layers)
    for (engine, case), lacking in log.lacking_layers.get(step, {}).items():
        other = f"{engine}, {case}" if case != AS_RUN else _name_other(engine)
        yield _skip(CheckKind.LAYERS, place, (engine, other), lacking.reason)
    yield from _compare_engines(CheckKind.LOG_PROBS, at, as_run)
    for (engine, case), values in log_probs.items():
        # vLLM computes the same token with an empty and with a filled prefix cache; the check compares these log-probs.
        wanted = EMPTY_CACHE if case == PREFIX_CACHE else AS_RUN
        base = log_probs.get((engine, wanted)) or log_probs.get((engine, AS_RUN))
        if case not in {AS_RUN, EMPTY_CACHE} and base is not None:
            check = _compare(CheckKind.LOG_PROBS, at, (engine, case), base, values)
            yield replace(check, kind=CheckKind.INVARIANCE, found=_describe_case(check))


@dataclass(frozen=True)
class _At:
    """What all checks of a step share; ``inputs`` are the tokens that a difference is found in."""

    place: Place
    contract: AgreementContract
    inputs: Inputs | None


def _find_as_run(records: Mapping[tuple[str, str], Any]) -> dict[str, Any]:
    return {engine: found for (engine, case), found in records.items() if case == AS_RUN}


def _compare_engines(kind: CheckKind, at: _At, by_engine: Mapping[str, Any]) -> Iterator[AgreementCheck]:
    for (first, one), (second, other) in combinations(by_engine.items(), 2):
        yield _compare(kind, at, (first, second), one, other)


def _compare_cases(kind: CheckKind, at: _At, records: Mapping[tuple[str, str], Any]) -> Iterator[AgreementCheck]:
    """Compare each engine with itself: as it ran, and on the same tokens in another way."""
    for (engine, case), found in records.items():
        if case != AS_RUN and (engine, AS_RUN) in records:
            yield _compare(kind, at, (engine, f"{engine}, {case}"), records[engine, AS_RUN], found)


def _compare(kind: CheckKind, at: _At, names: Names, one: Any, other: Any) -> AgreementCheck:
    for side in (one, other):
        if isinstance(side, Skipped):
            return _skip(kind, at.place, names, side.reason)
    return COMPARISONS[kind](at, names, one, other)


def _compare_routing(at: _At, names: Names, one: Routing, other: Routing) -> AgreementCheck:
    dtype = _find_dtype(one, other)
    word, found, numbers = compare_routing(at.contract, one, other, dtype, at.inputs)
    return _make(CheckKind.ROUTING, at.place, names, word, found, **numbers)


def _skip_missing(kind: CheckKind, place: Place, found: Mapping[str, Any]) -> AgreementCheck:
    name, reason = next(iter(found), ROLLOUT), f"engines with a record: {len(found)}"
    for side in found.values():
        if isinstance(side, Skipped):
            reason = side.reason or reason
    return _skip(kind, place, (name, _name_other(name)), reason)


def _name_other(engine: str) -> str:
    return ROLLOUT if engine == TRAINING else TRAINING


def _describe_case(check: AgreementCheck) -> str:
    if check.word is not CheckWord.PASS:
        return check.found
    return f"within the contract: {check.found}" if check.num_unequal else "bitwise"


def compare_training(place: Place, names: Names, one: EngineLog, other: EngineLog) -> Iterator[AgreementCheck]:
    step = place[2]
    if reason := _find_other(step, one, other):
        yield _skip(CheckKind.LOG_PROBS, place, names, reason)
        return
    at, key = _At(place, one.contract, one.inputs.get(step, {}).get(ROLLOUT)), (TRAINING, AS_RUN)
    for kind in (CheckKind.ROUTING, CheckKind.LAYERS, CheckKind.LOG_PROBS):
        name = kind.value.replace("-", "_")
        mine, theirs = (getattr(log, name).get(step, {}) for log in (one, other))
        if key in mine and key in theirs:
            yield _compare(kind, at, names, mine[key], theirs[key])


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


def _make(kind: CheckKind, place: Place, names: Names, word: CheckWord, found: str, **numbers: Any) -> AgreementCheck:
    pair, variant, step = place
    first, second = names
    return AgreementCheck(
        kind=kind, pair=pair, variant=variant, step=step, first=first, second=second, word=word, found=found, **numbers
    )


def _skip(kind: CheckKind, place: Place, names: Names, reason: str) -> AgreementCheck:
    return _make(kind, place, names, CheckWord.NOT_MEASURED, reason)


def _compare_inputs(at: _At, names: Names, one: Inputs, other: Inputs) -> AgreementCheck:
    num = sum(len(sample.tokens) for sample in one.samples)
    special = {token: name for name, token in one.special.items()}
    problem = ""
    if len(one.samples) != len(other.samples):
        problem = f"{count(len(one.samples), 'sample')} against {len(other.samples)}"
    for number, pair in enumerate(zip(one.samples, other.samples, strict=False)):
        problem = problem or _find_mismatch(number, names, pair, special)
    word = CheckWord.FAIL if problem else CheckWord.PASS
    return _make(CheckKind.INPUTS, at.place, names, word, problem or f"{count(num, 'token')} equal", num=num)


def _find_mismatch(
    number: int, names: Names, sides: tuple[SampleInput, SampleInput], special: Mapping[int, str]
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
                words = []
                for name, value in zip(names, found, strict=True):
                    meaning = f" ({special[value]})" if field == "tokens" and value in special else ""
                    words.append(f"{name} {value}{meaning}")
                return f"{field} of sample {number}, position {position}: {' against '.join(words)}"
    return ""


def _compare_weights(at: _At, names: Names, one: Weights, other: Weights) -> AgreementCheck:
    """Compare the tensors' hashes; a tensor that one engine lacks is unequal."""
    own, known = dict(one.tensors), dict(other.tensors)
    unequal = [name for name in own | known if own.get(name) != known.get(name)]
    if unequal:
        lacking = names[0] if unequal[0] not in own else names[1] if unequal[0] not in known else ""
        fault = f"is missing in {lacking}" if lacking else "is not equal"
        found = f"{unequal[0]} {fault}, the first of {count(len(unequal), 'such tensor')}"
    else:
        notes = [f"; {name}: {side.note}" for name, side in zip(names, (one, other), strict=True) if side.note]
        found = f"{count(len(own), 'tensor')} equal{''.join(notes)}"
    word, num = CheckWord.FAIL if unequal else CheckWord.PASS, len(one.tensors)
    return _make(CheckKind.WEIGHTS, at.place, names, word, found, num=num, num_unequal=len(unequal))


def _find_dtype(*sides: Routing | LogProbs | Layer) -> str:
    """Return the least precise of the sides' number types."""
    return max((side.dtype for side in sides), key=lambda name: DTYPES.index(name) if name in DTYPES else len(DTYPES))


class _Gap(NamedTuple):
    """``largest`` and ``mean`` are None if a value is not finite."""

    num: int
    num_unequal: int
    largest: float | None
    mean: float | None
    row: int
    position: int


def _find_gap(one: Rows, other: Rows) -> _Gap:
    gaps: list[float] = []
    largest, place = 0.0, (0, 0)
    for row, (lefts, rights) in enumerate(zip(one, other, strict=True)):
        for position, (left, right) in enumerate(zip(lefts, rights, strict=True)):
            gap = math.inf if left is None or right is None else abs(left - right)
            gaps.append(gap)
            if gap > largest:
                largest, place = gap, (row, position)
    num_unequal = sum(gap > 0 for gap in gaps)
    if largest == math.inf:
        return _Gap(len(gaps), num_unequal, None, None, *place)
    return _Gap(len(gaps), num_unequal, largest, math.fsum(gaps) / len(gaps), *place)


def _compare_log_probs(at: _At, names: Names, one: LogProbs, other: LogProbs) -> AgreementCheck:
    kind = CheckKind.LOG_PROBS
    if list(map(len, one.values)) != list(map(len, other.values)):
        return _make(kind, at.place, names, CheckWord.FAIL, "the engines give different numbers of tokens")
    if not any(one.values):
        return _skip(kind, at.place, names, "the record of the log-probs holds 0 numbers")
    gap, dtype = _find_gap(one.values, other.values), _find_dtype(one, other)
    bound = at.contract.find_bound("log-probs", dtype)
    word, found = judge_size(gap.largest, bound, dtype, _describe_gap(gap, one, at.inputs))
    return _make(
        kind, at.place, names, word, found,
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


def _compare_layers(at: _At, names: Names, one: Mapping[str, Layer], other: Mapping[str, Layer]) -> AgreementCheck:
    points = [point for point in one if point in other]
    if not points:
        return _skip(CheckKind.LAYERS, at.place, names, "the engines recorded no layer in common")
    for point in points:
        shape = _find_shape(one[point])
        if shape != _find_shape(other[point]) or len(one[point].norms) != len(one[point].values):
            found = f"{point}: the engines recorded different numbers of rows or columns"
            return _make(CheckKind.LAYERS, at.place, names, CheckWord.FAIL, found)
    if not any(any(_find_shape(layer)) for layer in one.values()):
        return _skip(CheckKind.LAYERS, at.place, names, "the record of the layers holds 0 numbers")
    curve = [_find_distance(one[point], other[point]) for point in points]
    dtype = _find_dtype(one[points[0]], other[points[0]])
    bound = at.contract.find_bound("layers", dtype)
    sizes = [math.inf if value is None else value for value in curve]
    first = next((n for n, size in enumerate(sizes) if bound is not None and size > bound), None)
    worst = sizes.index(max(sizes)) if first is None else first
    shown = "not finite" if curve[worst] is None else f"relative difference {format_number(sizes[worst], 3)}"
    lead = "largest at" if first is None else "first outside at"
    found = "bitwise" if not any(sizes) else f"{lead} {points[worst]}: {shown}"
    largest = None if None in curve else max(sizes)
    word, found = judge_size(largest, bound, dtype, found)
    return _make(
        CheckKind.LAYERS, at.place, names, word, found, num=len(points), num_unequal=sum(size > 0 for size in sizes),
        largest=largest, dtype=dtype, bound=bound, points=tuple(points), curve=tuple(curve),
    )  # fmt: skip


def _find_shape(layer: Layer) -> tuple[int, ...]:
    return (len(layer.norms), *map(len, layer.values))


def _find_distance(one: Layer, other: Layer) -> float | None:
    """Return the largest norm(one - other) / norm(other) over all tokens; None if it is not finite."""
    found = 0.0
    for left, right, norm in zip(one.values, other.values, other.norms, strict=False):
        gaps = [a - b for a, b in zip(left, right, strict=True) if a is not None and b is not None]
        if len(gaps) < len(left) or norm is None:
            return None
        size = math.sqrt(math.fsum(gap * gap for gap in gaps))
        if size:
            found = max(found, size / norm if norm else math.inf)
    return found if found < math.inf else None


COMPARISONS: Final[Mapping[CheckKind, Callable[[_At, Names, Any, Any], AgreementCheck]]] = {
    CheckKind.INPUTS: _compare_inputs,
    CheckKind.WEIGHTS: _compare_weights,
    CheckKind.ROUTING: _compare_routing,
    CheckKind.LAYERS: _compare_layers,
    CheckKind.LOG_PROBS: _compare_log_probs,
}
