"""What KubeRay checks in code, or does otherwise than one would think.  Read in its source; docs/kubernetes.md."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from rlk_repro.base.errors import Problem
from rlk_repro.clusters.k8s.naming import OVERWRITE_COMMAND, QUEUE
from rlk_repro.clusters.k8s.tree import as_list, as_map
from tests.support.kube.templates import find_templates, place, wrong

MAX_NAME: Final = 47
MODES: Final = ("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode")
MAX_GROUPS: Final = 7
MAX_TTL_S: Final = 600
_DNS_1035: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_HEAD_PORTS: Final = ("gcs-server", "dashboard")


def find_rayjob_problems(item: Mapping[str, Any]) -> Iterator[Problem]:
    where, spec = f"{place(item)}: spec", as_map(item.get("spec"))
    yield from _check_name(item)
    yield from _check_end(where, spec)
    yield from _check_submission(where, spec, item)
    yield from _check_queue(where, spec, item)
    yield from _check_groups(f"{where}.rayClusterSpec", as_map(spec.get("rayClusterSpec")))
    yield from _check_command(item)


def _check_name(item: Mapping[str, Any]) -> Iterator[Problem]:
    name = str(as_map(item.get("metadata")).get("name", ""))
    where = f"{place(item)}: metadata.name"
    if len(name) > MAX_NAME:
        yield wrong(where, "too long: the names of cluster and services are made of it", name, f"at most {MAX_NAME}")
    if not _DNS_1035.fullmatch(name):
        yield wrong(where, "not DNS-1035, and services are named after it", name, "small letters, digits and dashes")


def _check_end(where: str, spec: Mapping[str, Any]) -> Iterator[Problem]:
    shuts_down = spec.get("shutdownAfterJobFinishes") is True
    if spec.get("suspend") and not shuts_down:
        yield wrong(f"{where}.suspend", "needs shutdownAfterJobFinishes: true", spec["suspend"], "both or none")
    if spec.get("ttlSecondsAfterFinished") and not shuts_down:
        got = spec["ttlSecondsAfterFinished"]
        yield wrong(f"{where}.ttlSecondsAfterFinished", "needs shutdownAfterJobFinishes: true", got, "both or none")
    ttl = spec.get("ttlSecondsAfterFinished", 0)
    if isinstance(ttl, int) and ttl > MAX_TTL_S:
        what = "the cluster stays for so long after the end, and its GPUs with it"
        yield wrong(f"{where}.ttlSecondsAfterFinished", what, ttl, f"at most {MAX_TTL_S}")
    if "deletionStrategy" in spec and (shuts_down or spec.get("ttlSecondsAfterFinished")):
        what = "excludes shutdownAfterJobFinishes and ttlSecondsAfterFinished"
        yield wrong(f"{where}.deletionStrategy", what, spec["deletionStrategy"], "one of the two ways to end")
    if spec.get("backoffLimit", 0) != 0:
        what = "an attempt on a new cluster is another trial"
        yield wrong(f"{where}.backoffLimit", what, spec["backoffLimit"], "0")


def _check_submission(where: str, spec: Mapping[str, Any], item: Mapping[str, Any]) -> Iterator[Problem]:
    mode = spec.get("submissionMode", "K8sJobMode")
    if mode == "SidecarMode":
        yield from _check_sidecar(where, spec, item)
    if mode not in MODES:
        yield wrong(f"{where}.submissionMode", "no such mode", mode, " or ".join(MODES))
    if mode == "InteractiveMode":
        what = "waits until somebody submits by hand"
        yield wrong(f"{where}.submissionMode", what, mode, "HTTPMode")
    if spec.get("backoffLimit") and (mode == "InteractiveMode" or "clusterSelector" in spec):
        got = spec["backoffLimit"]
        yield wrong(f"{where}.backoffLimit", "not with InteractiveMode or clusterSelector", got, "0")
    if mode != "InteractiveMode" and not spec.get("entrypoint"):
        yield wrong(f"{where}.entrypoint", "missing", None, "the command of the job")
    if "clusterSelector" not in spec and "rayClusterSpec" not in spec:
        yield wrong(where, "neither rayClusterSpec nor clusterSelector", None, "one of them")


def _check_sidecar(where: str, spec: Mapping[str, Any], item: Mapping[str, Any]) -> Iterator[Problem]:
    for key in ("submitterPodTemplate", "submitterConfig", "clusterSelector"):
        if key in spec:
            yield wrong(f"{where}.{key}", "SidecarMode forbids it", "SidecarMode", "HTTPMode, or none of this key")
    for template in find_templates(item):
        if template.spec.get("restartPolicy") != "Never":
            got = template.spec.get("restartPolicy")
            yield wrong(f"{template.where}.spec.restartPolicy", "SidecarMode wants Never", got, "Never")


def _check_queue(where: str, spec: Mapping[str, Any], item: Mapping[str, Any]) -> Iterator[Problem]:
    """What Kueue takes; it refuses the rest at admission, or never admits it."""
    if QUEUE not in as_map(as_map(item.get("metadata")).get("labels")):
        return
    cluster = as_map(spec.get("rayClusterSpec"))
    if spec.get("shutdownAfterJobFinishes") is not True:
        got = spec.get("shutdownAfterJobFinishes")
        yield wrong(f"{where}.shutdownAfterJobFinishes", "Kueue must get the nodes back", got, "true")
    if "clusterSelector" in spec:
        yield wrong(f"{where}.clusterSelector", "Kueue manages no clusters of others", spec["clusterSelector"], "none")
    if cluster.get("enableInTreeAutoscaling"):
        got = cluster["enableInTreeAutoscaling"]
        yield wrong(f"{where}.rayClusterSpec.enableInTreeAutoscaling", "not with Kueue", got, "false")
    groups = as_list(cluster.get("workerGroupSpecs"))
    if len(groups) > MAX_GROUPS:
        what = "Kueue counts eight sets of pods at most, the head among them"
        yield wrong(f"{where}.rayClusterSpec.workerGroupSpecs", what, len(groups), f"at most {MAX_GROUPS}")


def _check_groups(where: str, cluster: Mapping[str, Any]) -> Iterator[Problem]:
    head = as_map(cluster.get("headGroupSpec"))
    yield from _check_start(f"{where}.headGroupSpec", head)
    containers = as_list(as_map(as_map(head.get("template")).get("spec")).get("containers"))
    ports = [as_map(port).get("name") for port in as_list(as_map(containers[0] if containers else {}).get("ports"))]
    if ports:
        for name in _HEAD_PORTS:
            if name not in ports:
                what = f"without {name}: KubeRay adds its own ports only where the container names none"
                yield wrong(f"{where}.headGroupSpec.template.spec.containers[0].ports", what, ports, name)
    names = []
    for index, value in enumerate(as_list(cluster.get("workerGroupSpecs"))):
        group, place_of = as_map(value), f"{where}.workerGroupSpecs[{index}]"
        names.append(group.get("groupName"))
        yield from _check_start(place_of, group)
        sizes = [group.get(key) for key in ("minReplicas", "replicas", "maxReplicas")]
        if len(set(map(str, sizes))) > 1:
            what = "a benchmark runs on as many nodes as its layout says"
            yield wrong(f"{place_of}.replicas", what, sizes, "minReplicas, replicas and maxReplicas the same")
        if group.get("numOfHosts", 1) != 1:
            yield wrong(f"{place_of}.numOfHosts", "multiplies the pods", group["numOfHosts"], "1")
    if len(set(map(str, names))) < len(names):
        yield wrong(f"{where}.workerGroupSpecs", "two groups of one name", names, "each once")


def _check_start(where: str, group: Mapping[str, Any]) -> Iterator[Problem]:
    """Values become words of ``ray start``."""
    for key, value in as_map(group.get("rayStartParams")).items():
        if not isinstance(value, str):
            what = "a number or truth value where the API wants text"
            yield wrong(f"{where}.rayStartParams[{key}]", what, value, f'"{value}"')
    params = as_map(group.get("rayStartParams"))
    containers = as_list(as_map(as_map(group.get("template")).get("spec")).get("containers"))
    limits = as_map(as_map(as_map(containers[0] if containers else {}).get("resources")).get("limits"))
    gpus = [value for key, value in limits.items() if key.endswith("/gpu")]
    if gpus and str(params.get("num-gpus", gpus[0])) != str(gpus[0]):
        what = "Ray would hand out other GPUs than the container has"
        yield wrong(f"{where}.rayStartParams[num-gpus]", what, params["num-gpus"], str(gpus[0]))


def _check_command(item: Mapping[str, Any]) -> Iterator[Problem]:
    """A command of our own is run beside KubeRay's without this annotation: it would wait for the end of ours."""
    annotations = [as_map(as_map(item.get("metadata")).get("annotations"))]
    annotations += [as_map(as_map(found.value.get("metadata")).get("annotations")) for found in find_templates(item)]
    commands = [container.get("command") for found in find_templates(item) for _, container in found.containers()]
    if any(commands) and any(found.get(OVERWRITE_COMMAND) != "true" for found in annotations):
        what = "containers have commands of their own, which KubeRay puts in front of its own"
        yield wrong(
            f"{place(item)}: metadata.annotations[{OVERWRITE_COMMAND}]", what, None, "true, on job and templates"
        )
