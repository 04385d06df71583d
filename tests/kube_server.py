"""A small API server on the loopback that the real ``kubectl`` speaks with, and stand-ins for the controllers.

Pods are local processes: their commands run as they are, with the paths of their volumes put in place.  What only a
real controller, scheduler or kubelet could show, it does not show (docs/kubernetes.md).
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.k8s_validate import find_errors

REPOSITORY = Path(__file__).parent.parent
Object = dict[str, Any]
# group and version, plural, kind, namespaced
RESOURCES: Final = (
    ("v1", "pods", "Pod", True),
    ("v1", "configmaps", "ConfigMap", True),
    ("v1", "events", "Event", True),
    ("v1", "persistentvolumeclaims", "PersistentVolumeClaim", True),
    ("v1", "secrets", "Secret", True),
    ("v1", "nodes", "Node", False),
    ("v1", "namespaces", "Namespace", False),
    ("batch/v1", "jobs", "Job", True),
    ("ray.io/v1", "rayjobs", "RayJob", True),
    ("jobset.x-k8s.io/v1alpha2", "jobsets", "JobSet", True),
    ("resource.nvidia.com/v1beta1", "computedomains", "ComputeDomain", True),
    ("storage.k8s.io/v1", "storageclasses", "StorageClass", False),
    ("scheduling.k8s.io/v1", "priorityclasses", "PriorityClass", False),
    ("kueue.x-k8s.io/v1beta1", "localqueues", "LocalQueue", True),
    ("apiextensions.k8s.io/v1", "customresourcedefinitions", "CustomResourceDefinition", False),
    ("authorization.k8s.io/v1", "selfsubjectaccessreviews", "SelfSubjectAccessReview", False),
)
_PATH: Final = re.compile(
    r"/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+/[^/]+))(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[a-z]+)"
    r"(?:/(?P<name>[^/]+))?(?:/(?P<sub>proxy|log|status)(?P<rest>/.*)?)?"
)
TICK_S: Final = 0.05


@dataclass
class Faults:
    """What goes wrong; read while it runs, so that a test changes it at any time."""

    unschedulable: bool = False
    bad_image: bool = False
    refuse_create: str = ""  # a kind
    refuse_words: str = "exceeded quota: gpus"
    suspend: bool = False
    cut_every_bytes: int = 0
    cuts_left: int = 0
    no_proxy: bool = False
    forbidden: str = ""  # a plural


@dataclass
class RunningPod:
    folder: Path
    process: subprocess.Popen[bytes]
    env: dict[str, str]
    mounts: list[tuple[str, str]]
    port: int


@dataclass
class KubeServer:
    """Use as a context manager; ``kubeconfig`` is what kubectl needs."""

    folder: Path
    faults: Faults = field(default_factory=Faults)
    ray_command: str = "sleep 100000"
    namespaces: tuple[str, ...] = ("default",)
    without: frozenset[str] = frozenset()
    num_nodes: int = 4
    python_path: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.running: dict[str, RunningPod] = {}
        self.entrypoints: dict[str, subprocess.Popen[bytes]] = {}
        self.requests: list[str] = []
        self.bytes_sent = 0
        self.version = itertools.count(1)
        self.is_over = threading.Event()
        self.server: ThreadingHTTPServer | None = None
        self.port = 0

    def __enter__(self) -> KubeServer:
        self.claim("results")
        self.start()
        self.keeper = threading.Thread(target=self.keep, daemon=True)
        self.keeper.start()
        self.kubeconfig = self.folder / "kubeconfig"
        self.kubeconfig.write_text(yaml.safe_dump(self.config()))
        return self

    def __exit__(self, *error: object) -> None:
        self.is_over.set()
        self.keeper.join()
        self.stop()
        for process in [*self.entrypoints.values(), *(pod.process for pod in self.running.values())]:
            end_process(process, 0.0)

    def config(self) -> Object:
        cluster = {"server": f"http://127.0.0.1:{self.port}"}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "me", "user": {}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "me", "namespace": "default"}}],
            "current-context": "test",
        }

    def start(self) -> None:
        server = self

        class Handler(_Handler):
            kube = server

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True

        self.server = Server(("127.0.0.1", self.port), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def stop(self) -> None:
        """The API is away; what runs goes on."""
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()
            self.server = None

    # what a test looks at
    def all(self, plural: str) -> list[Object]:
        with self.lock:
            return [item for (kind, _, _), item in sorted(self.objects.items()) if kind == plural]

    def ours(self) -> list[str]:
        """Everything that carries our label."""
        with self.lock:
            return [
                f"{kind}/{name}"
                for (kind, _, name), item in sorted(self.objects.items())
                if "rlk-repro/id" in item["metadata"].get("labels", {})
            ]

    def pod(self, role: str) -> Object | None:
        key = "app.kubernetes.io/component"
        found = [pod for pod in self.all("pods") if pod["metadata"]["labels"].get(key) == role]
        return found[0] if found else None

    def claim(self, name: str) -> Path:
        path = self.folder / "claims" / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def add(self, plural: str, item: Object, namespace: str = "") -> None:
        with self.lock:
            self.objects[plural, namespace, item["metadata"]["name"]] = item

    def say(self, name: str, reason: str, message: str) -> None:
        """A warning event."""
        key = f"{name}.{next(self.version)}"
        self.add("events", {"apiVersion": "v1", "kind": "Event", "metadata": {"name": key, "namespace": "default"},
                            "type": "Warning", "reason": reason, "message": message, "lastTimestamp": now(),
                            "involvedObject": {"kind": "Pod", "name": name}}, "default")  # fmt: skip

    # the store
    def create(self, plural: str, namespace: str, item: Object) -> Object:
        with self.lock:
            metadata = item.setdefault("metadata", {})
            metadata.update(uid=str(uuid.uuid4()), resourceVersion=str(next(self.version)), creationTimestamp=now())
            if namespace:
                metadata["namespace"] = namespace
            if plural == "pods":
                number = sum(key[0] == "pods" for key in self.objects)
                item["spec"].setdefault("nodeName", f"node-{number % self.num_nodes}")
            self.objects[plural, namespace, metadata["name"]] = item
            return item

    def delete(self, plural: str, namespace: str, name: str) -> Object | None:
        with self.lock:
            item = self.objects.get((plural, namespace, name))
            if item is None:
                return None
            if plural == "pods" and name in self.running:
                if "deletionTimestamp" not in item["metadata"]:
                    item["metadata"]["deletionTimestamp"] = now()
                    threading.Thread(target=self.end_pod, args=(namespace, name), daemon=True).start()
                return item
            del self.objects[plural, namespace, name]
            owned = [key for key, other in self.objects.items() if is_owned(other, item)]
        for key in owned:
            self.delete(*key)
        return item

    def end_pod(self, namespace: str, name: str, *, keeps_object: bool = False) -> None:
        pod = self.running.get(name)
        item = self.objects.get(("pods", namespace, name))
        if pod is None or item is None:
            return
        end_process(pod.process, float(item["spec"].get("terminationGracePeriodSeconds", 30)))
        with self.lock:
            self.running.pop(name, None)
            if not keeps_object:
                self.objects.pop(("pods", namespace, name), None)

    def evict(self, role: str, reason: str = "Evicted", condition: str = "TerminationByKubelet") -> None:
        """As the kubelet does: SIGTERM, the grace, and a pod that failed."""
        pod = self.pod(role)
        assert pod is not None
        name = pod["metadata"]["name"]
        conditions = [{"type": "DisruptionTarget", "status": "True", "reason": condition, "message": "node is short"}]
        process = self.running[name].process
        end_process(process, 30.0)
        with self.lock:
            self.running.pop(name, None)
            pod["status"] = {"phase": "Failed", "reason": reason, "conditions": conditions}

    # the stand-ins
    def keep(self) -> None:
        while not self.is_over.wait(TICK_S):
            with self.lock:
                steps = {"jobs": self.keep_job, "jobsets": self.keep_jobset, "rayjobs": self.keep_rayjob}
                for plural, step in steps.items():
                    for item in self.all(plural):
                        step(item)
                for pod in self.all("pods"):
                    self.keep_pod(pod)

    def make_pod(self, owner: Object, template: Object, name: str, labels: Mapping[str, str] | None = None,
                 env: tuple[Object, ...] = ()) -> None:  # fmt: skip
        metadata = template.get("metadata", {})
        spec = json.loads(json.dumps(template["spec"]))
        spec["containers"][0].setdefault("env", []).extend(env)
        item = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "labels": {**metadata.get("labels", {}), **(labels or {})},
                "annotations": metadata.get("annotations", {}),
                "ownerReferences": [{"uid": owner["metadata"]["uid"]}],
            },
            "spec": spec,
            "status": {"phase": "Pending"},
        }
        self.create("pods", owner["metadata"]["namespace"], item)

    def owned_pods(self, owner: Object) -> list[Object]:
        return [pod for pod in self.all("pods") if is_owned(pod, owner)]

    def keep_job(self, job: Object) -> None:
        if self.faults.suspend:
            job["status"] = {"conditions": [{"type": "Suspended", "status": "True", "reason": "JobSuspended"}]}
            return
        if "status" not in job or "Suspended" in str(job["status"]):
            job["status"] = {"active": 1}
            self.make_pod(job, job["spec"]["template"], f"{job['metadata']['name']}-{suffix()}")
            return
        self.end_by_pods(job, self.owned_pods(job), "Complete")

    def keep_jobset(self, job: Object) -> None:
        if "status" not in job:
            job["status"] = {}
            for replicated in job["spec"]["replicatedJobs"]:
                spec = replicated["template"]["spec"]
                for index in range(spec.get("completions", 1)):
                    name = f"{job['metadata']['name']}-{replicated['name']}-0-{index}-{suffix()}"
                    self.make_pod(job, spec["template"], name)
            return
        pods = self.owned_pods(job)
        leaders = [pod for pod in pods if pod["metadata"]["labels"]["app.kubernetes.io/component"] == "leader"]
        failed = [pod for pod in pods if pod["status"]["phase"] == "Failed"]
        self.end_by_pods(job, failed or leaders, "Completed")

    def end_by_pods(self, job: Object, pods: list[Object], done: str) -> None:
        if "conditions" in job["status"] or not pods:
            return
        phases = {pod["status"]["phase"] for pod in pods}
        if "Failed" in phases:
            failed = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "a pod failed"}
            job["status"] = {"conditions": [failed]}
        elif phases == {"Succeeded"}:
            job["status"] = {"conditions": [{"type": done, "status": "True"}]}
        if "conditions" in job["status"]:
            for pod in self.owned_pods(job):
                if pod["metadata"]["name"] in self.running:
                    self.delete("pods", pod["metadata"]["namespace"], pod["metadata"]["name"])

    def keep_rayjob(self, job: Object) -> None:
        status = job.setdefault("status", {"jobDeploymentStatus": "Initializing"})
        name, cluster = job["metadata"]["name"], job["spec"]["rayClusterSpec"]
        if self.faults.suspend:
            status["jobDeploymentStatus"] = "Suspended"
            return
        if status["jobDeploymentStatus"] == "Suspended":
            status["jobDeploymentStatus"] = "Initializing"
        if "rayClusterName" not in status:
            status["rayClusterName"] = f"{name}-{suffix()}"
            env = ({"name": "KUBERAY_GEN_RAY_START_CMD", "value": self.ray_command},)
            labels = {"ray.io/cluster": status["rayClusterName"]}
            self.make_pod(job, cluster["headGroupSpec"]["template"], f"{status['rayClusterName']}-head", labels, env)
            for group in cluster.get("workerGroupSpecs", ()):
                for _ in range(group["replicas"]):
                    pod_name = f"{status['rayClusterName']}-{group['groupName']}-{suffix()}"
                    self.make_pod(job, group["template"], pod_name, labels, env)
            return
        head = f"{status['rayClusterName']}-head"
        if status["jobDeploymentStatus"] == "Initializing" and head in self.running:
            if all(pod["metadata"]["name"] in self.running for pod in self.owned_pods(job)):
                self.entrypoints[name] = self.start_entrypoint(job, self.running[head])
                status.update(jobDeploymentStatus="Running", jobStatus="RUNNING")
        elif status["jobDeploymentStatus"] == "Running":
            self.end_rayjob(job, status, head)

    def start_entrypoint(self, job: Object, pod: RunningPod) -> subprocess.Popen[bytes]:
        argv = place_paths(shlex.split(job["spec"]["entrypoint"]), pod.mounts)
        with (pod.folder / "entrypoint.log").open("wb") as log:
            return subprocess.Popen(argv, env=pod.env, stdout=log, stderr=log, cwd=pod.folder, start_new_session=True)

    def end_rayjob(self, job: Object, status: Object, head: str) -> None:
        name = job["metadata"]["name"]
        code = self.entrypoints[name].poll()
        head_pod = self.objects.get(("pods", job["metadata"]["namespace"], head))
        if head_pod is None or head_pod["status"]["phase"] == "Failed":
            end_process(self.entrypoints[name], 0.0)
            status.update(jobDeploymentStatus="Failed", reason="AppFailed", message="the head pod is gone")
        elif code is not None:
            word = "SUCCEEDED" if code == 0 else "FAILED"
            status.update(jobDeploymentStatus="Complete" if code == 0 else "Failed", jobStatus=word)
            for pod in self.owned_pods(job):  # shutdownAfterJobFinishes
                self.delete("pods", pod["metadata"]["namespace"], pod["metadata"]["name"])

    def keep_pod(self, pod: Object) -> None:
        name, status = pod["metadata"]["name"], pod.setdefault("status", {"phase": "Pending"})
        if name in self.running:
            code = self.running[name].process.poll()
            if code is not None and "deletionTimestamp" not in pod["metadata"]:
                del self.running[name]
                status["phase"] = "Succeeded" if code == 0 else "Failed"
                ended = {"exitCode": abs(code), "reason": "Completed" if code == 0 else "Error"}
                status["containerStatuses"] = [container_status(pod, {"terminated": ended})]
            return
        if status["phase"] != "Pending":
            return
        if self.faults.unschedulable:
            message = "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."
            status["conditions"] = [
                {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
            ]
            return
        status.pop("conditions", None)
        if self.faults.bad_image:
            waiting = {"reason": "ImagePullBackOff", "message": "Back-off pulling image: manifest unknown"}
            status["containerStatuses"] = [container_status(pod, {"waiting": waiting})]
            return
        if not self.has_volumes(pod):
            status["containerStatuses"] = [container_status(pod, {"waiting": {"reason": "ContainerCreating"}})]
            return
        self.running[name] = self.start_pod(pod)
        status.update(phase="Running", containerStatuses=[container_status(pod, {"running": {"startedAt": now()}})])

    def has_volumes(self, pod: Object) -> bool:
        namespace = pod["metadata"]["namespace"]
        for volume in pod["spec"]["volumes"]:
            name = volume.get("configMap", {}).get("name")
            if name is not None and ("configmaps", namespace, name) not in self.objects:
                return False
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            if claim is not None and not (self.folder / "claims" / claim).is_dir():
                return False
        return True

    def start_pod(self, pod: Object) -> RunningPod:
        folder = self.folder / "pods" / f"{pod['metadata']['name']}-{next(self.version)}"
        folder.mkdir(parents=True)
        sources = {volume["name"]: self.make_volume(pod, volume, folder) for volume in pod["spec"]["volumes"]}
        container = pod["spec"]["containers"][0]
        mounts = [(mount["mountPath"], str(sources[mount["name"]])) for mount in container["volumeMounts"]]
        port = free_port()
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([*self.python_path, str(REPOSITORY)])}
        for entry in container.get("env", ()):
            env[entry["name"]] = self.find_value(pod, entry)
        env["RLK_REPRO_WINDOW_PORT"] = str(port)
        words = [expand(word, env) for word in [*container["command"], *container.get("args", ())]]
        with (folder / "output.log").open("wb") as log:
            process = subprocess.Popen(place_paths(words, mounts), env=env, stdout=log, stderr=log, cwd=folder,
                                       start_new_session=True)  # fmt: skip
        return RunningPod(folder=folder, process=process, env=env, mounts=mounts, port=port)

    def make_volume(self, pod: Object, volume: Object, folder: Path) -> Path:
        if "persistentVolumeClaim" in volume:
            return self.folder / "claims" / str(volume["persistentVolumeClaim"]["claimName"])
        path = folder / str(volume["name"])
        path.mkdir()
        if "configMap" in volume:
            data = self.objects["configmaps", pod["metadata"]["namespace"], volume["configMap"]["name"]]["data"]
            for item in volume["configMap"]["items"]:
                target = path / item["path"]
                target.parent.mkdir(exist_ok=True)
                target.write_text(data[item["key"]])
        return path

    def find_value(self, pod: Object, entry: Object) -> str:
        if "value" in entry:
            return str(entry["value"])
        source = entry["valueFrom"]
        if "secretKeyRef" in source:
            place = source["secretKeyRef"]
            return str(self.objects["secrets", pod["metadata"]["namespace"], place["name"]]["stringData"][place["key"]])
        path = source["fieldRef"]["fieldPath"]
        label = re.fullmatch(r"metadata\.labels\['(.*)'\]", path)
        if label is not None:
            return str(pod["metadata"]["labels"].get(label[1], ""))
        value: Any = pod
        for part in path.split("."):
            value = value[part]
        return str(value)


class _Handler(BaseHTTPRequestHandler):
    kube: KubeServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.handle_one("GET")

    def do_POST(self) -> None:
        self.handle_one("POST")

    def do_PATCH(self) -> None:
        self.handle_one("PATCH")

    def do_DELETE(self) -> None:
        self.handle_one("DELETE")

    def handle_one(self, verb: str) -> None:
        url = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else b""
        self.kube.requests.append(f"{verb} {self.path}")
        found = _PATH.fullmatch(url.path)
        special = discover(self.kube, url.path)
        if special is not None:
            self.answer(200, special)
        elif found is None:
            self.refuse(404, "NotFound", f"no {url.path}")
        elif found["sub"] == "proxy":
            self.proxy(verb, found, body)
        else:
            self.serve(verb, found, query, body)

    def serve(self, verb: str, found: re.Match[str], query: Mapping[str, str], body: bytes) -> None:
        kube = self.kube
        plural, name, namespace = found["plural"], found["name"], found["namespace"] or ""
        row = next((row for row in RESOURCES if row[1] == plural), None)
        if row is None or row[2] in kube.without:
            self.refuse(404, "NotFound", "the server could not find the requested resource")
            return
        if plural == "namespaces":
            namespace = ""
        if kube.faults.forbidden == plural:
            self.refuse(403, "Forbidden", f'{plural} is forbidden: User "me" cannot {verb.lower()} resource "{plural}"')
            return
        if plural == "selfsubjectaccessreviews":
            review = json.loads(body)
            wanted = review["spec"]["resourceAttributes"].get("resource", "")
            self.answer(201, {**review, "status": {"allowed": wanted != kube.faults.forbidden}})
            return
        if verb == "GET" and name is None:
            self.answer(200, self.list(row, namespace, query))
            return
        with kube.lock:
            item = kube.objects.get((plural, namespace, name or ""))
        if verb == "POST":
            self.create(row, namespace, query, json.loads(body))
        elif item is None:
            self.refuse(404, "NotFound", f'{plural} "{name}" not found', name or "", plural)
        elif verb == "PATCH":
            with kube.lock:
                merge(item, json.loads(body))
            self.answer(200, item)
        elif verb == "DELETE":
            options = json.loads(body) if body else {}
            assert not options.get("dryRun")
            self.answer(200, kube.delete(plural, namespace, name or "") or {"kind": "Status", "status": "Success"})
        else:
            self.answer(200, item)

    def create(self, row: tuple[str, str, str, bool], namespace: str, query: Mapping[str, str], item: Object) -> None:
        kube, name = self.kube, item["metadata"]["name"]
        if kube.faults.refuse_create == row[2]:
            self.refuse(403, "Forbidden", f'{row[1]} "{name}" is forbidden: {kube.faults.refuse_words}', name, row[1])
            return
        if row[3] and namespace not in kube.namespaces:
            self.refuse(404, "NotFound", f'namespaces "{namespace}" not found', namespace, "namespaces")
            return
        plain = json.loads(json.dumps(item))
        errors = find_errors(plain, ("1.34",)) if query.get("fieldValidation") == "Strict" else []
        if errors:
            self.refuse(400, "BadRequest", f"strict decoding error: {'; '.join(errors)}", name, row[1])
            return
        with kube.lock:
            if (row[1], namespace, name) in kube.objects:
                self.refuse(409, "AlreadyExists", f'{row[1]} "{name}" already exists', name, row[1])
                return
            if query.get("dryRun") == "All":
                item["metadata"].update(uid=str(uuid.uuid4()), creationTimestamp=now(), namespace=namespace)
            else:
                item = kube.create(row[1], namespace, item)
        self.answer(201, item)

    def list(self, row: tuple[str, str, str, bool], namespace: str, query: Mapping[str, str]) -> Object:
        wanted = dict(part.split("=", 1) for part in query.get("labelSelector", "").split(",") if part)
        fields = dict(part.split("=", 1) for part in query.get("fieldSelector", "").split(",") if part)
        with self.kube.lock:
            items = [
                json.loads(json.dumps(item))
                for (plural, space, _), item in sorted(self.kube.objects.items())
                if plural == row[1]
                and (not namespace or space == namespace)
                and all(item["metadata"].get("labels", {}).get(key) == value for key, value in wanted.items())
                and all(find_field(item, key) == value for key, value in fields.items())
            ]
        for item in items:
            item.update(apiVersion=row[0], kind=row[2])
        return {"apiVersion": row[0], "kind": f"{row[2]}List", "metadata": {"resourceVersion": "1"}, "items": items}

    def proxy(self, verb: str, found: re.Match[str], body: bytes) -> None:
        kube, name = self.kube, (found["name"] or "").partition(":")[0]
        pod = kube.running.get(name)
        if pod is None or kube.faults.no_proxy:
            self.refuse(503, "ServiceUnavailable", f"no endpoints for pod {name}")
            return
        connection = http.client.HTTPConnection("127.0.0.1", pod.port, timeout=60)
        try:
            with contextlib.closing(connection):
                connection.request(verb, found["rest"] or "/", body=body or None)
                response = connection.getresponse()
                data = response.read()
        except (OSError, http.client.HTTPException) as error:
            self.refuse(502, "BadGateway", f"error trying to reach service: {error}")
            return
        self.send_response(response.status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.send_or_cut(data)

    def send_or_cut(self, data: bytes) -> None:
        """In pieces, so that a connection can be cut in the middle of one answer."""
        faults, kube = self.kube.faults, self.kube
        for start in range(0, len(data), 1 << 16):
            piece = data[start : start + (1 << 16)]
            with kube.lock:
                before = kube.bytes_sent
                kube.bytes_sent += len(piece)
            every = faults.cut_every_bytes
            if every and faults.cuts_left and before // every != kube.bytes_sent // every:
                faults.cuts_left -= 1
                self.close_connection = True
                with contextlib.suppress(OSError):
                    self.connection.shutdown(socket.SHUT_RDWR)
                return
            self.wfile.write(piece)

    def refuse(self, code: int, reason: str, message: str, name: str = "", plural: str = "") -> None:
        status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "reason": reason,
                  "message": message, "code": code, "details": {"name": name, "kind": plural}}  # fmt: skip
        self.answer(code, status)

    def answer(self, code: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def discover(kube: KubeServer, path: str) -> Object | None:
    """What kubectl asks before anything else: versions, groups, resources, and which of them know strict validation."""
    rows = [row for row in RESOURCES if row[2] not in kube.without]
    groups = sorted({row[0] for row in rows if "/" in row[0]})
    if path == "/version":
        return {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        listed = [{"groupVersion": group, "version": group.partition("/")[2]} for group in groups]
        return {
            "kind": "APIGroupList",
            "apiVersion": "v1",
            "groups": [
                {"name": item["groupVersion"].partition("/")[0], "versions": [item], "preferredVersion": item}
                for item in listed
            ],
        }
    if path == "/openapi/v3":
        paths = {f"apis/{group}": {"serverRelativeURL": f"/openapi/v3/apis/{group}"} for group in groups}
        return {"paths": {**paths, "api/v1": {"serverRelativeURL": "/openapi/v3/api/v1"}}}
    version = path.removeprefix("/openapi/v3").removeprefix("/apis/").removeprefix("/api/")
    known = [row for row in rows if row[0] == version]
    if not known:
        return None
    if path.startswith("/openapi/v3"):
        return describe_paths(known)
    verbs = ["create", "delete", "get", "list", "patch", "watch"]
    resources = [
        {"name": plural, "singularName": kind.lower(), "namespaced": is_namespaced, "kind": kind, "verbs": verbs}
        for _, plural, kind, is_namespaced in known
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}


def describe_paths(rows: list[tuple[str, str, str, bool]]) -> Object:
    paths = {}
    for version, plural, kind, _ in rows:
        group, _, number = version.rpartition("/")
        parameters = [{"name": name, "in": "query"} for name in ("dryRun", "fieldValidation")]
        gvk = {"group": group, "version": number, "kind": kind}
        root = f"/apis/{version}" if group else "/api/v1"
        paths[f"{root}/namespaces/{{namespace}}/{plural}/{{name}}"] = {
            "patch": {"parameters": parameters, "responses": {}, "x-kubernetes-group-version-kind": gvk}
        }
    return {"openapi": "3.0.0", "info": {"title": "test", "version": "1"}, "paths": paths}


def end_process(process: subprocess.Popen[bytes], grace_s: float) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def place_paths(words: list[str], mounts: list[tuple[str, str]]) -> list[str]:
    """Where a pod would see a volume, the folder that stands for it."""
    for path, folder in mounts:
        words = [re.sub(rf"(?<![\w/.]){re.escape(path)}(?=/|$)", folder.replace("\\", r"\\"), word) for word in words]
    return [sys.executable if word == "python3" else word for word in words]


def expand(word: str, env: Mapping[str, str]) -> str:
    """``$(NAME)`` as the kubelet does it; ``$$`` is a dollar sign."""
    return re.sub(
        r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_]*)\)",
        lambda found: "$" if found[0] == "$$" else env.get(found[1], found[0]),
        word,
    )


def container_status(pod: Object, state: Object) -> Object:
    container = pod["spec"]["containers"][0]
    return {"name": container["name"], "image": container["image"], "imageID": container["image"], "state": state}


def merge(item: Object, patch: Object) -> None:
    for key, value in patch.items():
        if isinstance(value, dict) and isinstance(item.get(key), dict):
            merge(item[key], value)
        elif value is None:
            item.pop(key, None)
        else:
            item[key] = value


def find_field(item: Object, path: str) -> Any:
    value: Any = item
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def is_owned(item: Object, owner: Object) -> bool:
    uid = owner["metadata"]["uid"]
    return any(reference["uid"] == uid for reference in item["metadata"].get("ownerReferences", ()))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def suffix() -> str:
    return uuid.uuid4().hex[:5]


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def serving(folder: Path, **options: Any) -> Iterator[KubeServer]:
    with KubeServer(folder, **options) as server:
        yield server
