"""Decide from the ops files of all ranks whether the planned operators ran in a trial."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rlk_repro.logs.ops import OpsLog
from rlk_repro.logs.ops_lines import OpCount
from rlk_repro.operators import ALL_OPERATORS, KERNELS, Implementation
from rlk_repro.rundir.results import ProofStatus
from rlk_repro.spec.values import BASELINE, ENABLED

MAX_SHOWN_RANKS: Final = 100


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Whether the planned operators ran in a trial; only the status ``proved`` allows a verdict on speed."""

    status: ProofStatus
    reason: str = ""


# The statuses are ordered from worst to best.
_SEVERITY: Final = (ProofStatus.MISSING, ProofStatus.FALLBACK, ProofStatus.NATIVE, ProofStatus.PROVED)


def find_unproved(
    ops_log: OpsLog, op: str, step: int, planned: str | None, num_stages: int = 1, serves: str = ENABLED
) -> str:
    """Return why a step's record does not show that the planned variant ran; empty if the record shows this.

    ``planned`` is None in a trial of one variant; the operator ``serves`` steps of one variant only.
    Of ``num_stages`` pipeline stages, one calls the operators.
    """
    count = ops_log.calls_in(op, step)
    if planned is not None and (other := _find_other_variant(ops_log, step, planned)):
        return other
    if planned not in {None, serves}:
        return "" if count == OpCount() else f"called in step {step}, which is {planned}"
    if not count.tokens:
        return f"never called in step {step}"
    callers, needed = ops_log.count_callers(op, step), count_serving(ops_log, num_stages)
    return "" if callers >= needed else f"called on {callers} of {needed} ranks in step {step}"


def count_serving(ops_log: OpsLog, num_stages: int) -> int:
    """Return how many ranks call the operators: those of the last pipeline stage."""
    return max(1, len(ops_log.ranks) // num_stages)


def find_unswitched(ops_log: OpsLog, step: int, planned: str, *, of_tokens: bool) -> str:
    """Return why a step's records do not show the planned variant of an own switch; empty if the records show it.

    With ``of_tokens``, the variants differ in whether tokens are recorded.
    """
    if missing := _name_missing_ranks(ops_log):
        return missing
    if other := _find_other_variant(ops_log, step, planned):
        return other
    lacking = next((rank.source for rank in ops_log.ranks if step not in rank.steps), "")
    if lacking:
        return f"{lacking}: has no record of step {step}"
    if not of_tokens:
        return ""
    records = [record for rank in ops_log.ranks if (record := rank.steps[step][1].agreement) is not None]
    if planned == BASELINE:
        return f"step {step}, which is baseline, has a record of tokens" if records else ""
    if any(not record.reason for record in records):
        return ""
    reason = next((f": {record.reason}" for record in records), "")
    return f"step {step}, which is enabled, has no record of tokens{reason}"


def _find_other_variant(ops_log: OpsLog, step: int, planned: str) -> str:
    found = ops_log.variant_of(step)
    if found == planned:
        return ""
    return f"step {step} is planned as {planned} and recorded as {found or 'neither variant'}"


def prove(
    ops_log: OpsLog,
    *,
    variant: str,
    requested_ops: Sequence[str],
    platform: str,
    baseline_ops: Sequence[str] = (),
    planned: Mapping[int, str] | None = None,
    commit: str = "",
    num_stages: int = 1,
) -> Proof:
    """Decide from the ops files of a trial whether the planned operators ran.

    A baseline trial gets ``not requested`` if its ops files show no sign of an operator; any other status means that
    an operator may have run.

    Args:
        baseline_ops: the operators that serve the baseline's steps of a session.
        planned: the steps of a session that count, each with its variant; None in a trial of one variant.
        commit: the RL-Kernel commit that must have run; empty if the run names none.
        num_stages: the number of pipeline stages.
    """
    is_touched = any(rank.install is not None and rank.install.is_requested for rank in ops_log.ranks)
    if variant == BASELINE and not is_touched and not ops_log.decisions():
        foreign = _find_foreign_kernel(ops_log)
        return Proof(status=ProofStatus.MISSING if foreign else ProofStatus.NOT_REQUESTED, reason=foreign)
    gap = _find_gap(ops_log) or _find_other_commit(ops_log, commit)
    if gap:
        return Proof(status=ProofStatus.MISSING, reason=gap)
    serves = dict.fromkeys(requested_ops, ENABLED) | dict.fromkeys(baseline_ops, BASELINE)
    by_op = {op: _prove_op(ops_log, op, platform, planned, num_stages, served) for op, served in serves.items()}
    status = min((item.status for item in by_op.values()), key=_SEVERITY.index, default=ProofStatus.MISSING)
    reasons = [f"{op}: {item.reason}" for op, item in by_op.items() if item.status is status and item.reason]
    return Proof(status=status, reason="; ".join(reasons))


def _find_gap(ops_log: OpsLog) -> str:
    if not ops_log.ranks:
        return "the trainer wrote no ops file"
    if missing := _name_missing_ranks(ops_log):
        return missing
    steps = set(ops_log.steps())
    for rank in ops_log.ranks:
        if rank.first_reject:
            return f"{rank.source}: {rank.first_reject}"
        if rank.install is None:
            return f"{rank.source}: has no record of the trainer's setup"
        if not rank.install.is_requested:
            return f"{rank.source}: the trainer was started with RL-Kernel off"
        if lacking := steps - set(rank.steps):
            return f"{rank.source}: has no record of step {min(lacking)}"
    return "" if steps else "no step was recorded"


def _name_missing_ranks(ops_log: OpsLog) -> str:
    if not ops_log.missing_ranks:
        return ""
    names = [str(rank) for rank in ops_log.missing_ranks[:MAX_SHOWN_RANKS]]
    rest = len(ops_log.missing_ranks) - len(names)
    return f"no ops file of rank {', '.join(names)}{f' and {rest} more' if rest else ''}"


def _find_other_commit(ops_log: OpsLog, commit: str) -> str:
    served = (item for rank in ops_log.ranks for item in rank.decisions if item.is_rl_kernel)
    other = next((item for item in served if f" at {commit[:12]}" not in item.version), None) if commit else None
    return "" if other is None else f"{other.op} ran from RL-Kernel {other.version}, not from the planned {commit[:12]}"


def _prove_op(
    ops_log: OpsLog, op: str, platform: str, planned: Mapping[int, str] | None, num_stages: int, serves: str
) -> Proof:
    decisions = [item for rank in ops_log.ranks for item in rank.decisions if item.op == op]
    undecided = [rank.rank for rank in ops_log.ranks if all(item.op != op for item in rank.decisions)]
    if undecided:
        return Proof(status=ProofStatus.MISSING, reason=f"no decision on rank {undecided[0]}")
    for item in decisions:
        if not item.is_served:
            return Proof(status=ProofStatus.FALLBACK, reason=item.reason)
    found = {
        item.implementation: ALL_OPERATORS[op].find_implementation(platform, item.implementation) for item in decisions
    }
    for name, implementation in found.items():
        if implementation is None:
            reason = f"{name} is not an accepted implementation on {platform}"
            return Proof(status=ProofStatus.FALLBACK, reason=reason)
    if ops_log.calls.get(op, OpCount()).fallbacks:
        return Proof(status=ProofStatus.FALLBACK, reason=f"{ops_log.calls[op].fallbacks} calls fell back")
    gap = _find_gap_in_steps(ops_log, op, planned, num_stages, serves) or _find_unseen_kernel(ops_log, found.values())
    if gap:
        return Proof(status=ProofStatus.MISSING, reason=gap)
    is_native = any(implementation is not None and implementation.is_native for implementation in found.values())
    reason = "RL-Kernel's operator ran as plain PyTorch" if is_native else ""
    return Proof(status=ProofStatus.NATIVE if is_native else ProofStatus.PROVED, reason=reason)


def _find_gap_in_steps(
    ops_log: OpsLog, op: str, planned: Mapping[int, str] | None, num_stages: int, serves: str
) -> str:
    for rank in ops_log.ranks:
        for line, record in rank.steps.values():
            if op in record.odd:
                return f"{rank.source}:{line}: {record.odd[op]}"
    for step in ops_log.steps() if planned is None else planned:
        variant = None if planned is None else planned[step]
        if unproved := find_unproved(ops_log, op, step, variant, num_stages, serves):
            return unproved
    return ""


def _find_foreign_kernel(ops_log: OpsLog) -> str:
    if unprofiled := _find_unprofiled(ops_log):
        return unprofiled
    for rank in ops_log.ranks:
        for name in rank.kernels.names if rank.kernels is not None else ():
            if any(part in name for part in KERNELS):
                return f"{rank.source}: RL-Kernel's {name} ran, though it was off"
    return ""


def _find_unseen_kernel(ops_log: OpsLog, implementations: Iterable[Implementation | None]) -> str:
    if unprofiled := _find_unprofiled(ops_log):
        return unprofiled
    wanted = [part for item in implementations if item is not None for part in item.kernels]
    for rank in ops_log.ranks:
        if rank.kernels is not None:
            seen = "\n".join(rank.kernels.names)
            if absent := [part for part in wanted if part not in seen]:
                return f"{rank.source}: the profiler saw no {', '.join(absent)}"
    return ""


def _find_unprofiled(ops_log: OpsLog) -> str:
    """Where one rank has the profiler's list of kernels, every rank must have it."""
    absent = [rank.source for rank in ops_log.ranks if rank.kernels is None]
    return f"{absent[0]}: has no list of kernels" if absent and len(absent) < len(ops_log.ranks) else ""
