"""Check a profile for Slurm with facts of the cluster and this machine, and with ``sbatch --test-only``."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rlk_repro.base import proc
from rlk_repro.base.disk import can_make
from rlk_repro.base.findings import Finding, Level, sort_findings
from rlk_repro.clusters.profiles import load_all_hardware
from rlk_repro.clusters.slurm import client as slurmctl
from rlk_repro.clusters.slurm.container import host_python
from rlk_repro.clusters.slurm.judge import Needs, UserHere, judge_profile, list_paths
from rlk_repro.clusters.slurm.options import list_options, list_site_values, time_limit_min
from rlk_repro.clusters.slurm.site import probe_site
from rlk_repro.plan import Plan
from rlk_repro.probes.folder import find_filesystem
from rlk_repro.probes.host import NETWORK_FILESYSTEMS
from rlk_repro.rundir.paths import RunDir, runs_root
from rlk_repro.spec import ContainerSettings, Hardware, Profile, SlurmSettings

OWN_FILESYSTEMS: Final = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "overlay", "tmpfs", "f2fs"})
SCHEDULER: Final = "sbatch --test-only"


def check_profile(profile: Profile, plan: Plan | None) -> list[Finding]:
    site, hardware = probe_site(), load_all_hardware()
    found = judge_profile(profile, site, look_around(profile), find_needs(profile, plan, hardware), hardware)
    return sort_findings([*found, ask_scheduler(list_probe_options(profile, plan, hardware))])


def find_needs(profile: Profile, plan: Plan | None, hardware: dict[str, Hardware]) -> Needs:
    if plan is None:
        model = hardware.get(profile.hardware or "")
        return Needs(gpus_per_node=1 if model is not None and model.gpus_per_node else 0)
    layout = plan.layout
    return Needs(
        num_nodes=layout.num_nodes, gpus_per_node=layout.gpus_per_node, time_limit_min=time_limit_min(plan)
    )  # fmt: skip


def look_around(profile: Profile) -> UserHere:
    root = runs_root().absolute()
    mounts = Path("/proc/mounts")
    kind = find_filesystem(mounts.read_text() if mounts.is_file() else "", root.resolve())
    is_shared = True if kind in NETWORK_FILESYSTEMS else False if kind in OWN_FILESYSTEMS else None
    image_dir = None if profile.container is None else profile.container.image_dir
    return UserHere(
        variables=frozenset(os.environ),
        existing={path: Path(path).exists() for path in list_paths(profile)},
        runs_root=root,
        is_runs_root_shared=is_shared,
        python_without_package=find_bare_python(profile.container or ContainerSettings()),
        can_make_images=image_dir is not None and can_make(Path(image_dir)),
    )


def find_bare_python(settings: ContainerSettings) -> str | None:
    """Return the nodes' Python if it exists on this machine and cannot import rlk_repro; otherwise return None."""
    python = host_python(settings)
    if python is None or shutil.which(python) is None:
        return None
    path = {"PYTHONPATH": settings.package_dir} if settings.package_dir else {}
    env = {"PATH": os.environ.get("PATH", os.defpath), **path}
    done = proc.run([python, "-c", "import rlk_repro"], timeout_s=60, env=env, cwd=Path("/"))
    return None if done.is_ok else python


def list_probe_options(profile: Profile, plan: Plan | None, hardware: dict[str, Hardware]) -> list[str]:
    """Return sbatch's options for the plan's job; without a plan, for a job of 10 minutes on one node."""
    if plan is not None:
        return list_options(plan, RunDir(runs_root() / "check"), ())
    settings, needs = profile.slurm or SlurmSettings(), find_needs(profile, None, hardware)
    values: dict[str, str | int | None] = {
        **list_site_values(settings, needs.gpus_per_node),
        "nodes": needs.num_nodes,
        "time": f"{needs.time_limit_min:.0f}",
    }
    whole = ["--exclusive", "--mem=0"] if settings.exclusive else []
    return [*(f"--{name}={value}" for name, value in values.items() if value is not None), *whole, *settings.extra]


def ask_scheduler(options: Sequence[str]) -> Finding:
    """Ask Slurm whether it accepts the job.  While nodes are down, a refusal by Slurm gives only a warning."""
    done = slurmctl.run_client("sbatch", "--test-only", *options, "--wrap=true")
    words = slurmctl.quote_words(done)
    if done.is_ok:
        return Finding(Level.INFO, SCHEDULER, "accepted", words)
    level = Level.WARNING if slurmctl.has_missing_nodes() else Level.BLOCKING
    return Finding(level, SCHEDULER, "accepted", words)
