"""Runs of the reference trainer in pods that are processes, on a claim that is a folder."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from rlk_repro.base import proc
from rlk_repro.submit import planning, sending
from tests import ROOT
from tests.support.two_node_agent import write_agent
from tests.support.waiting import wait_until

Object = dict[str, Any]
INDEX = "batch.kubernetes.io/job-completion-index"
SETTINGS = (
    "measure.pairs=1", "measure.warmup_steps=1", "measure.scored_steps=3", "workload.grpo.rollout_batch_size=2",
    "workload.model.hidden_size=32",
)  # fmt: skip
LONG = (*SETTINGS[:2], "measure.scored_steps=400", "workload.grpo.rollout_batch_size=8")
TWO_NODES = "layouts.cpu={num_nodes: 2, gpus_per_node: 0}"
DOUBLE = Path(__file__).with_name("kubectl.py")
SCRIPT = "#!{python} -IS\nimport runpy\nrunpy.run_path({program!r}, run_name='__main__')\n"


class Site:
    """A namespace with a claim; ``pods`` are the processes of a job's pods by their names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.claim = folder / "claim"
        self.pods: dict[str, Any] = {}
        self.claim.mkdir(parents=True)
        tools = folder / "tools"
        tools.mkdir()
        (tools / "kubectl").write_text(SCRIPT.format(python=sys.executable, program=str(DOUBLE)))
        (tools / "kubectl").chmod(0o755)
        version = {"gitVersion": "v1.36.2"}
        self.answer("version", {"clientVersion": version, "serverVersion": version})

    def answer(self, verb: str, answer: Any) -> None:
        text = answer if isinstance(answer, str) else json.dumps(answer)
        (self.folder / f"{verb}.answer").write_text(text)

    def environment(self) -> dict[str, str]:
        return {
            "RLK_TEST_KUBECTL": str(self.folder),
            "PATH": f"{self.folder / 'tools'}{os.pathsep}{os.environ['PATH']}",
        }

    def close(self) -> None:
        for process in self.pods.values():
            proc.signal_group(process.pid, signal.SIGKILL)
            process.wait()

    def submit(self, settings: tuple[str, ...] = SETTINGS, **site: Any) -> sending.Launched:
        results = {"claim": "results", "path": str(self.claim)}
        profile = {
            "profile": "here",
            "cluster": "k8s",
            "hardware": "cpu",
            "kubernetes": {"results": results, "python": write_agent(self.folder), "grace_s": 60, **site},
            "preflight": {"min_free_disk_gib": 0.01, "min_free_memory_gib": 0.01},
        }
        image = {"reference": "registry.example/rlk-repro/cpu", "digest": "sha256:" + "0123456789abcdef" * 4}
        stack = {"stack": "pods", "purpose": "An image that nothing pulls.", "images": {"cpu": image}}
        for name, value in (("profile", profile), ("stack", stack)):
            (self.folder / f"{name}.yaml").write_text(yaml.safe_dump(value))
        request = planning.Request(
            run="smoke",
            cluster="k8s",
            profile=str(self.folder / "profile.yaml"),
            stack=str(self.folder / "stack.yaml"),
            settings=settings,
            is_exploratory=True,
        )
        return sending.submit(planning.prepare(request))

    def objects(self, kind: str) -> list[Object]:
        store = self.folder / "objects.json"
        found: list[Object] = json.loads(store.read_text()) if store.is_file() else []
        return [item for item in found if item["kind"] == kind]

    def change(self, edit: Callable[[list[Object]], object]) -> None:
        store = self.folder / "objects.json"
        found = json.loads(store.read_text())
        edit(found)
        store.write_text(json.dumps(found))

    def start_pod(self, index: int = 0) -> str:
        """Do a kubelet's work: lay out the ConfigMap, run the container's command, say that the pod runs."""
        (job,), (inputs,) = self.objects("Job"), self.objects("ConfigMap")
        template = job["spec"]["template"]
        (volume,) = (item["configMap"] for item in template["spec"]["volumes"] if "configMap" in item)
        name = f"{job['metadata']['name']}-{index}-{len(self.pods):05}"
        mount = self.folder / name
        for item in volume["items"]:
            (mount / item["path"]).parent.mkdir(parents=True, exist_ok=True)
            (mount / item["path"]).write_text(inputs["data"][item["key"]])
        command = [*template["spec"]["containers"][0]["command"], f"--inputs={mount}", f"--last-word={mount}.word"]
        env = {**os.environ, "JOB_COMPLETION_INDEX": str(index), "RLK_REPRO_NODE": f"node-{index}"}
        with (self.folder / f"{name}.log").open("wb") as log:
            process = proc.start(command, output_fd=log.fileno(), env=env, cwd=ROOT)
        self.pods[name] = process
        annotations = {INDEX: str(index), "pid": str(process.pid)}
        pod = {"kind": "Pod", "metadata": {**template["metadata"], "name": name, "annotations": annotations},
               "spec": {"nodeName": f"node-{index}"}, "status": {"phase": "Running"}}  # fmt: skip
        self.change(lambda items: items.append(pod))
        return name

    def wait_for_pod(self, name: str) -> int:
        """Wait until the pod's process has ended; give its status to the pod, as a kubelet does."""
        process = self.pods[name]
        wait_until(lambda: process.poll() is not None)
        word = self.folder / f"{name}.word"
        ended = {"exitCode": process.returncode, "reason": "Error" if process.returncode else "Completed",
                 "message": word.read_text() if word.is_file() else ""}  # fmt: skip
        phase = "Failed" if process.returncode else "Succeeded"
        status = {"phase": phase, "containerStatuses": [{"state": {"terminated": ended}}]}

        def edit(items: list[Object]) -> None:
            for item in items:
                if item["metadata"]["name"] == name:
                    item["status"] = status
                    del item["metadata"]["annotations"]["pid"]

        self.change(edit)
        return int(process.returncode)

    def end_job(self, condition: str, reason: str = "", message: str = "") -> None:
        """Set a condition, as the Job controller does."""
        found = {"type": condition, "status": "True", "reason": reason, "message": message}

        def edit(items: list[Object]) -> None:
            for item in items:
                if item["kind"] == "Job":
                    item["status"] = {"conditions": [found]}

        self.change(edit)
