"""Check a profile for Slurm: ``sbatch --test-only``, and the job's time against the partition's limit."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rlk_repro.base.errors import Problem, SpecError
from rlk_repro.base.findings import Finding, Level, sort_findings
from rlk_repro.clusters.profiles import load_all_hardware
from rlk_repro.clusters.slurm import client as slurmctl
from rlk_repro.clusters.slurm.options import (
    find_gres_problem,
    list_options,
    list_site_values,
    shortest_job_min,
    slurm_settings,
    time_limit_min,
)
from rlk_repro.clusters.slurm.propose import parse_time_min
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir, runs_root
from rlk_repro.spec import Profile, SlurmSettings


def check_profile(profile: Profile, plan: Plan | None) -> list[Finding]:
    """Check the plan's job; without a plan, a job of 10 minutes on one node.

    Raises:
        EnvironmentMissing: no Slurm answers.
    """
    slurmctl.require_slurm()
    settings, model = profile.slurm or SlurmSettings(), load_all_hardware().get(profile.hardware or "")
    found = [*_check_time(settings, plan)]
    options = _list_short_options(profile)
    if plan is not None:
        options = list_options(plan, RunDir(runs_root() / "check"), ())
    done = slurmctl.ask_client("sbatch", "--test-only", *options, "--wrap=true")
    level = Level.INFO
    if not done.is_ok:  # while nodes are down, a refusal gives only a warning
        is_unsure = done.is_outage or bool(slurmctl.list_nodes(slurmctl.AWAY))
        level = Level.WARNING if is_unsure else Level.BLOCKING
    found.append(Finding(level, "sbatch --test-only", "accepted", slurmctl.quote_words(done)))
    if plan is None and model is not None and (problem := find_gres_problem(settings.gres, model)):
        found.append(Finding(Level.BLOCKING, problem.where, str(problem.expected), f"{problem.got}: {problem.what}"))
    return sort_findings(found)


def require_time(plan: Plan) -> None:
    """Raise SpecError if the job asks for more time than its partition allows: Slurm would let it wait for ever."""
    settings, one_min = slurm_settings(plan), shortest_job_min(plan)
    limit_min, needed_min = _find_limit_min(settings), time_limit_min(plan)
    if needed_min <= limit_min:
        return
    hint = f"--max-job-time {math.floor(limit_min)}m: the run then continues in further jobs"
    if limit_min < one_min or not settings.requeue:
        hint = f"choose another partition, or fewer steps: one job needs {one_min:g} min"
    if not settings.requeue:
        hint += ", and with slurm.requeue: false all trials run in one job"
    where, expected = f"partition {settings.partition or '(default)'}", f"at most {limit_min:g} min"
    what = "ends jobs before this run is over"
    raise SpecError(Problem(where, what, got=f"{needed_min:g} min", expected=expected, hint=hint))


def _check_time(settings: SlurmSettings, plan: Plan | None) -> Iterator[Finding]:
    """Slurm accepts a job that exceeds the partition's limit, unless EnforcePartLimits is set, and never starts it."""
    minutes = settings.max_time_min if plan is None else time_limit_min(plan)
    limit_min = _find_limit_min(settings)
    if minutes is not None and minutes > limit_min:
        where = "slurm.max_time_min" if plan is None else "time"
        expected = f"at most {limit_min:g} min in this partition"
        yield Finding(Level.BLOCKING, where, expected, f"{minutes:g} min")


def _find_limit_min(settings: SlurmSettings) -> float:
    """Return the longest limit of the partitions that the profile names; infinite if none of them is known."""
    limits = []
    for line in slurmctl.read_client("sinfo", "--noheader", "--all", "--format=%P|%l", must_answer=True).splitlines():
        name, _, text = line.partition("|")
        is_default = settings.partition is None and name.endswith("*")
        if is_default or name.rstrip("*") in (settings.partition or "").split(","):
            limits.append(parse_time_min(text.strip()) or math.inf)
    return max(limits, default=math.inf)


def _list_short_options(profile: Profile) -> list[str]:
    settings, model = profile.slurm or SlurmSettings(), load_all_hardware().get(profile.hardware or "")
    has_gpus = model is not None and model.gpus_per_node > 0
    values = {**list_site_values(settings, int(has_gpus)), "nodes": "1", "time": "10"}
    whole = ["--exclusive", "--mem=0"] if settings.exclusive else []
    return [*(f"--{name}={value}" for name, value in values.items() if value is not None), *whole, *settings.extra]
