"""Walks over objects: pod templates with their place, quantities, label syntax."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from rlk_repro.base.errors import Problem

_QUANTITY: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")
_FACTORS: Final[Mapping[str, Decimal]] = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    **{name: Decimal(1000) ** power for power, name in enumerate("kMGTPE", start=1)},
    **{f"{name}i": Decimal(1024) ** power for power, name in enumerate("KMGTPE", start=1)},
}
LABEL_VALUE: Final = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


@dataclass(frozen=True, kw_only=True)
class Template:
    """A pod template and where it stands."""

    where: str
    value: Mapping[str, Any]

    @property
    def spec(self) -> Mapping[str, Any]:
        return as_map(self.value.get("spec"))

    def containers(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for part in ("initContainers", "containers"):
            for index, container in enumerate(as_list(self.spec.get(part))):
                yield f"{self.where}.spec.{part}[{index}]", as_map(container)


def find_templates(item: Mapping[str, Any]) -> Iterator[Template]:
    """Every pod template of an object, whatever its kind."""
    spec, name = as_map(item.get("spec")), place(item)
    match item.get("kind"):
        case "Pod":
            yield Template(where=name, value=item)
        case "Job":
            yield Template(where=f"{name}: spec.template", value=as_map(spec.get("template")))
        case "RayJob":
            cluster = as_map(spec.get("rayClusterSpec"))
            head = as_map(as_map(cluster.get("headGroupSpec")).get("template"))
            yield Template(where=f"{name}: spec.rayClusterSpec.headGroupSpec.template", value=head)
            for index, group in enumerate(as_list(cluster.get("workerGroupSpecs"))):
                where = f"{name}: spec.rayClusterSpec.workerGroupSpecs[{index}].template"
                yield Template(where=where, value=as_map(as_map(group).get("template")))
            if "submitterPodTemplate" in spec:
                yield Template(where=f"{name}: spec.submitterPodTemplate", value=as_map(spec["submitterPodTemplate"]))
        case _:
            return


def place(item: Mapping[str, Any]) -> str:
    return f"{item.get('kind', 'object')} {as_map(item.get('metadata')).get('name', '')}".strip()


def as_map(value: Any) -> Mapping[str, Any]:
    """What a schema is there to check is nothing here."""
    return value if isinstance(value, Mapping) else {}


def as_list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def parse_quantity(value: Any) -> Decimal | None:
    """``64Gi`` as a number; None for what is no quantity."""
    if isinstance(value, int) and not isinstance(value, bool):
        return Decimal(value)
    found = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return None
    return Decimal(found[1]) * _FACTORS[found[2] or ""]


def wrong(where: str, what: str, got: Any, expected: str) -> Problem:
    return Problem(where, what, got=got, expected=expected)
