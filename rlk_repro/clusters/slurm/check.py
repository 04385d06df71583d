"""Check a profile for Slurm: ``sbatch --test-only``, and the job's time against the partition's limit."""

from __future__ import annotations

from collections.abc import Iterator

from rlk_repro.base.findings import Finding, Level, sort_findings
from rlk_repro.clusters.profiles import load_all_hardware
from rlk_repro.clusters.slurm import client as slurmctl
from rlk_repro.clusters.slurm.options import list_options, list_site_values, time_limit_min
from rlk_repro.clusters.slurm.propose import parse_time_min
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir, runs_root
from rlk_repro.spec import Profile, SlurmSettings

SHORT_MIN = 10


def check_profile(profile: Profile, plan: Plan | None) -> list[Finding]:
    """Check the plan's job; without a plan, a job of 10 minutes on one node.

    Raises:
        EnvironmentMissing: no Slurm answers.
    """
    slurmctl.require_slurm()
    return sort_findings([*_check_time(profile.slurm or SlurmSettings(), plan), _ask_scheduler(profile, plan)])


def _check_time(settings: SlurmSettings, plan: Plan | None) -> Iterator[Finding]:
    """Slurm accepts a job that exceeds the partition's limit, unless EnforcePartLimits is set, and never starts it."""
    limit_min = None
    for line in slurmctl.read_client("sinfo", "--noheader", "--all", "--format=%P|%l").splitlines():
        name, _, text = line.partition("|")
        is_chosen = name.endswith("*") if settings.partition is None else name.rstrip("*") == settings.partition
        limit_min = parse_time_min(text.strip()) if is_chosen else limit_min
    if limit_min is None:
        return
    needed = {"slurm.max_time_min": settings.max_time_min, "time": time_limit_min(plan) if plan else SHORT_MIN}
    for where, minutes in needed.items():
        if minutes is not None and minutes > limit_min:
            yield Finding(Level.BLOCKING, where, f"at most {limit_min:g} min in this partition", f"{minutes:g} min")


def _ask_scheduler(profile: Profile, plan: Plan | None) -> Finding:
    """Ask Slurm whether it accepts the job.  While nodes are down, a refusal by Slurm gives only a warning."""
    options = _list_short_options(profile) if plan is None else list_options(plan, RunDir(runs_root() / "check"), ())
    done = slurmctl.run_client("sbatch", "--test-only", *options, "--wrap=true")
    level = Level.INFO
    if not done.is_ok:
        level = Level.WARNING if slurmctl.has_missing_nodes() else Level.BLOCKING
    return Finding(level, "sbatch --test-only", "accepted", slurmctl.quote_words(done))


def _list_short_options(profile: Profile) -> list[str]:
    settings, model = profile.slurm or SlurmSettings(), load_all_hardware().get(profile.hardware or "")
    gpus_per_node = 1 if model is not None and model.gpus_per_node else 0
    values = {**list_site_values(settings, gpus_per_node), "nodes": "1", "time": str(SHORT_MIN)}
    whole = ["--exclusive", "--mem=0"] if settings.exclusive else []
    return [*(f"--{name}={value}" for name, value in values.items() if value is not None), *whole, *settings.extra]
