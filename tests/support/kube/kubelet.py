"""A stand-in for the kubelets of all nodes: pods are local processes.

Their commands run as they are, with the paths of their volumes put in place.  Of several containers the first one runs.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from tests import ROOT
from tests.support.kube.store import Gone, Object, Store, make_condition, now

REPOSITORY: Final = ROOT
POD_ADDRESS: Final = "10.244.0.{}"


@dataclass
class Faults:
    """What goes wrong; read while it runs, so that a test changes it at any time."""

    unschedulable: bool = False
    bad_image: bool = False
    suspend: bool = False
    cut_every_bytes: int = 0
    cuts_left: int = 0
    no_exec: bool = False
    # where no real API server says it
    refuse_create: str = ""  # a kind
    refuse_words: str = "exceeded quota: gpus"
    forbidden: str = ""  # a plural
    bytes_sent: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def cut(self, num_bytes: int) -> bool:
        """Count what pods answer; whether the connection breaks here."""
        with self._lock:
            before, self.bytes_sent = self.bytes_sent, self.bytes_sent + num_bytes
            every = self.cut_every_bytes
            if not every or not self.cuts_left or before // every == self.bytes_sent // every:
                return False
            self.cuts_left -= 1
            return True


@dataclass
class RunningPod:
    """``process`` is None for a pod without a first process."""

    address: str = "10.244.1.1"
    process: subprocess.Popen[bytes] | None = None
    folder: Path = Path()
    env: dict[str, str] = field(default_factory=dict)
    mounts: list[tuple[str, str]] = field(default_factory=list)
    is_ending: bool = False

    @property
    def code(self) -> int | None:
        return None if self.process is None else self.process.poll()

    def end(self, grace_s: float) -> None:
        if self.process is not None:
            end_process(self.process, grace_s)

    def execute(self, command: Sequence[str], output: int | IO[bytes]) -> subprocess.Popen[bytes]:
        """A further process in the pod."""
        argv = place_paths(list(command), self.mounts)
        return subprocess.Popen(argv, env=self.env, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                                cwd=self.folder, start_new_session=True)  # fmt: skip


class Kubelet:
    """``running`` by the pod's name; a stand-in for one namespace."""

    def __init__(self, store: Store, folder: Path, faults: Faults) -> None:
        self.store = store
        self.folder = folder
        self.faults = faults
        self.python_path: tuple[str, ...] = ()
        self.running: dict[str, RunningPod] = {}
        self._number = itertools.count(1)
        self._endings: list[threading.Thread] = []

    def keep(self, pods: Sequence[Object]) -> None:
        for pod in pods:
            with contextlib.suppress(Gone):
                self.keep_pod(pod)
        names = {pod["metadata"]["name"] for pod in pods}
        for name, running in [*self.running.items()]:
            if name not in names and running.process is not None:  # its object was removed by force
                self._begin_end(name, running, None)

    def keep_pod(self, pod: Object) -> None:
        name, phase = pod["metadata"]["name"], pod.get("status", {}).get("phase", "Pending")
        running = self.running.get(name)
        if "deletionTimestamp" in pod["metadata"]:
            if running is not None:
                self._begin_end(name, running, pod)
            elif pod["metadata"].get("deletionGracePeriodSeconds") != 0:
                self.store.delete("pods", pod, 0)
        elif running is not None:
            if running.is_ending:
                return
            if running.code is not None:
                self._report_end(pod, running.code)
                del self.running[name]
            elif phase == "Pending":
                self._report_running(pod, running)
        elif phase == "Pending" and pod["spec"].get("nodeName"):
            self._bring_up(pod)

    def evict(self, pod: Object, reason: str, condition: str) -> None:
        """SIGTERM, the grace, and a pod that failed."""
        name = pod["metadata"]["name"]
        running = self.running[name]
        running.is_ending = True
        running.end(30.0)
        self._report_end(
            pod, 1, reason=reason, conditions=[make_condition("DisruptionTarget", condition, "node is short")]
        )
        del self.running[name]

    def close(self) -> None:
        for pod in [*self.running.values()]:
            pod.end(0.0)
        for thread in self._endings:
            thread.join()
        self.running.clear()

    def _bring_up(self, pod: Object) -> None:
        if self.faults.bad_image:
            self._report_waiting(pod, "ImagePullBackOff", "Back-off pulling image: manifest unknown")
        elif not self._has_volumes(pod):
            self._report_waiting(pod, "ContainerCreating", "")
        else:
            running = self._start(pod)
            self.running[pod["metadata"]["name"]] = running
            self._report_running(pod, running)

    def _begin_end(self, name: str, running: RunningPod, pod: Object | None) -> None:
        if running.is_ending:
            return
        running.is_ending = True
        grace_s = 0.0
        if pod is not None:
            spec, metadata = pod["spec"], pod["metadata"]
            grace_s = float(metadata.get("deletionGracePeriodSeconds", spec.get("terminationGracePeriodSeconds", 30)))
        thread = threading.Thread(target=self._end, args=(name, running, pod, grace_s), daemon=True)
        self._endings.append(thread)
        thread.start()

    def _end(self, name: str, running: RunningPod, pod: Object | None, grace_s: float) -> None:
        running.end(grace_s)
        with contextlib.suppress(Gone, OSError):
            if pod is not None:
                self._report_end(pod, running.code or 0)
                self.store.delete("pods", pod, 0)
        self.running.pop(name, None)

    # what it says
    def _report_waiting(self, pod: Object, reason: str, message: str) -> None:
        waiting = {"reason": reason, "message": message}
        if "waiting" not in str(pod["status"]) or reason not in str(pod["status"]):
            self.store.patch_status("pods", pod, {"containerStatuses": [container_status(pod, {"waiting": waiting})]})

    def _report_running(self, pod: Object, running: RunningPod) -> None:
        containers = [container_status(pod, {"running": {"startedAt": now()}})]
        self.store.patch_status("pods", pod, {
            "phase": "Running",
            "startTime": now(),
            "podIP": running.address,
            "podIPs": [{"ip": running.address}],
            "conditions": [make_condition("Ready"), make_condition("ContainersReady")],
            "containerStatuses": containers,
        })  # fmt: skip

    def _report_end(self, pod: Object, code: int, reason: str | None = None,
                    conditions: Sequence[Object] = ()) -> None:  # fmt: skip
        # a signal is 128 and its number to the container runtime
        ended = {"exitCode": code if code >= 0 else 128 - code, "reason": "Error" if code else "Completed",
                 "startedAt": now(), "finishedAt": now()}  # fmt: skip
        running = self.running.get(pod["metadata"]["name"])
        policy = pod["spec"]["containers"][0].get("terminationMessagePolicy")
        if code and running is not None and policy == "FallbackToLogsOnError":
            ended["message"] = (running.folder / "output.log").read_text(errors="replace")[-2048:]
        unready = make_condition("Ready", "PodFailed" if code else "PodCompleted", status="False")
        self.store.patch_status("pods", pod, {
            "phase": "Failed" if code else "Succeeded",
            **({} if reason is None else {"reason": reason}),
            "conditions": [unready, *conditions],
            "containerStatuses": [container_status(pod, {"terminated": ended})],
        })  # fmt: skip

    # what a container needs
    def _has_volumes(self, pod: Object) -> bool:
        namespace = pod["metadata"]["namespace"]
        for volume in pod["spec"]["volumes"]:
            name = volume.get("configMap", {}).get("name")
            if name is not None and self.store.find("configmaps", namespace, name) is None:
                return False
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            if claim is not None and not (self.folder / "claims" / claim).is_dir():
                return False
        return True

    def _start(self, pod: Object) -> RunningPod:
        number = next(self._number)
        folder = self.folder / "pods" / f"{pod['metadata']['name']}-{number}"
        folder.mkdir(parents=True)
        container = pod["spec"]["containers"][0]
        sources = {volume["name"]: self._make_volume(pod, volume, folder) for volume in pod["spec"]["volumes"]}
        mounts = [(mount["mountPath"], str(sources[mount["name"]])) for mount in container["volumeMounts"]]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([*self.python_path, str(REPOSITORY)])}
        for entry in container.get("env", ()):
            env[entry["name"]] = self._find_value(pod, entry)
        words = [expand(word, env) for word in [*container["command"], *container.get("args", ())]]
        with (folder / "output.log").open("wb") as log:
            process = subprocess.Popen(place_paths(words, mounts), env=env, stdout=log, stderr=log, cwd=folder,
                                       start_new_session=True)  # fmt: skip
        return RunningPod(POD_ADDRESS.format(number), process, folder, env, mounts)

    def _make_volume(self, pod: Object, volume: Object, folder: Path) -> Path:
        if "persistentVolumeClaim" in volume:
            return self.folder / "claims" / str(volume["persistentVolumeClaim"]["claimName"])
        path = folder / str(volume["name"])
        if "configMap" in volume:
            self._write_files(pod, volume["configMap"], path)
        path.mkdir(exist_ok=True)
        return path

    def _write_files(self, pod: Object, source: Object, path: Path) -> None:
        found = self.store.find("configmaps", pod["metadata"]["namespace"], source["name"])
        if found is None:
            raise Gone(source["name"])
        for item in source["items"]:
            target = path / item["path"]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(found["data"][item["key"]])

    def _find_value(self, pod: Object, entry: Object) -> str:
        if "valueFrom" not in entry:
            return str(entry.get("value", ""))
        source = entry["valueFrom"]
        if "secretKeyRef" in source:
            place = source["secretKeyRef"]
            found = self.store.find("secrets", pod["metadata"]["namespace"], place["name"])
            if found is None:
                raise Gone(place["name"])
            return base64.b64decode(found["data"][place["key"]]).decode()
        path = source["fieldRef"]["fieldPath"]
        entry_of = re.fullmatch(r"metadata\.(labels|annotations)\['(.*)'\]", path)
        if entry_of is not None:
            return str(pod["metadata"][entry_of[1]].get(entry_of[2], ""))
        value: Any = pod
        for part in path.split("."):
            value = value[part]
        return str(value)


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
    return {"name": container["name"], "image": container["image"], "imageID": container["image"], "state": state,
            "ready": "running" in state, "restartCount": 0}  # fmt: skip
