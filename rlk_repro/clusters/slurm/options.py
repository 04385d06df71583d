"""List the options of sbatch that a plan, a site and a run need, always in the same order."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from rlk_repro.base.errors import Problem
from rlk_repro.base.escapes import printable
from rlk_repro.clusters.api import SURROUNDINGS_MIN
from rlk_repro.clusters.asking import NOT_WHOLE, find_count_problems, list_secrets
from rlk_repro.clusters.profiles import is_slice, name_gpus
from rlk_repro.plan import LIMIT_PER_ESTIMATE, Plan
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import Hardware, SlurmSettings

_SHORT_HASH: Final = 12
_NODE: Final = re.compile("[A-Za-z0-9_][A-Za-z0-9._-]*")


def slurm_settings(plan: Plan) -> SlurmSettings:
    return plan.profile.slurm or SlurmSettings()


def time_limit_min(plan: Plan) -> int:
    """Return the job's time limit in minutes: all trials and the work around them, at most the profile's limit."""
    needed_min = _surround(plan, _trials_min(plan))
    return math.ceil(min(needed_min, slurm_settings(plan).max_time_min or needed_min))


def find_max_jobs(plan: Plan) -> int:
    """Return how many jobs the run may need; each job finishes at least one pair, session or set of rollouts."""
    is_enough = time_limit_min(plan) >= _surround(plan, plan.all_limits_min)
    return 1 if is_enough or not slurm_settings(plan).requeue else len(plan.groups()) + plan.num_stores


def _surround(plan: Plan, trials_min: float) -> float:
    return trials_min + SURROUNDINGS_MIN + slurm_settings(plan).stop_before_s / 60


def _trials_min(plan: Plan) -> float:
    """Return 1.5 times the estimated minutes if Slurm may requeue the job, else the sum of the trials' limits."""
    expected_min = plan.expected_minutes()
    if expected_min is None or not slurm_settings(plan).requeue:
        return plan.all_limits_min
    trials_min = max(LIMIT_PER_ESTIMATE * expected_min, plan.group_limit_min)
    return min(trials_min + plan.num_stores * plan.storing_limit_min, plan.all_limits_min)


def shortest_job_min(plan: Plan) -> float:
    """Return the minutes that a job needs for one pair, session or set of stored rollouts."""
    longest_min = max(plan.group_limit_min, plan.storing_limit_min if plan.num_stores else 0.0)
    return longest_min + slurm_settings(plan).stop_before_s / 60


def find_option_problems(plan: Plan, nodes: Sequence[str]) -> Iterator[Problem]:
    settings, pair_min = slurm_settings(plan), shortest_job_min(plan)
    if settings.max_time_min is not None and settings.max_time_min < pair_min:
        unit = "session" if plan.is_crossover else "pair of trials"
        what = f"is shorter than the time limit of one {unit}"
        where = f"profile {plan.profile.profile}: slurm.max_time_min"
        yield Problem(where, what, got=settings.max_time_min, expected=f"at least {pair_min:g}")
    if plan.num_gpus and (problem := find_gres_problem(settings.gres, plan.hardware)):
        yield replace(problem, where=f"profile {plan.profile.profile}: {problem.where}")
    for option in settings.extra:
        if option.startswith(("--cluster", "-M")):
            what = "sends the job to another cluster, where rlk-repro does not find it"
            yield Problem(f"profile {plan.profile.profile}: slurm.extra", what, got=option)
    yield from find_count_problems(plan, nodes)
    for name in nodes:
        if _NODE.fullmatch(name) is None:
            yield Problem("--same-nodes", "is not a node name", got=name, expected="one name per node")


def find_gres_problem(gres: str, hardware: Hardware) -> Problem | None:
    """Find a GRES type whose words name a slice, a variant that the hardware file refuses, or another GPU."""
    if is_slice(gres):
        return Problem("slurm.gres", NOT_WHOLE, got=gres, expected="whole GPUs")
    if None in name_gpus([gres], {hardware.hardware: hardware}):
        return Problem("slurm.gres", "names another GPU than the hardware", got=gres, expected=hardware.title)
    return None


def list_options(plan: Plan, run_dir: RunDir, nodes: Sequence[str]) -> list[str]:
    """Return all options of sbatch, sorted; the profile's ``extra`` options follow, in the order of the profile."""
    settings, layout = slurm_settings(plan), plan.layout
    values: dict[str, str | int | None] = {
        **list_site_values(settings, layout.gpus_per_node),
        "comment": f"rlk-repro {printable(run_dir.run_id)} plan {plan.plan_hash[:_SHORT_HASH]}",
        "export": ",".join(list_secrets(plan)) or "NONE",
        "job-name": f"rlk-repro-{plan.run.run}",
        "mem": 0 if settings.exclusive else None,
        "nodelist": ",".join(nodes) or None,
        "nodes": layout.num_nodes,
        "ntasks": layout.num_nodes,
        "ntasks-per-node": 1,
        "open-mode": "append",
        "output": run_dir.job_output("%j").name,
        "propagate": "NONE",
        "segment": find_segment(layout.num_nodes, settings.block_size),
        "signal": f"B:TERM@{settings.stop_before_s}",
        "time": time_limit_min(plan),
    }
    bare = ["exclusive"] if settings.exclusive else []
    bare.append("requeue" if settings.requeue else "no-requeue")
    if any(option.startswith(("--dependency", "-d")) for option in settings.extra):
        values["kill-on-invalid-dep"] = "yes"
    options = [f"--{name}={value}" for name, value in values.items() if value is not None]
    return [*sorted([*options, *(f"--{name}" for name in bare)]), *settings.extra]


def list_site_values(settings: SlurmSettings, gpus_per_node: int) -> dict[str, str | None]:
    """Return the options for account, partition, nodes and GPUs; None for an option that the profile leaves out."""
    has_gres = settings.gres != "none" and gpus_per_node
    return {
        "account": settings.account,
        "constraint": settings.constraint,
        "exclude": settings.exclude,
        "gres": f"{settings.gres}:{gpus_per_node}" if has_gres else None,
        "partition": settings.partition,
        "qos": settings.qos,
        "reservation": settings.reservation,
    }


def find_segment(num_nodes: int, block_size: int | None) -> int | None:
    """Return how many nodes must share an NVLink domain: the greatest divisor of ``num_nodes`` up to ``block_size``."""
    if block_size is None or num_nodes == 1:
        return None
    return max(size for size in range(1, min(num_nodes, block_size) + 1) if num_nodes % size == 0)
