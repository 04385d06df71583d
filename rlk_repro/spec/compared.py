"""What a run compares (two implementations, two commits of RL-Kernel, or the user's own switch), and its margins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

from pydantic import Field, StrictBool

from rlk_repro.operators import COMPILED_LOGP, RL_KERNEL, TORCH_COMPILE, TRAINER
from rlk_repro.spec.values import (
    BASELINE,
    CROSSOVER,
    UNSEEN,
    Commit,
    GrowingModel,
    Mode,
    Model,
    Name,
    NonNegative,
    PathProblem,
    Positive,
    Text,
)
from rlk_repro.switches import AGREEMENT_RECORD, DEMO_WAIT

_OF_COMMITS: Final = ("rl_kernel", "commits")
_OF_BASELINE: Final = ("rl_kernel", "baseline_implementation")

Operators: TypeAlias = Annotated[tuple[Name, ...], Field(min_length=1)]


class Commits(Model):
    """Two commits of RL-Kernel to compare; both variants switch RL-Kernel on."""

    baseline: Commit
    enabled: Commit


class RlKernel(GrowingModel):
    """What serves the trainer's operators.  In mode ``require``, a trial fails if an operator cannot run."""

    added_later: ClassVar[frozenset[str]] = frozenset(
        {"ops_on", "commits", "implementation", "baseline_implementation"}
    )

    mode: Mode = "require"
    ops: Operators = ("logp", "ratio_kl")
    ops_on: dict[Name, Operators] = Field({}, description="operators for the named hardware; they replace ops there")
    commits: Commits | None = Field(None, description="two commits of RL-Kernel to compare, in design parallel")
    implementation: Literal["rl-kernel", "torch-compile"] = Field(
        "rl-kernel",
        description="what serves the trainer's operators in the enabled variant; ops are RL-Kernel's only",
    )
    baseline_implementation: Literal["trainer", "torch-compile"] = Field(
        "trainer", description="what serves them in the baseline: the trainer's own function, or this"
    )

    @property
    def is_usual(self) -> bool:
        return (self.implementation, self.baseline_implementation) == (RL_KERNEL, TRAINER)

    def find_implementation(self, variant: str) -> str:
        """Return what serves trials of this variant; ``trainer`` for the trainer's own functions."""
        if variant == BASELINE and self.commits is None:
            return self.baseline_implementation
        return self.implementation

    def find_ops(self, variant: str, hardware: str) -> Operators:
        """Return the operators of trials of this variant; empty if the trainer's own functions serve them."""
        ops = {RL_KERNEL: self.ops_on.get(hardware, self.ops), TORCH_COMPILE: (COMPILED_LOGP,)}
        return ops.get(self.find_implementation(variant), ())

    def find_commit(self, variant: str) -> str:
        """Return the commit that trials of this variant must run; an empty text means the stack's commit."""
        if self.commits is None:
            return ""
        return self.commits.baseline if variant == BASELINE else self.commits.enabled


SwitchName: TypeAlias = Annotated[
    str, Field(pattern=r"^([A-Za-z_][A-Za-z0-9_]*|--[a-z0-9]([a-z0-9-]*[a-z0-9])?)$", max_length=100)
]
SwitchValue: TypeAlias = Annotated[str, Field(pattern=rf"^[^{UNSEEN}]*$", max_length=1000)] | StrictBool | int | float
SwitchValues: TypeAlias = Annotated[dict[SwitchName, SwitchValue], Field(min_length=1, max_length=20)]

PER_ROLLOUT: Final = (
    ({AGREEMENT_RECORD: "0"}, {AGREEMENT_RECORD: "1"}),
    ({DEMO_WAIT: "1"}, {DEMO_WAIT: "0"}),
)
"""Baseline and enabled values of the switches that can change between the rollouts of a session."""


class OwnSwitch(Model):
    """A switch other than RL-Kernel: variables, flags of the trainer, or checkouts, each with a value per variant.

    A name that begins with two dashes is a flag, which the value ``false`` leaves out; VIME_SRC, MEGATRON_SRC and
    RLK_SRC name the folder from which a variant imports that code.
    """

    title: Text
    baseline: SwitchValues
    enabled: SwitchValues

    def variables_of(self, variant: str) -> dict[str, str]:
        values = self.baseline if variant == BASELINE else self.enabled
        return {name: str(value) for name, value in values.items() if not name.startswith("--")}

    def flags_of(self, variant: str) -> dict[str, Any]:
        """Return the flags of a variant without their dashes; False leaves a flag out."""
        values = self.baseline if variant == BASELINE else self.enabled
        return {name[2:]: value for name, value in values.items() if name.startswith("--")}


def find_compared_problems(
    rl_kernel: RlKernel, switch: OwnSwitch | None, *, design: str, has_rollout_log_probs: bool
) -> Iterator[PathProblem]:
    if switch is not None:
        yield from _switch_problems(switch, design)
        if not has_rollout_log_probs and AGREEMENT_RECORD in {*switch.baseline, *switch.enabled}:
            what = "the rollouts of this run hold no log-probs that the trainer could record"
            yield ("switch",), what, AGREEMENT_RECORD, "other variables, or rollouts from an inference engine"
    if rl_kernel.implementation == rl_kernel.baseline_implementation:
        name = rl_kernel.implementation
        yield _OF_BASELINE, "serves both variants", name, "another implementation"
    if not rl_kernel.is_usual and (switch is not None or rl_kernel.commits is not None):
        what = "cannot be compared together with rl_kernel.commits or switch"
        yield ("rl_kernel", "implementation"), what, rl_kernel.implementation, "only one of them"
    if rl_kernel.commits is None:
        return
    if design == CROSSOVER:
        what = "RL-Kernel's commit cannot change within a session: a process imports one RL-Kernel"
        yield ("measure", "design"), what, CROSSOVER, "parallel"
    if rl_kernel.commits.baseline == rl_kernel.commits.enabled:
        yield _OF_COMMITS, "is the same in both variants", rl_kernel.commits.baseline, "two commits"
    if rl_kernel.mode != "require":
        yield ("rl_kernel", "mode"), "allows fallbacks, so a trial might not run its commit", rl_kernel.mode, "require"
    if switch is not None:
        yield _OF_COMMITS, "contradicts the key `switch`, which is also set", None, "rl_kernel.commits or switch"


def _switch_problems(switch: OwnSwitch, design: str) -> Iterator[PathProblem]:
    if design == CROSSOVER and (switch.baseline, switch.enabled) not in PER_ROLLOUT:
        what = "the switch cannot change within a session: a process reads its variables when it starts"
        accepted = f'parallel, or a switch with only the variable {AGREEMENT_RECORD} ("0" in baseline, "1" in enabled)'
        yield ("measure", "design"), what, CROSSOVER, accepted
    for side, values in (("baseline", switch.baseline), ("enabled", switch.enabled)):
        for name, value in values.items():
            if not name.startswith("--") and not isinstance(value, str):
                yield ("switch", side, name), "is not a text", value, f'a value in quotes, as in {name}: "1"'
    for name in sorted(switch.baseline.keys() ^ switch.enabled.keys()):
        side = "enabled" if name in switch.baseline else "baseline"
        yield ("switch", side, name), "missing", None, "a value in both variants"
    if not switch.baseline.keys() ^ switch.enabled.keys() and switch.baseline == switch.enabled:
        yield ("switch",), "is the same in both variants", None, "a variable with two values"


class Margins(GrowingModel):
    """How much worse the enabled variant may be before its speed no longer counts (docs/statistics.md)."""

    added_later: ClassVar[frozenset[str]] = frozenset({"shadow_log_prob", "shadow_gradient_share"})

    raw_reward: NonNegative = Field(0.01, description="largest allowed drop of the mean raw_reward, absolute")
    logprob_abs_diff_ratio: Positive = Field(
        1.05, description="largest allowed ratio, enabled / baseline, of the mean train_rollout_logprob_abs_diff"
    )
    logprob_abs_diff_difference: NonNegative = Field(
        0.001, description="the gate also passes if enabled exceeds baseline by at most this much, whatever the ratio"
    )
    logprob_abs_diff_cap: Positive = Field(
        0.1, description="largest allowed train_rollout_logprob_abs_diff of a trial, as in vime's own tests"
    )
    peak_memory_ratio: Positive = Field(
        1.02, description="largest allowed ratio, enabled / baseline, of peak device memory"
    )
    response_length_pct: Positive = Field(
        2.0, description="largest allowed difference of the mean response length in either direction, in percent"
    )
    shadow_log_prob: Positive = Field(
        0.01, description="largest allowed difference of one log-prob between RL-Kernel and the trainer's function"
    )
    shadow_gradient_share: Positive = Field(
        0.01, description="largest allowed difference of a gradient at the logits, as a share of the largest gradient"
    )
