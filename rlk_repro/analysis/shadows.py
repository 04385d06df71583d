"""Check the shadow steps, in which both variants' functions compute the same microbatch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from rlk_repro.analysis.evidence import Evidence, plain_gate
from rlk_repro.base.units import format_number, group
from rlk_repro.logs.ops import OpsLog
from rlk_repro.logs.ops_lines import Gap
from rlk_repro.rundir.results import NO_SHADOW_STEP, Gate, GateStatus, ShadowResult
from rlk_repro.spec import Margins

SHADOWS: Final = "same_numbers"
CASES: Final = ("as trained", "peaked")
ROUTES: Final = "RL-Kernel and the trainer's own functions"


def summarise_shadows(session: str, ops: OpsLog, num_serving: int = 1) -> Iterator[ShadowResult]:
    """Summarise each case over ranks; all ``num_serving`` ranks that call RL-Kernel must have compared."""
    by_case = group((shadow.case, (rank.rank, shadow)) for rank in ops.ranks for shadow in rank.shadows)
    serving = _list_serving(ops)
    for case, found in by_case.items():
        gaps, errors = [], []
        shares: list[float | None] = []
        for number, record in found:
            gaps += [gap for gap in (record.log_probs, record.log_probs_no_grad) if gap is not None]
            if record.logits_grad is not None:
                shares.append(_find_share(record.logits_grad))
            if record.error:
                errors.append(f"rank {number}: {record.error}")
        compared = {number for number, _ in found}
        errors += [f"rank {number} has no comparison" for number in sorted(serving - compared)]
        if len(compared) < num_serving:
            errors.append(f"compared on fewer than {num_serving} ranks")
        if not errors and None in [*(gap.max_abs for gap in gaps), *shares]:
            errors.append("a difference is not finite")
        if not errors and not all(record.calls for _, record in found):
            errors.append("no operator of the enabled variant was called in the comparison")
        yield ShadowResult(
            session=session,
            case=case,
            num_ranks=len(compared),
            error=errors[0] if errors else "",
            log_prob_max=_worst(gap.max_abs for gap in gaps),
            log_prob_mean=_worst(gap.mean_abs for gap in gaps),
            gradient_share=_worst(shares),
        )


def _find_share(gap: Gap) -> float | None:
    return None if not gap.max_abs_baseline or gap.max_abs is None else gap.max_abs / gap.max_abs_baseline


def _list_serving(ops: OpsLog) -> set[int]:
    """Return the ranks on which an operator was called."""
    serving = set()
    for rank in ops.ranks:
        for _, step in rank.steps.values():
            if any(count.calls for count in step.calls.values()):
                serving.add(rank.rank)
    return serving


def _worst(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def judge_shadows(evidence: Evidence) -> Gate:
    """Return the gate on shadow steps of a plan of sessions."""
    margins, sessions = evidence.measure.margins, [pair.pair for pair in evidence.scored]
    routes = evidence.title.replace(" in place of ", " and ") or ROUTES
    found = [item for item in evidence.shadows if item.session in sessions]
    if evidence.switch:
        return _make(GateStatus.NOT_APPLICABLE, NO_SHADOW_STEP, found)
    if not evidence.measure.shadow_steps:
        return _make(evidence.not_planned, NO_SHADOW_STEP, found)
    beyond = [item for item in found if _is_beyond(item, margins)]
    if beyond:
        return _make(GateStatus.FAILED, f"{routes} differ beyond a margin: {_name(beyond[0], margins)}", found)
    compared = {(item.session, item.case) for item in found}
    for session in sessions:
        for case in CASES:
            if (session, case) not in compared:
                return _make(GateStatus.UNDECIDED, f"{routes} were not compared in {session}, case {case}", found)
    unknown = [item for item in found if item.error or item.log_prob_max is None or item.gradient_share is None]
    if unknown:
        reason = unknown[0].error or "a difference is not finite"
        return _make(GateStatus.UNDECIDED, f"{unknown[0].session}, case {unknown[0].case}: {reason}", found)
    if not found:
        return _make(GateStatus.UNDECIDED, "no scored session", found)
    worst = max(found, key=lambda item: item.log_prob_max or 0.0)
    detail = f"{routes} agree on one microbatch of every rank; largest difference: {_name(worst, margins)}"
    return _make(GateStatus.PASSED, detail, found)


def _is_beyond(item: ShadowResult, margins: Margins) -> bool:
    limits = ((item.log_prob_max, margins.shadow_log_prob), (item.gradient_share, margins.shadow_gradient_share))
    return any(value is not None and value > limit for value, limit in limits)


def _name(item: ShadowResult, margins: Margins) -> str:
    log_prob, gradient = (
        "unknown" if value is None else format_number(value, 2) for value in (item.log_prob_max, item.gradient_share)
    )
    return (
        f"{item.session}, case {item.case}: log-probs {log_prob} (margin {margins.shadow_log_prob:g}), gradients at "
        f"the logits {gradient} of the largest gradient (margin {margins.shadow_gradient_share:g})"
    )


def _make(status: GateStatus, detail: str, found: Sequence[ShadowResult]) -> Gate:
    gate = plain_gate(SHADOWS, status, detail, len({item.session for item in found}))
    return replace(gate, estimate=_worst(item.log_prob_max for item in found))
