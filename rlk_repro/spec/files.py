"""Runs and profiles, and the rules that a run's values must satisfy together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, ClassVar, Final, Literal, TypeAlias

from pydantic import Field

from rlk_repro.operators import OPERATORS, TITLES, TRAINER, find_conflicts
from rlk_repro.spec.compared import Margins, OwnSwitch, RlKernel, find_compared_problems
from rlk_repro.spec.kubernetes import KubernetesSettings
from rlk_repro.spec.site import AbsolutePath, ContainerSettings, Preflight, RaySettings, SlurmSettings
from rlk_repro.spec.values import (
    CROSSOVER,
    Count,
    EnvName,
    EnvValue,
    GrowingModel,
    Lane,
    Minutes,
    Model,
    Name,
    PathProblem,
    Positive,
    Schema,
    Seed,
    Text,
    Word,
)
from rlk_repro.spec.vime import VimeWorkload
from rlk_repro.spec.workloads import ModuleWorkload, OperatorsWorkload, ReferenceWorkload

MAX_STEPS: Final = 20_000
"""Limit for the steps of all trials together: an analysis holds about forty numbers for each step."""

Workload: TypeAlias = Annotated[
    ReferenceWorkload | ModuleWorkload | OperatorsWorkload | VimeWorkload, Field(discriminator="kind")
]
PERIODS_PER_BLOCK: Final = 4
MAX_BLOCKS: Final = 200
"""Limit for the blocks of a session: its effect is a median over all pairs of blocks (20100 pairs for 200 blocks)."""

Spread: TypeAlias = Annotated[float, Field(gt=0, le=100)]


class Measure(GrowingModel):
    """The measurement plan, fixed and hashed before the first trial.

    A file may hold the keys of both designs, and a submission may choose the other design.
    """

    of_parallel: ClassVar[frozenset[str]] = frozenset({"pairs", "control_pairs", "scored_steps"})
    of_crossover: ClassVar[frozenset[str]] = frozenset(
        {"sessions", "blocks", "control_blocks", "period_steps", "shadow_steps", "expected_block_sd_pct"}
    )
    added_later: ClassVar[frozenset[str]] = of_crossover | {"design", "replay_margin_pct", "rules"}

    design: Literal["parallel", "crossover"] = Field(
        "parallel",
        description="parallel: pairs of trials; crossover: sessions, each of which runs both variants in turn",
    )
    rules: Literal[1, 2, 3] = Field(
        1, description="version of the rules that decide intervals and gates; 1: those of runs that lack this key"
    )
    pairs: Annotated[int, Field(ge=0, le=64)] = Field(6, description="number of pairs of baseline and enabled trials")
    control_pairs: Annotated[int, Field(ge=0, le=64)] = Field(0, description="number of pairs of two baseline trials")
    warmup_steps: Annotated[int, Field(ge=0, le=10000)] = Field(2, description="unscored rollouts at the start")
    scored_steps: Annotated[int, Field(ge=1, le=10**5)] = Field(10, description="rollouts scored per trial")
    seed: Seed = Field(1234, description="pair or session i uses this seed plus i")
    alpha: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    smallest_effect_pct: Positive = Field(1.0, description="smallest change of step time that matters, in percent")
    replay_margin_pct: Positive | None = Field(
        None,
        description="a replay counts as reproduced up to this difference from the recorded ratio, in percent; default: "
        "smallest_effect_pct",
    )
    expected_pair_sd_pct: Spread = Field(
        2.0, description="assumed standard deviation of pair effects, in percent, for the power estimate"
    )
    max_dropped_fraction: Annotated[float, Field(ge=0, le=1)] = 0.2
    margins: Margins = Margins()
    sessions: Annotated[int, Field(ge=1, le=64)] = Field(
        4, description="number of sessions, each one set of training processes that runs both variants"
    )
    blocks: Annotated[int, Field(ge=1, le=MAX_BLOCKS)] = Field(
        8, description="blocks in a session; a block has four periods"
    )
    control_blocks: Annotated[int, Field(ge=0, le=MAX_BLOCKS)] = Field(
        2, description="number of further blocks that run the baseline only"
    )
    period_steps: Annotated[int, Field(ge=1, le=100)] = Field(
        2, description="number of rollouts in a period; only the last one is scored"
    )
    expected_block_sd_pct: Spread = Field(
        0.5, description="assumed standard deviation of block effects, in percent, for the power estimate"
    )
    shadow_steps: Annotated[int, Field(ge=0, le=1000)] = Field(
        2, description="number of rollouts at a session's end, run by the baseline and not scored"
    )

    @property
    def unused(self) -> frozenset[str]:
        """The keys that have no effect in this design."""
        return self.of_parallel if self.design == CROSSOVER else self.of_crossover

    @property
    def replay_margin(self) -> float:
        """The largest difference from the recorded ratio at which a replay counts as reproduced, as a fraction."""
        return (self.replay_margin_pct or self.smallest_effect_pct) / 100

    @property
    def num_trials(self) -> int:
        return self.sessions if self.design == CROSSOVER else 2 * (self.pairs + self.control_pairs)

    @property
    def num_steps(self) -> int:
        if self.design == "parallel":
            return self.warmup_steps + self.scored_steps
        num_periods = PERIODS_PER_BLOCK * (self.blocks + self.control_blocks)
        return self.warmup_steps + num_periods * self.period_steps + self.shadow_steps

    @property
    def num_scored(self) -> int:
        if self.design == "parallel":
            return self.scored_steps
        return PERIODS_PER_BLOCK * (self.blocks + self.control_blocks)

    @property
    def num_stored(self) -> int:
        """The number of stored rollouts of a trial or session; in each half of a block, A and B use the same ones."""
        if self.design == "parallel":
            return self.num_steps
        return PERIODS_PER_BLOCK // 2 * (self.blocks + self.control_blocks) * self.period_steps


class Layout(Model):
    """The number of nodes and the parallel sizes for one type of hardware."""

    num_nodes: Annotated[int, Field(ge=1, le=4096)] = 1
    gpus_per_node: Annotated[int, Field(ge=0, le=72)] = 0
    tensor_parallel: Count = 1
    pipeline_parallel: Count = 1
    context_parallel: Count = 1
    expert_parallel: Count = 1


class Run(GrowingModel):
    """A benchmark definition, ``jobs/<run>.yaml``."""

    added_later: ClassVar[frozenset[str]] = frozenset({"expected_session_minutes", "switch", "gc_freeze", "stack_on"})

    schema_: Schema = Field(alias="schema", default=1)
    run: Name
    purpose: Text
    may_claim: tuple[Text, ...] = ()
    may_not_claim: tuple[Text, ...] = ()
    stack: Name
    stack_on: dict[Name, Name] = Field({}, description="stacks for the named hardware; they replace stack there")
    lane: Lane
    expected_trial_minutes: dict[Name, Minutes] = Field(
        {}, description="estimated minutes of one trial or session of this run, by hardware"
    )
    expected_session_minutes: dict[Name, Minutes] = Field(
        {},
        description="estimated minutes of a session, if a run supports both designs; expected_trial_minutes then "
        "applies to trials only",
    )
    time_limit_min: Minutes | None = Field(
        None,
        description="time limit of one trial, or of one session in design crossover; default: 1.5 times the estimate "
        "for the hardware, at least 10 minutes, and 30 without an estimate",
    )
    layouts: Annotated[dict[Name, Layout], Field(min_length=1, max_length=100)]
    measure: Measure = Measure()
    rl_kernel: RlKernel = RlKernel()
    switch: OwnSwitch | None = Field(
        None, description="compare these variables, flags or checkouts instead of RL-Kernel, in design parallel"
    )
    entropy_metric: bool = Field(True, description="whether both variants compute the entropy that vime reports")
    gc_freeze: bool = Field(
        False,
        description="after the warm-up, exempt the Python objects of every trainer process from garbage collection "
        "(gc.freeze), in both variants; vime collects garbage after every step",
    )
    workload: Workload

    def find_stack(self, hardware: str) -> str:
        return self.stack_on.get(hardware, self.stack)

    @property
    def switch_title(self) -> str:
        """The commit, switch or implementation in which the variants differ; empty if it is RL-Kernel itself."""
        commits = self.rl_kernel.commits
        if commits is not None:
            return f"RL-Kernel {commits.enabled[:12]}"
        return self.implementation_title if self.switch is None else self.switch.title

    @property
    def implementation_title(self) -> str:
        """What serves the enabled variant and what the baseline; empty for RL-Kernel and the trainer."""
        chosen = self.rl_kernel
        if chosen.is_usual:
            return ""
        replaced = TITLES.get(chosen.baseline_implementation, f"{self.workload.trainer}'s function")
        return f"{TITLES[chosen.implementation]} in place of {replaced}"

    def find_implementation(self, variant: str) -> str:
        """Return what serves trials of this variant and must be proved; ``trainer`` needs no proof."""
        return TRAINER if self.switch is not None else self.rl_kernel.find_implementation(variant)

    def is_routed(self, variant: str) -> bool:
        """Whether trials of this variant must prove that their operators ran."""
        return self.find_implementation(variant) != TRAINER

    @property
    def expected_minutes(self) -> dict[str, float]:
        is_crossover = self.measure.design == CROSSOVER
        return (self.expected_session_minutes if is_crossover else {}) or self.expected_trial_minutes


class FromEnv(Model):
    """A value from the submitting shell's environment, by the name of its variable."""

    from_env: EnvName


class Profile(GrowingModel):
    """What one site needs: partition or namespace, container runtime, mounts, environment."""

    added_later: ClassVar[frozenset[str]] = frozenset(
        {"slurm", "container", "ray", "prepared_dir", "kubernetes", "settings", "gpus"}
    )

    schema_: Schema = Field(alias="schema", default=1)
    profile: Name
    cluster: Name
    purpose: Annotated[str, Field(max_length=2000)] = ""
    hardware: Name | None = Field(None, description="default hardware of this site")
    env: dict[EnvName, EnvValue | FromEnv] = Field({}, description="environment variables of the trainers")
    preflight: Preflight = Preflight()
    telemetry_interval_s: Annotated[float, Field(ge=0.05, le=3600)] = 1.0
    slurm: SlurmSettings | None = None
    container: ContainerSettings | None = None
    ray: RaySettings = RaySettings()
    gpus: tuple[Annotated[int, Field(ge=0, le=63)], ...] = Field(
        (),
        max_length=64,
        description="local: the numbers of the GPUs that a run may use, so that others can serve another run; an "
        "equal share of the machine's processors and ports of its own go with them. Default: all GPUs",
    )
    kubernetes: KubernetesSettings | None = None
    settings: dict[Name, Word | float | bool] = Field(
        {},
        max_length=100,
        description="settings of a cluster without its own section in profiles; the cluster's backend defines the keys",
    )
    prepared_dir: AbsolutePath | None = Field(
        None, description="where `rlk-repro prepare` puts models and data; the path must be equal on all nodes"
    )


def run_problems(run: Run) -> list[PathProblem]:
    """Find wrong combinations of fields; each problem is a tuple (path, what is wrong, got, expected)."""
    return list(_find_problems(run))


def _find_problems(run: Run) -> Iterator[PathProblem]:
    workload, rl_kernel = run.workload, run.rl_kernel
    yield from _operator_problems(("rl_kernel", "ops"), rl_kernel.ops)
    for name, ops in rl_kernel.ops_on.items():
        yield from _operator_problems(("rl_kernel", "ops_on", name), ops)
    for path, *rest in workload.find_problems():
        yield ("workload", *path), *rest
    if run.lane not in workload.lanes:
        yield ("lane",), workload.lane_limit, run.lane, " or ".join(workload.lanes)
    yield from _measure_problems(run.measure, has_variants=workload.has_variants)
    if run.gc_freeze and not workload.has_output_layer:
        yield ("gc_freeze",), "this workload trains no model", True, "false"
    elif run.gc_freeze and run.measure.warmup_steps == 0:
        yield ("measure", "warmup_steps"), "leaves no warm-up step, which gc_freeze needs", 0, "1 or more"
    has_log_probs = workload.has_output_layer and workload.has_rollout_log_probs(run.lane)
    design = run.measure.design
    yield from find_compared_problems(rl_kernel, run.switch, design=design, has_rollout_log_probs=has_log_probs)
    yield from _hardware_problems(run)


def _operator_problems(path: tuple[str, ...], ops: tuple[str, ...]) -> Iterator[PathProblem]:
    unknown = [index for index, op in enumerate(ops) if op not in OPERATORS]
    for index in unknown:
        yield (*path, str(index)), "no such operator", ops[index], f"one of {', '.join(OPERATORS)}"
    if len(set(ops)) != len(ops):
        yield path, "operator named twice", list(ops), "each once"
    elif not unknown:
        for pair in find_conflicts(ops):
            yield path, "two operators would serve the same call", list(pair), "one of them"


def _measure_problems(measure: Measure, *, has_variants: bool) -> Iterator[PathProblem]:
    is_crossover = measure.design == CROSSOVER
    if is_crossover and not has_variants:
        yield ("measure", "design"), "this workload has no enabled variant", measure.design, "parallel"
    elif measure.pairs and not has_variants:
        yield ("measure", "pairs"), "this workload has no enabled variant", measure.pairs, "0; set control_pairs"
    margin = measure.replay_margin_pct
    if margin is not None and not has_variants:
        yield ("measure", "replay_margin_pct"), "this workload has no ratio of step times", margin, "none"
    if is_crossover and measure.warmup_steps < 2:
        yield ("measure", "warmup_steps"), "is too small to warm up both variants", measure.warmup_steps, "2 or more"
    if measure.num_trials == 0:
        yield ("measure", "pairs"), "nothing to run", 0, "at least one pair or control pair"
    if measure.num_trials * measure.num_steps > MAX_STEPS:
        name, what = ("blocks", "sessions") if is_crossover else ("scored_steps", "trials")
        expected = f"at most {MAX_STEPS} steps in total, including warm-up"
        found = f"{measure.num_trials} {what} of {measure.num_steps} steps"
        yield ("measure", name), found, getattr(measure, name), expected


def _hardware_problems(run: Run) -> Iterator[PathProblem]:
    """Find values for hardware without a layout, and layouts without a placement."""
    named: dict[tuple[str, ...], Iterable[str]] = {
        ("expected_trial_minutes",): run.expected_trial_minutes,
        ("expected_session_minutes",): run.expected_session_minutes,
        ("rl_kernel", "ops_on"): run.rl_kernel.ops_on,
        ("stack_on",): run.stack_on,
    }
    if isinstance(run.workload, VimeWorkload):
        placements = run.workload.placements
        named["workload", "placements"] = placements
        for name in run.layouts:
            if name not in placements:
                what = f"no value for hardware {name}"
                yield ("workload", "placements"), what, list(placements), f"{name} too"
    for path, names in named.items():
        for name in names:
            if name not in run.layouts:
                yield (*path, name), "no layout for this hardware", name, f"one of {', '.join(run.layouts)}"
