"""``profile init`` and ``profile check``: nodes, claims, queues and levels of security as a cluster reports them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlk_repro.base.errors import SchedulerRefused
from rlk_repro.base.proc import Completed
from rlk_repro.base.resources import all_profile_folders
from rlk_repro.clusters.k8s.check import find_obstacle
from rlk_repro.clusters.k8s.kubectl import Unreachable, require
from rlk_repro.clusters.k8s.pods import make_pod
from rlk_repro.clusters.k8s.propose import group_nodes, list_sizes, list_taints
from rlk_repro.clusters.profiles import load_all_hardware
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec.load import load_profile, load_stack
from tests.support.k8s.examples import num_nodes, plan_for
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
VIRTUAL = {"amd.com/gpu.device-id": "74b5", "amd.com/gpu.product-name": "AMD_Instinct_MI300X_VF"}


@pytest.mark.parametrize(
    ("nodes", "found"),
    [
        ([node(), node(labels={PRODUCT: "NVIDIA-B300"})], {"h200": 1}),
        ([node(labels=GKE)], {"h200": 1}),
        ([node(labels=VIRTUAL, resource="amd.com/gpu")], {"mi300x": 1}),
        ([node(labels={PRODUCT: "NVIDIA-A100-SXM4-80GB", **GKE})], {}),  # its own words contradict each other
        ([node(taints=[LOST]), away(), node(unschedulable=True), node(taints=[DEDICATED])], {"h200": 1}),
    ],
)
def test_hardware_comes_from_usable_nodes_own_words(nodes: list[Any], found: dict[str, int]) -> None:
    assert {name: len(items) for name, items in group_nodes(nodes, load_all_hardware()).items()} == found


def test_a_taint_is_tolerated_as_it_is() -> None:
    soft = {"key": "soft", "effect": "PreferNoSchedule"}
    assert list_taints(node(taints=[DEDICATED, soft])) == [DEDICATED]
    assert list_sizes([node(), node()]) == {"cpu": "171", "memory": "1710Gi", "shm": "64Gi"}


@pytest.mark.parametrize(
    ("item", "obstacle"),
    [
        (node(), ""),
        (node(gpus=7), "nvidia.com/gpu: 7 of 8"),
        (node(taints=[DEDICATED]), "taint dedicated"),
        (node(taints=[{**DEDICATED, "effect": "PreferNoSchedule"}]), ""),
        (node(labels={PRODUCT: "NVIDIA-H100-80GB-HBM3"}), "other labels"),
        (node(labels={PRODUCT: "NVIDIA-H200", "kubernetes.io/arch": "arm64"}), "other labels"),
        (node(labels=GKE), ""),
        (node(unschedulable=True), "not ready"),
        (away(), "not ready"),
    ],
)
def test_a_node_fits_by_label_taint_readiness_and_allocatable(item: Any, obstacle: str) -> None:
    pod = make_pod(plan_for(settings=num_nodes("h200", 4)), RunDir(Path("/r/id")))["spec"]
    assert find_obstacle(item, pod) == obstacle


def claim(name: str, mode: str) -> dict[str, Any]:
    return {"kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": {"accessModes": [mode]}}


def namespace(**labels: str) -> dict[str, Any]:
    return {"kind": "Namespace", "metadata": {"name": "default", "labels": labels}}


QUEUE = {"kind": "LocalQueue", "metadata": {"name": "gpus"}}
SHARED = claim("shared", "ReadWriteMany")
SINGLE = claim("single", "ReadWriteOnce")
NODES = [node("n0"), node("n1", taints=[TAINT, DEDICATED])]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    site = Site(tmp_path / "site")
    for name, value in site.environment().items():
        monkeypatch.setenv(name, value)
    site.answer("config", {"current-context": "here", "contexts": [{"context": {"namespace": "default"}}]})
    site.answer("api-resources", "jobs.batch\nlocalqueues.kueue.x-k8s.io\n")
    (site.folder / "objects.json").write_text(json.dumps([*NODES, SHARED, namespace(), QUEUE]))
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
FOUND = {"namespace": "default", "context": "here", **SIZES, "tolerations": [DEDICATED]}
RESULTS = {"results": {"claim": "shared", "path": "/results"}}


@pytest.mark.parametrize(
    ("objects", "found", "remark"),
    [
        (
            [SHARED, SINGLE, QUEUE, namespace()],
            {**RESULTS, "queue": "gpus"},
            "tolerations: the nodes have taints (dedicated)",
        ),
        ([SHARED, namespace()], RESULTS, "queue: the namespace has no queue"),
        ([SINGLE, namespace()], {"results": {"claim": "single", "path": "/results"}}, "serves runs of one node"),
        ([namespace()], {}, "results: the namespace has no volume claim"),
        (
            [SHARED, QUEUE, namespace(**{"pod-security.kubernetes.io/enforce": "restricted"})],
            {**RESULTS, "queue": "gpus", "run_as": {"user": 1000, "group": 1000}},
            "run_as: the namespace is restricted",
        ),
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


def test_a_profile_without_a_claim_is_refused_in_one_sentence(server: Site, tmp_path: Path, call: Call) -> None:
    for words in (
        ("profile", "check"),
        ("submit", "smoke", "--cluster", "k8s", "--dry-run", "--stack", "example", "--profile"),
    ):
        code, _, err = call(*words, str(write_profile(tmp_path, results={})))
        assert (code, err.count("\n")) == (2, 1)
        assert err.startswith("rlk-repro: profile here: kubernetes.results.claim: missing: ")


def test_without_a_cluster_there_is_no_profile(server: Site, tmp_path: Path, call: Call) -> None:
    server.answer("version", {"clientVersion": {"gitVersion": "v1.36.2"}})
    code, _, err = call("profile", "check", str(write_profile(tmp_path)))
    assert (code, "no cluster answers" in err) == (3, True)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("Error from server (TooManyRequests): storage is (re)initializing", Unreachable),
        ("Error from server (ServiceUnavailable): the server is currently unable to handle the request", Unreachable),
        ("The connection to the server 192.0.2.7:6443 was refused - did you specify the right host?", Unreachable),
        ('Error from server (Forbidden): pods "p" is forbidden: exceeded quota', SchedulerRefused),
    ],
)
def test_a_server_that_restarts_does_not_refuse(words: str, error: type[Exception]) -> None:
    with pytest.raises(SchedulerRefused) as caught:
        require(Completed(argv=(), returncode=1, stdout="", stderr=words))
    assert type(caught.value) is error
