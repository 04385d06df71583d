"""Read a Kubernetes cluster's facts: nodes and GPUs, operators, volume claims, queues, the level of Pod Security.

A fact that the cluster does not reveal, often because a permission is missing, is None or empty.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from rlk_repro.base.errors import EnvironmentMissing, Problem, SchedulerRefused
from rlk_repro.base.files import dump_json
from rlk_repro.clusters.k8s import kubectl
from rlk_repro.clusters.k8s.kubectl import Target, Unreachable
from rlk_repro.clusters.k8s.sent import COMPUTE_DOMAINS, KINDS, NETWORK_POLICIES
from rlk_repro.clusters.k8s.tree import as_list, as_map

# the custom resource, from a Kubernetes operator, that a kind of job or a feature of a profile needs
OPERATORS: Final[Mapping[str, str]] = {
    "rayjob": "rayjobs.ray.io",
    "compute_domain": COMPUTE_DOMAINS,
    "queue": "localqueues.kueue.x-k8s.io",
}
SECURITY_LABEL: Final = "pod-security.kubernetes.io/enforce"
# every run needs these permissions, and JOB_VERBS on its job; a ComputeDomain or NetworkPolicy needs OWNED_VERBS
PERMISSIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "pods": ("create", "delete", "get", "list"),
    "pods/exec": ("create",),
    "configmaps": ("create", "delete", "list"),
    "events": ("list",),
}
JOB_VERBS: Final = ("create", "delete", "get", "list")
OWNED_VERBS: Final = (*JOB_VERBS, "patch")


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node that accepts pods."""

    labels: Mapping[str, str]
    allocatable: Mapping[str, str]
    taints: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class FoundClaim:
    name: str
    modes: frozenset[str]


class Permission(NamedTuple):
    """A permission such as ``create`` on ``pods/exec``; ``group`` is the resource's API group."""

    verb: str
    resource: str
    group: str = ""

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}"


@dataclass(frozen=True, kw_only=True)
class KubernetesSite:
    """The facts of one cluster and namespace; ``nodes`` is None if this user may not list them."""

    place: Target
    version: str
    nodes: tuple[Node, ...] | None
    operators: frozenset[str]
    claims: tuple[FoundClaim, ...]
    queues: tuple[str, ...]
    secrets: frozenset[str] | None
    security: str | None
    denied: tuple[Permission, ...]


def probe_site(place: Target) -> KubernetesSite:
    """Read the cluster's facts with about 20 short requests; raise EnvironmentMissing if no cluster answers."""
    obstacle = kubectl.find_obstacle()
    versions = {} if obstacle else kubectl.probe_versions(place)
    if obstacle or "server" not in versions:
        words = obstacle or "no cluster answers"
        raise EnvironmentMissing(Problem("kubernetes", words, hint="kubectl config get-contexts"))
    nodes = _ask(place, "nodes")
    resources = place.run("api-resources", "--output=name").stdout.split()
    namespace = _ask(place, "namespace", place.namespace) or []
    labels = as_map(as_map(namespace[0].get("metadata")).get("labels")) if namespace else {}
    operators = frozenset(name for name, resource in OPERATORS.items() if resource in resources)
    secrets = place.run("get", "secrets", "--output=name").stdout.split()
    return KubernetesSite(
        place=place,
        version=versions["server"],
        nodes=None if nodes is None else tuple(_read_nodes(nodes)),
        operators=operators,
        claims=tuple(_read_claims(_ask(place, "persistentvolumeclaims") or [])),
        queues=_names(_ask(place, OPERATORS["queue"]) or []) if "queue" in operators else (),
        secrets=frozenset(word.partition("/")[2] for word in secrets) if secrets else None,
        security=labels.get(SECURITY_LABEL),
        denied=tuple(_find_denied(place, operators)),
    )


def list_permissions(kinds: Iterable[str], *, has_domain: bool, has_policy: bool = True) -> Iterator[Permission]:
    for resource, verbs in PERMISSIONS.items():
        yield from (Permission(verb, resource) for verb in verbs)
    wanted: list[tuple[str, tuple[str, ...]]] = [(KINDS[kind][1], JOB_VERBS) for kind in sorted(kinds)]
    owned = {COMPUTE_DOMAINS: has_domain, NETWORK_POLICIES: has_policy}
    wanted += [(name, OWNED_VERBS) for name, is_made in owned.items() if is_made]
    for name, verbs in wanted:
        resource, _, group = name.partition(".")
        yield from (Permission(verb, resource, group) for verb in verbs)


def _read_nodes(items: Sequence[Mapping[str, Any]]) -> Iterator[Node]:
    for item in items:
        metadata, spec, status = (as_map(item.get(part)) for part in ("metadata", "spec", "status"))
        if not spec.get("unschedulable"):
            yield Node(
                labels=dict(as_map(metadata.get("labels"))),
                allocatable={key: str(value) for key, value in as_map(status.get("allocatable")).items()},
                taints=tuple(str(as_map(taint).get("key")) for taint in as_list(spec.get("taints"))),
            )


def _read_claims(items: Sequence[Mapping[str, Any]]) -> Iterator[FoundClaim]:
    for item in items:
        yield FoundClaim(
            name=str(as_map(item.get("metadata")).get("name")),
            modes=frozenset(map(str, as_list(as_map(item.get("spec")).get("accessModes")))),
        )


def _find_denied(place: Target, operators: Collection[str]) -> Iterator[Permission]:
    """Ask for all permissions in one call, because kubectl starts slowly.

    Without ``--validate=false``, kubectl would read all CRDs to check fields, and few users may read CRDs.
    """
    kinds = [kind for kind in KINDS if kind not in OPERATORS or kind in operators]
    wanted = [*list_permissions(kinds, has_domain="compute_domain" in operators)]
    reviews = b"".join(dump_json(_make_review(place, permission)) for permission in wanted)
    done = place.run("create", "--filename=-", "--validate=false", "--output=json", stdin=reviews)
    answers = _read_many(done.stdout) if done.is_ok else []
    for permission, answer in zip(wanted, answers, strict=False):
        if as_map(answer.get("status")).get("allowed") is False:
            yield permission


def _make_review(place: Target, permission: Permission) -> dict[str, Any]:
    resource, _, part = permission.resource.partition("/")
    attributes = {"namespace": place.namespace, "verb": permission.verb, "resource": resource,
                  "group": permission.group, "subresource": part}  # fmt: skip
    return {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }


def _read_many(text: str) -> list[dict[str, Any]]:
    decoder, found, place = json.JSONDecoder(), [], 0
    while text[place:].strip():
        place += len(text[place:]) - len(text[place:].lstrip())
        value, place = decoder.raw_decode(text, place)
        found.append(value)
    return found


def _ask(place: Target, kinds: str, *words: str) -> list[dict[str, Any]] | None:
    try:
        return place.get(kinds, *words)
    except Unreachable as error:
        raise EnvironmentMissing(*error.problems) from None
    except SchedulerRefused:
        return None


def _names(items: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(sorted(str(as_map(item.get("metadata")).get("name")) for item in items))
