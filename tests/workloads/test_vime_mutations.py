"""Mistakes made of every shipped run of vime, one value at a time: which are refused before there is a job.

Each is made on the run's first hardware in every test run, and on its others with the heavier parts.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from rlk_repro.base.errors import Problem, SpecError
from rlk_repro.base.resources import data_dir, profile_folders
from rlk_repro.base.yamlfile import parse_yaml
from rlk_repro.plan import make_plan
from rlk_repro.spec import Run, Stack, run_problems
from rlk_repro.spec.load import Loaded, load_bytes, load_hardware, load_profile, load_stack
from rlk_repro.workloads import WORKLOADS

VIME = WORKLOADS["vime"]

RUN, HARDWARE = "qwen3-30b-a3b", "h200"
LARGE = 10**12
MARGIN = "workload.placements.HARDWARE.arguments.train-memory-margin-bytes"
REWARD_MARGIN = "measure.margins.raw_reward"
SURVIVORS = {
    "misspelt": {},
    "negative": {},
    "in one variant": {},
    "a list": {},
    "wrong type": {"workload.model.arguments.moe-layer-freq": "a pattern of layers may be a number as well"},
    "too large": {
        MARGIN: "memory that vime leaves free: no bound of ours",
        REWARD_MARGIN: "rewards have no scale of ours",
    },
    "zero": {
        MARGIN: "none is left free",
        REWARD_MARGIN: "a reward must not fall at all",
        "measure.pairs": "sessions are run, and no pairs",
        "measure.shadow_steps": "the trainer's own functions were not compared",
        "measure.control_blocks": "no blocks run the baseline in every period",
        "measure.warmup_steps": "every step is scored",
        "workload.rollouts_seed": "a seed like any other",
        "workload.model.arguments.moe-aux-loss-coeff": "as upstream's scripts have it",
        "workload.model.arguments.moe-router-bias-update-rate": "as upstream's script has it",
        "workload.placements.HARDWARE.rollout_num_gpus": "engines and training share all GPUs",
    },
    "dropped": dict.fromkeys(
        (
            *("schema", "may_claim", "may_not_claim", "expected_trial_minutes.HARDWARE", "time_limit_min"),
            *(f"layouts.HARDWARE.{name}_parallel" for name in ("tensor", "pipeline", "expert")),
            "layouts.HARDWARE.num_nodes",
            *("measure.pairs", "measure.warmup_steps", "measure.scored_steps"),
            *("measure.design", "entropy_metric", "gc_freeze", "measure.sessions"),
            *(f"measure.{name}" for name in ("blocks", "control_blocks", "period_steps", "shadow_steps")),
            "workload.what_for",  # without it, an agreement run is a timing run
            *("expected_session_minutes.HARDWARE", REWARD_MARGIN),
            *("measure.expected_pair_sd_pct", "measure.expected_block_sd_pct"),
            *("rl_kernel.mode", "rl_kernel.ops", "rl_kernel.ops_on.HARDWARE"),
            *("workload.model.recipe", "workload.model.source.revision", "workload.data.source.revision"),
            *("workload.data.input_key", "workload.data.label_key", "workload.grpo.rollout_max_prompt_len"),
            *("workload.grpo.use_rollout_routing_replay", "workload.rollouts_seed"),
        ),
        "has a default",
    ),
}
"""By kind of mistake: what is no mistake, and why.  Nothing else may pass, but for dropping what is below."""
FREE_TO_DROP = (".arguments.", "workload.placements.HARDWARE.")
"""Flags that build a model are held against upstream's script, where vime is at hand; a placement is all defaults."""


def list_cases() -> list[tuple[str, str, bool]]:
    """Run, hardware, and whether it is the run's first."""
    names = sorted(path.stem for path in data_dir("jobs").glob("*.yaml"))
    return [
        (name, hardware, number == 0)
        for name in names
        if read(name)["workload"]["kind"] == "vime"
        for number, hardware in enumerate(read(name)["layouts"])
    ]


@functools.cache
def read(run: str) -> dict[str, Any]:
    value = parse_yaml(run, (data_dir("jobs") / f"{run}.yaml").read_bytes()).value
    assert isinstance(value, dict)
    return value


def find_leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from find_leaves(item, (*path, key))
    else:
        yield path


def change(document: dict[str, Any], path: tuple[str, ...], kind: str) -> dict[str, Any] | None:
    """The run with that mistake in one value; None where the value cannot have it."""
    changed = copy.deepcopy(document)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    value = inner.pop(path[-1])
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "misspelt":
        inner[f"{path[-1]}x"] = value
    elif kind == "wrong type":
        inner[path[-1]] = "many" if isinstance(value, int | float | list) else 7
    elif kind == "a list":
        if isinstance(value, list):
            return None
        inner[path[-1]] = [value]
    elif kind in ("negative", "zero", "too large"):
        if not is_number:
            return None
        inner[path[-1]] = {"negative": -5, "zero": 0, "too large": LARGE}[kind]
    elif kind == "in one variant":
        for key in reversed(path):
            value = {key: value}
        changed["enabled"] = value
    return changed


@functools.cache
def load_pins(stack: str) -> Loaded[Stack]:
    return load_stack(stack)


@functools.cache
def load_site(hardware: str) -> dict[str, Any]:
    return {
        "hardware": load_hardware(hardware),
        "profile": load_profile(f"generic-{hardware}", profile_folders("slurm")),
    }


def judge(document: dict[str, Any], hardware: str) -> tuple[Problem, ...]:
    """What loading, planning and the rules say."""
    try:
        run = load_bytes(Run, "jobs/x.yaml", json.dumps(document).encode(), (), run_problems)
        plan = make_plan(
            run=run,
            stack=load_pins(run.model.stack),
            **load_site(hardware),
        )
    except SpecError as error:
        return error.problems
    return tuple(VIME.find_problems(plan))


def list_values(run: str, hardware: str) -> list[tuple[str, ...]]:
    """By their paths; those for other hardware are looked at when that is planned."""
    others = set(read(run)["layouts"]) - {hardware}
    return [path for path in find_leaves(read(run)) if not set(path) & others]


@functools.cache
def list_survivors(run: str, hardware: str, kind: str) -> frozenset[str]:
    """Which values may have that mistake unnoticed, by path with one word for any hardware."""
    made = ((path, change(read(run), path, kind)) for path in list_values(run, hardware))
    passed = [path for path, changed in made if changed is not None and not judge(changed, hardware)]
    return frozenset(".".join("HARDWARE" if key == hardware else key for key in path) for path in passed)


@pytest.mark.parametrize(
    ("run", "hardware"),
    [
        pytest.param(run, hardware, marks=() if is_first else pytest.mark.real)
        for run, hardware, is_first in list_cases()
    ],
)
def test_a_mistake_in_any_value_is_refused_or_harmless(run: str, hardware: str) -> None:
    assert judge(read(run), hardware) == ()
    passed = {kind: list_survivors(run, hardware, kind) - SURVIVORS[kind].keys() for kind in SURVIVORS}
    passed["dropped"] = frozenset(path for path in passed["dropped"] if not any(part in path for part in FREE_TO_DROP))
    assert not any(passed.values()), passed


def test_of_one_run_just_these_pass() -> None:
    """And flags that its model may drop: those are held against upstream's script, where vime is at hand."""
    assert len(list_values(RUN, HARDWARE)) == 73
    assert list_survivors(RUN, HARDWARE, "misspelt") == set()
    assert list_survivors(RUN, HARDWARE, "wrong type") == {"workload.model.arguments.moe-layer-freq"}
    assert list_survivors(RUN, HARDWARE, "negative") == set()
    dropped = list_survivors(RUN, HARDWARE, "dropped")
    assert {path for path in dropped if not path.startswith("workload.model.arguments.")} == DEFAULTED


DEFAULTED = {
    *("schema", "may_claim", "may_not_claim", "expected_trial_minutes.HARDWARE"),
    *("layouts.HARDWARE.num_nodes", "layouts.HARDWARE.tensor_parallel", "layouts.HARDWARE.expert_parallel"),
    *("measure.pairs", "measure.warmup_steps", "measure.scored_steps", "measure.sessions", "measure.blocks"),
    *("measure.design", "entropy_metric", "expected_session_minutes.HARDWARE"),
    *("rl_kernel.mode", "rl_kernel.ops"),
    *("workload.model.recipe", "workload.model.source.revision"),
    *("workload.data.source.revision", "workload.data.input_key", "workload.data.label_key"),
    *("workload.arguments.vllm-cudagraph-capture-sizes", "workload.grpo.rollout_max_prompt_len"),
    *("workload.placements.HARDWARE.rollout_num_gpus_per_engine", "workload.placements.HARDWARE.max_tokens_per_gpu"),
}


@pytest.mark.real
def test_every_listed_survivor_really_survives() -> None:
    for kind, listed in SURVIVORS.items():
        missing = set(listed)
        for run, hardware, _ in list_cases():
            missing -= list_survivors(run, hardware, kind) if missing else set()
        assert missing == set(), kind


def test_the_error_of_a_mistake_names_its_place() -> None:
    """Its key is in one message at least."""
    for path in list_values(RUN, HARDWARE):
        for kind in ("misspelt", "negative", "zero", "too large", "a list"):
            changed = change(read(RUN), path, kind)
            problems = () if changed is None else judge(changed, HARDWARE)
            assert not problems or any(path[-1] in str(problem) for problem in problems), (path, kind, problems)


def test_a_misspelt_flag_is_named_where_it_makes_the_layout_impossible() -> None:
    path = ("workload", "model", "arguments", "num-experts")
    changed = change(read(RUN), path, "misspelt")
    assert changed is not None
    first, second = judge(changed, HARDWARE)
    assert str(first).startswith("run qwen3-30b-a3b: layouts.h200.expert_parallel: a dense model has no experts")
    assert str(second).startswith("run qwen3-30b-a3b: --num-expertsx: is unknown to vime 1fc199d9")
    assert second.hint == "did you mean '--num-experts'?"
