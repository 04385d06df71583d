"""The agreement contract, ``manifests/contracts/agreement.yaml``: the largest allowed differences between engines."""

from __future__ import annotations

import json
from typing import Final, Literal, TypeAlias

from pydantic import Field, ValidationError

from rlk_repro.base.errors import BundleUnreadable, Problem, SpecError
from rlk_repro.base.resources import data_dir
from rlk_repro.base.yamlfile import parse_yaml
from rlk_repro.spec.values import Model, Positive, Schema, Text

Compared: TypeAlias = Literal["log-probs", "layers", "routing"]
DTYPES: Final = ("float64", "float32", "float16", "bfloat16")
"""Dtypes of engines, the most precise first."""


class Bound(Model):
    """The largest difference that counts as agreement: absolute for log-probs, relative for values of layers.

    For routing, the bound limits each layer's share of tokens whose experts differ.
    """

    compares: Compared
    dtype: Literal["float32", "float16", "bfloat16"]
    within: Positive
    source: Text


class AgreementContract(Model):
    """All bounds for differences between engines; a comparison without a bound is not judged."""

    schema_: Schema = Field(alias="schema", default=1)
    bounds: tuple[Bound, ...]

    def find_bound(self, compares: Compared, dtype: str) -> float | None:
        found = (item.within for item in self.bounds if (item.compares, item.dtype) == (compares, dtype))
        return next(found, None)


def load_contract() -> AgreementContract:
    path = data_dir("manifests") / "contracts" / "agreement.yaml"
    return parse_contract(path.name, path.read_text())


def parse_contract(where: str, text: str) -> AgreementContract:
    """Read a contract; raise BundleUnreadable if the text is not valid."""
    try:
        value = parse_yaml(where, text.encode()).value
        return AgreementContract.model_validate_json(json.dumps(value))
    except (SpecError, ValidationError) as error:
        raise BundleUnreadable(
            Problem(where, "the agreement contract is not valid", got=str(error).split("\n")[0])
        ) from None
