"""What a test sees of a cluster, whoever keeps its objects: faults, claims, pods, and what is left of a run."""

from __future__ import annotations

import contextlib
import http.client
import threading
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Final, Self

import yaml

from rlk_repro.clusters.k8s.naming import CONTAINER, ID
from rlk_repro.clusters.k8s.states import find_latest, role_of
from tests.support.kube.controllers import Controllers
from tests.support.kube.kubelet import Faults, Kubelet, RunningPod
from tests.support.kube.store import Object, Store

OURS: Final = ("computedomains", "configmaps", "jobs", "networkpolicies", "pods", "rayjobs")


class Cluster(ABC):
    """Use as a context manager; ``kubeconfig`` is what kubectl needs."""

    tick_s = 0.05
    has_scheduler = has_jobs = False
    has_garbage = True

    def __init__(self, folder: Path, store: Store, faults: Faults | None, num_nodes: int) -> None:
        self.folder = folder
        self.store = store
        self.faults = faults or Faults()
        self.kubelet = Kubelet(store, folder, self.faults)
        self.controllers = Controllers(store, self.kubelet, self.faults, num_nodes)
        self.kubeconfig = folder / "kubeconfig"
        self.num_nodes = num_nodes
        self.is_over = threading.Event()
        self.keeper = threading.Thread(target=self._keep, daemon=True)

    def __enter__(self) -> Self:
        self.set_up()
        self.keeper.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.is_over.set()
        self.keeper.join()
        self.controllers.close()
        self.kubelet.close()
        self.clean_up()

    def set_up(self) -> None:
        self.start()

    def clean_up(self) -> None:
        self.stop()

    @abstractmethod
    def start(self) -> None:
        """The API is there, again."""

    @abstractmethod
    def stop(self) -> None:
        """The API is away; what runs goes on."""

    def locked(self) -> contextlib.AbstractContextManager[object]:
        """While controllers and kubelets take one step."""
        return contextlib.nullcontext()

    def write_kubeconfig(self, cluster: Object, user: Object) -> None:
        self.kubeconfig.write_text(yaml.safe_dump(make_kubeconfig(cluster, user)))

    @property
    def running(self) -> dict[str, RunningPod]:
        return self.kubelet.running

    # what a test looks at
    def ours(self) -> list[str]:
        """Everything that carries our label."""
        return [
            f"{plural}/{item['metadata']['name']}"
            for plural in OURS
            for item in self.store.list(plural)
            if ID in item["metadata"].get("labels", {})
        ]

    def pod(self, role: str) -> Object | None:
        pods = find_latest(self.store.list("pods"))
        return next((pod for pod in pods if role_of(pod) == role), None)

    # what a test does
    def claim(self, name: str) -> Path:
        path = self.folder / "claims" / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    @abstractmethod
    def add(self, plural: str, item: Object) -> None:
        """An object as it is, in place of one of its name."""

    def delete(self, plural: str, name: str) -> None:
        """As somebody else would."""
        item = self.store.find(plural, "default", name)
        assert item is not None
        self.store.delete(plural, item)

    def evict(self, role: str, reason: str = "Evicted", condition: str = "TerminationByKubelet") -> None:
        """As the kubelet does."""
        pod = self.pod(role)
        assert pod is not None
        self.kubelet.evict(pod, reason, condition)

    @abstractmethod
    def refuse(self, kind: str) -> None:
        """No object of this kind, because of a quota; of all others again."""

    @abstractmethod
    def forbid(self, plural: str) -> None:
        """The user has no permission for it."""

    @abstractmethod
    def remove_operators(self) -> None:
        """A cluster without custom resources."""

    @abstractmethod
    def show(self, name: str, pod: RunningPod) -> None:
        """A pod without a first process, in which commands run."""

    def _keep(self) -> None:
        while not self.is_over.wait(self.tick_s):
            # an API that is away is waited for, as by everybody
            with contextlib.suppress(OSError, http.client.HTTPException), self.locked():
                self.keep()

    def keep(self) -> None:
        self.controllers.keep(
            has_scheduler=self.has_scheduler, has_jobs=self.has_jobs, has_garbage=self.has_garbage
        )  # fmt: skip
        self.kubelet.keep(self.store.list("pods"))


def make_far_pod(name: str) -> Object:
    container = {"name": CONTAINER, "image": "registry.example/far"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"nodeName": "node-0", "containers": [container]},
        "status": {"phase": "Running"},
    }


def make_kubeconfig(cluster: Object, user: Object) -> Object:
    context: dict[str, Any] = {"cluster": "test", "user": "me", "namespace": "default"}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "me", "user": user}],
        "contexts": [{"name": "test", "context": context}],
        "current-context": "test",
    }
