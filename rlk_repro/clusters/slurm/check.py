"""Check a profile for Slurm with facts of the cluster and this machine, and with ``sbatch --test-only``."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rlk_repro.base import proc
from rlk_repro.base.disk import can_make
from rlk_repro.base.findings import Finding, Level, sort_findings
from rlk_repro.clusters.profiles import find_hardware, load_all_hardware
from rlk_repro.clusters.slurm import client as slurmctl
from rlk_repro.clusters.slurm.container import host_python
from rlk_repro.clusters.slurm.options import list_options, list_site_values, time_limit_min
from rlk_repro.clusters.slurm.site import Pool, SlurmSite, probe_site
from rlk_repro.images.importing import is_imported
from rlk_repro.plan import Plan
from rlk_repro.probes.folder import find_filesystem
from rlk_repro.probes.host import NETWORK_FILESYSTEMS
from rlk_repro.rundir.paths import RunDir, runs_root
from rlk_repro.spec import ContainerSettings, FromEnv, Hardware, Profile, SlurmSettings

OWN_FILESYSTEMS: Final = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "overlay", "tmpfs", "f2fs"})
SCHEDULER: Final = "sbatch --test-only"
SEGMENT_RELEASE: Final = (23, 11)
NOT_FOR_JOBS: Final = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108  (only compared; nothing is written there)


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The needs of a run; the defaults are the needs of a job of 10 minutes on one node without GPUs."""

    num_nodes: int = 1
    gpus_per_node: int = 0
    time_limit_min: float = 10.0


@dataclass(frozen=True, kw_only=True)
class UserHere:
    variables: frozenset[str]
    existing: Mapping[str, bool]
    runs_root: Path
    is_runs_root_shared: bool | None
    can_make_images: bool = True
    python_without_package: str | None = None


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


def judge_profile(
    profile: Profile, site: SlurmSite, here: UserHere, needs: Needs, hardware: Mapping[str, Hardware]
) -> list[Finding]:
    settings = profile.slurm or SlurmSettings()
    pools = site.pools_of(settings.partition)
    return [
        *_judge_partition(settings, site, pools, needs),
        *(_judge_gpus(profile, settings, pools, needs, hardware) if pools else []),
        *_judge_account(settings, site),
        *_judge_reservation(settings, site),
        *_judge_topology(settings, site, needs),
        *_judge_container(profile.container or ContainerSettings(), site, here),
        *_judge_env(profile, here),
        *_judge_runs_root(here),
    ]


def _judge_partition(
    settings: SlurmSettings, site: SlurmSite, pools: Sequence[Pool], needs: Needs
) -> Iterator[Finding]:
    where = "slurm.partition"
    if not pools:
        found = settings.partition or "no default partition"
        yield Finding(Level.BLOCKING, where, f"one of {', '.join(site.partitions)}", found)
        return
    name = pools[0].partition
    if not any(pool.is_up for pool in pools):
        yield Finding(Level.BLOCKING, where, "a partition that is up", f"{name}, which is not up")
    if name not in site.visible:
        yield Finding(
            Level.WARNING, where, f"a partition that sinfo shows you: {', '.join(sorted(site.visible))}", name
        )
    num_nodes = sum(pool.num_nodes for pool in pools)
    num_usable = sum(pool.num_nodes for pool in pools if pool.is_usable)
    if num_nodes < needs.num_nodes:
        yield Finding(Level.BLOCKING, where, f"{needs.num_nodes} nodes", f"{name} has {num_nodes}")
    elif num_usable < needs.num_nodes:
        found = f"{num_usable} usable nodes of {num_nodes} in {name}"
        yield Finding(Level.WARNING, where, f"{needs.num_nodes} nodes that are neither down nor drained", found)
    limits = [pool.max_time_min for pool in pools if pool.max_time_min is not None]
    limit = min(limits, default=None)
    if limit is not None and needs.time_limit_min > limit:
        yield Finding(Level.BLOCKING, where, f"{needs.time_limit_min:g} min for this run", f"{name} allows {limit:g}")
    if limit is not None and settings.max_time_min is not None and settings.max_time_min > limit:
        yield Finding(Level.BLOCKING, "slurm.max_time_min", f"at most {limit:g}", f"{settings.max_time_min:g}")


def _judge_gpus(
    profile: Profile,
    settings: SlurmSettings,
    pools: Sequence[Pool],
    needs: Needs,
    hardware: Mapping[str, Hardware],
) -> Iterator[Finding]:
    where = "slurm.gres"
    kinds = {gpus.kind for pool in pools for gpus in pool.gpus}
    menu = ", ".join(sorted(f"gpu:{kind}" if kind else "gpu" for kind in kinds)) or "none"
    wanted, _, kind = settings.gres.partition(":")
    if wanted == "none" and kinds and needs.gpus_per_node:
        yield Finding(Level.WARNING, where, menu, "none: Slurm may hide GPUs that were not requested")
    elif wanted == "gpu" and needs.gpus_per_node and (not kinds or (kind and kind not in kinds)):
        yield Finding(Level.BLOCKING, where, f"a GRES of partition {pools[0].partition}: {menu}", settings.gres)
    elif wanted == "gpu":
        most = max(sum(gpus.count for gpus in pool.gpus if kind in ("", gpus.kind)) for pool in pools)
        if most < needs.gpus_per_node:
            yield Finding(Level.BLOCKING, where, f"{needs.gpus_per_node} GPUs per node", str(most))
    yield from _judge_hardware(profile, pools, hardware)


def _judge_hardware(profile: Profile, pools: Sequence[Pool], hardware: Mapping[str, Hardware]) -> Iterator[Finding]:
    model = hardware.get(profile.hardware or "")
    if model is None or model.gpus_per_node == 0:
        return
    kinds = [gpus.kind for pool in pools for gpus in pool.gpus]
    found = find_hardware([*kinds, *(name for pool in pools for name in pool.features)], hardware)
    if found and model.hardware not in found:
        yield Finding(Level.WARNING, "hardware", f"{' or '.join(found)} (named by GRES or features)", model.hardware)
    counts = sorted({pool.gpus_per_node for pool in pools} - {0})
    if counts and model.gpus_per_node not in counts:
        expected = f"nodes with {model.gpus_per_node} GPUs (hardware {model.hardware})"
        yield Finding(Level.WARNING, "hardware", expected, " or ".join(map(str, counts)))


def _judge_account(settings: SlurmSettings, site: SlurmSite) -> Iterator[Finding]:
    if not site.associations:
        return
    accounts = sorted({item.account for item in site.associations})
    level = Level.BLOCKING if site.enforces_associations else Level.WARNING
    if settings.account is not None and settings.account not in accounts:
        yield Finding(level, "slurm.account", f"one of yours: {', '.join(accounts)}", settings.account)
    qos = sorted({name for item in site.associations for name in item.qos})
    if settings.qos is not None and qos and settings.qos not in qos:
        yield Finding(level, "slurm.qos", f"one of yours: {', '.join(qos)}", settings.qos)


def _judge_reservation(settings: SlurmSettings, site: SlurmSite) -> Iterator[Finding]:
    if settings.reservation is not None and settings.reservation not in site.reservations:
        menu = ", ".join(sorted(site.reservations)) or "no reservation: the cluster has none"
        yield Finding(Level.BLOCKING, "slurm.reservation", menu, settings.reservation)


def _judge_topology(settings: SlurmSettings, site: SlurmSite, needs: Needs) -> Iterator[Finding]:
    size = settings.block_size
    if size is None:
        if site.block_size is not None and needs.num_nodes > 1:
            expected = f"{site.block_size}, the size of this cluster's blocks"
            yield Finding(
                Level.WARNING, "slurm.block_size", expected, "not set: nodes may lie in several NVLink domains"
            )
    elif site.release < SEGMENT_RELEASE:
        yield Finding(Level.BLOCKING, "slurm.block_size", "Slurm 23.11 or newer", site.version)
    elif site.block_size is None:
        found = "no block topology: block_size has no effect"
        yield Finding(Level.WARNING, "slurm.block_size", "a cluster with block topology", found)
    elif size > site.block_size:
        yield Finding(Level.BLOCKING, "slurm.block_size", f"at most {site.block_size}", str(size))


def _judge_container(settings: ContainerSettings, site: SlurmSite, here: UserHere) -> Iterator[Finding]:
    runtime = settings.runtime
    if runtime == "pyxis" and runtime not in site.runtimes:
        yield Finding(
            Level.BLOCKING,
            "container.runtime",
            "an srun that supports --container-image",
            "an srun without it: pyxis is not installed",
        )
    elif runtime not in ("host", *site.runtimes):
        yield Finding(Level.WARNING, "container.runtime", f"{runtime} on the nodes", f"no {runtime} on this machine")
    if is_imported(runtime) and settings.image_dir is None:
        yield Finding(Level.BLOCKING, "container.image_dir", "a shared folder for imported images", "not set")
    elif is_imported(runtime) and not here.can_make_images:
        found = f"{settings.image_dir}, which you cannot write to"
        yield Finding(Level.WARNING, "container.image_dir", "a folder that you can write to", found)
    if here.python_without_package is not None:
        expected = "an interpreter that has rlk_repro, or container.package_dir"
        yield Finding(Level.BLOCKING, "container", expected, f"{here.python_without_package} cannot import rlk_repro")
    for path, is_there in here.existing.items():
        if not is_there:
            yield Finding(Level.WARNING, "container", f"{path} on the nodes", "no such path on this machine")


def list_paths(profile: Profile) -> list[str]:
    """List files and folders that a profile expects on the nodes, without devices, which only nodes have."""
    settings = profile.container or ContainerSettings()
    python = host_python(settings)
    interpreter = [python] if python is not None and python.startswith("/") else []
    package = [settings.package_dir] if settings.package_dir else []
    mounts = [mount.source for mount in settings.mounts if not mount.source.startswith("/dev/")]
    return [*interpreter, *package, *mounts]


def _judge_env(profile: Profile, here: UserHere) -> Iterator[Finding]:
    for name, value in profile.env.items():
        if isinstance(value, FromEnv) and value.from_env not in here.variables:
            yield Finding(Level.BLOCKING, f"env.{name}", f"the variable {value.from_env} in this shell", "not set")


def _judge_runs_root(here: UserHere) -> Iterator[Finding]:
    expected = "a file system that the nodes share (set RLK_REPRO_RUNS)"
    if str(here.runs_root).startswith(tuple(f"{folder}/" for folder in NOT_FOR_JOBS)):
        yield Finding(Level.WARNING, "run directories", expected, "a folder for temporary files")
    elif here.is_runs_root_shared is False:
        yield Finding(Level.WARNING, "run directories", expected, "a file system of this machine only")
