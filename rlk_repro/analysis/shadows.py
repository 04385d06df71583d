"""Check the shadow steps, in which both variants' functions compute the same microbatch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from rlk_repro.base.units import format_number, group
from rlk_repro.logs.ops import OpsLog
from rlk_repro.rundir.results import NO_SHADOW_STEP, Gate, GateStatus, ShadowResult
from rlk_repro.spec import Margins

SHADOWS: Final = "same_numbers"
CASES: Final = ("as trained", "peaked")
ROUTES: Final = "RL-Kernel and the trainer's own functions"


def summarise_shadows(session: str, ops: OpsLog, num_serving: int = 1) -> Iterator[ShadowResult]:
    """Summarise each case over ranks; all ``num_serving`` ranks that call RL-Kernel must have compared."""
    by_case = group((shadow.case, (rank.rank, shadow)) for rank in ops.ranks for shadow in rank.shadows)
    serving = {
        rank.rank
        for rank in ops.ranks
        if any(count.calls for _, step in rank.steps.values() for count in step.calls.values())
    }
    for case, found in by_case.items():
        records = [record for _, record in found]
        gaps = [gap for record in records for gap in (record.log_probs, record.log_probs_no_grad) if gap is not None]
        shares = [
            None if not gap.max_abs_baseline or gap.max_abs is None else gap.max_abs / gap.max_abs_baseline
            for record in records
            if (gap := record.logits_grad) is not None
        ]
        errors = [f"rank {number}: {record.error}" for number, record in found if record.error]
        errors += [f"rank {number} has no comparison" for number in sorted(serving - {number for number, _ in found})]
        if len({number for number, _ in found}) < num_serving:
            errors.append(f"compared on fewer than {num_serving} ranks")
        if not errors and not all(record.calls for record in records):
            errors = ["no operator of the enabled variant was called in the comparison"]
        yield ShadowResult(
            session=session,
            case=case,
            num_ranks=len({number for number, _ in found}),
            error=errors[0] if errors else "",
            log_prob_max=_worst(gap.max_abs for gap in gaps),
            log_prob_mean=_worst(gap.mean_abs for gap in gaps),
            gradient_share=_worst(shares),
        )


def _worst(values: Iterable[float | None]) -> float | None:
    found = list(values)
    known = [value for value in found if value is not None]
    return max(known) if known and len(known) == len(found) else None


def make_shadow_gate(
    shadows: Sequence[ShadowResult],
    *,
    sessions: Sequence[str],
    unplanned: GateStatus | None,
    margins: Margins,
    routes: str = ROUTES,
) -> Gate:
    """Return the gate on shadow steps; if none was planned, its status is ``unplanned``."""
    found = [item for item in shadows if item.session in sessions]
    if unplanned is not None:
        return _make(unplanned, NO_SHADOW_STEP, found)
    beyond = [item for item in found if _is_beyond(item, margins)]
    if beyond:
        return _make(GateStatus.FAILED, f"{routes} differ beyond a margin: {_name(beyond[0], margins)}", found)
    missing = [
        f"{session}, case {case}"
        for session in sessions
        for case in CASES
        if not any((item.session, item.case) == (session, case) for item in found)
    ]
    if missing:
        return _make(GateStatus.UNDECIDED, f"{routes} were not compared in {missing[0]}", found)
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
    worst = _worst(item.log_prob_max for item in found)
    return Gate(name=SHADOWS, status=status, detail=detail, estimate=worst, low=None, high=None, margin=None,
                n=len({item.session for item in found}))  # fmt: skip
