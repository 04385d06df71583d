"""Read a Slurm cluster's facts; a fact that Slurm does not tell is None or empty."""

from __future__ import annotations

import getpass
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from rlk_repro.base.errors import EnvironmentMissing, Problem
from rlk_repro.clusters.asking import parse_release
from rlk_repro.clusters.slurm.client import find_obstacle, probe_config, read_client

POOL_FIELDS: Final = "%P|%a|%l|%D|%T|%G|%f"
# marks that sinfo writes after a state, such as ``*`` for a node that does not respond
STATE_MARKS: Final = "*~#!%$@^-+"
UNUSABLE: Final = frozenset(
    {"down", "drained", "draining", "fail", "failing", "maint", "unknown", "inval", "future", "error", "blocked"}
)
RUNTIMES: Final = {"apptainer": ("apptainer", "singularity"), "podman": ("podman",), "docker": ("docker",)}
PYXIS_OPTION: Final = "--container-image"
NO_ACCOUNTING: Final = "accounting_storage/none"

_RESERVATIONS: Final = ("scontrol", "--oneliner", "show", "reservation")
_GRES: Final = re.compile(r"gpu(?::(?P<type>[A-Za-z][A-Za-z0-9._-]*))?(?::(?P<count>\d+))?(?:\([^)]*\))?")
_TIME: Final = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """GPUs of one GRES type on a node; ``kind`` is that type, or empty if the site names no type."""

    kind: str
    count: int


@dataclass(frozen=True, kw_only=True)
class Pool:
    """A group of equal nodes in one partition; ``max_time_min`` is None if time is not limited."""

    partition: str
    is_default: bool
    is_up: bool
    max_time_min: float | None
    num_nodes: int
    state: str
    gpus: tuple[Gpus, ...]
    features: frozenset[str]

    @property
    def is_usable(self) -> bool:
        return self.state not in UNUSABLE

    @property
    def gpus_per_node(self) -> int:
        return sum(gpus.count for gpus in self.gpus)


@dataclass(frozen=True, kw_only=True)
class Association:
    """An account that this user may charge, and the partition and QOS for which it is valid."""

    account: str
    partition: str
    qos: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class SlurmSite:
    """The facts of one cluster; a partition that is not in ``visible`` may refuse this user."""

    cluster: str
    version: str
    pools: tuple[Pool, ...]
    visible: frozenset[str]
    block_size: int | None
    enforces_associations: bool
    associations: tuple[Association, ...]
    reservations: frozenset[str]
    runtimes: frozenset[str]

    @property
    def release(self) -> tuple[int, int]:
        return parse_release(self.version)

    @property
    def partitions(self) -> list[str]:
        return list(dict.fromkeys(pool.partition for pool in self.pools))

    def pools_of(self, partition: str | None) -> list[Pool]:
        name = partition or next((pool.partition for pool in self.pools if pool.is_default), None)
        return [pool for pool in self.pools if pool.partition == name]


def probe_site() -> SlurmSite:
    """Read the facts of this machine's cluster; raise EnvironmentMissing if no Slurm answers."""
    obstacle = find_obstacle()
    if obstacle is not None:
        copy = "rlk-repro profile show generic-h200 > my-site.yaml"
        hint = f"log in to the cluster, or copy a shipped profile: {copy}"
        raise EnvironmentMissing(Problem("slurm", obstacle, hint=hint))
    config = probe_config()
    visible = read_client("sinfo", "--noheader", "--format=%R")
    has_accounting = config.get("AccountingStorageType", NO_ACCOUNTING) != NO_ACCOUNTING
    return SlurmSite(
        cluster=config.get("ClusterName", ""),
        version=config.get("SLURM_VERSION") or read_client("sinfo", "--version").rpartition(" ")[2].strip(),
        pools=tuple(parse_pools(read_client("sinfo", "--noheader", "--all", f"--format={POOL_FIELDS}"))),
        visible=frozenset(visible.split()),
        block_size=parse_block_size(read_client("scontrol", "show", "topology")),
        enforces_associations="associations" in config.get("AccountingStorageEnforce", ""),
        associations=tuple(_ask_associations()) if has_accounting else (),
        reservations=frozenset(re.findall(r"^ReservationName=(\S+)", read_client(*_RESERVATIONS), re.MULTILINE)),
        runtimes=find_runtimes(read_client("srun", "--help")),
    )


def parse_pools(text: str) -> Iterator[Pool]:
    """Read rows of ``sinfo`` with the columns POOL_FIELDS; the default partition's name ends in ``*``."""
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) != POOL_FIELDS.count("|") + 1 or not fields[3].isdigit():
            continue
        name, is_up, limit, num_nodes, state, gres, features = fields
        yield Pool(
            partition=name.removesuffix("*"),
            is_default=name.endswith("*"),
            is_up=is_up == "up",
            max_time_min=parse_time_min(limit),
            num_nodes=int(num_nodes),
            state=state.rstrip(STATE_MARKS).lower(),
            gpus=tuple(parse_gres(gres)),
            features=frozenset(re.split(r"[,&|]", features)) - {"", "(null)"},
        )


def parse_gres(text: str) -> Iterator[Gpus]:
    """Read GPUs from a text such as ``gpu:nvidia_h200:8(S:0-1),gpu:a100:2``; the list of sockets may hold commas."""
    for item in re.split(r",(?![^(]*\))", text):
        match = _GRES.fullmatch(item.strip())
        if match is not None:
            yield Gpus(kind=match["type"] or "", count=int(match["count"] or 1))


def parse_time_min(text: str) -> float | None:
    """Read minutes from ``1-00:00:00`` or ``10:00``; None for ``infinite`` and similar words."""
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return (days * 24 + hours) * 60 + minutes + seconds / 60


def parse_block_size(text: str) -> int | None:
    """Return how many nodes the smallest block has; None if the topology has no blocks."""
    sizes = [int(size) for size in re.findall(r"^BlockName=.*\bBlockSize=(\d+)", text, re.MULTILINE)]
    return min(sizes, default=None)


def parse_associations(text: str) -> Iterator[Association]:
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) == 3 and fields[0]:
            yield Association(account=fields[0], partition=fields[1], qos=frozenset(fields[2].split(",")) - {""})


def find_runtimes(srun_help: str) -> frozenset[str]:
    """Find the container runtimes that this machine could start; nodes may have other runtimes."""
    found = {name for name, tools in RUNTIMES.items() if any(shutil.which(tool) for tool in tools)}
    return frozenset(found | ({"pyxis"} if PYXIS_OPTION in srun_help else set()))


def _ask_associations() -> Iterator[Association]:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        return
    fields = "format=account,partition,qos"
    yield from parse_associations(
        read_client("sacctmgr", "--noheader", "--parsable2", "show", "associations", f"user={user}", fields)
    )
