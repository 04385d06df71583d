"""Check processor, memory limits, clocks and the run directory's file system in preflight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from rlk_repro.agent.preflight.base import OTHER_POLICIES, Check, Complaint, Scope, Situation

# each reading of these clock sources costs a system call or a slow bus access
SLOW_CLOCKS: Final = ("hpet", "acpi_pm", "jiffies", "refined-jiffies", "pit")
MAX_LOAD_PER_CPU: Final = 0.5
# the default of 64 MiB in a container is too little for NCCL and for data loaders
MIN_SHARED_MEMORY_GIB: Final = 1.0
MIN_SCRATCH_GIB: Final = 10.0
# Ray opens several sockets per worker
MIN_OPEN_FILES: Final = 8192
# registering GPU memory with a network adapter locks at least this much
MIN_LOCKED_BYTES: Final = 16 << 30
# a trial writes dozens of files per rank
MIN_FREE_INODES: Final = 10_000
FOLDER: Final = "run_directory"


def check_governor(situation: Situation) -> Iterator[Complaint]:
    governor = situation.fact("host", "governor")
    if isinstance(governor, str) and governor != "performance":
        yield Complaint("host.governor", "performance", governor)


def check_numa_balancing(situation: Situation) -> Iterator[Complaint]:
    """Check that automatic NUMA balancing is off: it unmaps pages to see which processor uses them."""
    if situation.fact("host", "numa_balancing") == 1:
        yield Complaint("host.numa_balancing", "0", "1")


def check_load(situation: Situation) -> Iterator[Complaint]:
    load, num_cpus = situation.fact("host", "load_average"), situation.fact("host", "num_cpus")
    if isinstance(load, list) and isinstance(num_cpus, int) and load and load[0] > MAX_LOAD_PER_CPU * num_cpus:
        yield Complaint("host.load_average", f"at most {MAX_LOAD_PER_CPU * num_cpus:g}", f"{load[0]:g}")


def check_stale_processes(situation: Situation) -> Iterator[Complaint]:
    """Check for Ray or engine processes: before the first trial, such processes belong to another job."""
    names = situation.fact("host", "trainer_processes")
    if isinstance(names, list) and names:
        yield Complaint("host.trainer_processes", "no such process before the first trial", ", ".join(map(str, names)))


def check_other_runs(situation: Situation) -> Iterator[Complaint]:
    """Check for other runs on this machine: two runs disturb each other, even while the GPUs of one are idle."""
    runs = situation.fact("host", "other_runs")
    if isinstance(runs, list) and runs:
        yield Complaint("host.other_runs", "no other run", f"other runs: {', '.join(map(str, runs))}")


def check_shared_memory(situation: Situation) -> Iterator[Complaint]:
    return _require_least("host.dev_shm_gib", situation.fact("host", "dev_shm_gib"), MIN_SHARED_MEMORY_GIB)


def check_scratch(situation: Situation) -> Iterator[Complaint]:
    """Check the space for temporary files: Ray's session files and spilled objects, and the caches of compilers."""
    return _require_least("host.tmp_free_gib", situation.fact("host", "tmp_free_gib"), MIN_SCRATCH_GIB)


def check_open_files(situation: Situation) -> Iterator[Complaint]:
    """Check the hard limit of open files: where the agent starts Ray, it raises the soft limit up to the hard limit."""
    return _require_least("host.limits.nofile.hard", _limit(situation, "nofile", "hard"), MIN_OPEN_FILES)


def check_locked_memory(situation: Situation) -> Iterator[Complaint]:
    """Check the limit of locked memory: InfiniBand and RoCE lock the memory that they register."""
    soft = _limit(situation, "memlock", "soft")
    if situation.mapping("network", "rdma_devices") and isinstance(soft, int) and soft < MIN_LOCKED_BYTES:
        yield Complaint("host.limits.memlock.soft", "unlimited", f"{soft} bytes")


def check_clock_source(situation: Situation) -> Iterator[Complaint]:
    source = situation.fact("host", "clock_source")
    if source in SLOW_CLOCKS:
        yield Complaint("host.clock_source", "a clock source that programs read without a system call", str(source))


def check_clock_sync(situation: Situation) -> Iterator[Complaint]:
    if situation.fact("host", "clock_is_synchronized") is False:
        yield Complaint("host.clock_is_synchronized", "true", "false")


def check_clock_skew(situation: Situation) -> Iterator[Complaint]:
    skew_s = situation.fact(FOLDER, "clock_skew_s")
    if isinstance(skew_s, int | float) and abs(skew_s) > situation.limits.max_clock_skew_s:
        yield Complaint("clock", "the same time on this node and the file system", f"a difference of {skew_s:+.1f} s")


def check_file_latency(situation: Situation) -> Iterator[Complaint]:
    latency_ms, limit_ms = situation.fact(FOLDER, "file_latency_ms"), situation.limits.max_file_latency_ms
    if isinstance(latency_ms, int | float) and latency_ms > limit_ms:
        yield Complaint(f"{FOLDER}.file_latency_ms", f"at most {limit_ms:g} ms", f"{latency_ms:g} ms")


def check_free_inodes(situation: Situation) -> Iterator[Complaint]:
    return _require_least(f"{FOLDER}.free_inodes", situation.fact(FOLDER, "free_inodes"), MIN_FREE_INODES)


def _require_least(where: str, value: Any, least: float) -> Iterator[Complaint]:
    if isinstance(value, int | float) and value < least:
        yield Complaint(where, f"at least {least:g}", f"{value:g}")


def _limit(situation: Situation, name: str, kind: str) -> Any:
    limit = situation.mapping("host", "limits").get(name)
    return limit.get(kind) if isinstance(limit, dict) else None


CHECKS: Final = (
    Check(name="governor", scope=Scope.GPUS, policy="warn", judge=check_governor),
    Check(name="numa_balancing", scope=Scope.GPUS, policy="warn", judge=check_numa_balancing),
    Check(name="load", scope=Scope.GPUS, policy="warn", judge=check_load),
    Check(name="stale_processes", scope=Scope.GPUS, policy="warn", judge=check_stale_processes),
    Check(name="other_runs", scope=Scope.GPUS, policy="fail", judge=check_other_runs),
    Check(name="shared_memory", scope=Scope.GPUS, policy="warn", judge=check_shared_memory),
    Check(name="scratch_room", scope=Scope.GPUS, policy="warn", judge=check_scratch),
    Check(name="open_files", scope=Scope.GPUS, policy="warn", judge=check_open_files),
    Check(name="locked_memory", scope=Scope.NODES, policy="warn", judge=check_locked_memory),
    Check(name="clock_source", scope=Scope.GPUS, policy="warn", judge=check_clock_source),
    Check(name="clock_sync", scope=Scope.NODES, policy="warn", judge=check_clock_sync),
    Check(name="clock_skew", scope=Scope.ANY, policy=OTHER_POLICIES["clock_skew"], judge=check_clock_skew),
    Check(name="file_latency", scope=Scope.GPUS, policy="warn", judge=check_file_latency),
    Check(name="free_inodes", scope=Scope.ANY, policy="warn", judge=check_free_inodes),
)
