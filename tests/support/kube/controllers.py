"""Stand-ins for controllers and the scheduler, as far as a run needs them.

Those of Job, scheduler and garbage collector rest where the real ones run (tests/support/kube/real.py); KubeRay's
always works.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import itertools
import secrets
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from rlk_repro.clusters.k8s.naming import INDEX
from tests.support.kube.kubelet import Faults, Kubelet, end_process
from tests.support.kube.store import Gone, Object, Store, has_condition, is_owned, make_condition, now, suffix

TERMINAL: Final = ("Complete", "Failed")
OWNERS: Final = ("jobs", "rayjobs")
OWNED: Final = ("configmaps", "pods", "jobs", "computedomains", "networkpolicies", "secrets")


class Controllers:
    """``keep`` does once what controllers do all the time."""

    ray_command = "sleep 100000"

    def __init__(self, store: Store, kubelet: Kubelet, faults: Faults, num_nodes: int) -> None:
        self.store = store
        self.kubelet = kubelet
        self.faults = faults
        self.num_nodes = num_nodes
        self.entrypoints: dict[str, subprocess.Popen[bytes]] = {}
        self._next_node = itertools.count()

    def keep(self, *, has_scheduler: bool, has_jobs: bool, has_garbage: bool) -> None:
        """What is named is there already, and does its part itself."""
        steps: dict[str, Callable[[Object], None]] = {"rayjobs": self.keep_rayjob}
        if not has_jobs:
            steps["jobs"] = self.keep_job
        for plural, step in steps.items():
            for item in self.store.list(plural):
                if "deletionTimestamp" not in item["metadata"]:
                    with contextlib.suppress(Gone):
                        step(item)
        if not has_garbage:
            self.remove_garbage()
        if not has_scheduler:
            for pod in self.store.list("pods"):
                with contextlib.suppress(Gone):
                    self.schedule(pod)

    def close(self) -> None:
        for process in self.entrypoints.values():
            end_process(process, 0.0)

    def owned(self, plural: str, owner: Object) -> list[Object]:
        return [item for item in self.store.list(plural) if is_owned(item, owner)]

    def schedule(self, pod: Object) -> None:
        if pod["spec"].get("nodeName") or "deletionTimestamp" in pod["metadata"]:
            return
        if not self.faults.unschedulable:
            self.store.bind(pod, f"node-{next(self._next_node) % self.num_nodes}")
            self.store.patch_status("pods", pod, {"conditions": [make_condition("PodScheduled")]})
        elif "Unschedulable" not in str(pod["status"]):
            message = f"0/{self.num_nodes} nodes are available: {self.num_nodes} Insufficient nvidia.com/gpu."
            condition = make_condition("PodScheduled", "Unschedulable", message, "False")
            self.store.patch_status("pods", pod, {"conditions": [condition]})

    def remove_garbage(self) -> None:
        uids = {item["metadata"]["uid"] for plural in OWNERS for item in self.store.list(plural)}
        for plural in OWNED:
            for item in self.store.list(plural):
                owners = [owner["uid"] for owner in item["metadata"].get("ownerReferences", ())]
                if owners and uids.isdisjoint(owners) and "deletionTimestamp" not in item["metadata"]:
                    with contextlib.suppress(Gone):
                        self.store.delete(plural, item)

    # Job
    def keep_job(self, job: Object) -> None:
        status = job.get("status") or {}
        if has_condition(job, *TERMINAL):
            return
        if self.faults.suspend or job["spec"].get("suspend"):
            if not has_condition(job, "Suspended"):
                message = "Job suspended" if "startTime" in status else ""
                conditions = [make_condition("Suspended", "JobSuspended", message)]
                self.store.patch_status("jobs", job, {"conditions": conditions, "startTime": None, "active": 0})
            for pod in self.owned("pods", job):
                if "deletionTimestamp" not in pod["metadata"]:
                    self.store.delete("pods", pod)
        elif "startTime" not in status:
            count = job["spec"].get("completions", 1)
            resumed = [make_condition("Suspended", "JobResumed", status="False")] if "conditions" in status else []
            self.store.patch_status("jobs", job, {"startTime": now(), "active": count, "conditions": resumed})
            assert job["spec"]["completionMode"] == "Indexed"
            for index in range(count):
                self.make_indexed_pod(job, str(index))
        elif not self.replace_pods(job):
            self.end_job(job)

    def make_indexed_pod(self, job: Object, index: str) -> None:
        name = f"{job['metadata']['name']}-{index}-{suffix()}"
        source = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
        env = [{"name": "JOB_COMPLETION_INDEX", "valueFrom": source}]
        self.make_pod(job, job["spec"]["template"], name, env=env, annotations={INDEX: index})

    def replace_pods(self, job: Object) -> bool:
        """As the failure policy says of failed pods; False where it fails the job, or too many pods failed."""
        rules = job["spec"].get("podFailurePolicy", {}).get("rules", ())
        pods = self.owned("pods", job)
        failed = [pod for pod in pods if pod["status"].get("phase") == "Failed"]
        is_over = len(failed) > job["spec"]["backoffLimit"]
        if not failed or is_over or any(find_action(pod, rules) != "Count" for pod in failed):
            return False
        index_of = {pod["metadata"]["name"]: pod["metadata"]["annotations"][INDEX] for pod in pods}
        alive = {index_of[pod["metadata"]["name"]] for pod in pods if pod not in failed}
        missing = {index_of[pod["metadata"]["name"]] for pod in failed} - alive
        for index in missing:
            self.make_indexed_pod(job, index)
        return bool(missing)

    def end_job(self, job: Object) -> None:
        pods = self.find_last_pods(job)
        phases = [pod["status"].get("phase") for pod in pods]
        if "Failed" in phases:
            ends = ("FailureTarget", "Failed")
            counts = {"failed": phases.count("Failed")}
            words = ("BackoffLimitExceeded", "Job has reached the specified backoff limit")
        elif phases and set(phases) == {"Succeeded"}:
            ends, counts = ("SuccessCriteriaMet", "Complete"), {"succeeded": len(phases)}
            words = ("CompletionsReached", "Reached expected number of succeeded pods")
        else:
            return
        for pod in pods:
            if pod["status"].get("phase") == "Running":
                self.store.delete("pods", pod)
        done = {} if ends[1] == "Failed" else {"completionTime": now()}
        conditions = [make_condition(end, *words) for end in ends]
        self.store.patch_status("jobs", job, {"active": 0, "ready": 0, **counts, **done, "conditions": conditions})

    def find_last_pods(self, job: Object) -> list[Object]:
        """Of each index the pod that is there, or that failed last."""
        pods = sorted(self.owned("pods", job), key=lambda pod: pod["status"].get("phase") != "Failed")
        return [*{pod["metadata"]["annotations"][INDEX]: pod for pod in pods}.values()]

    # KubeRay
    def keep_rayjob(self, job: Object) -> None:
        status = job.get("status") or {}
        word = status.get("jobDeploymentStatus", "")
        if self.faults.suspend or word == "Suspended":
            wanted = "Suspended" if self.faults.suspend else "Initializing"
            if word != wanted:
                self.store.patch_status("rayjobs", job, {"jobDeploymentStatus": wanted, "rayClusterName": None})
                if entrypoint := self.entrypoints.pop(job["metadata"]["uid"], None):
                    end_process(entrypoint, 0.0)
                for pod in self.owned("pods", job):
                    self.store.delete("pods", pod)
        elif "rayClusterName" not in status:
            name = f"{job['metadata']['name']}-{suffix()}"
            self.store.patch_status("rayjobs", job, {"jobDeploymentStatus": "Initializing", "rayClusterName": name})
            self.make_ray_pods(job, name)
        elif word in {"Initializing", "Running"} and job["metadata"]["uid"] not in self.entrypoints:
            self.start_entrypoint(job, status["rayClusterName"])
        elif word == "Running":
            self.end_rayjob(job, f"{status['rayClusterName']}-head")

    def start_entrypoint(self, job: Object, cluster: str) -> None:
        """Also on a new head, which knows of no job, and whose workers are new as well."""
        pods = self.owned("pods", job)
        if not pods:
            self.make_ray_pods(job, cluster)
        head = self.kubelet.running.get(f"{cluster}-head")
        if head is not None and all(each["status"].get("phase") == "Running" for each in pods):
            with (head.folder / "entrypoint.log").open("wb") as log:
                words = shlex.split(job["spec"]["entrypoint"])
                self.entrypoints[job["metadata"]["uid"]] = head.execute(words, log)
            self.store.patch_status("rayjobs", job, {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"})

    def make_ray_pods(self, job: Object, name: str) -> None:
        cluster = job["spec"]["rayClusterSpec"]
        env: list[Object] = [{"name": "KUBERAY_GEN_RAY_START_CMD", "value": self.ray_command}]
        if cluster.get("authOptions", {}).get("mode") == "token":
            env += self.make_token(job, name)
        labels = {"ray.io/cluster": name}
        self.make_pod(job, cluster["headGroupSpec"]["template"], f"{name}-head", labels, env)
        for group in cluster.get("workerGroupSpecs", ()):
            for _ in range(group["replicas"]):
                self.make_pod(job, group["template"], f"{name}-{group['groupName']}-{suffix()}", labels, env)

    def make_token(self, job: Object, name: str) -> list[Object]:
        """A secret of the cluster, and how its containers get it."""
        token = base64.b64encode(secrets.token_hex(16).encode()).decode()
        namespace, owner = job["metadata"]["namespace"], make_owner(job, "ray.io/v1", "RayJob")
        earlier = self.store.find("secrets", namespace, name)
        if earlier is not None:
            self.store.delete("secrets", earlier)
        metadata = {"name": name, "namespace": namespace, "ownerReferences": [owner]}
        self.store.create("secrets", {"metadata": metadata, "data": {"auth_token": token}})
        source = {"secretKeyRef": {"name": name, "key": "auth_token"}}
        return [{"name": "RAY_AUTH_MODE", "value": "token"}, {"name": "RAY_AUTH_TOKEN", "valueFrom": source}]

    def end_rayjob(self, job: Object, head: str) -> None:
        entrypoint = self.entrypoints[job["metadata"]["uid"]]
        code = entrypoint.poll()
        pods = self.owned("pods", job)
        phase = next((pod["status"].get("phase") for pod in pods if pod["metadata"]["name"] == head), "Failed")
        if code is not None:
            words = ("Complete", "SUCCEEDED") if code == 0 else ("Failed", "FAILED")
            self.store.patch_status("rayjobs", job, dict(zip(("jobDeploymentStatus", "jobStatus"), words, strict=True)))
        elif phase == "Failed":  # a new head takes its name, and the workers end with their Ray
            end_process(self.entrypoints.pop(job["metadata"]["uid"]), 0.0)
        else:
            return
        for pod in pods:  # shutdownAfterJobFinishes
            self.store.delete("pods", pod)

    def make_pod(self, owner: Object, template: Object, name: str, labels: Mapping[str, str] | None = None,
                 env: Sequence[Object] = (), annotations: Mapping[str, str] | None = None) -> None:  # fmt: skip
        metadata = template.get("metadata", {})
        spec = copy.deepcopy(template["spec"])
        spec["containers"][0].setdefault("env", []).extend(env)
        version, kind = ("ray.io/v1", "RayJob") if labels else ("batch/v1", "Job")
        self.store.create("pods", {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": owner["metadata"]["namespace"],
                "labels": {**metadata.get("labels", {}), **(labels or {})},
                "annotations": {**metadata.get("annotations", {}), **(annotations or {})},
                "ownerReferences": [make_owner(owner, version, kind)],
            },
            "spec": spec,
        })  # fmt: skip


def find_action(pod: Object, rules: Sequence[Object]) -> str:
    """What the first rule that matches a failed pod says; a pod that no rule matches counts."""
    ends = [status["state"].get("terminated") for status in pod["status"].get("containerStatuses", ())]
    codes = [end["exitCode"] for end in ends if end is not None and end["exitCode"]]
    for rule in rules:
        asked = rule.get("onExitCodes")
        if asked is not None and any((code in asked["values"]) is (asked["operator"] == "In") for code in codes):
            return str(rule["action"])
        if any(has_condition(pod, condition["type"]) for condition in rule.get("onPodConditions", ())):
            return str(rule["action"])
    return "Count"


def make_owner(owner: Object, version: str, kind: str) -> Object:
    metadata = owner["metadata"]
    return {"apiVersion": version, "kind": kind, "name": metadata["name"], "uid": metadata["uid"], "controller": True}
