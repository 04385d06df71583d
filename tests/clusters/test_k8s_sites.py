"""``profile init`` and ``profile check``: nodes, claims, queues and levels of security as a cluster reports them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlk_repro.base.errors import SchedulerRefused
from rlk_repro.base.proc import Completed
from rlk_repro.base.resources import all_profile_folders
from rlk_repro.clusters.k8s.check import find_obstacle, list_taints, require_nodes
from rlk_repro.clusters.k8s.kubectl import Target, Unreachable, require
from rlk_repro.clusters.k8s.nodes import name_node
from rlk_repro.clusters.k8s.objects import render_objects
from rlk_repro.clusters.k8s.propose import choose_alike, group_nodes, list_sizes
from rlk_repro.clusters.profiles import load_all_hardware
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec.load import load_profile, load_stack
from tests.support.k8s.examples import num_nodes, plan_for, with_site
from tests.support.k8s.runs import Site
from tests.support.run_plans import read_commands

Call = Callable[..., tuple[int, str, str]]


TAINT = {"key": "nvidia.com/gpu", "effect": "NoSchedule"}
PRODUCT = "nvidia.com/gpu.product"


def node(
    name: str = "n",
    labels: dict[str, str] | None = None,
    gpus: int = 8,
    resource: str = "nvidia.com/gpu",
    taints: Sequence[dict[str, str]] = (TAINT,),
    **spec: Any,
) -> dict[str, Any]:
    allocatable = {"cpu": "190", "memory": "1900Gi", resource: str(gpus)}
    given = {PRODUCT: "NVIDIA-H200"} if labels is None else labels
    known = {"kubernetes.io/arch": "amd64"} | given
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": known},
        "spec": {"taints": [*taints], **spec},
        "status": {"allocatable": allocatable},
    }


def away(name: str = "n") -> dict[str, Any]:
    found = node(name)
    found["status"]["conditions"] = [{"type": "Ready", "status": "Unknown"}]
    return found


DEDICATED = {"key": "dedicated", "value": "rl", "effect": "NoExecute"}
LOST = {"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}
GKE = {"cloud.google.com/gke-accelerator": "nvidia-h200-141gb"}
KARPENTER = "karpenter.k8s.aws/instance-gpu-name"
COREWEAVE = "gpu.nvidia.com/class"
AMD = "amd.com/gpu.product-name"


# a node's labels, and the hardware that they name
@pytest.mark.parametrize(
    ("labels", "name"),
    [
        (GKE, "h200"),
        ({"cloud.google.com/gke-accelerator": "nvidia-tesla-a100"}, None),  # 40 GB
        ({KARPENTER: "h200", "node.kubernetes.io/instance-type": "p5en.48xlarge"}, "h200"),
        ({"node.kubernetes.io/instance-type": "p4de.24xlarge"}, "a100"),
        ({"node.kubernetes.io/instance-type": "Standard_ND96isr_MI300X_v5"}, "mi300x"),
        ({COREWEAVE: "H100_NVLINK_80GB"}, "h100"),
        ({COREWEAVE: "A100_PCIE_80GB"}, None),
        ({COREWEAVE: "GB200_4x", "kubernetes.io/arch": "arm64"}, "gb200"),
        ({"karpenter.azure.com/sku-gpu-name": "H200"}, "h200"),
        ({"doks.digitalocean.com/gpu-model": "mi300x"}, "mi300x"),
        ({"skypilot.co/accelerator": "h200"}, "h200"),
        ({f"beta.{AMD}": "AMD_Instinct_MI300X_VF"}, "mi300x"),
        ({PRODUCT: "NVIDIA-A100-SXM4-80GB", "nvidia.com/gpu.memory": "40960"}, None),
        ({PRODUCT: "NVIDIA-A100-SXM4-80GB", "nvidia.com/gpu.memory": "81920"}, "a100"),
        ({AMD: "AMD_Instinct_MI300X_VF", "amd.com/gpu.device-id": "74b5"}, "mi300x"),
        ({AMD: "AMD_Instinct_MI325X_OAM"}, None),
        ({PRODUCT: "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb", KARPENTER: "h100"}, None),
        ({PRODUCT: "NVIDIA-H200-SHARED", KARPENTER: "h200"}, None),
        ({PRODUCT: "NVIDIA-H100-NVL", KARPENTER: "h100"}, None),
        ({PRODUCT: "NVIDIA-A100-SXM4-80GB", **GKE}, None),  # its own words contradict each other
    ],
)
def test_a_node_s_labels_name_one_whole_gpu_or_none(labels: dict[str, str], name: str | None) -> None:
    assert name_node({"kubernetes.io/arch": "amd64", **labels}, load_all_hardware()) == name


GONE = {"key": "ToBeDeletedByClusterAutoscaler", "value": "1", "effect": "NoSchedule"}


@pytest.mark.parametrize("item", [
    node(taints=[LOST]), away(), node(gpus=0), node(unschedulable=True), node(taints=[GONE]),
])  # fmt: skip
def test_a_node_that_is_away_is_neither_used_nor_tolerated(item: Any) -> None:
    assert group_nodes([item], load_all_hardware()) == {}


def test_a_taint_is_tolerated_as_it_is() -> None:
    soft = {"key": "soft", "effect": "PreferNoSchedule"}
    dedicated = node(taints=[DEDICATED, soft])
    assert list_taints(dedicated) == [DEDICATED]
    remarks: list[str] = []
    assert choose_alike([dedicated, node(taints=[]), dedicated], remarks) == [node(taints=[])]
    assert remarks == ["tolerations: 2 other nodes with other taints left out"]
    assert list_sizes([node(), node()]) == {"cpu": "171", "memory": "1710Gi", "shm": "64Gi"}


def make_job() -> dict[str, Any]:
    return render_objects(plan_for(settings=num_nodes("h200", 1)), RunDir(Path("/r/id")))[0]


@pytest.mark.parametrize(
    ("item", "obstacle"),
    [
        (node(), ""),
        (node(gpus=7), "nvidia.com/gpu: 7 of 8"),
        (node(resource="nvidia.com/mig-1g.18gb"), "nvidia.com/gpu: 0 of 8"),
        (node(taints=[DEDICATED]), "taint dedicated"),
        (node(taints=[LOST]), "taint node.kubernetes.io/unreachable"),
        (node(taints=[{**DEDICATED, "effect": "PreferNoSchedule"}]), ""),
        (node(labels={PRODUCT: "NVIDIA-H100-80GB-HBM3"}, taints=[DEDICATED]), "other labels"),
        (node(labels={PRODUCT: "NVIDIA-H200", "kubernetes.io/arch": "arm64"}), "other labels"),
        (node(labels=GKE), ""),
        (node(unschedulable=True), "not ready"),
        (away(), "not ready"),
    ],
)
def test_a_node_fits_by_label_taint_readiness_and_allocatable(item: Any, obstacle: str) -> None:
    assert find_obstacle(item, make_job()["spec"]["template"]["spec"]) == obstacle


ANY = {"operator": "Exists"}


# what an overlay adds to the pod, the taint of the only node, and what keeps the pod away
@pytest.mark.parametrize(
    ("added", "taint", "obstacle"),
    [
        ({"tolerations": [{"key": "dedicated"}]}, DEDICATED, "taint dedicated"),
        ({"tolerations": [{**ANY, "key": "dedicated", "effect": ""}]}, DEDICATED, ""),
        ({"tolerations": [{"key": "gpu", "value": ""}]}, {**TAINT, "key": "gpu"}, ""),
        ({"tolerations": [ANY]}, DEDICATED, ""),
        ({"nodeSelector": {"pool": "b"}}, TAINT, "other labels"),
        ({"nodeSelector": {PRODUCT: "NVIDIA-H200"}}, TAINT, ""),
    ],
)
def test_what_an_overlay_adds_is_judged_as_kubernetes_does(
    added: dict[str, Any], taint: dict[str, str], obstacle: str
) -> None:
    plan = with_site(plan_for(settings=num_nodes("h200", 1)), overlay={"pod_spec": added})
    pod = render_objects(plan, RunDir(Path("/r/id")))[0]["spec"]["template"]["spec"]
    assert find_obstacle(node(taints=[taint]), pod) == obstacle


def claim(name: str, mode: str) -> dict[str, Any]:
    return {"kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": {"accessModes": [mode]}}


QUEUE = {"kind": "LocalQueue", "metadata": {"name": "gpus"}}
SHARED = claim("shared", "ReadWriteMany")
SINGLE = claim("single", "ReadWriteOnce")
NODES = [node("n0"), node("n1", taints=[TAINT, DEDICATED])]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    site = Site(tmp_path / "site")
    for name, value in site.environment().items():
        monkeypatch.setenv(name, value)
    site.answer("config", "here default")
    (site.folder / "objects.json").write_text(json.dumps([*NODES, SHARED, QUEUE]))
    yield site
    site.close()


def write_profile(folder: Path, **settings: Any) -> Path:
    value = {
        "profile": "here",
        "cluster": "k8s",
        "hardware": "h200",
        "kubernetes": {"results": {"claim": "shared"}, "cpu": "100", "memory": "500Gi", **settings},
    }
    path = folder / "here.yaml"
    path.write_text(yaml.safe_dump(value))
    return path


def check(call: Call, path: Path, *options: str) -> tuple[int, list[dict[str, str]]]:
    code, out, err = call("profile", "check", str(path), "--json", *options)
    assert out, err
    return code, list(json.loads(out)["findings"])


SIZES = {"cpu": "171", "memory": "1710Gi", "shm": "64Gi"}
FOUND = {"namespace": "default", "context": "here", **SIZES}
RESULTS = {"results": {"claim": "shared", "path": "/results"}}


@pytest.mark.parametrize(
    ("objects", "found", "remark"),
    [
        ([SHARED, SINGLE, QUEUE], {**RESULTS, "queue": "gpus"}, "1 other node with other taints left out"),
        ([SHARED, claim("too", "ReadWriteMany"), QUEUE], {"queue": "gpus"}, "has shared, too; chosen: none of these"),
        ([SINGLE], {"results": {"claim": "single", "path": "/results"}}, "serves runs of one node"),
        ([], {}, "results: the namespace has no volume claim"),
    ],
)
def test_a_profile_is_proposed_from_what_the_cluster_says(
    server: Site, tmp_path: Path, call: Call, objects: list[Any], found: dict[str, Any], remark: str
) -> None:
    (server.folder / "objects.json").write_text(json.dumps([*NODES, *objects]))
    path = tmp_path / "mine.yaml"
    code, _, err = call("profile", "init", "--cluster", "k8s", "--yes", "-o", str(path))
    assert code == 0, err
    proposed = yaml.safe_load(path.read_text())
    assert (proposed["hardware"], proposed["kubernetes"]) == ("h200", FOUND | found)
    assert remark in path.read_text() + err
    assert load_profile(str(path), all_profile_folders()).model.cluster == "k8s"


def test_the_page_on_installing_works_command_by_command(
    server: Site, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in read_commands("kubernetes.md", "Install on a Kubernetes cluster"):
        code, out, err = call(*command)
        assert code == 0, (command, out + err)


def test_nodes_that_do_not_fit_are_counted_and_the_server_is_asked(
    server: Site, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlk_repro.submit.planning.load_stack", lambda _: load_stack("example"))
    path = write_profile(tmp_path, tolerations=[DEDICATED])
    assert check(call, path, "--run", "smoke")[0] == 0
    code, findings = check(call, write_profile(tmp_path, cpu="400"), "--run", "smoke")
    blocking = [(item["where"], item["found"]) for item in findings if item["level"] == "blocking"]
    assert (code, blocking) == (1, [("nodes", "0 of 2: cpu: 190 of 400 (1 node); taint dedicated (1 node)")])


# nodes of a cluster, and why none can ever hold a pod of the job; empty where one can, or where one may come
@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ([node(), node(gpus=7)], ""),
        ([node(gpus=7), node(labels={PRODUCT: "NVIDIA-L40S"})], "nvidia.com/gpu: 7 of 8 (1 node)"),
        ([node(taints=[DEDICATED])] * 2, "taint dedicated (2 nodes)"),
        ([node(taints=[DEDICATED]), away()], ""),
        ([node(labels={PRODUCT: "NVIDIA-L40S"})], ""),
        ([], ""),
    ],
)
def test_what_no_node_can_hold_is_an_error_before_submit(
    monkeypatch: pytest.MonkeyPatch, nodes: list[Any], why: str
) -> None:
    monkeypatch.setattr(Target, "get", lambda *_: nodes)
    with pytest.raises(SchedulerRefused) if why else nullcontext() as caught:
        require_nodes(Target(namespace="default"), make_job())
    assert why in str(caught)


def test_without_a_claim_or_a_cluster_there_is_no_check(server: Site, tmp_path: Path, call: Call) -> None:
    for words in (("profile", "check"), ("submit", "smoke", "--dry-run", "--stack", "example", "--profile")):
        code, _, err = call(*words, str(write_profile(tmp_path, results={})))
        assert (code, err.count("\n")) == (2, 1)
        assert err.startswith("rlk-repro: profile here: kubernetes.results.claim: missing: ")
    server.answer("version", {"clientVersion": {"gitVersion": "v1.36.2"}})
    code, _, err = call("profile", "check", str(write_profile(tmp_path)))
    assert (code, "no cluster answers" in err) == (3, True)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("Error from server (TooManyRequests): storage is (re)initializing", Unreachable),
        ("The connection to the server 192.0.2.7:6443 was refused - did you specify the right host?", Unreachable),
        ('Error from server (Forbidden): pods "p" is forbidden: exceeded quota', SchedulerRefused),
    ],
)
def test_a_server_that_restarts_does_not_refuse(words: str, error: type[Exception]) -> None:
    with pytest.raises(SchedulerRefused) as caught:
        require(Completed(argv=(), returncode=1, stdout="", stderr=words))
    assert type(caught.value) is error
