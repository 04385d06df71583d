"""The objects that Kubernetes gets: real schemas, what a profile cannot ask for, and who may reach a pod."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rlk_repro.base.errors import SpecError
from rlk_repro.base.resources import data_dir
from rlk_repro.clusters.k8s.naming import MAX_NAME, make_name
from rlk_repro.clusters.k8s.objects import dump_objects, render_objects
from rlk_repro.clusters.k8s.pods import make_collector
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir
from tests.support.k8s.examples import list_plans, num_nodes, plan_for, run_dir_of, with_site
from tests.support.k8s.validate import find_errors

Object = dict[str, Any]
PLANS = dict(list_plans())


def objects_of(name: str) -> list[Object]:
    return render_objects(PLANS[name], run_dir_of(PLANS[name]))


def pod_spec(job: Object) -> Object:
    found: Object = job["spec"]["template"]["spec"]
    return found


@pytest.mark.parametrize("name", PLANS)
def test_an_example_passes_the_checks_of_servers(name: str) -> None:
    objects = objects_of(name)
    assert list(yaml.safe_load_all(dump_objects(objects))) == objects
    collector = make_collector(PLANS[name], run_dir_of(PLANS[name]))
    assert [error for item in (*objects, collector) for error in find_errors(item)] == []
    assert "gpu" not in str(collector["spec"]["containers"][0]["resources"])
    claims = [item["resourceClaimTemplateName"] for item in pod_spec(objects[0]).get("resourceClaims", ())]
    domains = [item["spec"]["channel"] for item in objects if item["kind"] == "ComputeDomain"]
    assert claims == [channel["resourceClaimTemplate"]["name"] for channel in domains]


@pytest.mark.parametrize("path", sorted((data_dir("k8s") / "base").glob("*.yaml")), ids=lambda path: path.stem)
def test_base_manifests_are_plain_objects(path: Path) -> None:
    item = yaml.safe_load(path.read_text())
    assert {"apiVersion", "kind", "metadata", "spec"} == item.keys()
    assert item["kind"] == "Job" or find_errors(item) == []


@pytest.mark.parametrize("run_id", ["0", "X" * 60, "ünï cødé", "-rf", "$(touch pwned)", "new\nline", "a" * 43])
def test_names_fit_every_controller(run_id: str) -> None:
    plan, run_dir = PLANS["smoke.gb200.job.four-nodes"], RunDir(Path("/runs") / run_id)
    assert len(make_name(run_dir)) <= MAX_NAME
    assert [error for item in render_objects(plan, run_dir) for error in find_errors(item)] == []


def test_different_runs_have_different_names() -> None:
    names = ["a b", "a-b", "A-b", "a.b", "a" * 60, "a" * 61]
    assert len({make_name(RunDir(Path("/runs") / name)) for name in names}) == len(names)


def test_a_command_is_not_expanded_by_kubernetes() -> None:
    item = render_objects(PLANS["smoke.h200.job"], RunDir(Path("/runs") / "$(HOME) $$(HOME)"))[0]
    assert "/results/smoke/$$(HOME) $$$(HOME)" in pod_spec(item)["containers"][0]["command"]


def test_nodes_that_are_asked_for_are_terms_of_their_own() -> None:
    plan = PLANS["smoke.mi300x.job.four-nodes"]
    nodes = ("n1", "n2", "n3", "n4")
    rule = pod_spec(render_objects(plan, run_dir_of(plan), nodes=nodes)[0])["affinity"]["nodeAffinity"]
    terms = rule["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert [term["matchFields"][0]["values"][0] for term in terms] == [node for node in nodes for _ in range(3)]
    with pytest.raises(SpecError, match="names more or fewer nodes than the layout has"):
        render_objects(plan, run_dir_of(plan), nodes=("n1",))


def test_a_lost_pod_is_replaced_and_one_that_fails_ends_the_job() -> None:
    spec = objects_of("smoke.gb200.job.four-nodes")[0]["spec"]
    assert (spec["completionMode"], spec["parallelism"], spec["completions"]) == ("Indexed", 4, 4)
    assert spec["backoffLimit"] == 4 * 6
    assert spec["podFailurePolicy"]["rules"][-1]["onExitCodes"]["values"] == [0, 143]
    assert pod_spec(objects_of("smoke.gb200.job.four-nodes")[0])["restartPolicy"] == "Never"
    spec = objects_of("smoke.h200.job.no-restarts")[0]["spec"]
    assert spec["backoffLimit"] == 0


def test_secrets_are_references_and_no_pod_talks_to_the_server() -> None:
    spec = pod_spec(objects_of("smoke.h200.job.secret")[0])
    assert "secretKeyRef" in str(spec["containers"][0]["env"])
    assert spec["automountServiceAccountToken"] is False


def test_pods_keep_to_the_level_of_pod_security_that_they_need() -> None:
    for name, own in {"smoke.mi300x.job": {"type": "Unconfined"}, "smoke.h200.job": None}.items():
        context = pod_spec(objects_of(name)[0])["containers"][0]["securityContext"]
        assert context.get("seccompProfile") == own, "ROCm needs system calls that the default forbids"
    spec = pod_spec(objects_of("smoke.h200.job.restricted")[0])
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    wanted = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert spec["containers"][0]["securityContext"] == wanted
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    assert {key for volume in spec["volumes"] for key in volume} <= {
        *("name", "configMap", "emptyDir", "persistentVolumeClaim")
    }


@pytest.mark.parametrize("name", [name for name in PLANS if "no-restarts" not in name])
def test_only_the_pods_of_a_run_may_reach_its_pods(name: str) -> None:
    job, *_, policy = objects_of(name)
    own = {"rlk-repro/id": job["metadata"]["name"]}
    pods = [job["spec"]["template"], make_collector(PLANS[name], run_dir_of(PLANS[name]))]
    assert all(own.items() <= pod["metadata"]["labels"].items() for pod in pods)
    # an absent namespaceSelector means the policy's own namespace
    assert policy["spec"] == {
        "podSelector": {"matchLabels": own},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": {"matchLabels": own}}]}],
    }


def test_a_site_may_have_no_network_policy() -> None:
    assert [item["kind"] for item in objects_of("smoke.h200.job.no-restarts")] == ["Job"]


def refuse(plan: Plan) -> str:
    with pytest.raises(SpecError) as caught:
        render_objects(plan, run_dir_of(plan))
    return str(caught.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"results": {"path": "/results"}}, "kubernetes.results.claim: missing: a pod's own files are lost with it"),
        ({"kind": "rayjob"}, "kubernetes.kind: was removed in version 0.3, got 'rayjob'"),
        ({"ray_version": "2.60.0"}, "kubernetes.ray_version: was removed"),
        ({"operator_namespace": "ray-system"}, "kubernetes.operator_namespace: was removed"),
        ({"hold_min": 5.0}, "kubernetes.hold_min: was removed"),
        ({"gpu_products": ["NVIDIA-H200-MIG-1g.18gb"]}, "a partition or a share of a GPU"),
        ({"gpu_resource": "nvidia.com/mig-1g.18gb"}, "a partition or a share of a GPU"),
        ({"gpu_resource": "nvidia.com/gpu.shared"}, "a partition or a share of a GPU"),
        ({"gpu_resource": "amd.com/gpu"}, "is a GPU of another vendor"),
        ({"node_labels": {"nvidia.com/gpu.product": ["NVIDIA-H200-MIG-1g.18gb"]}}, "a partition or a share of a GPU"),
        ({"rdma": {"resource": "nvidia.com/gpu"}}, "is not an RDMA device"),
        ({"rdma": {"resource": "hca"}}, "is not an RDMA device"),
        ({"max_time_min": 1.0}, "is shorter than the time limit of one pair"),
        ({"shm": "2000Gi"}, "is not larger than kubernetes.shm"),
        ({"env": {"HF_TOKEN": {"from_env": "HF_TOKEN"}}}, "a pod does not get this shell's variables"),
        (
            {"env": {"N": {"from_env": "RLK_REPRO_NODE"}}, "secrets": {"RLK_REPRO_NODE": {"secret": "s", "key": "k"}}},
            "a name is set twice",
        ),
    ],
)
def test_a_profile_that_cannot_work_is_refused(values: dict[str, Any], words: str) -> None:
    assert words in refuse(with_site(plan_for(settings=num_nodes("h200", 2)), **values))


def test_a_plan_of_an_earlier_version_stays_readable(tmp_path: Path) -> None:
    plan = with_site(plan_for(), kind="rayjob", ray_version="2.60.0", hold_min=5.0, results={"path": "/results"})
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_json()))
    assert Plan.load(tmp_path / "plan.json").plan_hash == plan.plan_hash


def test_an_image_is_named_by_its_digest_alone() -> None:
    assert "has no image for h200, and a pod needs an image" in refuse(plan_for(stack="host"))
    plan = plan_for()
    images = {name: image.model_copy(update={"reference": "cuda:12"}) for name, image in plan.stack.images.items()}
    plan = dataclasses.replace(plan, stack=plan.stack.model_copy(update={"images": images}))
    assert "has a tag, but only the digest is checked" in refuse(plan)


SIZES = st.sampled_from(["1", "0.5", "64Gi", "100G", "2Ti"])
LABELS = st.lists(st.sampled_from(["arm64", "amd64", "H200", "NVIDIA-GB200", "X-SHARED"]), min_size=1, max_size=2)
RESOURCES = st.sampled_from(["nvidia.com/gpu", "amd.com/gpu", "nvidia.com/mig-1g.18gb", "rdma/ib", "site.example/gpu"])
SITES = st.fixed_dictionaries(
    {},
    optional={
        "queue": st.just("q" * 63),
        "cpu": SIZES,
        "memory": SIZES,
        "shm": SIZES,
        "gpu_resource": RESOURCES,
        "gpu_products": LABELS,
        "node_labels": st.dictionaries(st.sampled_from(["nvidia.com/gpu.product", "kubernetes.io/arch"]), LABELS),
        "rdma": st.fixed_dictionaries({"resource": RESOURCES, "count": st.integers(1, 64)}),
        "compute_domain": st.booleans(),
        "restarts": st.sampled_from([0, 100]),
        "grace_s": st.sampled_from([60, 3600]),
        "ttl_s": st.sampled_from([0, 31_536_000]),
        "run_as": st.just({"user": 1000, "group": 1000, "supplemental_groups": [44]}),
    },
)  # fmt: skip


@given(st.sampled_from(["h200", "gb200", "mi300x"]), SITES)
def test_no_profile_that_is_taken_makes_an_object_that_a_server_refuses(hardware: str, site: dict[str, Any]) -> None:
    plan = with_site(PLANS[f"smoke.{hardware}.job.four-nodes"], **site)
    try:
        objects = render_objects(plan, run_dir_of(plan))
    except SpecError:
        return
    assert [error for item in objects for error in find_errors(item, ("1.34",))] == []
