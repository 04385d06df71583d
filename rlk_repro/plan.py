"""A plan holds all values that follow from run, stack, hardware, profile and flags.

``experiment_hash`` covers all that is measured.  ``plan_hash`` also covers the profile, which differs at another site.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from rlk_repro.base.errors import BundleUnreadable, Problem, SpecError
from rlk_repro.base.files import check_schema, dump_json, sha256_bytes
from rlk_repro.base.units import group
from rlk_repro.loss_options import read_loss_options
from rlk_repro.operators import RL_KERNEL, Case, find_refusal, name_implementations
from rlk_repro.rundir.store import read_plan
from rlk_repro.spec import Hardware, Image, Layout, Measure, Profile, Run, Stack, Variant, choices, run_problems
from rlk_repro.spec.values import BASELINE, CROSSOVER, ENABLED, dump_model
from rlk_repro.switches import VARIANT_SWITCHES

if TYPE_CHECKING:
    from rlk_repro.spec.load import Loaded, Override

SCHEMA: Final = 1
LIMIT_PER_ESTIMATE: Final = 1.5
SHORTEST_LIMIT_MIN: Final = 10.0  # the first trial also compiles
LIMIT_WITHOUT_ESTIMATE_MIN: Final = 30.0
PROFILE: Final = "profile."
"""What the paths of a profile's values begin with in ``sources``; those of a run's values have no prefix."""
_RUN_ID: Final = "run_id"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One execution of one variant, or one session, whose variant is ``crossover``.

    ``is_control`` marks the trials of a pair that compares baseline with baseline.
    """

    index: int
    pair: str
    variant: Variant | Literal["crossover"]
    is_control: bool
    seed: int

    @property
    def name(self) -> str:
        return f"{self.index:02d}-{self.pair}-{self.variant}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The values of a submission; ``sources`` maps the dotted path of a value to the file or flag that set it."""

    run: Run
    stack: Stack
    hardware: Hardware
    profile: Profile
    variants: tuple[Variant, ...] = (BASELINE, ENABLED)
    is_exploratory: bool = False
    sources: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def trials(self) -> tuple[Trial, ...]:
        return tuple(order_trials(self.run.measure, has_enabled=ENABLED in self.variants))

    @property
    def has_enabled(self) -> bool:
        return any(trial.variant != BASELINE for trial in self.trials)

    @property
    def routed(self) -> tuple[Variant, ...]:
        """The variants of this plan's trials that must prove which operators ran."""
        ran = {trial.variant for trial in self.trials}
        return tuple(
            variant for variant in (ENABLED, BASELINE) if ran & {variant, CROSSOVER} and self.run.is_routed(variant)
        )

    @property
    def needs_rl_kernel(self) -> bool:
        return any(self.run.find_implementation(variant) == RL_KERNEL for variant in self.routed)

    @property
    def serving(self) -> str:
        """What serves the trainer's operators in this plan, like ``RL-Kernel and torch.compile``."""
        return name_implementations(op for variant in self.routed for op in self.ops_of(variant))

    @property
    def is_crossover(self) -> bool:
        return self.run.measure.design == CROSSOVER

    @property
    def has_own_policies(self) -> bool:
        """Whether each variant learns from its own rollouts, so that it can come to another reward."""
        return self.run.lane == "live" and not self.is_crossover

    @property
    def layout(self) -> Layout:
        return self.run.layouts[self.hardware.hardware]

    @property
    def ops(self) -> tuple[str, ...]:
        return self.ops_of(ENABLED)

    def ops_of(self, variant: str) -> tuple[str, ...]:
        """Return the operators of trials of this variant; a session has those of both variants."""
        if self.run.switch is not None:
            return ()
        return self.run.rl_kernel.find_ops(variant, self.hardware.hardware)

    @property
    def switches(self) -> frozenset[str]:
        """The variables in which the variants may differ."""
        return VARIANT_SWITCHES if self.run.switch is None else frozenset(self.run.switch.enabled)

    @property
    def cluster(self) -> str:
        return self.profile.cluster

    @property
    def num_steps(self) -> int:
        """The number of rollouts per trial, warm-up included."""
        return self.run.measure.num_steps

    @property
    def num_gpus(self) -> int:
        return self.layout.num_nodes * self.layout.gpus_per_node

    @property
    def spans_nvlink(self) -> bool:
        """Whether NVLink connects GPUs of several nodes of this job."""
        return self.layout.num_nodes > 1 and self.hardware.nvlink_domain_gpus > self.layout.gpus_per_node

    @property
    def image(self) -> Image | None:
        return self.stack.images.get(self.hardware.image_platform)

    @property
    def experiment(self) -> dict[str, Any]:
        return {
            "run": dump_model(self.run),
            "stack": dump_model(self.stack),
            "hardware": dump_model(self.hardware),
            "variants": list(self.variants),
            "is_exploratory": self.is_exploratory,
            "trials": [_dump_trial(trial) for trial in self.trials],
        }

    @cached_property
    def experiment_hash(self) -> str:
        return sha256_bytes(dump_json({**self.experiment, "hardware": dump_model(self.hardware.as_measured)}))

    @cached_property
    def plan_hash(self) -> str:
        return sha256_bytes(dump_json({"experiment": self.experiment, "profile": dump_model(self.profile)}))

    def groups(self) -> dict[str, list[Trial]]:
        return group((trial.pair, trial) for trial in self.trials)

    def pairs(self) -> dict[str, tuple[Trial, Trial]]:
        """Return the two trials of each pair, baseline first, by the pair's name; a plan of sessions has no pairs.

        In every second control pair, the trial that runs later is returned first, so that linear drift cancels.
        """
        ordered: dict[str, tuple[Trial, Trial]] = {}
        num_controls = 0
        for name, (first, second) in () if self.is_crossover else self.groups().items():
            is_reversed = first.variant == ENABLED
            if first.is_control:
                is_reversed = num_controls % 2 == 1
                num_controls += 1
            ordered[name] = (second, first) if is_reversed else (first, second)
        return ordered

    def explain_operators(self) -> dict[str, str]:
        """Return, by operator, the reason why it cannot run here; an operator that can run has an empty reason."""
        pin = self.stack.pins.get("rl_kernel")
        case = Case(
            platform=self.hardware.platform,
            tensor_parallel=self.layout.tensor_parallel,
            context_parallel=self.layout.context_parallel,
            loss=read_loss_options(self.run.workload.loss_options),
            has_entropy_metric=self.run.entropy_metric,
            has_output_layer=self.run.workload.has_output_layer,
            commit=pin.commit if pin is not None else "",
        )
        return {op: str(find_refusal(op, case) or "") for op in (*self.ops, *self.ops_of(BASELINE))}

    def expected_minutes(self) -> float | None:
        """Return the estimated minutes of all trials; None without an estimate for this hardware and these steps."""
        minutes = self.run.expected_minutes.get(self.hardware.hardware)
        names = {"warmup_steps", "scored_steps", *Measure.of_crossover} - choices.FREE_RULES
        names |= set() if self.run.expected_session_minutes else {choices.DESIGN}
        changed = [name for name in names if self.sources.get(f"measure.{name}", "").startswith("--")]
        has_other_lane = self.is_crossover and self.sources.get("lane", "").startswith("--")
        if minutes is None or changed or has_other_lane:
            return None
        return minutes * len(self.trials)

    @property
    def time_limit_min(self) -> float:
        """The time limit of one trial or session: the run's own limit, or else a multiple of the estimate."""
        if self.run.time_limit_min is not None:
            return self.run.time_limit_min
        estimate_min = self.run.expected_minutes.get(self.hardware.hardware)
        if estimate_min is None:
            return LIMIT_WITHOUT_ESTIMATE_MIN
        return max(LIMIT_PER_ESTIMATE * estimate_min, SHORTEST_LIMIT_MIN)

    @property
    def storing_minutes(self) -> float | None:
        """The estimated minutes of the live run that stores rollouts; None without an estimate."""
        run, live_min = self.run, self.run.expected_trial_minutes.get(self.hardware.hardware)
        if live_min is None or not run.expected_session_minutes:
            return None
        return live_min * run.measure.num_stored / (run.measure.warmup_steps + run.measure.scored_steps)

    @property
    def storing_limit_min(self) -> float:
        """The time limit of the live run that stores rollouts; it is at least the limit of a trial."""
        if self.run.time_limit_min is not None or self.storing_minutes is None:
            return self.time_limit_min
        return max(self.time_limit_min, LIMIT_PER_ESTIMATE * self.storing_minutes)

    @property
    def num_stores(self) -> int:
        """The largest number of live runs that store rollouts: one for all sessions, or one for each pair's seed."""
        return 0 if self.run.lane == "live" else 1 if self.is_crossover else len({t.seed for t in self.trials})

    @property
    def all_limits_min(self) -> float:
        return len(self.trials) * self.time_limit_min + self.num_stores * self.storing_limit_min

    @property
    def group_limit_min(self) -> float:
        """The time limit of one pair or session, which always runs in one allocation."""
        return max(map(len, self.groups().values())) * self.time_limit_min

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "experiment_hash": self.experiment_hash,
            "plan_hash": self.plan_hash,
            "experiment": self.experiment,
            "profile": dump_model(self.profile),
            "sources": dict(self.sources),
        }

    @classmethod
    def load(cls, path: Path) -> Plan:
        return cls.from_json(read_plan(path), str(path))

    @classmethod
    def from_json(cls, value: Any, where: str = "plan.json") -> Plan:
        """Rebuild a plan; raise BundleUnreadable if ``value`` is not a valid plan or does not match its hashes."""
        check_schema(where, value, SCHEMA)
        try:
            record = PlanRecord.model_validate_json(json.dumps(value))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise BundleUnreadable(Problem(f"{where}: {place}", f"not a plan ({first['msg']})")) from None
        found = record.experiment
        plan = cls(run=found.run, stack=found.stack, hardware=found.hardware, profile=record.profile,
                   variants=found.variants, is_exploratory=found.is_exploratory, sources=record.sources)  # fmt: skip
        _check_record(where, record, plan)
        return plan


class PlanExperiment(BaseModel):
    """The measured experiment, as a plan file records it."""

    model_config = ConfigDict(strict=True, extra="ignore")

    run: Run
    stack: Stack
    hardware: Hardware
    variants: tuple[Variant, ...]
    is_exploratory: bool
    trials: list[Any]


class PlanRecord(BaseModel):
    """The content of a plan file; its trials and hashes must follow from its other values."""

    model_config = ConfigDict(strict=True, extra="ignore")

    experiment: PlanExperiment
    profile: Profile
    sources: dict[str, str]
    experiment_hash: str
    plan_hash: str


def _check_record(where: str, record: PlanRecord, plan: Plan) -> None:
    problems = choices.find_layout_problems(plan.run, plan.hardware)
    problems += choices.find_variant_problems(plan.run, plan.variants)
    for path, what, got, expected in run_problems(plan.run):
        problems.append(Problem(f"run.{'.'.join(path)}", what, got=got, expected=expected))
    problems = [dataclasses.replace(problem, where=f"{where}: {problem.where}") for problem in problems]
    if not problems and record.experiment.trials != [_dump_trial(trial) for trial in plan.trials]:
        what, expected = "trials do not follow from the plan's other values", "the trials of the plan's design"
        problems.append(Problem(where, what, expected=expected))
    if not problems and (record.experiment_hash, record.plan_hash) != (plan.experiment_hash, plan.plan_hash):
        what, hint = "hashes do not fit the content", "the file was changed after submission"
        got, expected = record.plan_hash[:12], plan.plan_hash[:12]
        problems.append(Problem(where, what, got=got, expected=expected, hint=hint))
    if problems:
        raise BundleUnreadable(*problems)


def make_record(plan: Plan, run_id: str) -> dict[str, Any]:
    """Return the content of a plan file: the plan, and the run id, which is not part of the plan's hashes."""
    return {**plan.to_json(), _RUN_ID: run_id}


def find_run_id(record: Any, folder_name: str) -> str:
    """Return the run id that a plan file records, or the folder's name if the file has no usable id."""
    run_id = record.get(_RUN_ID) if isinstance(record, Mapping) else None
    if not isinstance(run_id, str) or not run_id.isprintable() or "/" in run_id or run_id in {"", ".", ".."}:
        return folder_name
    return run_id


def make_plan(
    *,
    run: Loaded[Run],
    stack: Loaded[Stack],
    hardware: Loaded[Hardware],
    profile: Loaded[Profile],
    overrides: Sequence[Override] = (),
    variants: Sequence[str] = (BASELINE, ENABLED),
    is_exploratory: bool = False,
) -> Plan:
    """Make the plan of one submission.

    Raises:
        SpecError: the hardware has no layout in this run, the variants cannot form a pair, the measurement rules were
            changed without ``is_exploratory``, or the enabled variant has no eligible operator.
    """
    changed = choices.find_rule_problems(overrides)
    problems = choices.find_layout_problems(run.model, hardware.model)
    problems += choices.find_variant_problems(run.model, variants)
    problems += choices.find_design_problems(run.model, overrides)
    if not is_exploratory:
        problems += changed
    if problems:
        raise SpecError(*problems)
    plan = Plan(
        run=run.model,
        stack=stack.model,
        hardware=hardware.model,
        profile=profile.model,
        variants=tuple(variant for variant in get_args(Variant) if variant in variants),
        is_exploratory=is_exploratory and bool(changed),
        sources=run.sources,
    )
    if plan.routed:
        _check_operators(plan)
    return plan


def order_trials(measure: Measure, *, has_enabled: bool) -> Iterator[Trial]:
    """Yield the sessions in order, or the trials of all pairs, with control pairs spread evenly among the other pairs.

    In every second control pair, and in every second other pair, the two trials run in reverse order (ABBA).
    """
    if measure.design == CROSSOVER:
        for number in range(measure.sessions):
            seed = measure.seed + number
            yield Trial(index=number, pair=f"s{number + 1}", variant=CROSSOVER, is_control=False, seed=seed)
        return
    slots = []
    for letter, num_pairs, is_control in (("p", measure.pairs, not has_enabled), ("c", measure.control_pairs, True)):
        slots += [((number + 0.5) / num_pairs, is_control, f"{letter}{number + 1}") for number in range(num_pairs)]
    slots.sort(key=lambda slot: slot[:2])  # two pairs of one place and kind keep their order
    is_reversed = {True: False, False: False}
    for number, (_, is_control, pair) in enumerate(slots):
        order = (BASELINE, BASELINE if is_control else ENABLED)
        for place, variant in enumerate(reversed(order) if is_reversed[is_control] else order):
            index, seed = 2 * number + place, measure.seed + number
            yield Trial(index=index, pair=pair, variant=variant, is_control=is_control, seed=seed)
        is_reversed[is_control] = not is_reversed[is_control]


def _check_operators(plan: Plan) -> None:
    found = plan.explain_operators()
    where, expected = f"run {plan.run.run}: rl_kernel.ops", "at least one operator that can run here"
    hint = "--variants baseline measures the noise between trials without RL-Kernel"
    for variant in plan.routed:
        ops = plan.ops_of(variant)
        if all(found[op] for op in ops):
            reasons = {op: f"not eligible here ({found[op]})" for op in ops}
            raise SpecError(*(Problem(f"{where}: {op}", reasons[op], expected=expected, hint=hint) for op in ops))


def _dump_trial(trial: Trial) -> dict[str, Any]:
    return {**dataclasses.asdict(trial), "name": trial.name}
