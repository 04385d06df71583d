"""A site's settings for preflight: limits, and what a finding of each check does to the job (docs/preflight.md)."""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias

from pydantic import Field

from rlk_repro.spec.values import GrowingModel, NonNegative, Positive

CheckName: TypeAlias = Literal[
    "gpu_idle",
    "driver_toolkit",
    "gpu_errors",
    "gpu_ecc_mode",
    "gpu_memory_repair",
    "gpu_links",
    "gpu_fabric",
    "imex",
    "gpu_partition",
    "gpu_compute_mode",
    "gpu_slowdown",
    "gpu_power_limit",
    "gpu_persistence",
    "gpu_alike",
    "gpu_visibility",
    "rl_kernel_architecture",
    "governor",
    "numa_balancing",
    "load",
    "stale_processes",
    "other_runs",
    "shared_memory",
    "scratch_room",
    "open_files",
    "locked_memory",
    "clock_source",
    "clock_sync",
    "clock_skew",
    "rdma_active",
    "rdma_opens",
    "rdma_ports",
    "gpudirect_rdma",
    "ephemeral_ports",
    "file_latency",
    "free_inodes",
    "nodes_alike",
    "nvlink_domain",
    "all_reduce",
]
# pass: a finding is only recorded; warn: the report also shows it; fail: the job stops before its first trial.
Policy: TypeAlias = Literal["pass", "warn", "fail"]


class Preflight(GrowingModel):
    """Limits of the checks, and which findings are only recorded, which are warnings, and which stop the job."""

    added_later: ClassVar[frozenset[str]] = frozenset({"max_clock_skew_s", "max_file_latency_ms", "policy"})

    min_free_disk_gib: NonNegative = 1.0
    min_free_memory_gib: NonNegative = 1.0
    max_clock_skew_s: Positive = Field(
        2.0, description="largest allowed clock difference between a node and the file system of the run directory"
    )
    max_file_latency_ms: Positive = Field(
        1000.0, description="longest allowed time to write, sync and remove one small file in the run directory"
    )
    on_blocking: Literal["stop", "continue"] = "stop"
    policy: dict[CheckName, Policy] = Field(
        {}, description="pass, warn or fail, for the findings of a check; default: see docs/preflight.md"
    )
