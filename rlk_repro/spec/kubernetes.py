"""What a Kubernetes site needs: the ``kubernetes`` part of a profile.

Values only; ``clusters.k8s`` makes objects of them and refuses what a controller would.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field, JsonValue

from rlk_repro.spec.site import AbsolutePath, Line
from rlk_repro.spec.values import EnvName, GrowingModel, Model, PathProblem, Positive, Word

_NAME = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
Label: TypeAlias = Annotated[str, Field(pattern=rf"^{_NAME}$", max_length=63)]
"""A DNS label, such as the name of a namespace."""
ObjectName: TypeAlias = Annotated[str, Field(pattern=rf"^{_NAME}(\.{_NAME})*$", max_length=253)]
Quantity: TypeAlias = Annotated[
    str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$", max_length=40)
]
LabelKey: TypeAlias = Annotated[
    str,
    Field(pattern=rf"^({_NAME}(\.{_NAME})*/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$", max_length=317),
]
LabelValue: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$", max_length=63)]
SecretKeyName: TypeAlias = Annotated[str, Field(pattern=r"^[-._a-zA-Z0-9]+$", max_length=253)]
UserId: TypeAlias = Annotated[int, Field(ge=1, le=2**31 - 1)]


class SecretKey(Model):
    """Where a secret value lies in the cluster; the value itself is in no file of ours."""

    secret: ObjectName
    key: SecretKeyName


class Results(Model):
    """Where run directories go.  Without a claim they lie in the leading pod and are gone with it."""

    claim: ObjectName | None = Field(
        None, description="a PersistentVolumeClaim that several nodes can write (ReadWriteMany)"
    )
    path: AbsolutePath = Field("/results", description="where the pods see it")


class Claim(Model):
    """A further PersistentVolumeClaim, such as one with models or data sets."""

    claim: ObjectName
    path: AbsolutePath
    read_only: bool = True


class Rdma(Model):
    """How pods ask for RDMA devices here.  It needs the capability IPC_LOCK, hence a privileged namespace."""

    resource: LabelKey = Field(description="such as rdma/ib or rdma/hca_shared_devices_a")
    count: Annotated[int, Field(ge=1, le=64)] = 1
    networks: Line | None = Field(None, description="value of the annotation k8s.v1.cni.cncf.io/networks")


class RunAs(Model):
    """A user other than root, where the image supports one: the pods are then fit for the level ``restricted``."""

    user: UserId
    group: UserId
    supplemental_groups: tuple[UserId, ...] = Field((), description="such as those of video and render on AMD nodes")


class Toleration(Model):
    """A taint that the pods tolerate, besides those of GPU and Arm nodes."""

    key: LabelKey
    value: LabelValue | None = Field(None, description="none: any value")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] = "NoSchedule"


class Overlay(Model):
    """What this site adds to the objects: merged as it is, by key and by the names of list items."""

    metadata: dict[str, JsonValue] = Field({}, description="of the job: labels and annotations beside ours")
    pod_metadata: dict[str, JsonValue] = Field({}, description="of every agent's pod")
    pod_spec: dict[str, JsonValue] = Field({}, description="of every agent's pod, whose container is called agent")


class KubernetesSettings(GrowingModel):
    """How a job is asked for in this cluster."""

    added_later: ClassVar[frozenset[str]] = frozenset({"network_policy", "operator_namespace", "overlay"})

    kind: Literal["rayjob", "job", "jobset"] = Field(
        "rayjob", description="rayjob needs KubeRay, job needs nothing; jobset is read in old plans, and made no more"
    )
    context: Word | None = Field(None, description="of the kubeconfig; default: the current one")
    namespace: Label = "default"
    queue: Label | None = Field(None, description="a LocalQueue of Kueue")
    priority_class: ObjectName | None = None
    service_account: ObjectName | None = None
    image_pull_secrets: tuple[ObjectName, ...] = Field((), description="by name; they lie in the namespace")
    secrets: dict[EnvName, SecretKey] = Field({}, description="where the variables lie that env takes from_env")
    results: Results = Results()
    claims: tuple[Claim, ...] = Field((), description="mounted into every pod")
    cpu: Quantity | None = Field(None, description="of a pod; with memory it makes the pods Guaranteed")
    memory: Quantity | None = Field(None, description="of a pod; what is written to /dev/shm counts")
    shm: Quantity = Field("64Gi", description="size of /dev/shm")
    gpu_resource: LabelKey | None = Field(None, description="default: nvidia.com/gpu or amd.com/gpu")
    gpu_products: tuple[LabelValue, ...] = Field(
        (), description="values of the product label here; default: known ones"
    )
    node_labels: dict[LabelKey, tuple[LabelValue, ...]] = Field({}, description="nodes must have one of these values")
    tolerations: tuple[Toleration, ...] = ()
    rdma: Rdma | None = None
    compute_domain: bool = Field(False, description="NVLink across nodes by a ComputeDomain (GB200, DRA driver)")
    network_policy: bool = Field(
        True, description="nobody but the run's own pods and KubeRay reaches them; false where you may not create one"
    )
    operator_namespace: Label | None = Field(
        None, description="where KubeRay's operator runs; default: wherever its pods have the label of its chart"
    )
    overlay: Overlay | None = None
    run_as: RunAs | None = Field(None, description="default: the image's own user, which is root in vime's images")
    python: Word = Field("python3", description="the interpreter in the image that has rlk_repro")
    ray_version: Annotated[str, Field(pattern=r"^[0-9]+\.[0-9]+\.[0-9]+[0-9A-Za-z.]*$", max_length=40)] | None = Field(
        None, description="of the image, for KubeRay; the leading agent compares"
    )
    max_time_min: Positive | None = Field(None, description="the job is ended after that, waiting for nodes included")
    grace_s: Annotated[int, Field(ge=60, le=3600)] = Field(
        120, description="between the wish to end a pod and its end; the agents pack meanwhile"
    )
    ttl_s: Annotated[int, Field(ge=0, le=31_536_000)] = Field(
        86_400, description="ended jobs and job sets are removed after that; KubeRay removes clusters only, at once"
    )
    hold_min: Positive = Field(
        720.0, description="without a claim: the leading pod stays for so long, or until the bundle is collected"
    )


def kubernetes_problems(settings: KubernetesSettings | None) -> list[PathProblem]:
    """What old plans may say and an author may not."""
    if settings is None or settings.kind != "jobset":
        return []
    instead = "job, which takes several nodes and needs no operator"
    return [(("kubernetes", "kind"), "is made no more", settings.kind, instead)]
