"""Small claims and made-up measurements for the tests; no number here is anybody's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rlk_repro.claims.files import Claim, Pass
from rlk_repro.claims.results import Cell, Measurement
from rlk_repro.rundir.operator_results import OperatorStatus
from rlk_repro.spec.load import load_bytes

CLAIM = """\
claim: example
title: An example
tier: operator
operator: ratio_kl
source: {repository: example.org/kernels, document: README.md}
testbed: {gpu: NVIDIA H100, name_part: H100, stack: none}
dtype: float32
quantities:
  time: {unit: ms, pass: forward, meaning: time of one call}
  peak: {unit: MB, pass: forward, meaning: peak memory}
rows:
  - row: small
    shape: {sequences: 2, tokens: 4, vocab: 4096}
    published: {native: {time: 8, peak: 3}, triton: {time: 2, peak: 1}}
check:
  kind: measure
  operator: ratio-kl
  compare:
    - {kind: speed, quantity: time, baseline: native, candidate: triton}
    - {kind: memory, quantity: peak, implementation: native, counts_inputs: true, bytes_per_logit: 96, made_of: floats}
    - {kind: memory, quantity: peak, implementation: triton, counts_inputs: true}
"""


@dataclass(frozen=True, kw_only=True)
class Measurable:
    """An operator that ``claims check`` can measure: implementations, passes, settings and the inputs' dimensions."""

    implementations: tuple[str, ...]
    dimensions: tuple[str, ...]
    passes: tuple[Pass, ...] = ("forward",)
    settings: tuple[str, ...] = ()


_LOGITS: Final = ("sequences", "tokens", "vocab")
MEASURABLE: Final[Mapping[str, Measurable]] = {
    "logp": Measurable(implementations=("native", "fused"), dimensions=_LOGITS),
    "sampler-logp": Measurable(implementations=("native", "sampler"), dimensions=_LOGITS),
    "ratio-kl": Measurable(implementations=("native", "triton"), dimensions=_LOGITS),
    "grpo-loss": Measurable(
        implementations=("native", "triton"),
        dimensions=("prompts", "samples", "tokens", "vocab"),
        passes=("forward", "forward-backward"),
        settings=("clip_eps", "beta"),
    ),
    "linear-logp": Measurable(
        implementations=("native", "triton", "sm90"),
        dimensions=("tokens", "hidden", "vocab"),
        passes=("forward", "forward-backward"),
    ),
    "sampling": Measurable(
        implementations=("native", "flashinfer"),
        dimensions=("sequences", "vocab"),
        passes=("sample",),
        settings=("top_k", "top_p"),
    ),
}


def make_claim(text: str = CLAIM) -> Claim:
    return load_bytes(Claim, "example.yaml", text.encode()).model


def cell(implementation: str, *, is_cold: bool = False, pass_: str = "forward", row: str = "small") -> Cell:
    return Cell(row=row, implementation=implementation, pass_=pass_, is_cold=is_cold)


def measured(
    implementation: str, *samples_s: float, peak_extra_bytes: int | None = None, is_cold: bool = False
) -> Measurement:
    return Measurement(
        cell=cell(implementation, is_cold=is_cold),
        status=OperatorStatus.PASSED,
        samples_s=samples_s,
        peak_extra_bytes=peak_extra_bytes,
        input_bytes=0,
    )


def obstructed(implementation: str, status: OperatorStatus, reason: str = "") -> Measurement:
    return Measurement(cell=cell(implementation), status=status, reason=reason)
