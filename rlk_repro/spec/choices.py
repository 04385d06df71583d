"""Check a submission's choices (hardware, variants, design, overrides) against the run that it submits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, get_args

from rlk_repro.base.errors import Problem
from rlk_repro.base.resources import suggest
from rlk_repro.spec import Hardware, Measure, Run, Variant
from rlk_repro.spec.values import BASELINE, CROSSOVER, ENABLED

if TYPE_CHECKING:
    from rlk_repro.spec.load import Override

DESIGN: Final = "design"
FREE_RULES: Final = frozenset(
    {"pairs", "control_pairs", "sessions", "seed", "expected_pair_sd_pct", "expected_block_sd_pct"}
)
"""Keys of ``measure`` that any submission may set, besides ``design``; a report still names another seed."""


def find_layout_problems(run: Run, hardware: Hardware) -> list[Problem]:
    """Return a problem if the run has no layout for this hardware, or a layout that does not fit the hardware."""
    name = hardware.hardware
    layout = run.layouts.get(name)
    if layout is None:
        known = sorted(run.layouts)
        # another machine is no typing error, so no name is guessed
        hint = f"--hardware {known[0]} --dry-run shows the job for {known[0]}; rlk-repro runs list names each run's"
        return [Problem(f"run {run.run}", "has no layout for this hardware", got=name,
                        expected=f"one of {', '.join(known)}", hint=hint)]  # fmt: skip
    what, expected = "", ""
    if (layout.gpus_per_node == 0) is not (hardware.platform == "cpu"):
        what, expected = "does not fit the hardware", "0 on a CPU" if hardware.platform == "cpu" else "1 or more"
    elif layout.gpus_per_node > hardware.gpus_per_node:
        what, expected = "exceeds the GPUs of a node", f"at most {hardware.gpus_per_node}"
    where = f"run {run.run}: layouts.{name}.gpus_per_node"
    return [Problem(where, what, got=layout.gpus_per_node, expected=expected)] if what else []


def find_variant_problems(run: Run, variants: Sequence[str]) -> list[Problem]:
    known = get_args(Variant)
    unknown = [name for name in variants if name not in known]
    if unknown:
        return [Problem("--variants", "no such variant", got=unknown[0], expected=" or ".join(known),
                        hint=suggest(unknown[0], list(known)))]  # fmt: skip
    if BASELINE not in variants or len(set(variants)) != len(variants):
        return [Problem("--variants", "cannot form a pair", got=",".join(variants),
                        expected="baseline,enabled, or baseline alone for control pairs")]  # fmt: skip
    if run.measure.design == CROSSOVER and ENABLED not in variants:
        return [
            Problem("--variants", "a session runs both variants", got=",".join(variants), expected="baseline,enabled")
        ]
    return []


def find_design_problems(run: Run, overrides: Sequence[Override]) -> list[Problem]:
    """Find flags that set a key of the design that is not chosen."""
    is_crossover = run.measure.design == CROSSOVER
    other, units = ("parallel", "sessions, not pairs") if is_crossover else (CROSSOVER, "pairs, not sessions")
    instead = {"pairs": "--sessions", "sessions": "--pairs"}
    return [
        Problem(item.flag, f"changes nothing here: this run measures {units}", got=item.value,
                expected=f"{instead.get(item.path[-1], 'this value left out')}, or --set measure.design={other}")
        for item in overrides
        if item.path[0] == "measure" and item.path[-1] in run.measure.unused
        and item.value != Measure.model_fields[item.path[-1]].default
    ]  # fmt: skip


def find_rule_problems(overrides: Sequence[Override]) -> list[Problem]:
    """Find flags that change how a run is measured or judged; only an exploratory plan may have such flags."""
    return [
        Problem(item.flag, "changes a measurement rule of the run", got=item.value, expected="the run's own rule",
                hint="add --exploratory; the verdict will then say that the rules changed")
        for item in overrides
        if item.path[0] == "measure" and ".".join(item.path[1:]) not in FREE_RULES | {DESIGN}
    ]  # fmt: skip
