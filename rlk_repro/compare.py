"""Compares two results of the same experiment, and the manifests of two bundles."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from rlk_repro.bundle import open_bundle
from rlk_repro.files import load_json
from rlk_repro.findings import Finding, Level, sort_findings
from rlk_repro.manifest import Manifest, diff_manifests
from rlk_repro.plan import Plan
from rlk_repro.results import Analysis, Effect, TrialResult
from rlk_repro.rundir import RunDir
from rlk_repro.units import format_number, format_percent

# What a seed decides.  Where all of these are equal to the last printed digit, the replay was bitwise.
SEEDED_METRICS: Final = ("loss", "raw_reward", "grad_norm", "kl_loss", "train_rollout_logprob_abs_diff")
COMPARED_EFFECTS: Final = ("step_time_s", "raw_reward", "train_rollout_logprob_abs_diff", "peak_memory_bytes")


class Match(StrEnum):
    """The strongest level at which a replay agrees with what was recorded."""

    BITWISE = "bitwise"
    STATISTICAL = "statistical"
    DIFFERENT = "different"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    level: Match
    is_same_experiment: bool
    recorded_verdict: str
    new_verdict: str
    details: tuple[str, ...]
    num_blocking_drift: int

    @property
    def is_ok(self) -> bool:
        return self.level is not Match.DIFFERENT

    def to_json(self) -> dict[str, Any]:
        return {"level": self.level.value, "is_ok": self.is_ok, "is_same_experiment": self.is_same_experiment,
                "recorded_verdict": self.recorded_verdict, "new_verdict": self.new_verdict,
                "details": list(self.details), "num_blocking_drift": self.num_blocking_drift}  # fmt: skip

    def lines(self) -> list[str]:
        """For people: the level first, then what it rests on."""
        meaning = {
            Match.BITWISE: "losses and rewards are identical, step by step",
            Match.STATISTICAL: "not identical, but no effect differs beyond its uncertainty",
            Match.DIFFERENT: "an effect differs beyond its uncertainty",
        }[self.level]
        lines = [f"replay level: {self.level} ({meaning})"]
        if not self.is_same_experiment:
            lines.append("  the experiment is not the recorded one")
        if self.num_blocking_drift:
            lines.append(f"  on a machine with {self.num_blocking_drift} blocking differences")
        lines += [f"  recorded verdict: {self.recorded_verdict}", f"  new verdict:      {self.new_verdict}"]
        return lines + [f"  {detail}" for detail in self.details]


def compare_analyses(recorded: Analysis, new: Analysis, drift: Sequence[Finding] = ()) -> Comparison:
    """Bitwise where every seeded metric of every trial is equal, else by the effects and their intervals."""
    is_same = recorded.experiment_hash == new.experiment_hash
    differing = list(_seeded_differences(recorded.trials, new.trials))
    effects = [_compare_effect(name, recorded.effect(name), new.effect(name)) for name in COMPARED_EFFECTS]
    if is_same and not differing:
        level = Match.BITWISE
    elif is_same and all(is_compatible for is_compatible, _ in effects):
        level = Match.STATISTICAL
    else:
        level = Match.DIFFERENT
    return Comparison(
        level=level,
        is_same_experiment=is_same,
        recorded_verdict=recorded.verdict.word.value,
        new_verdict=new.verdict.word.value,
        details=(*(text for _, text in effects if text), *differing[:5]),
        num_blocking_drift=sum(item.level is Level.BLOCKING for item in drift),
    )


def _seeded_differences(recorded: Sequence[TrialResult], new: Sequence[TrialResult]) -> Iterator[str]:
    by_name = {trial.name: trial for trial in new}
    for old in recorded:
        trial = by_name.get(old.name)
        if trial is None:
            yield f"{old.name}: not in the replay"
            continue
        for metric in SEEDED_METRICS:
            left, right = old.get_series(metric), trial.get_series(metric)
            was, now = (() if left is None else left.values), (() if right is None else right.values)
            step = next((index for index, pair in enumerate(zip(was, now, strict=False)) if pair[0] != pair[1]), None)
            if step is not None:
                yield f"{old.name}: {metric} first differs at step {step}: was {was[step]}, now {now[step]}"
            elif len(was) != len(now):
                yield f"{old.name}: {metric} has {len(now)} steps, recorded {len(was)}"


def _compare_effect(name: str, recorded: Effect | None, new: Effect | None) -> tuple[bool, str]:
    """Whether two effects are compatible (Welch-style interval of their difference on the log scale), and a line."""
    if recorded is None or new is None or recorded.ratio is None or new.ratio is None:
        return True, ""
    text = f"{name}: recorded {format_percent(recorded.ratio)} (n={recorded.n}), now {format_percent(new.ratio)} " \
           f"(n={new.n})"  # fmt: skip
    half_widths = [_half_width(effect) for effect in (recorded, new)]
    if None in half_widths:
        return True, f"{text}, no interval"
    distance = abs(math.log(new.ratio) - math.log(recorded.ratio))
    allowed = math.hypot(*(width for width in half_widths if width is not None))
    is_compatible = distance <= allowed + 1e-12
    return (
        is_compatible,
        f"{text}; apart {format_number(distance * 100, 3)} %, allowed {format_number(allowed * 100, 3)} %",
    )


def _half_width(effect: Effect) -> float | None:
    if effect.low is None or effect.high is None or effect.low <= 0:
        return None
    return (math.log(effect.high) - math.log(effect.low)) / 2


def diff_bundles(first: Path, second: Path) -> list[Finding]:
    """How two bundles differ in plan and manifests, node by node in order.

    Raises:
        BundleUnreadable: either is broken or unsafe.
    """
    with open_bundle(first) as left, open_bundle(second) as right:
        findings = _diff_plans(left, right)
        pairs = list(zip(_manifests(left), _manifests(right), strict=False))
        num_left, num_right = len(_manifests(left)), len(_manifests(right))
    if num_left != num_right:
        findings.append(Finding(Level.BLOCKING, "nodes", str(num_left), str(num_right)))
    for old, new in pairs:
        findings += diff_manifests(old, new)
    return sort_findings(findings)


def _diff_plans(left: RunDir, right: RunDir) -> list[Finding]:
    old, new = (Plan.from_json(load_json(run_dir.plan), str(run_dir.plan)) for run_dir in (left, right))
    findings = []
    if old.experiment_hash != new.experiment_hash:
        findings += list(_diff_values("plan", old.experiment, new.experiment, Level.BLOCKING))
    if old.profile != new.profile:
        findings += list(_diff_values("profile", old.profile.model_dump(mode="json"),
                                      new.profile.model_dump(mode="json"), Level.WARNING))  # fmt: skip
    return findings


def _diff_values(path: str, old: Any, new: Any, level: Level) -> Iterator[Finding]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from _diff_values(f"{path}.{key}", old.get(key), new.get(key), level)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (left, right) in enumerate(zip(old, new, strict=True)):
            yield from _diff_values(f"{path}.{index}", left, right, level)
    elif old != new:
        yield Finding(level, path, str(old), str(new))


def _manifests(run_dir: RunDir) -> list[Manifest]:
    files = [node.manifest for node in run_dir.node_dirs() if node.manifest.is_file()]
    return [Manifest.from_json(load_json(path), str(path)) for path in files]
