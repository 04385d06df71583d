"""A site's settings: the sections ``slurm``, ``container``, ``ray`` and ``preflight`` of a profile."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Final, Literal, TypeAlias

from pydantic import Field

from rlk_repro.spec.values import REMOVED, UNSEEN, GrowingModel, Model, NonNegative, Positive, Word

Line = Annotated[str, Field(pattern=rf"^[^{UNSEEN}]+$", max_length=1000)]
"""Text of one line: sbatch options are comment lines, and a line feed inside one would begin a shell command."""
AbsolutePath = Annotated[str, Field(pattern=rf"^/[^{UNSEEN}]*$", max_length=1000)]
Gres = Annotated[str, Field(pattern=r"^(none|gpu(:[A-Za-z0-9._-]+)?)$", max_length=100)]
Option = Annotated[str, Field(pattern=rf"^--?[A-Za-z][^{UNSEEN}]*$", max_length=1000)]
FIRST_RAY_WITH_TOKENS: Final = (2, 52)
Interface = Annotated[str, Field(pattern=rf"^[^-\s/{UNSEEN}][^\s/{UNSEEN}]{{0,14}}$")]


class SlurmSettings(GrowingModel):
    """How a job is requested at this site; if a key is not set, Slurm's own default applies."""

    account: Word | None = None
    partition: Word | None = None
    qos: Word | None = None
    reservation: Word | None = None
    constraint: Word | None = None
    exclude: Word | None = Field(None, description="nodes that must not be used, in Slurm's syntax of node lists")
    gres: Gres = Field(
        "gpu", description="how GPUs are requested: gpu, gpu:TYPE, or none where jobs always get whole nodes"
    )
    exclusive: bool = Field(
        True,
        description="whether to request whole nodes with all their memory; on shared nodes other jobs distort the "
        "measurement",
    )
    block_size: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None,
        description="number of nodes in one NVLink domain, at sites with block topology (18 for NVL72); sets --segment",
    )
    max_time_min: Positive | None = Field(None, description="longest time limit that the partition accepts")
    stop_before_s: Annotated[int, Field(ge=60, le=3600)] = Field(
        300, description="seconds before the time limit at which the agents are asked to stop"
    )
    requeue: bool = Field(True, description="whether Slurm starts the job again after a node failure or preemption")
    setup: tuple[Line, ...] = Field(
        (), description="shell lines that the job runs first, unchanged, such as 'module load …'"
    )
    extra: tuple[Option, ...] = Field((), description="further options of sbatch, passed on unchanged")
    srun_extra: tuple[Option, ...] = Field((), description="further options of srun, passed on unchanged")


class Mount(Model):
    """A folder or device of the host that the container sees."""

    source: AbsolutePath
    target: AbsolutePath | None = Field(None, description="path in the container; default: the path on the host")
    read_only: bool = False


Runtime: TypeAlias = Literal["host", "pyxis", "apptainer", "podman", "docker"]
"""``profile init`` proposes the first runtime that a Slurm site has: pyxis comes first, because it starts the container
inside srun; docker comes last, because it leaves files that root owns.
"""


class ContainerSettings(GrowingModel):
    """The program that starts the stack's image on a node; ``host`` uses the node's own software without an image."""

    added_later: ClassVar[frozenset[str]] = frozenset({"fabric", "host_python"})

    runtime: Runtime = "host"
    python: Word = Field(
        "python3", description="Python interpreter, in the container or on the host, that can import rlk_repro"
    )
    host_python: Word | None = Field(
        None, description="Python interpreter of the nodes, used if runtime is not host and the stack has no image"
    )
    package_dir: AbsolutePath | None = Field(
        None,
        description="folder that holds the rlk_repro package, put first on PYTHONPATH; default: the installed package",
    )
    image_dir: AbsolutePath | None = Field(
        None, description="shared folder where pyxis and apptainer keep imported images; each is imported once"
    )
    mounts: tuple[Mount, ...] = Field((), description="further mounts; the run directory is always mounted")
    extra: tuple[Option, ...] = Field((), description="further options of the runtime, passed on unchanged")
    fabric: tuple[AbsolutePath, ...] = Field(
        ("/dev/infiniband",), description="devices of the network between nodes, for runs on several nodes"
    )


class RaySettings(Model):
    """Ray's network, and Ray's ports from ``first_port`` on: three on the head, six on each node."""

    first_port: Annotated[int, Field(ge=1024, le=8000)] = Field(
        6379,
        description="first port of Ray's head; all ports stay below 9000, where ephemeral ports begin on some nodes",
    )
    interface: Interface | None = Field(
        None,
        description="network interface between the nodes, needed if the nodes' names resolve to addresses of another "
        "interface. NCCL and Gloo also use it, unless env names an interface for them",
    )


def knows_tokens(version: str) -> bool:
    """Tell whether this release of Ray authenticates by token; older releases silently ignore the setting."""
    return tuple(map(int, re.findall(r"\d+", version)[:2])) >= FIRST_RAY_WITH_TOKENS


# pass: a finding is only recorded; warn: the report also shows it; fail: the job stops before its first trial.
Policy: TypeAlias = Literal["pass", "warn", "fail"]


REMOVED_LIMITS: Final = ("max_clock_skew_s", "max_file_latency_ms")
REMOVED_CHECKS: Final = (
    *("all_reduce", "clock_skew", "clock_source", "clock_sync", "ephemeral_ports"),
    *("file_latency", "free_inodes", "governor", "gpu_alike", "gpu_compute_mode"),
    *("gpu_ecc_mode", "gpu_fabric", "gpu_memory_repair", "gpu_persistence"),
    *("gpu_power_limit", "gpudirect_rdma", "imex", "load", "locked_memory", "numa_balancing"),
    *("nvlink_domain", "rdma_active", "rdma_ports", "scratch_room", "stale_processes"),
)
"""Checks of earlier versions, which their plans may name."""


class Preflight(GrowingModel):
    """Limits of the checks, and which findings are only recorded, which are warnings, and which stop the job."""

    added_later: ClassVar[frozenset[str]] = frozenset({"policy", *REMOVED_LIMITS})

    min_free_disk_gib: NonNegative = 1.0
    min_free_memory_gib: NonNegative = 1.0
    max_clock_skew_s: Positive = Field(2.0, description=REMOVED)
    max_file_latency_ms: Positive = Field(1000.0, description=REMOVED)
    on_blocking: Literal["stop", "continue"] = "stop"
    policy: dict[str, Policy] = Field(
        {}, description="pass, warn or fail, for the findings of a check; default: as rlk-repro profile show says"
    )
