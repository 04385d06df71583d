"""Make the pod template of an agent: image, command, environment, volumes, resources, security."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from rlk_repro.base.errors import Problem
from rlk_repro.clusters.asking import list_secrets
from rlk_repro.clusters.k8s.base import load_base
from rlk_repro.clusters.k8s.naming import (
    COLLECTOR,
    NETWORKS,
    make_annotations,
    make_claim_template_name,
    make_labels,
    make_name,
)
from rlk_repro.clusters.k8s.nodes import (
    Object,
    gpu_resource,
    make_affinity,
    make_node_terms,
    make_tolerations,
    uses_compute_domain,
)
from rlk_repro.clusters.k8s.overlay import overlay_pod
from rlk_repro.clusters.k8s.tree import parse_quantity
from rlk_repro.images.unpublished import shown_image
from rlk_repro.plan import Plan
from rlk_repro.probes.container import DIGEST_VARIABLE
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import KubernetesSettings, Profile

INPUTS_PATH: Final = "/etc/rlk-repro"
INPUT_FILES: Final = ("run.yaml", "stack.yaml", "hardware.yaml", "profile.yaml", "plan.json", "submission.json")
RDMA_CAPABILITY: Final = "IPC_LOCK"
TERMINATION_LOG: Final = "/dev/termination-log"
PACK: Final = "pack"
COLLECTOR_S: Final = 86_400
"""A collector pod that nobody deletes ends by itself after so many seconds."""
_CHANNEL: Final = "channel"
_NO_KUBERAY: Final = "delete the key: the agents start Ray themselves, in a Job"
REMOVED: Final = {
    "kind": _NO_KUBERAY,
    "ray_version": _NO_KUBERAY,
    "operator_namespace": _NO_KUBERAY,
    "hold_min": "delete the key: results are on the claim",
}
"""Keys that only plans of earlier versions may set, and what to do instead."""
_COLLECTOR_RESOURCES: Final = {"cpu": "1", "memory": "2Gi"}


def kubernetes_settings(plan: Plan) -> KubernetesSettings:
    return plan.profile.kubernetes or KubernetesSettings()


def find_profile_problems(profile: Profile) -> Iterator[Problem]:
    """Find what only profiles of earlier versions may have, and a missing claim."""
    settings, where = profile.kubernetes or KubernetesSettings(), f"profile {profile.profile}: kubernetes"
    if settings.results.claim is None:
        expected = "the name of a PersistentVolumeClaim: ReadWriteOnce serves one node, several need ReadWriteMany"
        yield Problem(f"{where}.results.claim", "missing: a pod's own files are lost with it", expected=expected)
    for key, hint in REMOVED.items():
        if getattr(settings, key) != KubernetesSettings.model_fields[key].default:
            yield Problem(f"{where}.{key}", "was removed in version 0.3", got=getattr(settings, key), hint=hint)


def find_pod_problems(plan: Plan) -> Iterator[Problem]:
    settings = kubernetes_settings(plan)
    where = f"profile {plan.profile.profile}"
    yield from find_profile_problems(plan.profile)
    image = shown_image(plan)
    if image is None:
        hint = "choose another stack with --stack"
        what = f"has no image for {plan.hardware.hardware}, and a pod needs an image"
        yield Problem(f"stack {plan.stack.stack}", what, expected="an image by digest", hint=hint)
    elif ":" in image.reference.rpartition("/")[2]:
        what = "has a tag, but only the digest is checked"
        yield Problem(f"stack {plan.stack.stack}: images.{plan.hardware.image_platform}.reference", what,
                      got=image.reference, expected="a registry and a repository")  # fmt: skip
    if plan.profile.container is not None:
        what = "has no effect in a Kubernetes cluster"
        yield Problem(f"{where}: container", what, expected="these settings in the block kubernetes")
    wanted = list_secrets(plan)
    for name in wanted:
        if name in settings.secrets:
            continue
        yield Problem(f"{where}: kubernetes.secrets.{name}", "missing: a pod does not get this shell's variables",
                      expected="the name of a secret and its key")  # fmt: skip
    yield from _find_clashes(settings, wanted, where)


def _find_clashes(settings: KubernetesSettings, wanted: Sequence[str], where: str) -> Iterator[Problem]:
    """Find variables and mount paths that a profile sets twice, or that every pod already has."""
    own = load_base("pod")["spec"]["containers"][0]
    doubled = sorted({DIGEST_VARIABLE, *(item["name"] for item in own["env"])}.intersection(wanted))
    if doubled:
        yield Problem(
            f"{where}: env",
            "a name is set twice, and Kubernetes takes its last value",
            got=doubled,
            expected="each name once",
        )
    paths = [settings.results.path, INPUTS_PATH, *(claim.path for claim in settings.claims)]
    paths += [mount["mountPath"] for mount in own["volumeMounts"] if mount["name"] != "results"]
    if len(set(paths)) < len(paths):
        yield Problem(f"{where}: kubernetes.claims", "a path is used twice", got=paths, expected="each path once")
    memory, shm = parse_quantity(settings.memory), parse_quantity(settings.shm)
    if memory is not None and shm is not None and shm >= memory:
        what = "is not larger than kubernetes.shm, which counts as memory of the pod"
        yield Problem(f"{where}: kubernetes.memory", what, got=settings.memory, expected=f"more than {settings.shm}")


def pod_run_dir(plan: Plan, run_dir: RunDir) -> str:
    """Return the path at which the pods see the run directory."""
    path = kubernetes_settings(plan).results.path.rstrip("/")
    return f"{path}/{plan.run.run}/{run_dir.run_id}"


def make_command(plan: Plan, module: str, run_dir: RunDir, *options: str) -> list[str]:
    """Return the command with ``$`` doubled; otherwise Kubernetes would expand ``$(NAME)`` in it."""
    words = [kubernetes_settings(plan).python, "-P", "-m", module, pod_run_dir(plan, run_dir), *options]
    return [word.replace("$(", "$$(") for word in words]


def make_pod(plan: Plan, run_dir: RunDir, role: str, nodes: Sequence[str]) -> Object:
    settings, name = kubernetes_settings(plan), make_name(run_dir)
    spec = load_base("pod")["spec"]
    _fill_common(plan, settings, spec)
    options = [f"--num-nodes={plan.layout.num_nodes}", f"--restarts={settings.restarts}"]
    options += [f"--inputs={INPUTS_PATH}", f"--last-word={TERMINATION_LOG}"]
    container = spec["containers"][0]
    container["command"] = make_command(plan, "rlk_repro.job.pod", run_dir, *options)
    container["resources"] = make_resources(plan, settings)
    spec["terminationGracePeriodSeconds"] = settings.grace_s
    spec["affinity"] = make_affinity(plan, settings, name, nodes)
    _add_inputs(spec, name)
    _limit_shm(spec, settings.shm)
    if uses_compute_domain(plan, settings):
        template = make_claim_template_name(name)
        spec["resourceClaims"] = [{"name": _CHANNEL, "resourceClaimTemplateName": template}]
        container["resources"]["claims"] = [{"name": _CHANNEL}]
    if settings.rdma is not None:
        container["securityContext"]["capabilities"]["add"] = [RDMA_CAPABILITY]
    if plan.hardware.platform == "rocm":  # ROCm makes system calls that the default seccomp profile forbids
        container["securityContext"]["seccompProfile"] = {"type": "Unconfined"}
    annotations = make_annotations(plan, run_dir)
    if settings.rdma is not None and settings.rdma.networks is not None:
        annotations[NETWORKS] = settings.rdma.networks
    metadata = {"labels": make_labels(plan, name, role), "annotations": annotations}
    return overlay_pod({"metadata": metadata, "spec": spec}, settings)


def make_collector(plan: Plan, run_dir: RunDir) -> Object:
    """Make a pod without GPU that packs the results on their claim, and then waits while they are copied."""
    settings, name = kubernetes_settings(plan), make_name(run_dir)
    pod = load_base("pod")
    pod["metadata"] = {
        "name": f"{name}-collect",
        "namespace": settings.namespace,
        "labels": make_labels(plan, name, COLLECTOR),
        "annotations": make_annotations(plan, run_dir),
    }
    spec = pod["spec"]
    _fill_common(plan, settings, spec)
    spec["terminationGracePeriodSeconds"] = 5
    terms = make_node_terms(plan, settings, ())[:1]
    arch = [item for term in terms for item in term["matchExpressions"] if item["key"] == "kubernetes.io/arch"]
    if arch:
        selector = {"nodeSelectorTerms": [{"matchExpressions": arch}]}
        spec["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": selector}}
    container = spec["containers"][0]
    container["resources"] = {"requests": _COLLECTOR_RESOURCES, "limits": _COLLECTOR_RESOURCES}
    container["env"] = [item for item in container["env"] if item["name"] not in settings.secrets]
    _limit_shm(spec, "64Mi")
    pack = make_command(plan, "rlk_repro.job.pack", run_dir, TERMINATION_LOG)
    spec["initContainers"] = [{**container, "name": PACK, "command": pack}]
    container["command"] = ["sleep", str(COLLECTOR_S)]
    return pod


def make_resources(plan: Plan, settings: KubernetesSettings) -> Object:
    """Make equal requests and limits, which GPUs require; equal CPU and memory values let a pod be evicted last."""
    values: dict[str, Any] = {}
    for key, quantity in (("cpu", settings.cpu), ("memory", settings.memory)):
        if quantity is not None:
            values[key] = quantity
    if plan.layout.gpus_per_node:
        values[gpu_resource(plan, settings)] = str(plan.layout.gpus_per_node)
    if settings.rdma is not None:
        values[settings.rdma.resource] = str(settings.rdma.count)
    return {"requests": dict(values), "limits": dict(values)} if values else {}


def _fill_common(plan: Plan, settings: KubernetesSettings, spec: Object) -> None:
    image = shown_image(plan)
    assert image is not None
    container = spec["containers"][0]
    container["image"] = image.pinned
    container["env"] += [{"name": DIGEST_VARIABLE, "value": image.digest}, *_secret_env(plan, settings)]
    container["volumeMounts"][0]["mountPath"] = settings.results.path
    spec["volumes"][0]["persistentVolumeClaim"]["claimName"] = settings.results.claim
    for number, claim in enumerate(settings.claims):
        source = {"claimName": claim.claim, "readOnly": claim.read_only}
        spec["volumes"].append({"name": f"claim-{number}", "persistentVolumeClaim": source})
        mount = {"name": f"claim-{number}", "mountPath": claim.path, "readOnly": claim.read_only}
        container["volumeMounts"].append(mount)
    tolerations = make_tolerations(plan, settings)
    if tolerations:
        spec["tolerations"] = tolerations
    if settings.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in settings.image_pull_secrets]
    if settings.service_account is not None:
        spec["serviceAccountName"] = settings.service_account
    if settings.priority_class is not None:
        spec["priorityClassName"] = settings.priority_class
    _fill_user(settings, spec)


def _fill_user(settings: KubernetesSettings, spec: Object) -> None:
    user = settings.run_as
    if user is None:
        return
    context: Object = {"runAsNonRoot": True, "runAsUser": user.user, "runAsGroup": user.group, "fsGroup": user.group}
    if user.supplemental_groups:
        context["supplementalGroups"] = list(user.supplemental_groups)
    spec["securityContext"] |= context


def _secret_env(plan: Plan, settings: KubernetesSettings) -> Iterator[Object]:
    """Yield one variable for each secret; the agent reads the variables when a trial starts."""
    for name in list_secrets(plan):
        place = settings.secrets[name]
        yield {"name": name, "valueFrom": {"secretKeyRef": {"name": place.secret, "key": place.key}}}


def _add_inputs(spec: Object, name: str) -> None:
    items = [{"key": file, "path": file} for file in INPUT_FILES]
    items.append({"key": "job-objects.yaml", "path": "job/objects.yaml"})
    spec["volumes"].append({"name": "inputs", "configMap": {"name": name, "items": items}})
    mount = {"name": "inputs", "mountPath": INPUTS_PATH, "readOnly": True}
    spec["containers"][0]["volumeMounts"].append(mount)


def _limit_shm(spec: Object, size: str) -> None:
    volume = next(volume for volume in spec["volumes"] if volume["name"] == "shm")
    volume["emptyDir"]["sizeLimit"] = size
