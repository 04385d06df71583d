"""The table of preflight's checks.

A row is here because its problem ends a run or makes its numbers wrong; the comment above it says how.  All other facts
of a node (governor, load, fabric state, …) are only recorded in the node's manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from rlk_repro.agent.preflight import code, gpu, host
from rlk_repro.agent.preflight.facts import Facts
from rlk_repro.base.findings import Finding, Level
from rlk_repro.spec import Policy, Preflight

LEVELS: Final[dict[Policy, Level]] = {
    "pass": Level.INFO,
    "warn": Level.WARNING,
    "fail": Level.BLOCKING,
}

UNUSED_LIMITS: Final = frozenset({"max_clock_skew_s", "max_file_latency_ms"})


@dataclass(frozen=True)
class Check:
    """One row: ``find`` yields the findings, and ``policy`` (the profile may change it) limits their level.

    The levels of a check without a policy are those that ``find`` gives.  ``advice`` is the next step after a finding.
    """

    name: str
    applies: Callable[[Facts], bool]
    find: Callable[[Facts], Iterable[Finding]]
    policy: Policy | None = None
    advice: str = ""

    def judge(self, facts: Facts) -> Iterator[Finding]:
        if not self.applies(facts):
            return
        policies = {str(name): policy for name, policy in facts.limits.policy.items()}
        most, order = LEVELS[policies.get(self.name, self.policy or "fail")], list(Level)
        for finding in self.find(facts):
            if self.policy is None or order.index(finding.level) >= order.index(most):
                yield finding
            else:
                yield replace(finding, level=most)


def in_run(facts: Facts) -> bool:
    return facts.staged is not None


def on_node(facts: Facts) -> bool:
    return not facts.nodes


def with_gpus(facts: Facts) -> bool:
    return on_node(facts) and facts.layout.gpus_per_node > 0


def with_network(facts: Facts) -> bool:
    return on_node(facts) and facts.layout.num_nodes > 1


def between_nodes(facts: Facts) -> bool:
    return bool(facts.nodes)


CHECKS: Final[tuple[Check, ...]] = (
    # A read-only mount or a full quota: the run ends at its first trial, without a record of why.
    Check("writable", in_run, host.check_writable),
    # A full disk cuts logs off; a trial killed for memory looks like a fault of its variant.
    Check("room", in_run, host.check_room),
    # A half-copied checkpoint fails on one node only; other data make it another experiment.
    Check("prepared", in_run, code.check_prepared),
    # A missing module ends every trial at its first line, after a queue of hours.
    Check("modules", in_run, code.check_modules),
    # Without RL-Kernel both variants run the trainer's own functions: their ratio is 1.
    Check("rl_kernel", in_run, code.check_rl_kernel),
    # With other commits than the pinned ones, the report names code that did not run.
    Check("pins", in_run, code.check_pins),
    # A folder of the host hides the image's own: another torch runs than the record says.
    Check("image", in_run, code.check_image),
    # A partition mixes models (A100 with 40 GB beside 80 GB): the numbers are another product's.
    Check("hardware", on_node, gpu.check_hardware),
    # Another process takes a part of a GPU's time, and not the same part in both variants.
    Check("gpu_idle", with_gpus, gpu.check_idle, "fail", "wait, or ask for whole nodes"),
    # A driver older than the toolkit: the first CUDA call of every trial fails.
    Check("driver_toolkit", with_gpus, gpu.check_driver, "fail", "take an image for this driver"),
    # Uncorrected or unrepaired memory ends a trial hours later, or changes its numbers.
    Check("gpu_errors", with_gpus, gpu.check_errors, "fail", "drain the node and reset the GPU"),
    # With a link down, collectives take another route, and every step is several times too long.
    Check("gpu_links", with_gpus, gpu.check_links, "fail", "drain the node: a link is down"),
    # A MIG slice, or a partition of an MI300X, has a part of the memory and speed of its name.
    Check("gpu_partition", with_gpus, gpu.check_partition, "fail", "use whole GPUs (MIG off, SPX)"),
    # Heat or a power brake slows one GPU; which variant it hits depends on the hour.
    Check("gpu_slowdown", with_gpus, gpu.check_slowdown, "warn", "check cooling and power"),
    # On AMD Ray stops at "Inconsistent values"; with gaps, vime takes GPUs of another job.
    Check("gpu_visibility", with_gpus, gpu.check_visibility, "fail", "ask for whole nodes"),
    # An extension without code for this GPU: the enabled variant runs no compiled kernel.
    Check("rl_kernel_architecture", with_gpus, code.check_architecture, "fail", "build for this GPU"),
    # Two runs on one machine slow each other down, also while the GPUs of one are idle.
    Check("other_runs", with_gpus, host.check_other_runs, "fail", "wait until that run has ended"),
    # A container's default of 64 MiB: NCCL and data loaders end with a bus error.
    Check("shared_memory", with_gpus, host.check_shared_memory, "warn", "docker: --ipc=host"),
    # Ray opens several sockets per worker, and ends with "Too many open files".
    Check("open_files", with_gpus, host.check_open_files, "warn", "ulimit -Hn 65536"),
    # Without an open RDMA device (such as a container without it), NCCL takes TCP in silence.
    Check("rdma_opens", with_network, host.check_rdma, "fail", "set container.fabric"),
    # One job on two kinds of nodes measures neither.
    Check("nodes_alike", between_nodes, host.compare_nodes, "fail", "ask for nodes of one kind"),
)


def judge(facts: Facts) -> list[Finding]:
    """Return the findings of all rows that apply."""
    return [finding for check in CHECKS for finding in check.judge(facts)]


def default_policies() -> dict[str, Policy]:
    """Return the policies of the rows that a profile may change."""
    return {check.name: check.policy for check in CHECKS if check.policy is not None}


def find_unused(limits: Preflight) -> Iterator[Finding]:
    """Yield a warning about settings of a profile that belong to checks of earlier versions."""
    names = [str(name) for name in limits.policy if name not in default_policies()]
    names += sorted(limits.model_fields_set & UNUSED_LIMITS)
    if names:
        found = f"{', '.join(names)}: no longer checked"
        yield Finding(Level.WARNING, "profile: preflight", "names from docs/preflight.md", found)
