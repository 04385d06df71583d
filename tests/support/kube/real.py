"""A real API server as the cluster of a test; its nodes and KubeRay are stand-ins.

The control plane serves many tests in turn: each begins with nodes of its own, and removes what it made.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import yaml

from rlk_repro.clusters.k8s.naming import ID
from rlk_repro.clusters.k8s.propose import SECURITY_LABEL
from rlk_repro.clusters.k8s.sent import COMPUTE_DOMAINS, KINDS, NETWORK_POLICIES
from tests.support.kube.client import ApiStore, Client
from tests.support.kube.cluster import Cluster, make_far_pod
from tests.support.kube.kubelet import Faults, RunningPod
from tests.support.kube.plane import USER, ControlPlane, wait_until
from tests.support.kube.store import Gone, Object, make_condition

SPACE: Final = "default"
# docs/kubernetes.md names these permissions
PERMISSIONS: Final = {
    "pods": ("create", "delete", "get", "list"),
    "pods/exec": ("create",),
    "configmaps": ("create", "delete", "list"),
    "events": ("list",),
}
JOB_VERBS: Final = ("create", "delete", "get", "list")
OWNED_VERBS: Final = (*JOB_VERBS, "patch")
QUOTA: Final = "gpus"
COUNTED: Final = {"RayJob": "count/rayjobs.ray.io", "ConfigMap": "configmaps"}
ROOM: Final = {"cpu": "64", "memory": "256Gi", "ephemeral-storage": "1Ti", "pods": "110"}
# in the order of removal: owners first
MADE: Final = ("rayjobs", "jobs", "computedomains", "networkpolicies", "pods", "resourcequotas",
               "persistentvolumeclaims", "secrets", "events", "nodes", "persistentvolumes")  # fmt: skip
SHARED_KINDS: Final = frozenset({"nodes", "persistentvolumes"})
PATIENCE_S: Final = 5.0


class RealCluster(Cluster):
    """The user of ``kubeconfig`` may do what ``profile check`` asks for, and nothing else."""

    tick_s = 0.1
    store: ApiStore

    def __init__(self, folder: Path, plane: ControlPlane, faults: Faults | None = None, num_nodes: int = 4) -> None:
        super().__init__(folder, plane.store, faults, num_nodes)
        self.plane = plane
        self._used = plane
        self._bare: ControlPlane | None = None
        self._is_full = False
        self.has_scheduler = plane.has("kube-scheduler")
        self.has_jobs = self.has_garbage = plane.has("kube-controller-manager")

    def set_up(self) -> None:
        self._clear()
        self.plane.pods, self.plane.faults = self.running, self.faults
        self._use(self.plane)
        for number in range(self.num_nodes):
            name = f"node-{number}"
            labels = {"kubernetes.io/hostname": name, "kubernetes.io/arch": "amd64"}
            self.add("nodes", {"metadata": {"name": name, "labels": labels}, "status": {"allocatable": ROOM}})

    def clean_up(self) -> None:
        if self._bare is not None:
            self._bare.close()
        self.store = self.plane.store
        self._clear()

    def _clear(self) -> None:
        """Also what a test left that failed."""
        self.start()
        self._label_namespace({SECURITY_LABEL: None})
        self.store.delete_all("configmaps", SPACE, ID)
        until = time.monotonic() + (PATIENCE_S if self.has_jobs else 0.0)
        for plural in MADE:
            self._remove_all(plural, until)

    def start(self) -> None:
        if not self.plane.is_api_there:
            self.plane.start_api()

    def stop(self) -> None:
        self.plane.stop_api()

    def keep(self) -> None:
        if self.has_scheduler and self._is_full != self.faults.unschedulable:
            self._is_full = self.faults.unschedulable
            room = {**ROOM, "pods": "0"} if self._is_full else ROOM
            for node in self.store.list("nodes"):
                self.store.patch_status("nodes", node, {"allocatable": room, "capacity": room})
        super().keep()

    def claim(self, name: str) -> Path:
        folder = super().claim(name)
        if self.store.find("persistentvolumeclaims", SPACE, name) is None:
            self._make_claim(name, folder)
        return folder

    def add(self, plural: str, item: Object) -> None:
        metadata = item["metadata"]
        if plural == "namespaces":
            self._label_namespace(metadata["labels"])
            return
        made = self.store.create(plural, item)
        if plural == "nodes":  # admission makes each unready; a controller would see it come up
            made["spec"]["taints"] = item.get("spec", {}).get("taints", [])
            self.store.replace(plural, made)
            room = item["status"]["allocatable"]
            ready = [make_condition("Ready", "KubeletReady")]
            status = {"allocatable": room, "capacity": room, "conditions": ready, **self.plane.kubelet.describe()}
            self.store.patch_status(plural, made, status)

    def refuse(self, kind: str) -> None:
        with contextlib.suppress(Gone):
            self.store.delete("resourcequotas", {"metadata": {"name": QUOTA, "namespace": SPACE}})
        wait_until("end of quota", lambda: self.store.find("resourcequotas", SPACE, QUOTA) is None)
        hard = {COUNTED[kind]: "0"}
        quota = {"metadata": {"name": QUOTA, "namespace": SPACE}, "spec": {"hard": hard}}
        made = self.store.create("resourcequotas", quota)
        with contextlib.suppress(Gone):  # its controller was quicker
            self.store.patch_status("resourcequotas", made, {"hard": hard, "used": hard})

    def forbid(self, plural: str) -> None:
        every = self._rules()
        group = next(rule["apiGroups"][0] for rule in every if plural in rule["resources"])
        self._grant([rule for rule in every if plural not in rule["resources"]])
        user = Client(self._used.port, self._used.tokens[USER], self._used.ca)
        resource, _, part = plural.partition("/")
        attributes = {"namespace": SPACE, "verb": "create" if part else "list", "resource": resource, "group": group,
                      "subresource": part}  # fmt: skip
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
                  "spec": {"resourceAttributes": attributes}}  # fmt: skip
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        wait_until("the user's role", lambda: not user.ask("POST", path, review)["status"]["allowed"])
        user.close()

    def remove_operators(self) -> None:
        folder = self.folder / "bare"
        folder.mkdir()
        self._bare = ControlPlane(folder, has_operators=False)
        self._use(self._bare)

    def show(self, name: str, pod: RunningPod) -> None:
        self.running[name] = pod
        made = make_far_pod(name)
        self.store.create("pods", {part: made[part] for part in ("metadata", "spec")})
        wait_until(name, lambda: self._is_running(name))

    def _is_running(self, name: str) -> bool:
        pod = self.store.find("pods", SPACE, name)
        return pod is not None and pod["status"]["phase"] == "Running"

    def _use(self, plane: ControlPlane) -> None:
        self._used = plane
        self.store = self.kubelet.store = self.controllers.store = plane.store
        self._grant(self._rules())
        self.kubeconfig.write_text(yaml.safe_dump(plane.make_kubeconfig(USER)))

    def _rules(self) -> list[Object]:
        """What a run needs, whatever the kind of job."""
        wanted = {**PERMISSIONS, COMPUTE_DOMAINS: OWNED_VERBS, NETWORK_POLICIES: OWNED_VERBS}
        wanted |= {resource: JOB_VERBS for _, resource in KINDS.values()}
        rules = []
        for name, verbs in wanted.items():
            resource, _, group = name.partition(".")
            rules.append({"apiGroups": [group], "resources": [resource], "verbs": [*verbs]})
        return rules

    def _grant(self, rules: list[Object]) -> None:
        seen = ["nodes", "namespaces", "persistentvolumeclaims", "secrets"]  # without these it only proposes less
        # with create alone kubectl runs commands over SPDY, which no kubelet speaks here
        reading = {"apiGroups": [""], "resources": [*seen, "pods/exec"], "verbs": ["get", "list"]}
        for plural, kind, namespace, given in (
            ("role", "Role", SPACE, rules), ("clusterrole", "ClusterRole", "", [reading])
        ):  # fmt: skip
            metadata = {"name": "runner", **({"namespace": namespace} if namespace else {})}
            role_ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": "runner"}
            subject = {"kind": "User", "name": USER, "apiGroup": "rbac.authorization.k8s.io"}
            self._put(f"{plural}s", {"metadata": metadata, "rules": given})
            self._put(f"{plural}bindings", {"metadata": metadata, "roleRef": role_ref, "subjects": [subject]})

    def _put(self, plural: str, item: Object) -> None:
        try:
            self.store.create(plural, item)
        except Gone:
            self.store.replace(plural, item)

    def _make_claim(self, name: str, folder: Path) -> None:
        common: Object = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
        claim: Object = {
            "metadata": {"name": name, "namespace": SPACE},
            "spec": {**common, "volumeName": name, "resources": {"requests": {"storage": "1Gi"}}},
        }
        volume = {
            "metadata": {"name": name},
            "spec": {
                **common,
                "capacity": {"storage": "1Gi"},
                "hostPath": {"path": str(folder)},
                "claimRef": {"namespace": SPACE, "name": name},
            },
        }
        self.store.create("persistentvolumes", volume)
        made = self.store.create("persistentvolumeclaims", claim)
        if not self.has_garbage:
            self.store.patch_status("persistentvolumeclaims", made, {"phase": "Bound"})
        wait_until(f"claim {name}", lambda: self._is_bound(name))

    def _is_bound(self, name: str) -> bool:
        found = self.store.find("persistentvolumeclaims", SPACE, name)
        return found is not None and found["status"].get("phase") == "Bound"

    def _label_namespace(self, labels: Mapping[str, str | None]) -> None:
        self.store.patch("namespaces", {"metadata": {"name": SPACE}}, {"metadata": {"labels": dict(labels)}})

    def _remove_all(self, plural: str, until: float) -> None:
        space = "" if plural in SHARED_KINDS else SPACE
        while items := self.store.list(plural):
            self.store.delete_all(plural, space)
            if time.monotonic() > until:  # whose controller does not run, or forgot them
                for item in items:
                    with contextlib.suppress(Gone):
                        self.store.patch(plural, item, {"metadata": {"finalizers": None}})
            if plural == "events":
                return
            time.sleep(0.05)
