"""What a pod of a benchmark must and must not be: admission's rules, and ours with their reasons."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, Final

from rlk_repro.base.errors import Problem
from rlk_repro.base.secrets import is_secret_name, looks_secret
from rlk_repro.clusters.k8s.nodes import ARCH, CLIQUE
from rlk_repro.clusters.k8s.tree import as_list, as_map, parse_quantity
from tests.support.kube.templates import Template, wrong

MIN_GRACE_S: Final = 30
_DIGEST: Final = re.compile(r"[^@\s]+@sha256:[0-9a-f]{64}")
_TAGGED: Final = re.compile(r"[^@]*/[^/@]*:[^/@]*@|[^/@]*:[^/@]*@")
_GPU: Final = re.compile(r"(nvidia|amd)\.com/(gpu|mig-.*)(\.shared)?")
_PARTIAL: Final = re.compile(r"(nvidia|amd)\.com/(mig-.*|gpu\.shared)")
_ARM_PRODUCTS: Final = ("GB200", "GB300", "GH200")
_HOST: Final = ("hostNetwork", "hostPID", "hostIPC")
_SAFE_CAPABILITIES: Final = frozenset({"IPC_LOCK", "NET_BIND_SERVICE"})


def find_pod_rule_problems(template: Template, *, is_in_ray: bool) -> Iterator[Problem]:
    for rule in (_check_pod, _check_volumes, _check_claims, _check_nodes, _check_security):
        yield from rule(template)
    names = []
    for where, container in template.containers():
        names.append(container.get("name"))
        for check in _CONTAINER_RULES:
            yield from check(where, container)
    if len(set(map(str, names))) < len(names):
        yield wrong(f"{template.where}.spec.containers", "two of one name", names, "each once")
    if is_in_ray and template.spec.get("hostname"):
        yield wrong(
            f"{template.where}.spec.hostname", "KubeRay's pods cannot share one", template.spec["hostname"], "none"
        )


def _check_pod(template: Template) -> Iterator[Problem]:
    where, spec = f"{template.where}.spec", template.spec
    if spec.get("restartPolicy") != "Never":
        what = "a container that is started again is another trial"
        yield wrong(f"{where}.restartPolicy", what, spec.get("restartPolicy", "Always by default"), "Never")
    grace = spec.get("terminationGracePeriodSeconds", 30)
    is_short = isinstance(grace, int) and grace < MIN_GRACE_S
    if is_short and "activeDeadlineSeconds" not in spec:
        what = "the agents record and pack meanwhile"
        yield wrong(f"{where}.terminationGracePeriodSeconds", what, grace, f"at least {MIN_GRACE_S}")
    if spec.get("automountServiceAccountToken") is not False:
        what = "nothing in the pod speaks with the API server"
        yield wrong(f"{where}.automountServiceAccountToken", what, spec.get("automountServiceAccountToken"), "false")


def _check_image(where: str, container: Mapping[str, Any]) -> Iterator[Problem]:
    image = container.get("image")
    if not isinstance(image, str) or not _DIGEST.fullmatch(image):
        yield wrong(f"{where}.image", "a tag may be another image tomorrow", image, "repository@sha256:…")
    elif _TAGGED.match(image):
        yield wrong(f"{where}.image", "names a tag as well, which nobody checks", image, "repository@sha256:…")


def _check_env(where: str, container: Mapping[str, Any]) -> Iterator[Problem]:
    names = []
    for index, value in enumerate(as_list(container.get("env"))):
        entry, place = as_map(value), f"{where}.env[{index}]"
        name, text = str(entry.get("name", "")), entry.get("value")
        names.append(name)
        if text and (is_secret_name(name) or looks_secret(name, str(text)) is not None):
            yield wrong(f"{place} ({name})", "a secret in a manifest", "<redacted>", "valueFrom.secretKeyRef")
        if text is not None and not isinstance(text, str):
            yield wrong(f"{place} ({name})", "a number or truth value where the API wants text", text, f'"{text}"')
        if "value" in entry and "valueFrom" in entry:
            yield wrong(f"{place} ({name})", "value and valueFrom exclude each other", text, "one of them")
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        yield wrong(f"{where}.env", "the last one of a name wins silently", doubled, "each once")
    for word in [*as_list(container.get("command")), *as_list(container.get("args"))]:
        if looks_secret("", str(word)) is not None:
            yield wrong(
                f"{where}.command", "a secret in a manifest", "<redacted>", "an environment variable by reference"
            )


def _check_resources(where: str, container: Mapping[str, Any]) -> Iterator[Problem]:
    resources = as_map(container.get("resources"))
    limits, requests = as_map(resources.get("limits")), as_map(resources.get("requests"))
    for key in sorted({*limits, *requests}):
        limit, request = limits.get(key), requests.get(key)
        place = f"{where}.resources[{key}]"
        for value in (limit, request):
            if value is not None and parse_quantity(value) is None:
                yield wrong(place, "no quantity", value, "such as 8 or 64Gi")
        if _GPU.fullmatch(key) or "/" in key:
            if limit is None or request is None:
                what = "an extended resource has a limit, and a request of the same size"
                yield wrong(place, what, {"limit": limit, "request": request}, "both")
            elif parse_quantity(limit) != parse_quantity(request):
                what = "an extended resource cannot be overcommitted"
                yield wrong(place, what, {"limit": limit, "request": request}, "the same")
            amount = parse_quantity(limit)
            if amount is not None and amount != int(amount):
                yield wrong(place, "an extended resource comes whole", limit, "a whole number")
        if _PARTIAL.fullmatch(key):
            yield wrong(place, "a partition or a share of a GPU measures something else", key, "whole GPUs")
    if ("memory" in limits) is not ("memory" in requests) or ("cpu" in limits) is not ("cpu" in requests):
        yield wrong(f"{where}.resources", "the pod is not Guaranteed", sorted(resources), "limits and requests alike")


def _check_container_security(where: str, container: Mapping[str, Any]) -> Iterator[Problem]:
    context = as_map(container.get("securityContext"))
    place = f"{where}.securityContext"
    if context.get("privileged"):
        yield wrong(f"{place}.privileged", "the device plugin hands out the GPUs; nothing needs it", True, "false")
    if context.get("allowPrivilegeEscalation") is not False:
        got = context.get("allowPrivilegeEscalation")
        yield wrong(f"{place}.allowPrivilegeEscalation", "the level restricted refuses it", got, "false")
    capabilities = as_map(context.get("capabilities"))
    if "ALL" not in as_list(capabilities.get("drop")):
        yield wrong(f"{place}.capabilities.drop", "the level restricted refuses it", capabilities.get("drop"), "[ALL]")
    for name in as_list(capabilities.get("add")):
        if name not in _SAFE_CAPABILITIES:
            yield wrong(f"{place}.capabilities.add", "nothing needs it", name, "IPC_LOCK at most, for RDMA")
        elif name == "IPC_LOCK" and not _has_rdma(container):
            what = "only a privileged namespace takes it, and without an RDMA device nothing needs it"
            yield wrong(f"{place}.capabilities.add", what, name, "an RDMA device in limits, or no capability")


_CONTAINER_RULES: Final[tuple[Callable[[str, Mapping[str, Any]], Iterator[Problem]], ...]] = (
    _check_image,
    _check_env,
    _check_resources,
    _check_container_security,
)


def _check_volumes(template: Template) -> Iterator[Problem]:
    spec, where = template.spec, f"{template.where}.spec.volumes"
    volumes = {str(as_map(item).get("name")): as_map(item) for item in as_list(spec.get("volumes"))}
    if len(volumes) < len(as_list(spec.get("volumes"))):
        yield wrong(where, "two of one name", sorted(volumes), "each once")
    for name, volume in volumes.items():
        if "hostPath" in volume:
            what = "the level baseline refuses folders of the node"
            yield wrong(f"{where}[{name}]", what, volume["hostPath"], "a claim or an emptyDir")
    for place, container in template.containers():
        mounts = [as_map(item) for item in as_list(container.get("volumeMounts"))]
        paths = [mount.get("mountPath") for mount in mounts]
        for mount in mounts:
            if mount.get("name") not in volumes:
                yield wrong(f"{place}.volumeMounts", "no such volume", mount.get("name"), ", ".join(volumes))
        if len(set(map(str, paths))) < len(paths):
            yield wrong(f"{place}.volumeMounts", "two at one path", paths, "each path once")
        yield from _check_shm(place, container, volumes)


def _check_shm(where: str, container: Mapping[str, Any], volumes: Mapping[str, Mapping[str, Any]]) -> Iterator[Problem]:
    """What is written to a memory volume counts against the container's memory."""
    memory = parse_quantity(as_map(as_map(container.get("resources")).get("limits")).get("memory"))
    for mount in as_list(container.get("volumeMounts")):
        volume = as_map(volumes.get(str(as_map(mount).get("name")), {}).get("emptyDir"))
        size = parse_quantity(volume.get("sizeLimit"))
        if volume.get("medium") == "Memory" and size is None:
            yield wrong(f"{where}.volumeMounts", "a memory volume without a size", volume.get("sizeLimit"), "sizeLimit")
        elif volume.get("medium") == "Memory" and memory is not None and size is not None and size >= memory:
            what = "what is written to the memory volume counts, and it would take all of it"
            yield wrong(f"{where}.resources[memory]", what, str(memory), f"more than {volume['sizeLimit']}")


def _check_claims(template: Template) -> Iterator[Problem]:
    claims = [as_map(item).get("name") for item in as_list(template.spec.get("resourceClaims"))]
    used = []
    for where, container in template.containers():
        for item in as_list(as_map(container.get("resources")).get("claims")):
            name = as_map(item).get("name")
            used.append(name)
            if name not in claims:
                yield wrong(f"{where}.resources.claims", "the pod has no such claim", name, ", ".join(map(str, claims)))
    for name in claims:
        if name not in used:
            what = "no container uses it: it would be allocated in vain"
            yield wrong(f"{template.where}.spec.resourceClaims", what, name, "resources.claims of a container")


def _check_nodes(template: Template) -> Iterator[Problem]:
    """Labels that contradict each other make a pod wait for ever, without a word about why."""
    where, affinity = f"{template.where}.spec.affinity", as_map(template.spec.get("affinity"))
    rule = "requiredDuringSchedulingIgnoredDuringExecution"
    terms = as_list(as_map(as_map(affinity.get("nodeAffinity")).get(rule)).get("nodeSelectorTerms"))
    for term in terms:
        expressions = [as_map(item) for item in as_list(as_map(term).get("matchExpressions"))]
        values = {str(item.get("key")): list(map(str, as_list(item.get("values")))) for item in expressions}
        products = list(chain.from_iterable(found for key, found in values.items() if "product" in key))
        if ARCH in values and products:
            is_arm = any(part in product for product in products for part in _ARM_PRODUCTS)
            if values[ARCH] != (["arm64"] if is_arm else ["amd64"]):
                yield wrong(f"{where}.nodeAffinity", f"no node with {products[0]} has this processor", values[ARCH],
                            "arm64" if is_arm else "amd64")  # fmt: skip
        for product in products:
            if "MIG" in product or product.endswith("-SHARED"):
                what = "a partition or a share of a GPU measures something else"
                yield wrong(f"{where}.nodeAffinity", what, product, "whole GPUs")
    if "nodeSelector" in template.spec:
        what = "one spelling of a label is not enough: drivers and labellers differ"
        yield wrong(
            f"{template.where}.spec.nodeSelector", what, template.spec["nodeSelector"], "nodeAffinity with a list"
        )
    near = as_list(as_map(affinity.get("podAffinity")).get(rule))
    has_domain = bool(as_list(template.spec.get("resourceClaims")))
    if has_domain and not any(as_map(item).get("topologyKey") == CLIQUE for item in near):
        what = "a ComputeDomain serves the nodes of one NVLink domain"
        yield wrong(f"{where}.podAffinity", what, None, f"topologyKey {CLIQUE}")


def _check_security(template: Template) -> Iterator[Problem]:
    spec = template.spec
    for key in _HOST:
        if spec.get(key):
            yield wrong(f"{template.where}.spec.{key}", "the level baseline refuses it", True, "false")
    seccomp = as_map(as_map(spec.get("securityContext")).get("seccompProfile")).get("type")
    if seccomp not in {"RuntimeDefault", "Localhost"}:
        place = f"{template.where}.spec.securityContext.seccompProfile"
        yield wrong(place, "the level restricted refuses it", seccomp, "RuntimeDefault")
    for number, container in enumerate(map(as_map, as_list(spec.get("containers")))):
        own = as_map(as_map(container.get("securityContext")).get("seccompProfile")).get("type")
        limits = as_map(as_map(container.get("resources")).get("limits"))
        if own is not None and "nvidia.com/gpu" in limits:
            place = f"{template.where}.spec.containers.{number}.securityContext.seccompProfile"
            yield wrong(place, "ROCm alone needs another one than the pod's", own, "not set")


def _has_rdma(container: Mapping[str, Any]) -> bool:
    limits = as_map(as_map(container.get("resources")).get("limits"))
    return any("/" in key and not _GPU.fullmatch(key) for key in limits)
