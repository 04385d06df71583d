"""Make the pods of a job: image, command, environment, volumes, resources, security."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from rlk_repro.base.errors import Problem
from rlk_repro.clusters.asking import list_secrets
from rlk_repro.clusters.k8s.naming import AGENT, COLLECTOR, NETWORKS, make_annotations, make_labels, make_name
from rlk_repro.clusters.k8s.nodes import (
    ARCH,
    Object,
    gpu_resource,
    make_affinity,
    make_node_terms,
    make_tolerations,
    uses_compute_domain,
)
from rlk_repro.clusters.k8s.overlay import overlay_pod
from rlk_repro.clusters.k8s.tree import load_base, parse_quantity
from rlk_repro.images.unpublished import shown_image
from rlk_repro.plan import Plan
from rlk_repro.probes.container import DIGEST_VARIABLE
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import KubernetesSettings, Profile

INPUTS_PATH: Final = "/etc/rlk-repro"
INPUT_FILES: Final = ("run.yaml", "stack.yaml", "hardware.yaml", "profile.yaml", "plan.json", "submission.json")
TERMINATION_LOG: Final = "/dev/termination-log"
CHANNEL: Final = "channel"
COLLECTOR_S: Final = 86_400
"""A collector pod that nobody deletes ends by itself after so many seconds."""
_COLLECTOR_SIZE: Final = {"cpu": "1", "memory": "2Gi"}
_NO_KUBERAY: Final = "delete the key: the agents start Ray themselves, in a Job"
REMOVED: Final = {
    "kind": _NO_KUBERAY,
    "ray_version": _NO_KUBERAY,
    "operator_namespace": _NO_KUBERAY,
    "hold_min": "delete the key: results are on the claim",
}
"""Keys that only plans of earlier versions may set, and what to do instead."""


def kubernetes_settings(plan: Plan) -> KubernetesSettings:
    return plan.profile.kubernetes or KubernetesSettings()


def find_profile_problems(profile: Profile) -> Iterator[Problem]:
    """Find what only profiles of earlier versions may have, and a missing claim."""
    settings, where = profile.kubernetes or KubernetesSettings(), f"profile {profile.profile}: kubernetes"
    if settings.results.claim is None:
        expected = "the name of a PersistentVolumeClaim: ReadWriteOnce serves one node, several need ReadWriteMany"
        yield Problem(f"{where}.results.claim", "missing: a pod's own files are lost with it", expected=expected)
    for key, hint in REMOVED.items():
        value = getattr(settings, key)
        if value != KubernetesSettings.model_fields[key].default:
            yield Problem(f"{where}.{key}", "was removed in version 0.3", got=value, hint=hint)


def find_pod_problems(plan: Plan) -> Iterator[Problem]:
    settings, where = kubernetes_settings(plan), f"profile {plan.profile.profile}"
    yield from find_profile_problems(plan.profile)
    image = shown_image(plan)
    if image is None:
        what = f"has no image for {plan.hardware.hardware}, and a pod needs an image"
        yield Problem(f"stack {plan.stack.stack}", what, expected="an image by digest", hint="choose another --stack")
    elif ":" in image.reference.rpartition("/")[2]:
        place = f"stack {plan.stack.stack}: images.{plan.hardware.image_platform}.reference"
        yield Problem(place, "has a tag, but only the digest is checked", got=image.reference)
    if plan.profile.container is not None:
        what = "has no effect in a Kubernetes cluster"
        yield Problem(f"{where}: container", what, expected="these settings in the block kubernetes")
    own = load_base("pod")["spec"]["containers"][0]
    taken = {DIGEST_VARIABLE, *(item["name"] for item in own["env"])}
    for name in list_secrets(plan):
        if name in taken:
            yield Problem(f"{where}: env", "a name is set twice, and Kubernetes takes its last value", got=name)
        elif name not in settings.secrets:
            what = "missing: a pod does not get this shell's variables"
            yield Problem(f"{where}: kubernetes.secrets.{name}", what, expected="the name of a secret and its key")
    memory, shm = parse_quantity(settings.memory), parse_quantity(settings.shm)
    if memory is not None and shm is not None and shm >= memory:
        what = "is not larger than kubernetes.shm, which counts as memory of the pod"
        yield Problem(f"{where}: kubernetes.memory", what, got=settings.memory, expected=f"more than {settings.shm}")


def pod_run_dir(plan: Plan, run_dir: RunDir) -> str:
    """Return the path at which the pods see the run directory."""
    return f"{kubernetes_settings(plan).results.path.rstrip('/')}/{plan.run.run}/{run_dir.run_id}"


def make_pod(plan: Plan, run_dir: RunDir, nodes: Sequence[str] = ()) -> Object:
    settings, name = kubernetes_settings(plan), make_name(run_dir)
    options = [f"--num-nodes={plan.layout.num_nodes}", f"--restarts={settings.restarts}"]
    options += [f"--inputs={INPUTS_PATH}", f"--last-word={TERMINATION_LOG}"]
    spec = _make_spec(plan, settings, _make_command(plan, "rlk_repro.job.pod", run_dir, *options), settings.shm)
    spec["terminationGracePeriodSeconds"] = settings.grace_s
    spec["affinity"] |= make_affinity(plan, settings, name, nodes)
    items = [{"key": file, "path": file} for file in INPUT_FILES]
    items.append({"key": "job-objects.yaml", "path": "job/objects.yaml"})
    spec["volumes"].append({"name": "inputs", "configMap": {"name": name, "items": items}})
    container = spec["containers"][0]
    container["volumeMounts"].append({"name": "inputs", "mountPath": INPUTS_PATH, "readOnly": True})
    for variable in list_secrets(plan):  # the agent reads these variables when a trial starts
        secret = settings.secrets[variable]
        reference = {"secretKeyRef": {"name": secret.secret, "key": secret.key}}
        container["env"].append({"name": variable, "valueFrom": reference})
    container["resources"] = make_resources(plan, settings)
    if uses_compute_domain(plan, settings):
        spec["resourceClaims"] = [{"name": CHANNEL, "resourceClaimTemplateName": f"{name}-{CHANNEL}"}]
        container["resources"]["claims"] = [{"name": CHANNEL}]
    annotations = make_annotations(plan, run_dir)
    if settings.rdma is not None:
        container["securityContext"]["capabilities"]["add"] = ["IPC_LOCK"]
        if settings.rdma.networks is not None:
            annotations[NETWORKS] = settings.rdma.networks
    if plan.hardware.platform == "rocm":  # ROCm makes system calls that the default seccomp profile forbids
        container["securityContext"]["seccompProfile"] = {"type": "Unconfined"}
    metadata = {"labels": make_labels(plan, name, AGENT), "annotations": annotations}
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
    spec = pod["spec"] = _make_spec(plan, settings, ["sleep", str(COLLECTOR_S)], "64Mi")
    spec["terminationGracePeriodSeconds"] = 5
    terms = make_node_terms(plan, settings, ())[:1]
    arch = [item for term in terms for item in term["matchExpressions"] if item["key"] == ARCH]
    selector = {"nodeSelectorTerms": [{"matchExpressions": arch}]}
    wanted = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": selector}}
    spec["affinity"] = wanted if arch else {}
    container = spec["containers"][0]
    container["resources"] = {"requests": _COLLECTOR_SIZE, "limits": _COLLECTOR_SIZE}
    pack = _make_command(plan, "rlk_repro.job.pack", run_dir, TERMINATION_LOG)
    spec["initContainers"] = [{**container, "name": "pack", "command": pack}]
    return pod


def make_resources(plan: Plan, settings: KubernetesSettings) -> Object:
    """Make equal requests and limits, which GPUs require; equal CPU and memory values let a pod be evicted last."""
    values: dict[str, Any] = {"cpu": settings.cpu, "memory": settings.memory}
    if plan.layout.gpus_per_node:
        values[gpu_resource(plan, settings)] = str(plan.layout.gpus_per_node)
    if settings.rdma is not None:
        values[settings.rdma.resource] = str(settings.rdma.count)
    given = {key: quantity for key, quantity in values.items() if quantity is not None}
    return {"requests": given, "limits": dict(given)} if given else {}


def _make_command(plan: Plan, module: str, run_dir: RunDir, *options: str) -> list[str]:
    """Return the command with ``$`` doubled; otherwise Kubernetes would expand ``$(NAME)`` in it."""
    words = [kubernetes_settings(plan).python, "-P", "-m", module, pod_run_dir(plan, run_dir), *options]
    return [word.replace("$(", "$$(") for word in words]


def _make_spec(plan: Plan, settings: KubernetesSettings, command: list[str], shm: str) -> Object:
    image = shown_image(plan)
    assert image is not None
    spec: Object = load_base("pod")["spec"]
    container = spec["containers"][0]
    container |= {"image": image.pinned, "command": command}
    container["env"].append({"name": DIGEST_VARIABLE, "value": image.digest})
    container["volumeMounts"][0]["mountPath"] = settings.results.path
    spec["volumes"][0]["persistentVolumeClaim"]["claimName"] = settings.results.claim
    spec["volumes"][1]["emptyDir"]["sizeLimit"] = shm
    for number, claim in enumerate(settings.claims):
        volume = {"claimName": claim.claim, "readOnly": claim.read_only}
        spec["volumes"].append({"name": f"claim-{number}", "persistentVolumeClaim": volume})
        mount = {"name": f"claim-{number}", "mountPath": claim.path, "readOnly": claim.read_only}
        container["volumeMounts"].append(mount)
    optional = {
        "tolerations": make_tolerations(plan, settings),
        "imagePullSecrets": [{"name": name} for name in settings.image_pull_secrets],
        "serviceAccountName": settings.service_account,
        "priorityClassName": settings.priority_class,
    }
    spec |= {key: value for key, value in optional.items() if value}
    user = settings.run_as
    if user is not None:
        spec["securityContext"] |= {"runAsNonRoot": True, "runAsUser": user.user, "runAsGroup": user.group}
        spec["securityContext"]["fsGroup"] = user.group
        if user.supplemental_groups:
            spec["securityContext"]["supplementalGroups"] = list(user.supplemental_groups)
    return spec
