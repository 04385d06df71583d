"""Predict what RL-Kernel saves of a user's own step, from what module runs and whole steps of vime measured.

vime's loss functions read and write every logit, so what RL-Kernel saves is nearly constant per logit.  Milliseconds
therefore carry over to other models, layouts and machines of a kind; percentages of a step do not.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, TypeAlias

from rlk_repro.analysis.allocations import number_hosts
from rlk_repro.base.answer import Answer
from rlk_repro.base.errors import CheckFailed, Problem, SpecError
from rlk_repro.base.files import write_text
from rlk_repro.base.resources import data_dir
from rlk_repro.base.units import count, group
from rlk_repro.division import divide
from rlk_repro.logs.lines import open_log
from rlk_repro.logs.vime import parse_log
from rlk_repro.loss_options import has_old_policy_pass
from rlk_repro.operators import RL_KERNEL, TITLES, TRAINER
from rlk_repro.plan import Plan
from rlk_repro.spec import ModuleWorkload, Stack, VimeWorkload
from rlk_repro.spec.values import BASELINE, ENABLED
from rlk_repro.statistics.stats import mean, percentile, stdev, t_quantile

Kind: TypeAlias = tuple[object, ...]
CONFIDENCE: Final = 0.95
PS_PER_MS: Final = 1e9
OPS: Final = ("logp", "ratio_kl")
USUAL_ARMS: Final = (RL_KERNEL, TRAINER)
MODULE_RUN: Final = ("module-qwen3-4b", 151936, 9216)
"""The run that measures constants, with the vocabulary and the tokens of its file."""
MOST_ERROR: Final = 0.1
"""A whole step tells what its parts miss if its saving has a standard error of at most this fraction."""
OF_STEP_TIME: Final = ("hardware", "baseline", "has_entropy", "tensor_parallel", "vocab_size", "microbatch", "tokens",
                       "passes")  # fmt: skip
"""Of steps that differ in one of these, one's time says nothing about another's."""
EDGE: Final = 0.02
"""Sizes up to this fraction beyond those measured count as measured: vocabularies differ a little."""
MAX_ARGUMENT_BYTES: Final = 1 << 22
PASSES: Final = ("perf/log_probs_time", "perf/ref_log_probs_time")
FIRST_STEPS: Final = 2
"""Rollouts at the start of a log that do not count: they also compile and allocate."""


@dataclass(frozen=True, kw_only=True)
class StepShape(Answer):
    """What decides the saving of a step; ``vocab_size``, ``microbatch`` and ``tokens`` are those of one GPU.

    ``tokens`` are trained in one step (rollout), and ``passes`` is the number of passes without gradient.
    """

    hardware: str
    stack: str
    commit: str
    implementation: str = RL_KERNEL
    baseline: str = TRAINER
    has_entropy: bool
    tensor_parallel: int
    vocab_size: int
    microbatch: int
    tokens: int
    passes: int

    @property
    def arms(self) -> tuple[str, str]:
        """What is compared; torch.compile, for one, is slower in a step than alone, and RL-Kernel is not."""
        return self.implementation, self.baseline

    @property
    def kind(self) -> Kind:
        """What a constant belongs to."""
        return (self.hardware, self.commit, *self.arms, self.has_entropy, self.tensor_parallel)

    @property
    def served(self) -> str:
        against = "" if self.baseline == TRAINER else f" against {TITLES[self.baseline]}"
        return f"{TITLES.get(self.implementation, self.implementation)} {self.commit[:7]}{against}"

    @property
    def logits(self) -> float:
        return float(self.tokens * self.vocab_size)


@dataclass(frozen=True, kw_only=True)
class Measured(StepShape):
    """What a bundle measured: savings in ps per logit (of one pass, and of the loss), and those of the step in ms.

    ``error_ms`` is the half width of the interval of ``saved_ms`` divided by Student's t of ``n`` sessions or pairs:
    its standard error, or less where the noise of blocks sets the interval.  ``boots`` are ids of the hosts' boots:
    bundles that share a host count once, because two GPUs of one host tell little about the next host.
    ``has_collection`` tells whether a step holds vime's garbage collection.
    """

    bundle: str
    name: str
    run: str
    is_module: bool
    has_collection: bool
    gpus: str
    boots: str
    step_ms: float
    saved_ms: float
    error_ms: float
    n: int
    no_grad_ps: float
    loss_ps: float

    @property
    def ids(self) -> frozenset[str]:
        """What tells hosts apart."""
        known = [name for name in (*self.gpus.split(", "), *self.boots.split(", ")) if name]
        return frozenset(known or [self.bundle])

    @property
    def parts_ms(self) -> float:
        return self.logits * (self.passes * self.no_grad_ps + self.loss_ps) / PS_PER_MS


@dataclass(frozen=True, kw_only=True)
class Part(Answer):
    """``factor`` is what the part saves in a whole step relative to the module run, which gave ``ps_per_logit``."""

    name: str
    saved_ms: float
    ps_per_logit: float
    factor: float


@dataclass(frozen=True, kw_only=True)
class Prediction(Answer):
    """The interval is for one more machine at 95 %; ``whole_to_parts`` is what a step saves of what its parts save.

    ``shares_pct`` are the saving and the ends of its interval as shares of the step; empty if its time is unknown.
    """

    shape: StepShape
    saved_ms: float
    low_ms: float
    high_ms: float
    parts: tuple[Part, ...]
    whole_to_parts: float
    whole_from: str
    constants_from: tuple[str, ...]
    step_ms: float | None
    step_from: str
    shares_pct: tuple[float, ...]


def shape_of(plan: Plan) -> StepShape:
    """Return the shape of a plan's step; raise CheckFailed if nothing like it was ever measured."""
    workload, layout, hardware = plan.run.workload, plan.layout, plan.hardware.hardware
    refused = [op for op, reason in plan.explain_operators().items() if reason]
    is_known = plan.run.find_implementation(ENABLED) != RL_KERNEL or {*plan.ops} == {*OPS}
    if not isinstance(workload, ModuleWorkload | VimeWorkload) or not workload.is_timed or refused or not is_known:
        got = f"{plan.run.workload.kind} with {', '.join(plan.ops) or 'no operator'}"
        expected = f"a timed run of vime with {' and '.join(OPS)}"
        is_timed = isinstance(workload, VimeWorkload) and workload.is_timed
        hint = f"rlk-repro submit {plan.run.run} --hardware {hardware} measures it" if is_timed else None
        raise CheckFailed(Problem(plan.run.run, "cannot be predicted", got=got, expected=expected, hint=hint))
    _require_plain(plan.run.run, layout.pipeline_parallel, layout.context_parallel)
    if isinstance(workload, ModuleWorkload):
        vocab_size, microbatch = workload.batch.vocab_size, workload.batch.num_tokens
        tokens = microbatch * workload.batch.num_microbatches * workload.grpo.num_steps_per_rollout
    else:
        vocab_size = workload.model.size("vocab-size")
        tokens = workload.grpo.num_samples * workload.grpo.max_sample_len // divide(plan).data_parallel
        of_step = tokens // workload.grpo.num_steps_per_rollout
        microbatch = min(workload.placements[hardware].max_tokens_per_gpu, of_step)
    return StepShape(
        hardware=hardware,
        stack=plan.stack.stack,
        commit=_find_commit(plan.stack),
        implementation=plan.run.find_implementation(ENABLED),
        baseline=plan.run.find_implementation(BASELINE),
        has_entropy=plan.run.entropy_metric,
        tensor_parallel=layout.tensor_parallel,
        vocab_size=_split_vocabulary(vocab_size, layout.tensor_parallel),
        microbatch=microbatch,
        tokens=tokens,
        passes=has_old_policy_pass(workload.loss_options) + workload.grpo.use_kl_loss,
    )


def _require_plain(name: str, pp: int, cp: int) -> None:
    if pp * cp > 1:
        raise CheckFailed(
            Problem(f"{name}: layout", "was not measured", got=f"PP {pp}, CP {cp}", expected="PP 1, CP 1")
        )


def _find_commit(stack: Stack) -> str:
    return stack.pins["rl_kernel"].commit[:12] if "rl_kernel" in stack.pins else ""


def _split_vocabulary(size: int, tensor_parallel: int) -> int:
    """Return one GPU's part of a vocabulary, which Megatron-LM pads to a multiple of 128 x tensor parallel."""
    return -(-size // (128 * tensor_parallel)) * 128


def load_measured() -> list[Measured]:
    """Load what is shipped: one row for each bundle of a module run or of a whole step."""
    return [Measured(**row) for row in json.loads((data_dir("manifests") / "savings.json").read_bytes())]


def write_measured(rows: Sequence[Measured], path: Path) -> None:
    lines = [json.dumps(row.to_json()) for row in sorted(rows, key=lambda row: row.name)]
    write_text(path, "[\n" + ",\n".join(lines) + "\n]\n")


def predict_plan(plan: Plan, measured: Sequence[Measured], step_ms: float | None = None) -> Prediction:
    """Predict for a plan; without ``step_ms`` the step is as long as bundles of this run measured, if there are any."""
    if plan.run.workload.kind == "module":
        raise CheckFailed(Problem(plan.run.run, "has no whole step", expected="a run of vime"))
    told = "as given"
    shape = shape_of(plan)
    is_alike = attrgetter(*OF_STEP_TIME)
    known = [
        row.step_ms
        for row in measured
        if (row.run, row.has_collection) == (plan.run.run, not plan.run.gc_freeze) and is_alike(row) == is_alike(shape)
    ]
    if step_ms is None and known:
        step_ms, told = percentile(known, 50), f"the median of {count(len(known), 'bundle')} of this run"
    return predict(shape, measured, step_ms, told)


def predict(
    shape: StepShape, measured: Sequence[Measured], step_ms: float | None = None, step_from: str = ""
) -> Prediction:
    """Predict the saving of a step; raise CheckFailed that names the module run which would make its constants."""
    alone = group((row.kind, row) for row in measured if row.is_module)
    _require_measured(shape, alone, measured)
    machines = {
        kind: [_average([(row.no_grad_ps, row.loss_ps) for row in host]) for host in _group_hosts(rows)]
        for kind, rows in alone.items()
    }
    constants = {kind: _average(found) for kind, found in machines.items()}
    whole = [row for row in measured if not row.is_module]
    factors = _find_factors(whole, constants, shape.arms)
    factors = factors if len(factors) > 1 else _find_factors(whole, constants, USUAL_ARMS)
    # the parts do not depend on what the whole step happened to save
    known = [row for row in whole if row.error_ms <= MOST_ERROR * abs(row.parts_ms)]
    ratios = [mean([row.saved_ms / row.parts_ms for row in host]) for host in _group_hosts(known)]
    cards = sorted({row.hardware.upper() for row in known})
    served = sorted({TITLES.get(row.implementation, row.implementation) for row in known})
    weights = (shape.passes * constants[shape.kind][0], constants[shape.kind][1])
    sums = [weights[0] * no_grad + weights[1] * loss for no_grad, loss in factors]
    spread = math.hypot(_pool(machines.values(), shape.passes), _spread_of_next(sums), _spread_of_next(ratios))
    half = t_quantile(CONFIDENCE, len(ratios) - 1) * spread
    names = (f"{count(shape.passes, 'pass', 'passes')} without gradient", "loss, forward and backward")
    parts = []
    for name, weight, ps, factor in zip(names, weights, constants[shape.kind], _average(factors), strict=True):
        ms = shape.logits * weight * factor / PS_PER_MS
        parts.append(Part(name=name, saved_ms=ms, ps_per_logit=ps, factor=factor))
    ratio = mean(ratios)
    saved = ratio * sum(part.saved_ms for part in parts)
    low, high = saved - abs(saved) * half, saved + abs(saved) * half
    return Prediction(
        shape=shape,
        saved_ms=saved,
        low_ms=low,
        high_ms=high,
        parts=tuple(parts),
        whole_to_parts=ratio,
        whole_from=f"{count(len(known), 'bundle')} of {' and '.join(served)} on {' and '.join(cards)}",
        constants_from=tuple(f"{row.name} ({row.bundle})" for row in alone[shape.kind]),
        step_ms=step_ms,
        step_from=step_from,
        shares_pct=tuple(100 * ms / step_ms for ms in (saved, low, high)) if step_ms else (),
    )


def _find_factors(
    whole: Sequence[Measured], constants: Mapping[Kind, tuple[float, float]], arms: tuple[str, str]
) -> list[tuple[float, float]]:
    """Return what both parts save in each host's steps, relative to the module runs of their kinds."""
    alike = [row for row in whole if row.kind in constants and row.arms == arms]
    factors = []
    for host in _group_hosts(alike):
        pairs = [(row.no_grad_ps / constants[row.kind][0], row.loss_ps / constants[row.kind][1]) for row in host]
        factors.append(_average(pairs))
    return factors


def _average(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the means of the first and of the second numbers."""
    return mean([first for first, _ in pairs]), mean([second for _, second in pairs])


def _group_hosts(rows: Sequence[Measured]) -> list[list[Measured]]:
    hosts = number_hosts([row.ids for row in rows])
    return list(group(zip(hosts, rows, strict=True)).values())


def _pool(kinds: Iterable[Sequence[tuple[float, float]]], passes: int) -> float:
    """Return how much constants differ between machines of one kind, as a fraction, pooled over all kinds."""
    total, df = 0.0, 0
    for machines in kinds:
        sums = [passes * no_grad + loss for no_grad, loss in machines]
        total += sum((value / mean(sums) - 1) ** 2 for value in sums)
        df += len(sums) - 1
    return math.sqrt(total / df) if df else 0.0


def _spread_of_next(values: Sequence[float]) -> float:
    """Return the standard deviation of one more value around the mean of these, as a fraction of the mean."""
    return stdev(values) / mean(values) * math.sqrt(1 + 1 / len(values))


def _require_measured(shape: StepShape, alone: Mapping[Kind, object], measured: Sequence[Measured]) -> None:
    """Raise CheckFailed for a kind without constants, and for sizes beyond those measured on this kind of GPU."""
    hint = f"{_name_module_run(shape)} makes them; then name its bundle here too"
    if shape.kind not in alone:
        if replace(shape, has_entropy=False).kind in alone:
            hint += "; --no-entropy tells what a log's step would save without the metric"
        metric = "with" if shape.has_entropy else "without"
        what = f"{shape.served}, {metric} vime's entropy metric, TP {shape.tensor_parallel}"
        raise CheckFailed(Problem(f"{shape.hardware}: constants", "were not measured", got=what, hint=hint))
    alike = [row for row in measured if row.hardware == shape.hardware]
    for name in ("vocab_size", "microbatch"):
        known = [getattr(row, name) for row in alike]
        if not (1 - EDGE) * min(known) <= getattr(shape, name) <= (1 + EDGE) * max(known):
            where, what = f"{shape.hardware}: {name}", "of one GPU was not measured"
            got = f"{getattr(shape, name):,}"
            expected = f"{min(known):,} to {max(known):,}, give or take {100 * EDGE:.0f} %"
            raise CheckFailed(Problem(where, what, got=got, expected=expected, hint=hint))


def _name_module_run(shape: StepShape) -> str:
    """Return the command of the module run that would make the constants of a shape."""
    run, vocab_size, microbatch = MODULE_RUN
    is_usual = _split_vocabulary(vocab_size, shape.tensor_parallel) == shape.vocab_size
    settings = {
        "workload.batch.vocab_size": vocab_size if is_usual else shape.vocab_size * shape.tensor_parallel,
        "workload.batch.num_tokens": shape.microbatch,
        f"layouts.{shape.hardware}.tensor_parallel": shape.tensor_parallel,
        f"layouts.{shape.hardware}.gpus_per_node": shape.tensor_parallel,
        "entropy_metric": str(shape.has_entropy).lower(),
        "rl_kernel.implementation": shape.implementation,
        "rl_kernel.baseline_implementation": shape.baseline,
    }
    usual = {vocab_size, microbatch, 1, "false", RL_KERNEL, TRAINER}
    flags = "".join(f" --set {name}={value}" for name, value in settings.items() if value not in usual)
    return f"rlk-repro submit {run} --hardware {shape.hardware} --stack {shape.stack}{flags} --wait"


def read_log(path: Path, given: Mapping[str, Any], stack: Stack) -> tuple[StepShape, float | None, str]:
    """Return the step of a baseline log of vime, its time in ms, and where that comes from.

    ``given`` replaces what the log says.  Sizes are among the arguments that Megatron-LM prints at the start, and the
    passes are those whose times vime prints.

    Raises:
        SpecError: names every value that is still missing.
    """
    rows = parse_log(path).rows
    perf = [rows["perf"][index] for index in sorted(rows["perf"])][FIRST_STEPS:]
    with open_log(path) as stream:
        start = stream.read(MAX_ARGUMENT_BYTES).decode(errors="replace")
    arguments = {
        name: int(value) for name, value in re.findall(r"  (\w+) \.{3,} ([1-9]\d{0,8})\r?$", start, re.MULTILINE)
    }

    def middle(*keys: str) -> float | None:
        """Return the median over the steps of the product of these numbers."""
        found = [math.prod(row[key].value for key in keys) for row in perf if all(key in row for key in keys)]
        middle = percentile([value for value in found if math.isfinite(value)] or [0.0], 50)
        return middle if middle and middle > 0 else None

    tp, pp, cp = (arguments.get(f"{name}_parallel_size") for name in ("tensor_model", "pipeline_model", "context"))
    gpus = arguments.get("actor_num_nodes", 0) * arguments.get("actor_num_gpus_per_node", 0)
    trained = middle("perf/actor_train_tok_per_s", "perf/actor_train_time")
    entropies = [row["train/entropy_loss"].value for row in rows["step"].values() if "train/entropy_loss" in row]
    found: dict[str, Any] = {
        "hardware": None,
        "vocab": arguments.get("padded_vocab_size") or arguments.get("vocab_size"),
        "tp": tp,
        "tokens": max(1, round(trained * tp / gpus)) if trained and gpus and tp else None,
        "microbatch": arguments.get("max_tokens_per_gpu"),
        "passes": sum(any(key in row for row in perf) for key in PASSES) if perf else None,
        "entropy": any(entropies) if entropies else None,
    }
    found |= {name: value for name, value in given.items() if value is not None}
    missing = [name for name, value in found.items() if value is None]
    if missing:
        raise SpecError(*(Problem(f"--{name}", f"is needed: {path} does not tell it") for name in missing))
    _require_plain(str(path), pp or 1, cp or 1)
    shape = StepShape(
        hardware=found["hardware"],
        stack=stack.stack,
        commit=_find_commit(stack),
        has_entropy=found["entropy"],
        tensor_parallel=found["tp"],
        vocab_size=_split_vocabulary(found["vocab"], found["tp"]),
        microbatch=min(found["tokens"], found["microbatch"]),
        tokens=found["tokens"],
        passes=found["passes"],
    )
    step_s = found.get("step_time") or middle("perf/step_time")
    told = "as given" if "step_time" in found else f"the median of {count(len(perf), 'step')} of the log"
    return shape, step_s and 1000 * step_s, told


def describe(found: Prediction) -> Iterator[str]:
    """Yield the lines that a terminal shows: the saving, its share of the step, its parts, and where they come from."""
    ends = f"{found.low_ms:.1f} to {found.high_ms:.1f} ms"
    where = f"{found.shape.served} on one more {found.shape.hardware.upper()}"
    yield f"{where}: {found.saved_ms:.1f} ms less a step (95 % interval {ends})"
    yield describe_share(found)
    for part in found.parts:
        why = f"{part.ps_per_logit:.2f} ps a logit alone, × {part.factor:.2f} in a step"
        yield f"  {part.name:<28} {part.saved_ms:7.1f} ms: {why}"
    yield f"  a step saves {found.whole_to_parts:.2f} of what its parts save: {found.whole_from}"
    yield f"constants from {', '.join(found.constants_from)}"


def describe_share(found: Prediction) -> str:
    if found.step_ms is None:
        return "no share of a step: its time is unknown (--step-time SECONDS)"
    saved, low, high = found.shares_pct
    return f"{saved:.1f} % ({low:.1f} to {high:.1f} %) of a step of {found.step_ms / 1000:.2f} s, {found.step_from}"
