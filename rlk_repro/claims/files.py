"""Define and load published claims, ``manifests/claims/<claim>.yaml``.

A claim holds numbers as their authors printed them; rlk-repro measured none of these numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import Field

from rlk_repro.base.errors import Problem, SpecError
from rlk_repro.base.resources import data_dir, list_names, suggest
from rlk_repro.base.units import GIB, MIB
from rlk_repro.spec.load import load
from rlk_repro.spec.values import Count, Model, Name, NonNegative, Positive, Schema, Text

ShortCommit: TypeAlias = Annotated[str, Field(pattern=r"^[0-9a-f]{7,40}$")]
Pass: TypeAlias = Literal["forward", "forward-backward", "sample", "step"]
Unit: TypeAlias = Literal["ms", "s", "MB", "GB", "x", "tok/GPU/s", "none"]
Dtype: TypeAlias = Literal["float16", "bfloat16", "float32"]

# The published values fit the tensors' shapes only if MB means MiB and GB means GiB.
BYTES: Final[Mapping[str, int]] = {"MB": MIB, "GB": GIB}


class Source(Model):
    repository: Text
    document: Text | None = Field(None, description="path of the document in the repository")
    thread: Text | None = Field(None, description="issue or pull request")
    commit: ShortCommit | None = Field(None, description="commit of the document, if known")

    def __str__(self) -> str:
        places = ", ".join(place for place in (self.document, self.thread) if place)
        return f"{self.repository} {places}" + (f" at {self.commit[:12]}" if self.commit else "")


class Testbed(Model):
    """The machine that the authors measured on, in their words; ``unknown`` names the details that they left out."""

    __test__ = False

    gpu: Text
    name_part: Annotated[str, Field(max_length=40)] = Field("", description="part of the name that the driver reports")
    num_gpus: Count = 1
    stack: Text
    unknown: tuple[Text, ...] = ()


class Quantity(Model):
    unit: Unit
    pass_: Pass = Field(alias="pass")
    meaning: Text


class Row(Model):
    """A table row: published values by implementation and quantity; ``oom``: implementations that ran out of memory."""

    row: Name
    shape: dict[Name, Count] = Field({})
    published: dict[Name, dict[Name, NonNegative]] = Field({})
    oom: tuple[Name, ...] = ()

    def find(self, implementation: str, quantity: str) -> float | None:
        return self.published.get(implementation, {}).get(quantity)

    @property
    def num_logits(self) -> int:
        return math.prod(size for name, size in self.shape.items() if name != "hidden")


class SpeedComparison(Model):
    """A comparison of the ratio of two times, ``baseline`` / ``candidate``; absolute times are not compared.

    With ``is_cold``, the baseline's time is that of the first call in a new process, because the authors published that
    time.
    """

    kind: Literal["speed"]
    quantity: Name
    baseline: Name
    candidate: Name
    rows: tuple[Name, ...] = Field((), description="rows to compare; default: all")
    is_cold: bool = False
    tolerance_pct: Positive = Field(25.0, description="allowed relative difference of the ratio, in both directions")

    @property
    def implementations(self) -> tuple[str, ...]:
        return (self.baseline, self.candidate)


class MemoryComparison(Model):
    """A comparison of an implementation's peak memory with the published peak; ``counts_inputs``: both include inputs.

    Without a GPU, the published memory figure is compared with ``bytes_per_logit`` times the number of logits;
    ``made_of`` explains ``bytes_per_logit``.
    """

    kind: Literal["memory"]
    quantity: Name
    implementation: Name
    counts_inputs: bool
    rows: tuple[Name, ...] = Field((), description="rows to compare; default: all")
    bytes_per_logit: NonNegative | None = None
    made_of: Text | None = None
    tolerance_pct: Positive = 2.0

    @property
    def implementations(self) -> tuple[str, ...]:
        return (self.implementation,)


Comparison: TypeAlias = Annotated[SpeedComparison | MemoryComparison, Field(discriminator="kind")]


class MeasureCheck(Model):
    """How rlk-repro re-runs the claim on one GPU."""

    kind: Literal["measure"]
    operator: Literal["logp", "sampler-logp", "ratio-kl", "grpo-loss", "linear-logp", "sampling"]
    settings: dict[Name, NonNegative] = Field({})
    compare: Annotated[tuple[Comparison, ...], Field(min_length=1)]


class NotRunnable(Model):
    kind: Literal["not_runnable"]
    reason: Text


Check: TypeAlias = Annotated[MeasureCheck | NotRunnable, Field(discriminator="kind")]


class Claim(Model):
    schema_: Schema = Field(alias="schema", default=1)
    claim: Name
    title: Text
    tier: Literal["operator", "end-to-end"]
    operator: Text
    source: Source
    testbed: Testbed
    dtype: Dtype | None = None
    quantities: Annotated[dict[Name, Quantity], Field(min_length=1)]
    rows: Annotated[tuple[Row, ...], Field(min_length=1)]
    doubts: tuple[Text, ...] = ()
    check: Check


def claims_dir() -> Path:
    return data_dir("manifests") / "claims"


def load_claims(names: Sequence[str] = ()) -> list[Claim]:
    """Load the shipped claims with these names, in this order; without names, load all.

    Raises:
        SpecError: a name belongs to no claim, or the file of a claim is not valid.
    """
    known = list_names([claims_dir()])
    unknown = [name for name in dict.fromkeys(names) if name not in known]
    if unknown:
        hint = "rlk-repro claims list prints all claims"
        raise SpecError(*(Problem("ID", "no claim of this name", got=name, hint=suggest(name, known) or hint)
                          for name in unknown))  # fmt: skip
    chosen = dict.fromkeys(names) if names else known
    return [load(Claim, claims_dir() / f"{name}.yaml").model for name in chosen]


def chosen_rows(claim: Claim, comparison: Comparison) -> list[Row]:
    return [row for row in claim.rows if not comparison.rows or row.row in comparison.rows]


def find_published(claim: Claim, row: Row, comparison: Comparison) -> float | None:
    """Return the published value of a comparison (a ratio, or memory in the printed unit), or None."""
    if isinstance(comparison, MemoryComparison):
        return row.find(comparison.implementation, comparison.quantity)
    candidate = row.find(comparison.candidate, comparison.quantity)
    if claim.quantities[comparison.quantity].unit == "x":
        return candidate
    baseline = row.find(comparison.baseline, comparison.quantity)
    return baseline / candidate if baseline is not None and candidate else None
