"""The table of preflight's checks.

A row is here because its problem ends a run or makes its numbers wrong; the comment above it says how.  All other facts
of a node (governor, load, fabric state, …) are only recorded in the node's manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from rlk_repro.agent.preflight import gpu, host
from rlk_repro.agent.preflight.facts import Facts
from rlk_repro.base.errors import Problem, SpecError
from rlk_repro.base.findings import Finding, Level
from rlk_repro.base.resources import suggest
from rlk_repro.images.running import match_image
from rlk_repro.spec import Policy, Profile
from rlk_repro.spec.load import Loaded

LEVELS: Final[dict[Policy, Level]] = {
    "pass": Level.INFO,
    "warn": Level.WARNING,
    "fail": Level.BLOCKING,
}


@dataclass(frozen=True)
class Check:
    """One row: ``find`` yields the findings, and ``policy`` (the profile may change it) limits their level.

    The levels of a check without a policy are those that ``find`` gives.  ``advice`` is the next step after a finding.
    """

    name: str
    find: Callable[[Facts], Iterable[Finding]]
    policy: Policy | None = None
    advice: str = ""

    def judge(self, facts: Facts) -> Iterator[Finding]:
        most, order = LEVELS[facts.limits.policy.get(self.name, self.policy or "fail")], list(Level)
        for finding in self.find(facts):
            if self.policy is None or order.index(finding.level) >= order.index(most):
                yield finding
            else:
                yield replace(finding, level=most)


IN_RUN: Final[tuple[Check, ...]] = (
    # A read-only mount or a full quota: the run ends at its first trial, without a record of why.
    Check("writable", host.check_writable),
    # A full disk cuts logs off; a trial killed for memory looks like a fault of its variant.
    Check("room", lambda facts: host.find_little_room(facts.run_dir.root, facts.limits)),
    # A half-copied checkpoint fails on one node only; other data make it another experiment.
    Check("prepared", host.check_prepared),
    # A missing module ends every trial at its first line, after a queue of hours.
    Check("modules", host.check_modules),
    # Without RL-Kernel both variants run the trainer's own functions: their ratio is 1.
    Check("rl_kernel", host.check_rl_kernel),
    # With other commits than the pinned ones, the report names code that did not run.
    Check("pins", host.check_pins),
    # A folder of the host hides the image's own: another torch runs than the record says.
    Check("image", lambda facts: match_image(facts.plan, facts.manifest)),
)
ON_NODE: Final[tuple[Check, ...]] = (
    # A partition mixes models (A100 with 40 GB beside 80 GB): the numbers are another product's.
    Check("hardware", gpu.check_hardware),
)
WITH_GPUS: Final[tuple[Check, ...]] = (
    # Another process takes a part of a GPU's time, and not the same part in both variants.
    Check("gpu_idle", gpu.check_idle, "fail", "wait, or ask for whole nodes"),
    # A driver older than the toolkit: the first CUDA call of every trial fails.
    Check("driver_toolkit", gpu.check_driver, "fail", "take an image for this driver"),
    # A GPU in a fault state, or with broken memory, ends a trial hours later or changes its numbers.
    Check("gpu_errors", gpu.check_errors, "fail", "drain the node and reset the GPU"),
    # With a link down or a degraded fabric, collectives take another route, and every step is several times too long.
    Check("gpu_links", gpu.check_links, "fail", "drain the node: a link is down"),
    # A MIG slice, or a partition of an MI300X, has a part of the memory and speed of its name.
    Check("gpu_partition", gpu.check_partition, "fail", "use whole GPUs (MIG off, SPX)"),
    # Heat or a power brake slows one GPU; which variant it hits depends on the hour.
    Check("gpu_slowdown", gpu.check_slowdown, "warn", "check cooling and power"),
    # On AMD Ray stops at "Inconsistent values"; with gaps, vime takes GPUs of another job.
    Check("gpu_visibility", gpu.check_visibility, "fail", "ask for whole nodes"),
    # An extension without code for this GPU: the enabled variant runs no compiled kernel.
    Check("rl_kernel_architecture", host.check_architecture, "fail", "build for this GPU"),
    # Two runs on one machine slow each other down, also while the GPUs of one are idle.
    Check("other_runs", host.check_other_runs, "fail", "wait until that run has ended"),
    # A container's default of 64 MiB: NCCL and data loaders end with a bus error.
    Check("shared_memory", host.check_shared_memory, "warn", "docker: --ipc=host"),
    # Ray opens several sockets per worker, and ends with "Too many open files".
    Check("open_files", host.check_open_files, "warn", "ulimit -Hn 65536"),
)
WITH_NETWORK: Final[tuple[Check, ...]] = (
    # Without an open RDMA device (such as a container without it), NCCL takes TCP in silence.
    Check("rdma_opens", host.check_rdma, "fail", "set container.fabric"),
)
BETWEEN_NODES: Final[tuple[Check, ...]] = (
    # One job on two kinds of nodes measures neither.
    Check("nodes_alike", host.compare_nodes, "fail", "ask for nodes of one kind"),
)
IN_TRIAL: Final[tuple[Check, ...]] = (
    # NCCL falls back in silence (cuMem off, no IMEX channel, IPC not shared), and every step is several times too long.
    Check("nccl_transport", host.check_transports, "fail", "read the trial's log, unset NCCL_*"),
)
CHECKS: Final = (*IN_RUN, *ON_NODE, *WITH_GPUS, *WITH_NETWORK, *BETWEEN_NODES, *IN_TRIAL)


def find_checks(facts: Facts) -> tuple[Check, ...]:
    """Return the rows that apply."""
    if facts.transports:
        return IN_TRIAL
    if facts.nodes:
        return BETWEEN_NODES
    checks = ON_NODE
    if facts.staged is not None:
        checks += IN_RUN
    if facts.layout.gpus_per_node > 0:
        checks += WITH_GPUS
    if facts.layout.num_nodes > 1:
        checks += WITH_NETWORK
    return checks


def judge(facts: Facts) -> list[Finding]:
    """Return the findings of all rows that apply."""
    return [finding for check in find_checks(facts) for finding in check.judge(facts)]


def default_policies() -> dict[str, Policy]:
    """Return the policies of the rows that a profile may change."""
    return {check.name: check.policy for check in CHECKS if check.policy is not None}


def require_known(profile: Loaded[Profile]) -> None:
    """Refuse a profile that names an unknown check; recorded plans may name earlier versions'."""
    known = default_policies()
    for name in profile.model.preflight.policy:
        if name in known:
            continue
        path = f"preflight.policy.{name}"
        where = ": ".join(filter(None, [profile.origin.get(path), path]))
        expected = f"one of {', '.join(known)}"
        hint = suggest(name, list(known))
        raise SpecError(Problem(where, "no such check", expected=expected, hint=hint))
