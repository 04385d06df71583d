"""Find what differs between the variants of a plan, before it runs and in its records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from rlk_repro.base.errors import Problem
from rlk_repro.base.places import RUN_DIR
from rlk_repro.plan import Plan, Trial
from rlk_repro.rundir.differences import COMMAND, ENVIRONMENT, Difference, Kind, Started, compare, read_pair
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec.values import ENABLED
from rlk_repro.workloads import WORKLOADS
from rlk_repro.workloads.api import Command

NOWHERE: Final = RunDir(Path("/runs/run/id"))


def list_differences(plan: Plan) -> tuple[Difference, ...]:
    """Return the differences between the trials of all pairs of a plan, each difference once."""
    command = WORKLOADS[plan.run.workload.kind].trainer_command
    found = []
    for pair in _list_pairs(plan):
        first, second = (_from_command(trial, command(plan, trial, NOWHERE)) for trial in pair)
        found.append(compare(first, second, plan.switches))
    return _merge(found)


def read_differences(plan: Plan, run_dir: RunDir) -> tuple[Difference, ...] | None:
    """Return the recorded differences between the trials of all pairs, each once; None if no pair is recorded."""
    records = [read_pair(run_dir, *pair, plan.switches).differences for pair in _list_pairs(plan)]
    found = [record[part] for record in records for part in (COMMAND, ENVIRONMENT) if part in record]
    if not found:
        return None
    # what the variants loaded is shown only where a switch declares it, as with two checkouts
    loaded = [item for record in records for items in record.values() for item in items if item.kind is Kind.SWITCH]
    return _merge([*found, loaded])


def find_undeclared(plan: Plan) -> list[Problem]:
    """Return the differences that forbid running the plan."""
    return [
        Problem(
            f"run {plan.run.run}: {item.name}",
            "differs between the variants",
            got=f"{item.baseline} in baseline, {item.enabled} in enabled",
            expected=f"equal values, except in the switches {', '.join(sorted(plan.switches))}",
        )
        for item in list_differences(plan)
        if item.kind is Kind.UNDECLARED
    ]


def describe_differences(differences: Sequence[Difference]) -> str:
    names = {kind: ", ".join(item.name for item in differences if item.kind is kind) for kind in Kind}
    parts = [names[Kind.SWITCH] or "no switch"]
    if names[Kind.FOLDER]:
        parts.append(f"output folders ({names[Kind.FOLDER]})")
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
