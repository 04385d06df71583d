"""The objects that Kubernetes gets: real schemas, a site's additions, refusals, and who reaches a pod."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rlk_repro.base.errors import SpecError
from rlk_repro.clusters.k8s import backend
from rlk_repro.clusters.k8s.naming import COMPUTE_DOMAINS, Sent, make_name
from rlk_repro.clusters.k8s.objects import QUEUE, dump_objects, render_objects
from rlk_repro.clusters.k8s.pods import make_collector
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir
from tests.support.k8s.examples import list_plans, num_nodes, plan_for, run_dir_of, with_site
from tests.support.k8s.validate import find_errors

Object = dict[str, Any]
PLANS = dict(list_plans())
TWO = plan_for("smoke", "h200", settings=num_nodes("h200", 2))
MAX_NAME = 40  # a pod's name is longer by an index and a suffix, and has at most 63 characters


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
    # a new submission waits until the old domain, which the driver ends late, is gone
    assert (COMPUTE_DOMAINS in Sent.of_plan(PLANS[name], run_dir_of(PLANS[name])).kinds) is bool(domains)


def test_names_fit_every_controller_and_differ() -> None:
    ids = ["0", "X" * 60, "X" * 61, "ünï cødé", "-rf", "$(touch pwned)", "new\nline", "a b", "a-b", "A-b"]
    run_dirs = [RunDir(Path("/runs") / run_id) for run_id in ids]
    names = {make_name(run_dir) for run_dir in run_dirs}
    assert len(names) == len(ids)
    assert max(map(len, (*names, make_name(run_dir_of(TWO))))) <= MAX_NAME
    objects = render_objects(PLANS["smoke.gb200.job.four-nodes"], run_dirs[3])
    assert [error for item in objects for error in find_errors(item)] == []


def test_a_command_is_not_expanded_by_kubernetes() -> None:
    item = render_objects(PLANS["smoke.h200.job"], RunDir(Path("/runs") / "$(HOME) $$(HOME)"))[0]
    assert "/results/smoke/$$(HOME) $$$(HOME)" in pod_spec(item)["containers"][0]["command"]


def test_nodes_that_are_asked_for_are_terms_of_their_own() -> None:
    plan = PLANS["smoke.mi300x.job.four-nodes"]
    nodes = ("n1", "n2", "n3", "n4")
    rule = pod_spec(render_objects(plan, run_dir_of(plan), nodes=nodes)[0])["affinity"]["nodeAffinity"]
    terms = rule["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    wanted = [node for node in nodes for _ in plan.hardware.node_labels]
    assert [term["matchFields"][0]["values"][0] for term in terms] == wanted
    with pytest.raises(SpecError, match="names more or fewer nodes than the layout has"):
        render_objects(plan, run_dir_of(plan), nodes=("n1",))


def test_a_lost_pod_is_replaced_and_one_that_fails_ends_the_job() -> None:
    spec = objects_of("smoke.gb200.job.four-nodes")[0]["spec"]
    assert (spec["completionMode"], spec["parallelism"], spec["completions"]) == ("Indexed", 4, 4)
    assert spec["backoffLimit"] == 4 * 6
    assert spec["podFailurePolicy"]["rules"][-1]["onExitCodes"]["values"] == [0, 143]
    assert pod_spec(objects_of("smoke.gb200.job.four-nodes")[0])["restartPolicy"] == "Never"
    job, *others = objects_of("smoke.h200.job.no-restarts")
    assert (job["spec"]["backoffLimit"], others) == (0, [])  # nor has this site a network policy


def test_pods_keep_to_the_level_of_pod_security_that_they_need() -> None:
    for name, own in {"smoke.mi300x.job": {"type": "Unconfined"}, "smoke.h200.job": None}.items():
        context = pod_spec(objects_of(name)[0])["containers"][0]["securityContext"]
        assert context.get("seccompProfile") == own, "ROCm needs system calls that the default forbids"
    spec = pod_spec(objects_of("smoke.h200.job.secret")[0])
    assert "secretKeyRef" in str(spec["containers"][0]["env"])
    assert spec["automountServiceAccountToken"] is False, "no pod talks to the server"
    spec = pod_spec(objects_of("smoke.h200.job.restricted")[0])
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    wanted = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert spec["containers"][0]["securityContext"] == wanted
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    assert not any("hostPath" in volume for volume in spec["volumes"])


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


def refuse(plan: Plan) -> str:
    with pytest.raises(SpecError) as caught:
        render_objects(plan, run_dir_of(plan))
    return str(caught.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"results": {"path": "/results"}}, "kubernetes.results.claim: missing: a pod's own files are lost with it"),
        ({"gpu_products": ["NVIDIA-H200-MIG-1g.18gb"]}, "a partition or a share of a GPU"),
        ({"gpu_label": "gpu.nvidia.com/class"}, "kubernetes.gpu_products: missing"),
        (
            {"node_labels": {"nvidia.com/gpu.product": ["NVIDIA-H200-MIG-1g.18gb"]}},
            "node_labels[nvidia.com/gpu.product]: a partition or a share of a GPU",
        ),
        ({"env": {"A": {"from_env": "RLK_REPRO_NODE"}}}, "a name is set twice"),
        ({"gpu_resource": "nvidia.com/mig-1g.18gb"}, "a partition or a share of a GPU"),
        ({"gpu_resource": "nvidia.com/gpu.shared"}, "a partition or a share of a GPU"),
        ({"max_time_min": 1.0}, "is shorter than the time limit of one pair"),
        ({"env": {"HF_TOKEN": {"from_env": "HF_TOKEN"}}}, "a pod does not get this shell's variables"),
    ],
)
def test_a_profile_that_cannot_work_is_refused(values: dict[str, Any], words: str) -> None:
    assert words in refuse(with_site(plan_for(settings=num_nodes("h200", 2)), **values))


def test_a_pod_needs_an_image() -> None:
    assert "has no image for h200, and a pod needs an image" in refuse(plan_for(stack="host"))


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


def test_a_site_s_own_values_are_merged_and_those_that_identify_objects_stay() -> None:
    """As the guides of GKE and KAI ask for: annotations, a scheduler, volumes and variables of the container."""
    mount = {"name": "gib", "mountPath": "/usr/local/gib"}
    overlay: dict[str, Any] = {
        "metadata": {"labels": {"kai.scheduler/queue": "research", "app.kubernetes.io/managed-by": "me"}, "name": "x"},
        "pod_metadata": {"annotations": {"networking.gke.io/default-interface": "eth0"}},
        "pod_spec": {
            "schedulerName": "kai-scheduler",
            "terminationGracePeriodSeconds": 7,
            "containers": [{"name": "agent", "env": [{"name": "A", "value": "1"}], "volumeMounts": [mount]}],
            "volumes": [{"name": "gib", "hostPath": {"path": "/x"}}, {"name": "shm", "emptyDir": {"sizeLimit": "1Gi"}}],
        },
    }
    job, before = (render_objects(item, run_dir_of(item))[0] for item in (with_site(TWO, overlay=overlay), TWO))
    assert find_errors(job, ("1.34",)) == []
    assert job["metadata"]["labels"] == {**before["metadata"]["labels"], "kai.scheduler/queue": "research"}
    assert job["metadata"]["name"] == before["metadata"]["name"]
    pod, other = (item["spec"]["template"] for item in (job, before))
    assert pod["metadata"] == {**other["metadata"], **overlay["pod_metadata"]}
    assert (pod["spec"]["schedulerName"], pod["spec"]["terminationGracePeriodSeconds"]) == ("kai-scheduler", 7)
    (container,), (own,) = pod["spec"]["containers"], other["spec"]["containers"]
    assert container["env"] == [*own["env"], {"name": "A", "value": "1"}]
    assert container["volumeMounts"] == [*own["volumeMounts"], mount]
    assert container["image"] == own["image"]
    volumes = {volume.pop("name"): volume for volume in pod["spec"]["volumes"]}
    assert volumes["shm"] == {"emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}
    assert volumes["gib"] == {"hostPath": {"path": "/x"}}


@pytest.mark.parametrize(
    ("site", "problem"),
    [
        ({}, "or set kubernetes.gang: waived"),
        ({"overlay": {"pod_spec": {"schedulerName": "my-scheduler"}}}, "or set kubernetes.gang: waived"),
        ({"queue": "gpus"}, ""),
        ({"overlay": {"pod_spec": {"schedulerName": "volcano"}}}, ""),
        ({"overlay": {"metadata": {"labels": {QUEUE: "gpus"}}}}, ""),
        ({"gang": "waived"}, "2 nodes, and gang scheduling is waived"),
    ],
)
def test_several_nodes_need_gang_scheduling_or_a_waiver(site: dict[str, Any], problem: str) -> None:
    plan = with_site(TWO, **{"queue": None, **site})
    if problem.startswith("or set"):
        assert problem in refuse(plan)
    else:
        assert problem in "".join(backend.render(plan, run_dir_of(plan)).remarks)
    alone = with_site(plan_for("smoke", "h200"), queue=None)
    assert backend.render(alone, run_dir_of(alone)).remarks == ()


def test_plans_from_before_a_key_keep_their_hash_and_a_site_s_values_are_not_the_experiment_s() -> None:
    recorded = str(TWO.to_json()["profile"])
    for site in ({"gang": "waived"}, {"overlay": {"pod_spec": {"schedulerName": "volcano"}}}):
        assert not site.keys() & {key for key in ("gang", "overlay") if key in recorded}
        other = with_site(TWO, **site)
        assert (other.plan_hash == TWO.plan_hash, other.experiment_hash) == (False, TWO.experiment_hash)
