"""Define the references of the operator tier: vime's own functions for times, and float64 arithmetic for accuracy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from rlk_repro.bench.cases import CLIP, FORWARD_BACKWARD, POLICY_OPERATORS, CaseTensors, clip_high
from rlk_repro.bench.implementation import (
    BenchedImplementation,
    Call,
    Ready,
    as_tensor,
    find_attribute,
    find_version,
    reduce_losses,
)
from rlk_repro.rundir.operator_results import REFERENCE, OperatorKind

VIME_MODULE: Final = "vime.utils.ppo_utils"
_ROWS_PER_CHUNK: Final = 64
_COLUMNS_PER_CHUNK: Final = 16384


def _build_vime(inputs: CaseTensors, *, with_entropy: bool) -> Ready:
    """The entropy is only a metric: vime computes it by default, and without gradient."""
    select = find_attribute(f"{VIME_MODULE}.calculate_log_probs_and_entropy")
    policy_loss = find_attribute(f"{VIME_MODULE}.compute_policy_loss")

    def select_log_probs() -> torch.Tensor:
        leaves = inputs.leaves
        logits = leaves[0] if len(leaves) == 1 else (leaves[0] @ leaves[1].t()).float()
        log_probs, _ = select(logits, inputs.tokens, None, with_entropy=with_entropy, with_entropy_grad=False)
        return as_tensor(log_probs.squeeze(1))

    def compute_losses() -> torch.Tensor:
        kl = inputs.old_log_probs - select_log_probs()
        losses, _ = policy_loss(kl, inputs.advantages, CLIP, clip_high(inputs.case))
        return reduce_losses(losses, inputs)

    is_policy = inputs.case.operator in POLICY_OPERATORS
    names = "calculate_log_probs_and_entropy" + (", compute_policy_loss" if is_policy else "")
    return Ready(
        forward=compute_losses if is_policy else select_log_probs,
        kind=OperatorKind.TRAINER,
        class_name=f"{VIME_MODULE}: {names}",
        version=find_version("vime"),
    )


def list_references() -> tuple[BenchedImplementation, ...]:
    """List vime's functions as implementations for every operator, with and without the entropy metric."""
    return tuple(
        BenchedImplementation(
            name=name,
            operator=operator,
            kind=OperatorKind.TRAINER,
            build=partial(_build_vime, with_entropy=with_entropy),
        )
        for operator in ("logp", *POLICY_OPERATORS, "linear_logp")
        for name, with_entropy in ((REFERENCE, False), ("vime-entropy", True))
    )


@dataclass(frozen=True, eq=False)
class Truth:
    """The float64 values of the checked rows [R], or the whole loss; and the gradient in these rows [R, V] or [R, D].

    For ``linear_logp`` only the gradient of the hidden states is checked, as the weight's gradient sums over all rows.
    """

    rows: torch.Tensor
    values: torch.Tensor
    gradient: torch.Tensor | None


def compute_truth(inputs: CaseTensors, num_rows: int) -> Truth:
    """Compute ``num_rows`` of the wanted rows in float64; the rows are evenly spaced."""
    wanted = inputs.rows
    places = torch.linspace(0, len(wanted) - 1, min(num_rows, len(wanted)), device=wanted.device)
    rows = wanted[places.round().long()]
    logits = _find_logits(inputs, rows).requires_grad_()
    losses = _find_values(inputs, rows, logits)
    gradient = None
    if inputs.case.work == FORWARD_BACKWARD:
        (gradient,) = torch.autograd.grad((losses * inputs.weights[rows]).sum(), logits)
        gradient = _pull_back(inputs, gradient)
    values = _find_whole_loss(inputs) if inputs.case.operator == "grpo_loss" else losses.detach()
    return Truth(rows, values, gradient)


def _find_logits(inputs: CaseTensors, rows: torch.Tensor) -> torch.Tensor:
    """Return the logits of the rows, [R, V] in float64."""
    if inputs.logits is not None:
        return inputs.logits[rows].double()
    assert inputs.hidden is not None
    assert inputs.weight is not None
    hidden = inputs.hidden[rows].double()
    return torch.cat([hidden @ part.double().t() for part in torch.split(inputs.weight, _COLUMNS_PER_CHUNK)], dim=1)


def _pull_back(inputs: CaseTensors, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the hidden states; without hidden states, return ``gradient`` unchanged."""
    if inputs.weight is None:
        return gradient
    columns = torch.split(gradient, _COLUMNS_PER_CHUNK, dim=1)
    parts = zip(columns, torch.split(inputs.weight, _COLUMNS_PER_CHUNK), strict=True)
    return torch.stack([left @ right.double() for left, right in parts]).sum(dim=0)


def _find_values(inputs: CaseTensors, rows: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    log_probs = logits.log_softmax(-1).gather(1, inputs.tokens[rows].unsqueeze(1)).squeeze(1)
    if inputs.case.operator not in POLICY_OPERATORS:
        return log_probs
    ratio = (log_probs - inputs.old_log_probs[rows].double()).exp()
    advantages = inputs.advantages[rows].double()
    return torch.maximum(-ratio * advantages, -ratio.clamp(1 - CLIP, 1 + clip_high(inputs.case)) * advantages)


def _find_whole_loss(inputs: CaseTensors) -> torch.Tensor:
    parts = [
        (_find_values(inputs, rows, _find_logits(inputs, rows)) * inputs.weights[rows]).sum()
        for rows in torch.split(inputs.rows, _ROWS_PER_CHUNK)
    ]
    return torch.stack(parts).sum()


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """The distance of an implementation from float64, and whether a second call gave the same bits.

    ``gradient_error`` is divided by the largest gradient element; it is None where no gradient was computed.
    """

    error: float
    gradient_error: float | None
    is_repeatable: bool


def check_call(call: Call, truth: Truth) -> Accuracy:
    """Compare values and gradients of two calls, in the checked rows, with ``truth`` and with each other."""
    first, second = (_pick_rows(call(), truth.rows) for _ in range(2))
    gradient_error = None
    if truth.gradient is not None and first[1] is not None:
        largest = truth.gradient.abs().max()
        gradient_error = float((first[1].double() - truth.gradient).abs().max() / largest)
    return Accuracy(
        error=float((first[0].double() - truth.values).abs().max()),
        gradient_error=gradient_error,
        is_repeatable=all(_is_same(*pair) for pair in zip(first, second, strict=True)),
    )


def _pick_rows(
    result: tuple[torch.Tensor, tuple[torch.Tensor, ...]], rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    values, gradients = result
    picked = values.detach().clone() if values.ndim == 0 else values.detach()[rows]
    return picked, gradients[0][rows] if gradients else None


def _is_same(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)
