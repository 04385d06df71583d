"""Mistakes made of a shipped run, one value at a time: which are refused before there is a job, and which are not."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from rlk_repro.errors import Problem, SpecError
from rlk_repro.plan import make_plan
from rlk_repro.resources import data_dir, hardware_folders, profile_folders, stack_folders
from rlk_repro.spec import Run, run_problems
from rlk_repro.specfile import load_bytes, load_hardware, load_profile, load_stack
from rlk_repro.workloads import vime
from rlk_repro.yamlfile import parse_yaml

RUN = "qwen3-30b-a3b"
HARDWARE = "h200"
# what others of these hold is looked at when they are planned
ELSEWHERE = ("a100", "gb200", "mi300x")


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    value = parse_yaml(RUN, (data_dir("jobs") / f"{RUN}.yaml").read_bytes()).value
    assert isinstance(value, dict)
    return value


def find_leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from find_leaves(item, (*path, key))
    else:
        yield path


def change(document: dict[str, Any], path: tuple[str, ...], kind: str) -> dict[str, Any]:
    """One value dropped, misspelt, or of another type."""
    changed = copy.deepcopy(document)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    value = inner.pop(path[-1])
    if kind == "misspelt":
        inner[f"{path[-1]}x"] = value
    elif kind == "wrong type":
        inner[path[-1]] = "many" if isinstance(value, int | float | list) else 7
    elif kind == "out of range":
        inner[path[-1]] = -5
    return changed


def judge(document: dict[str, Any]) -> tuple[Problem, ...]:
    """What loading, planning and the rules say."""
    try:
        run = load_bytes(Run, "jobs/x.yaml", json.dumps(document).encode(), (), run_problems)
        plan = make_plan(
            run=run,
            stack=load_stack(run.model.stack, stack_folders()),
            hardware=load_hardware(HARDWARE, hardware_folders()),
            profile=load_profile(f"generic-{HARDWARE}", profile_folders("slurm")),
        )
    except SpecError as error:
        return error.problems
    return tuple(vime.find_problems(plan))


def list_survivors(document: dict[str, Any], kind: str) -> tuple[set[str], int]:
    leaves = [path for path in find_leaves(document) if not set(path) & set(ELSEWHERE)]
    found = {".".join(path) for path in leaves if not judge(change(document, path, kind))}
    return found, len(leaves)


def test_the_run_itself_passes(document: dict[str, Any]) -> None:
    assert judge(document) == ()


def test_every_misspelt_key_is_refused(document: dict[str, Any]) -> None:
    survivors, number = list_survivors(document, "misspelt")
    assert number == 69
    assert survivors == set()


def test_every_value_of_another_type_is_refused(document: dict[str, Any]) -> None:
    """But for the pattern of expert layers, which may be a number as well."""
    survivors, _ = list_survivors(document, "wrong type")
    assert survivors == {"workload.model.arguments.moe-layer-freq"}


def test_every_negative_number_is_refused(document: dict[str, Any]) -> None:
    survivors, _ = list_survivors(document, "out of range")
    assert survivors == set()


def test_what_may_be_dropped_has_a_default(document: dict[str, Any]) -> None:
    """And flags of the model: those are held against upstream's script, where vime is at hand."""
    survivors, _ = list_survivors(document, "dropped")
    assert {path for path in survivors if not path.startswith("workload.model.arguments.")} == DEFAULTED


DEFAULTED = {
    *("schema", "may_claim", "may_not_claim", "expected_trial_minutes.h200", "time_limit_min"),
    *("layouts.h200.num_nodes", "layouts.h200.tensor_parallel", "layouts.h200.expert_parallel"),
    *("measure.pairs", "measure.control_pairs", "measure.warmup_steps", "measure.scored_steps"),
    *("rl_kernel.mode", "rl_kernel.ops"),
    *("workload.model.recipe", "workload.model.source.revision"),
    *("workload.data.source.revision", "workload.data.input_key", "workload.data.label_key"),
    "workload.arguments.vllm-moe-backend",  # needed on other hardware, and for routing replay
    *("workload.placements.h200.rollout_num_gpus_per_engine", "workload.placements.h200.max_tokens_per_gpu"),
}
