"""The settings of a Kubernetes site: the ``kubernetes`` section of a profile."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field, JsonValue

from rlk_repro.spec.site import AbsolutePath, Line
from rlk_repro.spec.values import REMOVED, EnvName, GrowingModel, Model, Positive, Word

_NAME = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_VALUE = r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
_KEY = rf"^({_NAME}(\.{_NAME})*/)?{_VALUE}$"
_QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$"
Label: TypeAlias = Annotated[str, Field(pattern=rf"^{_NAME}$", max_length=63)]
ObjectName: TypeAlias = Annotated[str, Field(pattern=rf"^{_NAME}(\.{_NAME})*$", max_length=253)]
Quantity: TypeAlias = Annotated[str, Field(pattern=_QUANTITY, max_length=40)]
LabelKey: TypeAlias = Annotated[str, Field(pattern=_KEY, max_length=317)]
LabelValue: TypeAlias = Annotated[str, Field(pattern=rf"^{_VALUE}$", max_length=63)]
UserId: TypeAlias = Annotated[int, Field(ge=1, le=2**31 - 1)]


class SecretKey(Model):
    """The key of a Secret in the cluster; rlk-repro's files never hold the value itself."""

    secret: ObjectName
    key: Word


class Results(Model):
    """The storage of run directories, which plans of earlier versions may lack."""

    claim: ObjectName | None = Field(None, description="ReadWriteMany for several nodes")
    path: AbsolutePath = Field("/results", description="path at which the pods mount the claim")


class VolumeClaim(Model):
    """A further PersistentVolumeClaim, such as one with models or data sets."""

    claim: ObjectName
    path: AbsolutePath
    read_only: bool = True


class Rdma(Model):
    """How pods request RDMA devices.  RDMA needs IPC_LOCK, which only the Pod Security level ``privileged`` allows."""

    resource: LabelKey = Field(description="name of the resource, such as rdma/ib or rdma/hca_shared_devices_a")
    count: Annotated[int, Field(ge=1, le=64)] = 1
    networks: Line | None = Field(None, description="value of the annotation k8s.v1.cni.cncf.io/networks")


class RunAs(Model):
    """A user other than root, for images that support one; pods then meet the Pod Security level ``restricted``."""

    user: UserId
    group: UserId
    supplemental_groups: tuple[UserId, ...] = Field((), description="further groups, such as video and render on AMD")


class Toleration(Model):
    """A taint that the pods tolerate, in addition to the taints of GPU and Arm nodes."""

    key: LabelKey
    value: LabelValue | None = Field(None, description="value of the taint; default: any value")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] = "NoSchedule"


class Overlay(Model):
    """This site's additions to the job's Kubernetes objects; maps are merged by key, lists by their items' names."""

    metadata: dict[str, JsonValue] = Field({}, description="further labels and annotations of the job")
    pod_metadata: dict[str, JsonValue] = Field({}, description="further labels and annotations of every agent's pod")
    pod_spec: dict[str, JsonValue] = Field({}, description="further fields of the pods; the container is called agent")


class KubernetesSettings(GrowingModel):
    """How a job is requested in this cluster."""

    added_later: ClassVar[frozenset[str]] = frozenset(
        {"gang", "gpu_label", "network_policy", "operator_namespace", "overlay", "restarts"}
    )

    context: Word | None = Field(None, description="context of the kubeconfig; default: the current context")
    namespace: Label = "default"
    queue: Label | None = Field(None, description="name of a LocalQueue of Kueue")
    gang: Literal["required", "waived"] = Field(
        "required", description="whether several nodes need a queue or a known gang scheduler"
    )
    priority_class: ObjectName | None = None
    service_account: ObjectName | None = None
    image_pull_secrets: tuple[ObjectName, ...] = Field((), description="names of them")
    secrets: dict[EnvName, SecretKey] = Field({}, description="of the variables with from_env")
    results: Results = Results()
    claims: tuple[VolumeClaim, ...] = Field((), description="further claims that every pod mounts")
    cpu: Quantity | None = Field(None, description="of a pod")
    memory: Quantity | None = Field(None, description="of a pod, including its files in /dev/shm")
    shm: Quantity = Field("64Gi", description="size of /dev/shm")
    gpu_resource: LabelKey | None = Field(None, description="default: the vendor's")
    gpu_label: LabelKey | None = Field(
        None, description="key of the values in gpu_products; default: the vendor's product label"
    )
    gpu_products: tuple[LabelValue, ...] = Field(
        (), description="values of the GPU product label here; default: those of the hardware file"
    )
    node_labels: dict[LabelKey, tuple[LabelValue, ...]] = Field(
        {}, description="labels that nodes must have, each with its allowed values"
    )
    tolerations: tuple[Toleration, ...] = ()
    rdma: Rdma | None = None
    compute_domain: bool = Field(False, description="whether to use NVLink across nodes (GB200)")
    network_policy: bool = Field(True, description="whether other pods may not reach a run's")
    overlay: Overlay | None = None
    run_as: RunAs | None = Field(None, description="user of the pods; default: that of the image")
    python: Word = Field("python3", description="an interpreter that can import rlk_repro")
    max_time_min: Positive | None = Field(None, description="of the job, with the wait for nodes")
    restarts: Annotated[int, Field(ge=0, le=100)] = Field(6, description="after evictions")
    grace_s: Annotated[int, Field(ge=60, le=3600)] = Field(
        120, description="seconds from SIGTERM to the forced end of a pod, which packs results"
    )
    ttl_s: Annotated[int, Field(ge=0, le=31_536_000)] = Field(
        86_400, description="seconds until an ended job's objects are removed, but no results"
    )
    kind: Literal["rayjob", "job"] = Field("job", description=REMOVED)
    operator_namespace: Label | None = Field(None, description=REMOVED)
    ray_version: Line | None = Field(None, description=REMOVED)
    hold_min: Positive = Field(720.0, description=REMOVED)
