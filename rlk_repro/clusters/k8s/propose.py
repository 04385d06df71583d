"""Propose a first profile for a Kubernetes cluster, and check an existing profile, both from the cluster's facts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rlk_repro.base.findings import Finding, Level
from rlk_repro.clusters.asking import parse_release
from rlk_repro.clusters.k8s.nodes import GPU_RESOURCES, gpu_resource, list_products
from rlk_repro.clusters.k8s.pods import kubernetes_settings
from rlk_repro.clusters.k8s.site import OPERATORS, SECURITY_LABEL, KubernetesSite, Node, Permission, list_permissions
from rlk_repro.clusters.k8s.tree import parse_quantity
from rlk_repro.clusters.profiles import Ask, Proposal, make_name
from rlk_repro.plan import Plan
from rlk_repro.spec import OCI_ARCHITECTURES, FromEnv, Hardware, KubernetesSettings, Profile

SHARED: Final = frozenset({"ReadWriteMany"})
# share of a node's CPUs and memory for a pod; the system and daemon sets use the remaining share
USABLE: Final = 0.9
CLAIMS_RELEASE: Final = (1, 32)


def find_hardware(nodes: Sequence[Node], hardware: Mapping[str, Hardware]) -> dict[str, list[Node]]:
    found: dict[str, list[Node]] = {}
    for name, model in hardware.items():
        labels = list_products(model, KubernetesSettings())
        fitting = [node for node in nodes if any(node.labels.get(key) in values for key, values in labels)]
        if fitting:
            found[name] = fitting
    return found


def propose_kubernetes(site: KubernetesSite, hardware: Mapping[str, Hardware], ask: Ask) -> Proposal:
    remarks: list[str] = []
    found = find_hardware(site.nodes or (), hardware)
    ordered = sorted(found, key=lambda name: len(found[name]), reverse=True)
    name = ordered[0] if ordered else None
    if len(ordered) > 1:
        name = ask("Which hardware?", ordered, ordered[0])
    if name is None:
        remarks.append("hardware: no node has a known product label; set hardware, or kubernetes.gpu_products")
    values: dict[str, Any] = {
        "schema": 1,
        "profile": make_name(site.place.context or site.place.namespace),
        "cluster": "k8s",
        "purpose": f"Namespace {site.place.namespace} of a Kubernetes {site.version} cluster.",
        "hardware": name,
        "kubernetes": _settings(site, found.get(name or "", []), ask, remarks),
    }
    return Proposal(values={key: value for key, value in values.items() if value is not None}, remarks=remarks)


def _settings(site: KubernetesSite, nodes: Sequence[Node], ask: Ask, remarks: list[str]) -> dict[str, Any]:
    kinds = ["rayjob", "job"] if "rayjob" in site.operators else ["job"]
    values: dict[str, Any] = {"kind": ask("Which kind of job?", kinds, kinds[0]), "namespace": site.place.namespace}
    if site.place.context:
        values["context"] = site.place.context
    values |= _sizes(nodes)
    shared = [claim.name for claim in site.claims if claim.modes & SHARED]
    if shared:
        claim = ask("Where do results go?", shared, shared[0]) if len(shared) > 1 else shared[0]
        values["results"] = {"claim": claim, "path": "/results"}
    else:
        remarks.append("results: the namespace has no volume claim that several nodes can write to; run on one node, "
                       "and collect the bundle before the pod ends")  # fmt: skip
    if site.queues:
        values["queue"] = ask("Which queue?", site.queues, site.queues[0])
    elif shared:
        remarks.append("queue: the namespace has no queue; a run of several nodes needs a queue, a gang scheduler in "
                       "overlay.pod_spec.schedulerName, or gang: waived")  # fmt: skip
    if site.security == "restricted":
        values["run_as"] = {"user": 1000, "group": 1000}
        remarks.append("run_as: the namespace is restricted; the image must work as a user other than root")
    if any(permission.resource == "networkpolicies" for permission in site.denied):
        values["network_policy"] = False
        remarks.append("network_policy: you may not create a NetworkPolicy, so any pod can reach a run's pods")
    if "compute_domain" in site.operators and any("nvidia.com/gpu.clique" in node.labels for node in nodes):
        values["compute_domain"] = True
    known = {"nvidia.com/gpu", "amd.com/gpu", "kubernetes.io/arch"}
    taints = sorted({taint for node in nodes for taint in node.taints} - known)
    if taints:
        values["tolerations"] = [{"key": taint} for taint in taints]
        remarks.append(f"tolerations: the nodes have taints ({', '.join(taints)}); may you use these nodes?")
    return values


def _sizes(nodes: Sequence[Node]) -> dict[str, str]:
    """Return 90 % of the smallest node's CPU and memory: pods are then Guaranteed and fit on every node."""
    cpus, memories = ([parse_quantity(node.allocatable.get(key)) for node in nodes] for key in ("cpu", "memory"))
    num_cpus = min((float(value) for value in cpus if value is not None), default=None)
    memory_bytes = min((float(value) for value in memories if value is not None), default=None)
    if num_cpus is None or memory_bytes is None:
        return {}
    memory_gib = int(memory_bytes * USABLE / 2**30)
    shm_gib = max(1, min(64, memory_gib // 4))
    return {"cpu": str(int(num_cpus * USABLE)), "memory": f"{memory_gib}Gi", "shm": f"{shm_gib}Gi"}


def judge_kubernetes(
    profile: Profile, site: KubernetesSite, hardware: Mapping[str, Hardware], plan: Plan | None
) -> list[Finding]:
    """Compare a profile with the cluster's facts; return a finding for each fault."""
    settings = profile.kubernetes or KubernetesSettings()
    model = hardware.get(plan.hardware.hardware if plan is not None else profile.hardware or "")
    num_nodes = 1 if plan is None else plan.layout.num_nodes
    has_domain, has_policy = settings.compute_domain, settings.network_policy
    needed = {*list_permissions((settings.kind,), has_domain=has_domain, has_policy=has_policy)}
    return [
        *_judge_operators(settings, site),
        *_judge_results(settings, site, num_nodes),
        *_judge_security(settings, site),
        *_judge_secrets(profile, settings, site),
        *(_judge_nodes(settings, site, model, plan, num_nodes) if model is not None else ()),
        *(
            Finding(Level.BLOCKING, "permission", f"to {what} in {settings.namespace}", f"denied{_way_round(what)}")
            for what in site.denied
            if what in needed
        ),
    ]


def _way_round(denied: Permission) -> str:
    return "; not needed with kubernetes.network_policy: false" if denied.resource == "networkpolicies" else ""


def _judge_operators(settings: KubernetesSettings, site: KubernetesSite) -> Iterator[Finding]:
    if settings.kind in OPERATORS and settings.kind not in site.operators:
        yield Finding(Level.BLOCKING, "kubernetes.kind", f"the operator of {OPERATORS[settings.kind]}", "not installed")
    if settings.compute_domain:
        if "compute_domain" not in site.operators:
            expected = f"the driver that provides {OPERATORS['compute_domain']}"
            yield Finding(Level.BLOCKING, "kubernetes.compute_domain", expected, "not installed")
        if parse_release(site.version) < CLAIMS_RELEASE:
            yield Finding(Level.BLOCKING, "kubernetes.compute_domain", "Kubernetes 1.32 or newer", site.version)
    menu = f"one of {', '.join(site.queues)}" if site.queues else "not set: the namespace has no queue"
    if settings.queue is not None and settings.queue not in site.queues:
        yield Finding(Level.BLOCKING, "kubernetes.queue", menu, settings.queue)
    elif settings.queue is None and site.queues:
        yield Finding(Level.WARNING, "kubernetes.queue", menu, "not set: a job without a queue may be held or ignored")


def _judge_results(settings: KubernetesSettings, site: KubernetesSite, num_nodes: int) -> Iterator[Finding]:
    where = "kubernetes.results.claim"
    claims = {claim.name: claim for claim in site.claims}
    name = settings.results.claim
    if name is None:
        level = Level.BLOCKING if num_nodes > 1 else Level.WARNING
        yield Finding(level, where, "a volume claim", "not set: the results are lost with the pod")
    elif name not in claims:
        menu = f"one of {', '.join(claims)}" if claims else "a volume claim; the namespace has none"
        yield Finding(Level.BLOCKING, where, menu, name)
    elif num_nodes > 1 and not claims[name].modes & SHARED:
        yield Finding(Level.BLOCKING, where, "ReadWriteMany, for several nodes", ", ".join(sorted(claims[name].modes)))
    for claim in settings.claims:
        if claim.claim not in claims:
            yield Finding(Level.BLOCKING, "kubernetes.claims", "a volume claim in the namespace", claim.claim)


def _judge_security(settings: KubernetesSettings, site: KubernetesSite) -> Iterator[Finding]:
    where = f"namespace label {SECURITY_LABEL}"
    if settings.rdma is not None and site.security in {"baseline", "restricted"}:
        yield Finding(Level.BLOCKING, where, "privileged, because RDMA needs IPC_LOCK", site.security)
    if settings.run_as is None and site.security == "restricted":
        yield Finding(
            Level.BLOCKING, "kubernetes.run_as", "a user other than root: the namespace is restricted", "none"
        )


def _judge_secrets(profile: Profile, settings: KubernetesSettings, site: KubernetesSite) -> Iterator[Finding]:
    for name, value in profile.env.items():
        if isinstance(value, FromEnv) and value.from_env not in settings.secrets:
            expected = "the name of a secret and its key, because a pod does not get this shell's variables"
            yield Finding(Level.BLOCKING, f"kubernetes.secrets.{value.from_env}", expected, f"none for env.{name}")
    wanted = {place.secret for place in settings.secrets.values()} | set(settings.image_pull_secrets)
    for name in sorted(wanted - (site.secrets or wanted)):
        yield Finding(Level.BLOCKING, "kubernetes.secrets", "a secret that the namespace has", name)


def _judge_nodes(
    settings: KubernetesSettings, site: KubernetesSite, model: Hardware, plan: Plan | None, num_nodes: int
) -> Iterator[Finding]:
    if site.nodes is None:
        yield Finding(Level.INFO, "nodes", "a list of the nodes", "this user may not list nodes")
        return
    labels = list_products(model, settings)
    fitting = [node for node in site.nodes if not labels or any(node.labels.get(k) in v for k, v in labels)]
    if not fitting:
        products = sorted({value for node in site.nodes for key, value in node.labels.items() if "gpu.product" in key})
        expected = " or ".join(f"{key}={','.join(values)}" for key, values in labels)
        yield Finding(Level.BLOCKING, "nodes", expected, ", ".join(products) or "no node with a GPU label")
        return
    arch = OCI_ARCHITECTURES.get(model.machine)
    wrong = {node.labels.get("kubernetes.io/arch", "") for node in fitting} - {arch, ""}
    if arch is not None and wrong:
        yield Finding(Level.BLOCKING, "nodes", f"processor {arch}", ", ".join(sorted(wrong)))
    if len(fitting) < num_nodes:
        yield Finding(Level.BLOCKING, "nodes", f"{num_nodes} with {model.hardware}", str(len(fitting)))
    yield from _judge_sizes(settings, fitting, model, plan)


def _judge_sizes(
    settings: KubernetesSettings, nodes: Sequence[Node], model: Hardware, plan: Plan | None
) -> Iterator[Finding]:
    wanted = {"cpu": settings.cpu, "memory": settings.memory}
    if plan is not None and plan.layout.gpus_per_node:
        wanted[gpu_resource(plan, kubernetes_settings(plan))] = str(plan.layout.gpus_per_node)
    elif model.gpus_per_node:
        wanted[settings.gpu_resource or GPU_RESOURCES.get(model.platform, "")] = "1"
    if settings.rdma is not None:
        wanted[settings.rdma.resource] = str(settings.rdma.count)
    for key, quantity in wanted.items():
        need = parse_quantity(quantity)
        most = max((parse_quantity(node.allocatable.get(key)) or 0 for node in nodes), default=0)
        if need is not None and need > most:
            yield Finding(Level.BLOCKING, f"nodes: {key}", f"{quantity} on one node", f"{most} at most")
    if settings.cpu is None or settings.memory is None:
        found = "not set: the pods are evicted first and share CPUs with other pods"
        yield Finding(Level.WARNING, "kubernetes.cpu and kubernetes.memory", "both set (QoS class Guaranteed)", found)
