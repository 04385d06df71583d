"""Compare a recorded plan with its sources: the author's files, the recorded flags, the shipped run.

A plan's hashes show only that the plan is consistent with itself.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BaseModel

from rlk_repro.analysis.checks import has_other_contract
from rlk_repro.base.errors import BundleUnreadable, SpecError
from rlk_repro.base.files import read_start
from rlk_repro.base.findings import Finding, Level, diff_values
from rlk_repro.base.resources import list_names, run_folders
from rlk_repro.base.yamlfile import MAX_BYTES
from rlk_repro.plan import PROFILE, Plan
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import Hardware, Measure, Profile, Run, Stack
from rlk_repro.spec.choices import DESIGN, FREE_RULES, find_rule_problems
from rlk_repro.spec.load import Override, load_bytes, load_run
from rlk_repro.spec.values import dump_model, list_leaves

M = TypeVar("M", bound=BaseModel)

MAX_FINDINGS: Final = 20
MAX_FLAGS: Final = 1000
OTHER_CONTRACT: Final = Finding(Level.BLOCKING, "engines: contract", "this version's", "another one")
SETTING: Final = "--set "
COMPUTED: Final = ("lane", "entropy_metric", "gc_freeze", "rl_kernel", "switch")
SIZES: Final = (("measure", "pairs"), ("measure", "sessions"))
# These keys of ``measure`` say how much is measured, and not how the results are judged.
UNTOLD: Final = (FREE_RULES - {"seed"}) | {"rules"}
"""Rules of which no change is told; an earlier version of the rules is no change of this run."""
AMOUNTS: Final = frozenset({"warmup_steps", "scored_steps", "seed", "blocks", "control_blocks", "shadow_steps"})


def find_rewritten(plan: Plan, run_dir: RunDir) -> list[Finding]:
    """Return a blocking finding for each plan value that comes neither from a bundled file nor from a recorded flag."""
    found = list(_find_rewritten(plan, run_dir))
    if has_other_contract(plan, run_dir):
        found.append(OTHER_CONTRACT)
    rest = found[MAX_FINDINGS:]
    differing = f"{len(rest)} more values that differ"
    more = [Finding(Level.BLOCKING, run_dir.plan.name, "values of the bundled files", differing)]
    return found[:MAX_FINDINGS] + (more if rest else [])


def describe_rule_changes(plan: Plan) -> str:
    """Describe how a plan's measurement rules differ from the shipped run with the same name, or from the defaults.

    The text is empty if no rule differs.
    """
    name = plan.run.run
    is_shipped = name in list_names(run_folders())
    usual = dict(_list_rules(load_run(name).model.measure if is_shipped else Measure()))
    changes = [
        f"{path} {_show(value)} instead of {_show(usual[path])}"
        for path, value in _list_rules(plan.run.measure)
        if value != usual[path] and (is_shipped or path not in AMOUNTS)
    ]
    if not changes:
        return ""
    what = f"the shipped run {name}" if is_shipped else f"the defaults (rlk-repro ships no run named {name})"
    return f"Measurement rules differ from {what}: {', '.join(changes)}."


def _show(value: float | str | None) -> str:
    return f"{value:g}" if isinstance(value, float | int) else value or "none"


def _list_rules(measure: Measure) -> Iterator[tuple[str, Any]]:
    later = {name: getattr(measure, name) for name in Measure.added_later}
    values = {**dump_model(measure), **dict(sorted(later.items()))}
    for path in list_leaves(values):
        if path[0] not in UNTOLD:
            yield ".".join(path), _find(values, path)


def _find_rewritten(plan: Plan, run_dir: RunDir) -> Iterator[Finding]:
    name = run_dir.plan.name
    if _has_too_many_flags(plan):
        yield Finding(Level.BLOCKING, f"{name}: sources", f"at most {MAX_FLAGS} values from flags", "more values")
        return
    overrides = [*list_overrides(plan.run, plan.sources), _choose_design(plan)]
    if not plan.is_exploratory:
        for item in find_rule_problems(overrides):
            yield Finding(Level.BLOCKING, f"{name}: {item.where}", "a plan that is marked exploratory", item.what)
    for part, model, path, changed in (
        (plan.run, Run, run_dir.run_yaml, overrides),
        (plan.stack, Stack, run_dir.stack_yaml, list(list_overrides(plan.stack, plan.sources, "stack."))),
        (plan.hardware, Hardware, run_dir.hardware_yaml, []),
        (plan.profile, Profile, run_dir.profile_yaml, list(list_overrides(plan.profile, plan.sources, PROFILE))),
    ):
        try:
            written = dump_model(_load(model, path, changed))
        except SpecError as error:
            for item in error.problems:
                yield Finding(Level.BLOCKING, item.where, "the file from which the plan was made", item.what)
        else:
            yield from diff_values(f"{name}: {path.stem}", written, dump_model(part), Level.BLOCKING)


def _has_too_many_flags(plan: Plan) -> bool:
    return sum(flag.startswith("--") for flag in plan.sources.values()) > MAX_FLAGS


def _choose_design(plan: Plan) -> Override:
    """Plans of version 0.2.0 record no flag for the default design."""
    path = ("measure", DESIGN)
    return Override(path, plan.run.measure.design, SETTING + ".".join(path))


def _load(model: type[M], path: Path, overrides: list[Override]) -> M:
    try:
        data = read_start(path, MAX_BYTES + 1)  # one byte over the limit, to detect a file that is too large
    except BundleUnreadable as error:
        raise SpecError(replace(error.problems[0], where=path.name)) from error
    return load_bytes(model, path.name, data, overrides).model


def list_overrides(model: BaseModel, sources: Mapping[str, str], prefix: str = "") -> Iterator[Override]:
    values = dump_model(model)
    seen = set()
    for leaf in list_leaves(values):
        flag = sources.get(prefix + ".".join(leaf), "")
        path = tuple(flag.removeprefix(SETTING).split(".")) if flag.startswith(SETTING) else leaf
        if flag.startswith("--") and path not in seen and path == leaf[: len(path)]:
            seen.add(path)
            yield Override(path, _find(values, path), flag)
    for path, value in _list_left_out(model):
        if (flag := sources.get(prefix + ".".join(path), "")).startswith("--"):
            yield Override(path, value, flag)


def find_flags(plan: Plan) -> tuple[str, ...] | None:
    """Return the flags that a plan adds to its run's file, without its site and its size.

    Return None if rlk-repro ships a run of this name that computes something else with these flags.
    """
    if _has_too_many_flags(plan):
        return None
    overrides = list(list_overrides(plan.run, plan.sources))
    if _is_shipped_otherwise(plan, overrides):
        return None
    flags = []
    for item in overrides:
        if item.path not in SIZES:
            value = json.dumps(item.value, ensure_ascii=False)
            flags.append(shlex.join([SETTING.strip(), f"{'.'.join(item.path)}={value}"]))
    if plan.is_exploratory:
        flags.append("--exploratory")
    return tuple(flags)


def _is_shipped_otherwise(plan: Plan, overrides: list[Override]) -> bool:
    name, hardware = plan.run.run, plan.hardware.hardware
    if name not in list_names(run_folders()):
        return False
    try:
        shipped = load_run(name, overrides).model
    except SpecError:
        return True
    return _list_computed(plan.run, hardware) != _list_computed(shipped, hardware)


def _list_computed(run: Run, hardware: str) -> dict[str, Any]:
    """Return what decides what a run computes; all else is text, an estimate or a rule of measurement."""
    values = dump_model(run)
    workload = values["workload"]
    if "placements" in workload:
        workload = {**workload, "placements": workload["placements"].get(hardware)}
    found = {key: values.get(key) for key in COMPUTED}
    return {**found, "workload": workload, "layout": values["layouts"].get(hardware)}


def _list_left_out(model: BaseModel, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the keys that a plan's file omits, because a later version added them and they have their defaults."""
    dumped = dump_model(model)
    for name in type(model).model_fields:
        value = getattr(model, name)
        if name in getattr(model, "added_later", ()) and name not in dumped:
            yield (*path, name), value
        elif isinstance(value, BaseModel):
            yield from _list_left_out(value, (*path, name))


def _find(values: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        values = values[part]
    return values
