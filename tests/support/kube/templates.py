"""Pod templates of objects with their place, and problems of what stands there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rlk_repro.base.errors import Problem
from rlk_repro.clusters.k8s.tree import as_list, as_map

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


def wrong(where: str, what: str, got: Any, expected: str) -> Problem:
    return Problem(where, what, got=got, expected=expected)
