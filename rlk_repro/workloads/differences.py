"""What differs between the two variants: arguments and environment of a baseline and an enabled trial, side by side.

Two things may: the declared switches, and the folders that each trial writes its own records to.  A plan in which
anything else differs compares more than RL-Kernel and is refused; secrets are compared by the name of their variable.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from rlk_repro.contracts import split_arguments
from rlk_repro.errors import BundleUnreadable, Problem
from rlk_repro.files import load_json
from rlk_repro.places import RUN_DIR
from rlk_repro.plan import ENABLED, Plan, Trial
from rlk_repro.rundir import RunDir, TrialDir
from rlk_repro.secrets import looks_secret, scrub, scrub_argv
from rlk_repro.workloads import get_workload
from rlk_repro.workloads.api import Command
from rlk_repro.workloads.environment import VARIANT_SWITCHES

ABSENT: Final = "not set"
GIVEN: Final = "given"
REDACTED: Final = "<redacted>"
PROGRAM: Final = "program"
ORDER: Final = "order of arguments"
NOWHERE: Final = RunDir(Path("/runs/run/id"))


class Kind(StrEnum):
    """``FOLDER``: the same value but for the name of the trial that writes there."""

    SWITCH = "declared switch"
    FOLDER = "record folder"
    UNDECLARED = "not declared"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One variable or flag, with its value in either variant."""

    name: str
    baseline: str
    enabled: str
    kind: Kind

    def to_json(self) -> dict[str, str]:
        return {"name": self.name, "baseline": self.baseline, "enabled": self.enabled, "kind": self.kind.value}


@dataclass(frozen=True, kw_only=True)
class Started:
    """What a trial is, or was, started with.  Variables whose value is a secret have the name of their source."""

    trial: str
    variant: str
    argv: Sequence[str]
    env: Mapping[str, str]

    @property
    def placeholder(self) -> str:
        """Stands for the name of any trial of this variant."""
        return f"<nn>-<pair>-{self.variant}"


def compare(baseline: Started, enabled: Started) -> Iterator[Difference]:
    """Everything in which two trials differ, flags before variables; nothing where they are started alike."""
    trials = (baseline, enabled)
    flags = [_flags(trial.argv) for trial in trials]
    yield from _compare_values(trials, *flags)
    if flags[0] == flags[1] and list(baseline.argv) != list(enabled.argv):
        order = [" ".join(scrub_argv(trial.argv)) for trial in trials]
        yield Difference(name=ORDER, baseline=order[0], enabled=order[1], kind=Kind.UNDECLARED)
    yield from _compare_values(trials, baseline.env, enabled.env, VARIANT_SWITCHES)


def list_differences(plan: Plan) -> tuple[Difference, ...]:
    """Of all pairs of a plan as its workload renders them, each once."""
    command = get_workload(plan.run.workload.kind).trainer_command
    return _merge(
        compare(*(_from_command(trial, command(plan, trial, NOWHERE)) for trial in pair)) for pair in _list_pairs(plan)
    )


def read_differences(plan: Plan, run_dir: RunDir) -> tuple[Difference, ...]:
    """Of all pairs as a run directory records them; as planned where neither trial of any pair left a record."""
    recorded = [[_from_record(trial, run_dir.trial(trial.name)) for trial in pair] for pair in _list_pairs(plan)]
    found = [(first, second) for first, second in recorded if first is not None and second is not None]
    return _merge(compare(*pair) for pair in found) if found else list_differences(plan)


def find_undeclared(plan: Plan) -> list[Problem]:
    """What keeps the pairs of this plan from comparing RL-Kernel alone; none in any plan that may run."""
    return [
        Problem(
            f"run {plan.run.run}: {item.name}",
            "differs between the variants",
            got=f"{item.baseline} in baseline, {item.enabled} in enabled",
            expected=f"the same, or one of the declared switches {', '.join(sorted(VARIANT_SWITCHES))}",
        )
        for item in list_differences(plan)
        if item.kind is Kind.UNDECLARED
    ]


def describe_differences(differences: Sequence[Difference]) -> str:
    """In one line: the names of what differs, and what should not."""
    names = {kind: ", ".join(item.name for item in differences if item.kind is kind) for kind in Kind}
    parts = [names[Kind.SWITCH] or "no switch"]
    if names[Kind.FOLDER]:
        parts.append(f"where a trial writes ({names[Kind.FOLDER]})")
    parts.append(f"NOT DECLARED: {names[Kind.UNDECLARED]}" if names[Kind.UNDECLARED] else "nothing else")
    return "; ".join(parts)


def _list_pairs(plan: Plan) -> list[tuple[Trial, Trial]]:
    return [pair for pair in plan.pairs().values() if pair[1].variant == ENABLED]


def _merge(pairs: Iterable[Iterable[Difference]]) -> tuple[Difference, ...]:
    return tuple(dict.fromkeys(item for pair in pairs for item in pair))


def _from_command(trial: Trial, command: Command) -> Started:
    env = {name: value.replace(str(NOWHERE.root), RUN_DIR) for name, value in command.env.items()}
    env |= {name: f"<from {source}>" for name, source in command.from_env.items()}
    argv = [word.replace(str(NOWHERE.root), RUN_DIR) for word in command.argv]
    return Started(trial=trial.name, variant=trial.variant, argv=argv, env=env)


def _from_record(trial: Trial, folder: TrialDir) -> Started | None:
    try:
        command, environment = load_json(folder.command), load_json(folder.env)
    except BundleUnreadable:
        return None
    argv, env = (_get(value, key) for value, key in ((command, "argv"), (environment, "env")))
    if not isinstance(argv, list) or not isinstance(env, dict):
        return None
    env = {name: str(value) for name, value in env.items()}
    return Started(trial=trial.name, variant=trial.variant, argv=[str(word) for word in argv], env=env)


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _flags(argv: Sequence[str]) -> dict[str, str]:
    """By flag; one that is given twice has the values of both."""
    found: dict[str, str] = {}
    for flag, values in split_arguments(argv):
        shown = " ".join(values) or GIVEN
        found[flag] = f"{found[flag]} {shown}" if flag in found else shown
    return found


def _compare_values(
    trials: tuple[Started, Started],
    first: Mapping[str, str],
    second: Mapping[str, str],
    switches: Collection[str] = (),
) -> Iterator[Difference]:
    for name in sorted(first.keys() | second.keys()):
        was, now = first.get(name), second.get(name)
        if was == now:
            continue
        kind = Kind.SWITCH if name in switches else Kind.UNDECLARED
        if kind is Kind.UNDECLARED and was and now and was.replace(trials[0].trial, trials[1].trial) == now:
            kind = Kind.FOLDER
        shown = [_show(name, value, trial) for value, trial in zip((was, now), trials, strict=True)]
        yield Difference(name=name or PROGRAM, baseline=shown[0], enabled=shown[1], kind=kind)


def _show(name: str, value: str | None, started: Started) -> str:
    """Without what looks like a secret, and with one name for all trials of a variant."""
    if value is None:
        return ABSENT
    if looks_secret(name, value):
        return REDACTED
    return scrub(value).replace(started.trial, started.placeholder)
