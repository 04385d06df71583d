"""Make the pods of a job: image, command, environment, volumes, resources, security."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from rlk_repro.base.errors import Problem
from rlk_repro.clusters.asking import list_secrets
from rlk_repro.clusters.k8s.naming import (
    AGENT,
    COLLECTOR,
    ROLE,
    kubernetes_settings,
    load_base,
    make_labels,
    make_name,
    uses_compute_domain,
)
from rlk_repro.clusters.k8s.nodes import ARCH, Object, gpu_resource, make_affinity, make_tolerations
from rlk_repro.images.stacks import shown_image
from rlk_repro.plan import Plan
from rlk_repro.probes.container import DIGEST_VARIABLE
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import OCI_ARCHITECTURES, KubernetesSettings, Profile

INPUTS_PATH: Final = "/etc/rlk-repro"
INPUT_FILES: Final = ("run.yaml", "stack.yaml", "hardware.yaml", "profile.yaml", "plan.json")
CHANNEL: Final = "channel"
COLLECTOR_S: Final = 86_400
"""A collector pod that nobody deletes ends by itself after so many seconds."""
_COLLECTOR_SIZE: Final = {"cpu": "1", "memory": "2Gi"}
NETWORKS: Final = "k8s.v1.cni.cncf.io/networks"


def find_profile_problems(profile: Profile) -> Iterator[Problem]:
    """Find a missing claim, which plans of earlier versions may lack."""
    settings, where = profile.kubernetes or KubernetesSettings(), f"profile {profile.profile}: kubernetes"
    if settings.results.claim is None:
        expected = "the name of a PersistentVolumeClaim: ReadWriteOnce serves one node, several need ReadWriteMany"
        yield Problem(f"{where}.results.claim", "missing: a pod's own files are lost with it", expected=expected)


def find_pod_problems(plan: Plan) -> Iterator[Problem]:
    settings, where = kubernetes_settings(plan), f"profile {plan.profile.profile}"
    yield from find_profile_problems(plan.profile)
    image = shown_image(plan)
    if image is None:
        what = f"has no image for {plan.hardware.hardware}, and a pod needs an image"
        yield Problem(f"stack {plan.stack.stack}", what, expected="an image by digest", hint="choose another --stack")
    if plan.profile.container is not None:
        what = "has no effect in a Kubernetes cluster"
        yield Problem(f"{where}: container", what, expected="these settings in the block kubernetes")
    own = load_base("pod")["spec"]["containers"][0]["env"]
    for name in list_secrets(plan):
        if name in {DIGEST_VARIABLE, *(item["name"] for item in own)}:
            what = "a name is set twice, and Kubernetes takes its last value"
            yield Problem(f"{where}: env", what, got=name)
        elif name not in settings.secrets:
            what = "missing: a pod does not get this shell's variables"
            yield Problem(f"{where}: kubernetes.secrets.{name}", what, expected="the name of a secret and its key")


def pod_run_dir(plan: Plan, run_dir: RunDir) -> str:
    """Return the path at which the pods see the run directory."""
    return f"{kubernetes_settings(plan).results.path.rstrip('/')}/{plan.run.run}/{run_dir.run_id}"


def make_pod(plan: Plan, run_dir: RunDir, nodes: Sequence[str] = ()) -> Object:
    settings, name = kubernetes_settings(plan), make_name(run_dir)
    command = [settings.python, "-P", "-m", "rlk_repro.job.pod", pod_run_dir(plan, run_dir)]
    command += [f"--num-nodes={plan.layout.num_nodes}"]
    # Kubernetes would expand ``$(NAME)``
    spec = _make_spec(plan, [word.replace("$(", "$$(") for word in command], settings.shm)
    spec["terminationGracePeriodSeconds"] = settings.grace_s
    spec["affinity"] |= make_affinity(plan, name, nodes)
    items = [{"key": file, "path": file} for file in (*INPUT_FILES, "submission.json")]
    items.append({"key": "job-objects.yaml", "path": "job/objects.yaml"})
    spec["volumes"].append({"name": "inputs", "configMap": {"name": name, "items": items}})
    container = spec["containers"][0]
    container["volumeMounts"].append({"name": "inputs", "mountPath": INPUTS_PATH, "readOnly": True})
    for variable in list_secrets(plan):  # the agent reads these variables when a trial starts
        secret = settings.secrets[variable]
        reference = {"secretKeyRef": {"name": secret.secret, "key": secret.key}}
        container["env"].append({"name": variable, "valueFrom": reference})
    # GPUs need equal requests and limits; with equal CPU and memory too, a pod is evicted last
    sizes: dict[str, Any] = {"cpu": settings.cpu, "memory": settings.memory}
    if plan.layout.gpus_per_node:
        sizes[gpu_resource(plan)] = str(plan.layout.gpus_per_node)
    if settings.rdma is not None:
        sizes[settings.rdma.resource] = str(settings.rdma.count)
    sizes = {key: size for key, size in sizes.items() if size is not None}
    container["resources"] = {"requests": sizes, "limits": dict(sizes)}
    if uses_compute_domain(plan):
        spec["resourceClaims"] = [{"name": CHANNEL, "resourceClaimTemplateName": f"{name}-{CHANNEL}"}]
        container["resources"]["claims"] = [{"name": CHANNEL}]
    metadata: Object = {"labels": make_labels(plan, name) | {ROLE: AGENT}}
    if settings.rdma is not None:
        container["securityContext"]["capabilities"]["add"] = ["IPC_LOCK"]
        if settings.rdma.networks is not None:
            metadata["annotations"] = {NETWORKS: settings.rdma.networks}
    if plan.hardware.platform == "rocm":  # ROCm makes system calls that the default seccomp profile forbids
        container["securityContext"]["seccompProfile"] = {"type": "Unconfined"}
    return {"metadata": metadata, "spec": spec}


def make_collector(plan: Plan, run_dir: RunDir) -> Object:
    """Make a pod without GPU that waits while the results are packed on their claim and copied."""
    settings, name = kubernetes_settings(plan), make_name(run_dir)
    pod = load_base("pod")
    labels = make_labels(plan, name) | {ROLE: COLLECTOR}
    pod["metadata"] = {"name": f"{name}-collect", "namespace": settings.namespace, "labels": labels}
    spec = pod["spec"] = _make_spec(plan, ["sleep", str(COLLECTOR_S)], "64Mi")
    spec["terminationGracePeriodSeconds"] = 5
    del spec["affinity"]
    if plan.hardware.machine in OCI_ARCHITECTURES:
        spec["nodeSelector"] = {ARCH: OCI_ARCHITECTURES[plan.hardware.machine]}
    spec["containers"][0]["resources"] = {"requests": _COLLECTOR_SIZE, "limits": _COLLECTOR_SIZE}
    return pod


def _make_spec(plan: Plan, command: list[str], shm: str) -> Object:
    settings, image = kubernetes_settings(plan), shown_image(plan)
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
        "tolerations": make_tolerations(plan),
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
