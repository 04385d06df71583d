"""Who keeps the objects of a cluster: a dict here, or a real API server (tests/support/kube/client.py)."""

from __future__ import annotations

import copy
import itertools
import threading
import time
import uuid
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Protocol

Object = dict[str, Any]


class Resource(NamedTuple):
    version: str
    plural: str
    kind: str
    is_namespaced: bool = True


RESOURCES: Final = (
    Resource("v1", "pods", "Pod"),
    Resource("v1", "configmaps", "ConfigMap"),
    Resource("v1", "events", "Event"),
    Resource("v1", "persistentvolumeclaims", "PersistentVolumeClaim"),
    Resource("v1", "secrets", "Secret"),
    Resource("v1", "nodes", "Node", is_namespaced=False),
    Resource("v1", "namespaces", "Namespace", is_namespaced=False),
    Resource("networking.k8s.io/v1", "networkpolicies", "NetworkPolicy"),
    Resource("batch/v1", "jobs", "Job"),
    Resource("ray.io/v1", "rayjobs", "RayJob"),
    Resource("resource.nvidia.com/v1beta1", "computedomains", "ComputeDomain"),
    Resource("storage.k8s.io/v1", "storageclasses", "StorageClass", is_namespaced=False),
    Resource("scheduling.k8s.io/v1", "priorityclasses", "PriorityClass", is_namespaced=False),
    Resource("kueue.x-k8s.io/v1beta1", "localqueues", "LocalQueue"),
    Resource("apiextensions.k8s.io/v1", "customresourcedefinitions", "CustomResourceDefinition", is_namespaced=False),
    Resource("authorization.k8s.io/v1", "selfsubjectaccessreviews", "SelfSubjectAccessReview", is_namespaced=False),
)


class Gone(Exception):
    """Somebody else was quicker: the object is not there, or there already."""


class Store(Protocol):
    """What controllers and kubelets need of an API server.  What they get is theirs to change; it changes nothing."""

    def list(self, plural: str) -> list[Object]:
        """Of all namespaces."""
        ...

    def find(self, plural: str, namespace: str, name: str) -> Object | None: ...

    def create(self, plural: str, item: Object) -> Object:
        """Raises Gone where there is one of that name."""
        ...

    def patch_status(self, plural: str, item: Object, status: Object) -> None:
        """What is given replaces what is there; conditions of other types stay.  Raises Gone."""
        ...

    def bind(self, pod: Object, node: str) -> None:
        """Raises Gone."""
        ...

    def delete(self, plural: str, item: Object, grace_s: int | None = None) -> None:
        """With what it owns.  A pod that runs is only marked, until its kubelet deletes it with 0.  Raises Gone."""
        ...


class MemoryStore:
    """``objects`` by plural, namespace and name; whoever reads it directly holds the lock."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.version = itertools.count(1)

    def list(self, plural: str) -> list[Object]:
        with self.lock:
            return [copy.deepcopy(item) for key, item in sorted(self.objects.items()) if key[0] == plural]

    def find(self, plural: str, namespace: str, name: str) -> Object | None:
        with self.lock:
            return copy.deepcopy(self.objects.get((plural, namespace, name)))

    def create(self, plural: str, item: Object) -> Object:
        with self.lock:
            metadata = item["metadata"]
            if key_of(plural, item) in self.objects:
                raise Gone(metadata["name"])
            metadata.update(uid=str(uuid.uuid4()), resourceVersion=str(next(self.version)), creationTimestamp=now())
            if plural == "pods":
                item.setdefault("status", {"phase": "Pending"})
            self.objects[key_of(plural, item)] = item
            return copy.deepcopy(item)

    def patch_status(self, plural: str, item: Object, status: Object) -> None:
        with self.lock:
            known = self._find_same(plural, item).setdefault("status", {})
            if "conditions" in status:
                kept = {each["type"]: each for each in known.get("conditions", ())}
                status = {
                    **status,
                    "conditions": [*(kept | {each["type"]: each for each in status["conditions"]}).values()],
                }
            merge(known, status)

    def bind(self, pod: Object, node: str) -> None:
        with self.lock:
            self._find_same("pods", pod)["spec"]["nodeName"] = node

    def delete(self, plural: str, item: Object, grace_s: int | None = None) -> None:
        with self.lock:
            known = self._find_same(plural, item)
            if plural == "pods" and grace_s != 0 and known["status"]["phase"] == "Running":
                known["metadata"].setdefault("deletionTimestamp", now())
                return
            del self.objects[key_of(plural, item)]
            owned = [(key[0], other) for key, other in self.objects.items() if is_owned(other, item)]
            for kind, other in owned:
                self.delete(kind, other)

    def put(self, plural: str, item: Object) -> None:
        """As it is."""
        with self.lock:
            self.objects[key_of(plural, item)] = item

    def _find_same(self, plural: str, item: Object) -> Object:
        known = self.objects.get(key_of(plural, item))
        if known is None or known["metadata"].get("uid") != item["metadata"].get("uid"):
            raise Gone(item["metadata"]["name"])
        return known


def key_of(plural: str, item: Object) -> tuple[str, str, str]:
    return plural, item["metadata"].get("namespace", ""), item["metadata"]["name"]


def merge(item: Object, patch: Mapping[str, Any]) -> None:
    for key, value in patch.items():
        if isinstance(value, dict) and isinstance(item.get(key), dict):
            merge(item[key], value)
        elif value is None:
            item.pop(key, None)
        else:
            item[key] = value


def is_owned(item: Object, owner: Object) -> bool:
    uid = owner["metadata"].get("uid")
    return uid is not None and any(each["uid"] == uid for each in item["metadata"].get("ownerReferences", ()))


def has_condition(item: Object, *kinds: str) -> bool:
    conditions = (item.get("status") or {}).get("conditions") or ()
    return any(each["type"] in kinds and each["status"] == "True" for each in conditions)


def make_condition(kind: str, reason: str = "", message: str = "", status: str = "True") -> Object:
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": now()}


def suffix() -> str:
    return uuid.uuid4().hex[:5]


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
