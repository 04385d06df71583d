"""What API servers and controllers refuse, or quietly do otherwise, and no schema says.  Each rule gives its reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from rlk_repro.base.errors import Problem
from rlk_repro.clusters.k8s.tree import as_list, as_map
from tests.support.kube.rules_pod import find_pod_rule_problems
from tests.support.kube.rules_rayjob import find_rayjob_problems
from tests.support.kube.templates import LABEL_VALUE, find_templates, place, wrong

MAX_JOB_NAME: Final = 63
# the API server's limit for all annotations of an object; kubectl apply keeps a copy of the object in one of them
MAX_ANNOTATION_BYTES: Final = 262_144
_POD_SUFFIX: Final = 6  # a dash and five characters


def find_object_problems(objects: Iterable[Mapping[str, Any]]) -> list[Problem]:
    """Everything at once, located."""
    found = list(objects)
    problems = [problem for item in found for problem in _find_one(item)]
    return [*problems, *_find_together(found)]


def _find_one(item: Mapping[str, Any]) -> Iterator[Problem]:
    yield from _check_metadata(item)
    rule = _BY_KIND.get(str(item.get("kind")))
    if rule is not None:
        yield from rule(item)
    if item.get("kind") == "RayJob":
        yield from find_rayjob_problems(item)
    for template in find_templates(item):
        yield from find_pod_rule_problems(template, is_in_ray=item.get("kind") == "RayJob")


def _check_metadata(item: Mapping[str, Any]) -> Iterator[Problem]:
    where, metadata = f"{place(item)}: metadata", as_map(item.get("metadata"))
    if "generateName" in metadata or not metadata.get("name"):
        yield wrong(f"{where}.name", "apply needs a name of its own", metadata.get("generateName"), "a name")
    if not metadata.get("namespace"):
        yield wrong(f"{where}.namespace", "missing: it would be whatever the context says", None, "a namespace")
    yield from _check_labels(where, metadata)
    for template in find_templates(item):
        if template.value is not item:
            yield from _check_labels(f"{template.where}.metadata", as_map(template.value.get("metadata")))


def _check_labels(where: str, metadata: Mapping[str, Any]) -> Iterator[Problem]:
    for key, value in as_map(metadata.get("labels")).items():
        if isinstance(value, str) and not LABEL_VALUE.fullmatch(value):
            what = "a label's value has 63 characters at most: letters, digits, dash, dot, underscore"
            yield wrong(f"{where}.labels[{key}]", what, value, "a shorter or plainer one")
    size = sum(len(str(key)) + len(str(value)) for key, value in as_map(metadata.get("annotations")).items())
    if size > MAX_ANNOTATION_BYTES:
        yield wrong(f"{where}.annotations", "too large", size, f"at most {MAX_ANNOTATION_BYTES} bytes")


def _check_job(item: Mapping[str, Any]) -> Iterator[Problem]:
    name, spec = str(as_map(item.get("metadata")).get("name", "")), as_map(item.get("spec"))
    where = f"{place(item)}: spec"
    longest = f"{name}-{int(spec.get('completions') or 1) - 1}"
    if len(longest) > MAX_JOB_NAME - _POD_SUFFIX:
        yield wrong(f"{place(item)}: metadata.name", "its pods get longer names, cut at 63", longest, "57 at most")
    rules = as_list(as_map(spec.get("podFailurePolicy")).get("rules"))
    fails_alone = as_map(as_map(rules[-1]).get("onExitCodes")) if rules else {}
    if spec.get("backoffLimit") != 0 and fails_alone != {"operator": "NotIn", "values": [0, 143]}:
        what = "a pod that failed by itself and is started again is another trial"
        yield wrong(f"{where}.backoffLimit", what, spec.get("backoffLimit", "6 by default"), "0")
    template = as_map(as_map(spec.get("template")).get("spec"))
    if "podFailurePolicy" in spec and template.get("restartPolicy") != "Never":
        got = template.get("restartPolicy")
        yield wrong(f"{where}.podFailurePolicy", "is allowed with restartPolicy Never only", got, "Never")
    mode = spec.get("completionMode", "NonIndexed")
    if mode not in {"Indexed", "NonIndexed"}:
        yield wrong(f"{where}.completionMode", "no such mode", mode, "Indexed or NonIndexed")
    if mode == "Indexed" and spec.get("completions") is None:
        yield wrong(f"{where}.completions", "Indexed needs it", None, "as many as pods")
    parallelism, completions = spec.get("parallelism", 1), spec.get("completions", 1)
    if parallelism != completions:
        yield wrong(f"{where}.parallelism", "the agents of all nodes run at once", parallelism, f"{completions}")
    if spec.get("suspend") and spec.get("ttlSecondsAfterFinished") == 0:
        yield wrong(f"{where}.ttlSecondsAfterFinished", "removes the job before anybody saw how it ended", 0, "more")


def _check_compute_domain(item: Mapping[str, Any]) -> Iterator[Problem]:
    nodes = as_map(item.get("spec")).get("numNodes", 0)
    if nodes != 0:
        what = "deprecated: pods wait until so many nodes are there"
        yield wrong(f"{place(item)}: spec.numNodes", what, nodes, "0")


_BY_KIND: Final[Mapping[str, Callable[[Mapping[str, Any]], Iterator[Problem]]]] = {
    "Job": _check_job,
    "ComputeDomain": _check_compute_domain,
}


def _find_together(objects: list[Mapping[str, Any]]) -> Iterator[Problem]:
    """What only several objects together get wrong."""
    spaces = {as_map(item.get("metadata")).get("namespace") for item in objects}
    if len(spaces) > 1:
        yield Problem("objects", "lie in several namespaces", got=sorted(map(str, spaces)), expected="one")
    made = {_claim_template_of(item): item for item in objects if item.get("kind") == "ComputeDomain"}
    for item in objects:
        name = as_map(item.get("metadata")).get("name")
        if item.get("kind") == "ResourceClaimTemplate" and name in made:
            what = f"the controller of {place(made[name])} makes it, and fails where it is there"
            yield wrong(place(item), what, name, "no claim template of ours")
        for template in find_templates(item):
            for index, claim in enumerate(as_list(template.spec.get("resourceClaims"))):
                wanted = as_map(claim).get("resourceClaimTemplateName")
                if wanted is not None and wanted not in made and not _is_template(objects, wanted):
                    where = f"{template.where}.spec.resourceClaims[{index}]"
                    yield wrong(where, "nobody makes this claim template: the pod would wait for ever", wanted,
                                "the one that a ComputeDomain names")  # fmt: skip


def _claim_template_of(item: Mapping[str, Any]) -> Any:
    channel = as_map(as_map(item.get("spec")).get("channel"))
    return as_map(channel.get("resourceClaimTemplate")).get("name")


def _is_template(objects: Iterable[Mapping[str, Any]], name: Any) -> bool:
    kind = "ResourceClaimTemplate"
    return any(item.get("kind") == kind and as_map(item.get("metadata")).get("name") == name for item in objects)
