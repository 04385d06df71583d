"""Propose a first profile for Slurm from the cluster's facts, with remarks about what the user should check."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from rlk_repro.clusters.profiles import Ask, Proposal, find_hardware, make_name
from rlk_repro.clusters.slurm.site import Pool, SlurmSite
from rlk_repro.images.importing import is_imported
from rlk_repro.spec import Hardware
from rlk_repro.spec.site import Runtime


def propose_slurm(site: SlurmSite, hardware: Mapping[str, Hardware], images: Path, ask: Ask) -> Proposal:
    """Propose a profile; ``images`` is a folder shared by nodes and this machine, for imported images."""
    partition = _choose_partition(site, ask)
    pools = site.pools_of(partition)
    remarks: list[str] = []
    name = _choose_hardware(pools, hardware, ask, remarks)
    runtimes: list[str] = [runtime for runtime in get_args(Runtime) if runtime in site.runtimes]
    runtime = ask("How is an image started on the nodes?", [*runtimes, "host"], (runtimes or ["host"])[0])
    values: dict[str, Any] = {
        "schema": 1,
        "profile": make_name(site.cluster),
        "cluster": "slurm",
        "purpose": f"Partition {partition} of cluster {site.cluster or 'without a name'}.",
        "hardware": name,
        "slurm": _slurm_values(site, pools, partition, ask, remarks),
        "container": {"runtime": runtime},
    }
    if is_imported(runtime):
        values["container"]["image_dir"] = str(images)
        remarks.append(f"images are imported once into {images}, which must be on a file system that the nodes share")
    values["container"]["python" if runtime == "host" else "host_python"] = sys.executable
    remarks.append(f"without a container the nodes run {sys.executable}, which must exist on the nodes too")
    return Proposal(values={key: value for key, value in values.items() if value is not None}, remarks=remarks)


def _choose_partition(site: SlurmSite, ask: Ask) -> str:
    """Choose a partition; prefer partitions with GPUs, then those with the most usable nodes, then the default."""
    sizes: dict[str, tuple[int, int, bool]] = {}
    for pool in (pool for pool in site.pools if pool.partition in site.visible):
        has_gpus, num_nodes, _ = sizes.get(pool.partition, (0, 0, False))
        usable = pool.num_nodes if pool.is_usable and pool.is_up else 0
        sizes[pool.partition] = (max(has_gpus, int(pool.gpus_per_node > 0)), num_nodes + usable, pool.is_default)
    ordered = sorted(sizes, key=lambda name: sizes[name], reverse=True)
    if not ordered:
        return ""
    return ordered[0] if len(ordered) == 1 else ask("Which partition?", ordered, ordered[0])


def _choose_hardware(
    pools: Sequence[Pool], hardware: Mapping[str, Hardware], ask: Ask, remarks: list[str]
) -> str | None:
    words = [gpus.kind for pool in pools for gpus in pool.gpus] + [name for pool in pools for name in pool.features]
    found = find_hardware(words, hardware)
    if len(found) == 1:
        return found[0]
    none = "none of these"
    answer = ask("Which hardware do the nodes have?", [*(found or hardware), none], found[0] if found else none)
    if answer == none:
        remarks.append("hardware: GRES and features name no known GPU; set this key, or submit with --hardware")
        return None
    return answer


def _slurm_values(
    site: SlurmSite, pools: Sequence[Pool], partition: str, ask: Ask, remarks: list[str]
) -> dict[str, Any]:
    gpus = list(dict.fromkeys(item.kind for pool in pools for item in pool.gpus))
    if len(gpus) > 1:
        remarks.append(f"gres: the partition has GPUs of several types: {', '.join(kind or 'none' for kind in gpus)}")
    gres = "none" if not gpus else f"gpu:{gpus[0]}" if gpus[0] else "gpu"
    limits = [pool.max_time_min for pool in pools if pool.max_time_min is not None]
    values: dict[str, Any] = {
        "account": _choose_account(site, partition, ask),
        "partition": partition or None,
        "gres": gres,
        "block_size": site.block_size,
        "max_time_min": int(min(limits)) if limits else None,
    }
    return {key: value for key, value in values.items() if value is not None}


def _choose_account(site: SlurmSite, partition: str, ask: Ask) -> str | None:
    usable = [item.account for item in site.associations if item.partition in {"", partition}]
    accounts = list(dict.fromkeys(usable))
    if len(accounts) < 2:
        return accounts[0] if accounts else None
    return ask("Which account?", accounts, accounts[0])
