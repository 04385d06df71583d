"""The plan: run, stack, hardware, profile and flags, fully resolved.  Pure: the same inputs give the same two hashes.

``experiment_hash`` covers what is measured (all but profile and cluster), so that a replay elsewhere keeps it;
``plan_hash`` covers everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from rlk_repro.errors import BundleUnreadable, Problem, SpecError
from rlk_repro.files import check_schema, dump_json, sha256_bytes
from rlk_repro.operators import Eligibility, eligibility, read_loss_options
from rlk_repro.resources import suggest
from rlk_repro.spec import Hardware, Layout, Profile, Run, Stack, Variant
from rlk_repro.specfile import Loaded, Override

SCHEMA: Final = 1
_RUN_ID: Final = "run_id"
M = TypeVar("M", bound=BaseModel)
BASELINE: Final[Variant] = "baseline"
ENABLED: Final[Variant] = "enabled"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One variant to be executed once.  ``is_control`` marks trials of a baseline against baseline pair."""

    index: int
    pair: str
    variant: Variant
    is_control: bool
    seed: int

    @property
    def name(self) -> str:
        return f"{self.index:02d}-{self.pair}-{self.variant}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One submission, resolved.  ``sources`` says per dotted path of the run where its value came from."""

    run: Run
    stack: Stack
    hardware: Hardware
    profile: Profile
    trials: tuple[Trial, ...]
    is_exploratory: bool = False
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        return self.run.layouts[self.hardware.hardware]

    @property
    def cluster(self) -> str:
        return self.profile.cluster

    @property
    def num_steps(self) -> int:
        """Rollouts per trial: warm-up and scored."""
        return self.run.measure.warmup_steps + self.run.measure.scored_steps

    @property
    def num_gpus(self) -> int:
        return self.layout.num_nodes * self.layout.gpus_per_node

    @property
    def experiment(self) -> dict[str, Any]:
        """What is measured, as plain JSON values."""
        return {
            "run": _dump(self.run),
            "stack": _dump(self.stack),
            "hardware": _dump(self.hardware),
            "is_exploratory": self.is_exploratory,
            "trials": [_dump_trial(trial) for trial in self.trials],
        }

    @property
    def experiment_hash(self) -> str:
        return sha256_bytes(dump_json(self.experiment))

    @property
    def plan_hash(self) -> str:
        return sha256_bytes(dump_json({"experiment": self.experiment, "profile": _dump(self.profile)}))

    def pairs(self) -> dict[str, tuple[Trial, Trial]]:
        """Pair name to its two trials: baseline and enabled, whichever ran first.

        In every second control pair the later trial comes first, so that linear drift cancels there as it does in ABBA.
        """
        grouped: dict[str, list[Trial]] = {}
        for trial in self.trials:
            grouped.setdefault(trial.pair, []).append(trial)
        ordered = {}
        num_controls = 0
        for name, (first, second) in grouped.items():
            is_reversed = first.variant == ENABLED
            if first.is_control:
                is_reversed = num_controls % 2 == 1
                num_controls += 1
            ordered[name] = (second, first) if is_reversed else (first, second)
        return ordered

    def eligibilities(self) -> list[Eligibility]:
        """Operator by operator: may it run in this layout, and if not, why."""
        loss = read_loss_options(_dump(self.run.workload.grpo))
        return [
            eligibility(
                op,
                platform=self.hardware.platform,
                tensor_parallel=self.layout.tensor_parallel,
                context_parallel=self.layout.context_parallel,
                loss=loss,
            )
            for op in self.run.rl_kernel.ops
        ]

    def gpu_hours(self) -> float | None:
        """Expected GPU-hours from the run's own estimate; None where the run gives none for this hardware."""
        minutes = self.run.expected_minutes.get(self.hardware.hardware)
        return None if minutes is None else minutes / 60 * self.num_gpus

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "experiment_hash": self.experiment_hash,
            "plan_hash": self.plan_hash,
            "experiment": self.experiment,
            "profile": _dump(self.profile),
            "sources": dict(self.sources),
        }

    @classmethod
    def from_json(cls, value: Any, where: str = "plan.json") -> Plan:
        """Rebuild a plan and check both hashes.

        Raises:
            BundleUnreadable: fields missing or wrong, a newer schema, or hashes that do not fit the content.
        """
        check_schema(where, value, SCHEMA)
        try:
            experiment = value["experiment"]
            plan = cls(
                run=_load(Run, experiment["run"]),
                stack=_load(Stack, experiment["stack"]),
                hardware=_load(Hardware, experiment["hardware"]),
                profile=_load(Profile, value["profile"]),
                trials=tuple(Trial(**{key: item for key, item in trial.items() if key != "name"})
                             for trial in experiment["trials"]),
                is_exploratory=bool(experiment["is_exploratory"]),
                sources=dict(value["sources"]),
            )  # fmt: skip
            recorded = (value["experiment_hash"], value["plan_hash"])
        except (KeyError, TypeError, ValidationError) as error:
            raise BundleUnreadable(Problem(where, f"not a plan ({_first_line(error)})")) from None
        _check_trials(plan, where)
        if recorded != (plan.experiment_hash, plan.plan_hash):
            raise BundleUnreadable(
                Problem(where, "hashes do not fit the content", got=recorded[1][:12], expected=plan.plan_hash[:12],
                        hint="the file was changed after submission")
            )  # fmt: skip
        return plan


def make_record(plan: Plan, run_id: str) -> dict[str, Any]:
    """The content of a run's plan file: the plan, and the run id, which is in neither hash."""
    return {**plan.to_json(), _RUN_ID: run_id}


def find_run_id(record: Any, folder_name: str) -> str:
    """The run id in a plan file; the name of the run's folder where the file has none that could name one.

    Recorded, so that an analysis stays the same wherever its run directory was moved, renamed or unpacked.
    """
    run_id = record.get(_RUN_ID) if isinstance(record, Mapping) else None
    if not isinstance(run_id, str) or not run_id.isprintable() or "/" in run_id or run_id in {"", ".", ".."}:
        return folder_name
    return run_id


def flag_overrides(*, lane: str | None, pairs: int | None, control_pairs: int | None) -> list[Override]:
    """The flags that mean a ``--set``."""
    flags: list[tuple[tuple[str, ...], object, str]] = [
        (("lane",), lane, "--lane"),
        (("measure", "pairs"), pairs, "--pairs"),
        (("measure", "control_pairs"), control_pairs, "--control-pairs"),
    ]
    return [Override(path, value, flag) for path, value, flag in flags if value is not None]


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
    """Resolve one submission.

    Raises:
        SpecError: the hardware has no layout in this run, the variants make no pair, the measurement rules were
            changed without ``is_exploratory``, or the enabled variant has no eligible operator.
    """
    problems = [*_layout_problems(run.model, hardware.model), *_variant_problems(variants)]
    problems += _rule_problems(overrides, is_exploratory)
    if problems:
        raise SpecError(*problems)
    plan = Plan(
        run=run.model,
        stack=stack.model,
        hardware=hardware.model,
        profile=profile.model,
        trials=tuple(order_trials(run.model, has_enabled=ENABLED in variants)),
        is_exploratory=is_exploratory,
        sources=_sources(run),
    )
    if ENABLED in variants:
        _check_operators(plan)
    return plan


def order_trials(run: Run, *, has_enabled: bool) -> Iterator[Trial]:
    """ABBA: every second pair of a kind runs in reverse; control pairs are spread evenly among the others."""
    measure = run.measure
    slots = [((number + 0.5) / measure.pairs, not has_enabled, f"p{number + 1}") for number in range(measure.pairs)]
    slots += [((number + 0.5) / measure.control_pairs, True, f"c{number + 1}")
              for number in range(measure.control_pairs)]  # fmt: skip
    seen = {True: 0, False: 0}
    index = 0
    for number, (_, is_control, pair) in enumerate(sorted(slots, key=lambda slot: (slot[0], slot[1]))):
        order = [BASELINE, BASELINE if is_control else ENABLED]
        if seen[is_control] % 2:
            order.reverse()
        seen[is_control] += 1
        for variant in order:
            yield Trial(index=index, pair=pair, variant=variant, is_control=is_control, seed=measure.seed + number)
            index += 1


def _check_trials(plan: Plan, where: str) -> None:
    """One seed per pair, another for every pair: without it the pairs are not what the statistics take them for."""
    grouped: dict[str, list[Trial]] = {}
    for trial in plan.trials:
        grouped.setdefault(trial.pair, []).append(trial)
    seeds = [{trial.seed for trial in trials} for trials in grouped.values()]
    is_whole = all(len(trials) == 2 for trials in grouped.values())
    if not is_whole or any(len(found) > 1 for found in seeds) or len(set().union(*seeds)) < len(seeds):
        raise BundleUnreadable(
            Problem(
                where,
                "trials make no pairs",
                expected="two trials of one seed in each pair, another seed in every pair",
            )
        )


def _layout_problems(run: Run, hardware: Hardware) -> list[Problem]:
    name = hardware.hardware
    layout = run.layouts.get(name)
    if layout is None:
        known = sorted(run.layouts)
        return [Problem(f"run {run.run}", "has no layout for this hardware", got=name,
                        expected=f"one of {', '.join(known)}", hint=suggest(name, known))]  # fmt: skip
    if layout.gpus_per_node > hardware.gpus_per_node:
        return [Problem(f"run {run.run}: layouts.{name}.gpus_per_node", "more than a node has",
                        got=layout.gpus_per_node, expected=f"at most {hardware.gpus_per_node}")]  # fmt: skip
    return []


def _variant_problems(variants: Sequence[str]) -> list[Problem]:
    known = get_args(Variant)
    unknown = [name for name in variants if name not in known]
    if unknown:
        return [Problem("--variants", "no such variant", got=unknown[0], expected=" or ".join(known),
                        hint=suggest(unknown[0], list(known)))]  # fmt: skip
    if BASELINE not in variants or len(set(variants)) != len(variants):
        return [Problem("--variants", "makes no pair", got=",".join(variants),
                        expected="baseline,enabled, or baseline alone for control pairs")]  # fmt: skip
    return []


def _rule_problems(overrides: Sequence[Override], is_exploratory: bool) -> list[Problem]:
    free = {("measure", "pairs"), ("measure", "control_pairs"), ("measure", "expected_pair_sd_pct")}
    return [
        Problem(
            item.flag,
            "changes a measurement rule of the run",
            got=item.value,
            expected="the run's own rule",
            hint="add --exploratory, and the verdict will say so",
        )
        for item in overrides
        if item.path[0] == "measure" and item.path not in free and not is_exploratory
    ]


def _check_operators(plan: Plan) -> None:
    found = plan.eligibilities()
    if not any(item.is_eligible for item in found):
        raise SpecError(
            *(
                Problem(
                    f"run {plan.run.run}: rl_kernel.ops: {item.op}",
                    f"not eligible here ({item.reason})",
                    expected="at least one operator that can run",
                    hint="--variants baseline measures noise without it",
                )
                for item in found
            )
        )


def _sources(run: Loaded[Run]) -> dict[str, str]:
    return {path: _origin(run.origin, path) for path in _leaves(_dump(run.model))}


def _origin(origin: Mapping[str, str], path: str) -> str:
    """The flag, or file name and line without folders: a plan names no path of a machine."""
    return origin.get(path, "default").rpartition("/")[2]


def _leaves(value: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix


def _dump(model: BaseModel) -> dict[str, Any]:
    return model.model_dump(mode="json", by_alias=True)


def _dump_trial(trial: Trial) -> dict[str, Any]:
    return {"index": trial.index, "name": trial.name, "pair": trial.pair, "variant": trial.variant,
            "is_control": trial.is_control, "seed": trial.seed}  # fmt: skip


def _load(model: type[M], value: Any) -> M:
    import json

    return model.model_validate_json(json.dumps(value))


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
